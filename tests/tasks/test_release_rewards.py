"""The rewards of the paper's release, as documented, including their faults."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.tasks import grade_answer, release_rewards
from coa_jax.tasks.release_rewards import f1
from tests.tools.fault_server import stopwatch

QA = {
    name: getattr(release_rewards, name)
    for name in ("mhqa_train", "mhqa_eval", "qa_em", "qa_subem")
}


def said(answer):
    return f"<think>x</think><answer>{answer}</answer>"


@pytest.mark.parametrize(
    ("answer", "gold", "scores"),
    [  # mhqa_train, mhqa_eval, qa_em, qa_subem
        ("Röntgen", ["röntgen"], (1, 1, 1, 1)),
        ("The Beatles!", ["beatles"], (1, 1, 1, 1)),
        ("Io|Rhea", ["Io", "Rhea"], (1, 1, 0, 1)),
        ("A|", ["A"], (1, 1, 1, 1)),
        ("Mars| ", ["Mars"], (0, 1, 1, 1)),
        ("Mars|Venus", ["Mars"], (0, 1, 0, 1)),
        ("the", ["The"], (1, 1, 1, 1)),
        ("it is Mars", ["Mars"], (0, 0, 0, 1)),
        ("", ["Mars"], (0, 0, 0, 0)),
    ],
)
def test_answer_rewards_score_as_the_release_does(answer, gold, scores):
    assert tuple(QA[name](said(answer), gold) for name in QA) == scores
    assert tuple(QA[name](said(answer), gold[0]) for name in QA)[2] == QA["qa_em"](
        said(answer), gold[:1]
    )


def test_the_last_answer_counts_and_none_is_wrong():
    text = said("Mars") + said("Venus")
    assert QA["qa_em"](text, ["Venus"]) == 1 and QA["mhqa_train"](text, ["Mars"]) == 0
    assert [reward("no answer", ["x"]) for reward in QA.values()] == [0.0] * 4


@pytest.mark.parametrize(
    ("answer", "gold", "release", "ours"),
    [
        ("a", ["The"], 1, 0),  # nothing is left to compare
        ("15", ["1.5"], 1, 0),  # the dot is gone
        ("5", ["-5"], 1, 0),  # and the sign
        ("Cote d'Ivoire", ["Côte d'Ivoire"], 0, 1),
        ("1234.0", ["1,234"], 0, 1),
        ("Namibia", ["Namibia", "Zambia"], 1, 1),
        ("Namibia|Chad", ["Namibia", "Zambia"], 0, 0),
    ],
)
def test_where_the_corrected_form_differs(answer, gold, release, ours):
    assert (QA["mhqa_train"](said(answer), gold), grade_answer(answer, gold)) == (release, ours)


def test_f1_of_words():
    assert f1("the tall lighthouse", ["lighthouse of Aland"]) == pytest.approx(2 * 1 / (2 + 3))
    assert f1("Aland", ["nothing", "Aland!"]) == 1.0
    assert f1("", [""]) == 0.0


WEB = (
    "<think>a</think><plan>b</plan><think>c</think><web_search>q</web_search>"
    "<observation>r</observation><think>d</think><answer>e</answer>"
)


@pytest.mark.parametrize(
    ("text", "simple", "repetition", "validate"),
    [
        (WEB, True, True, True),
        (WEB.replace("r</obs", "<b>r</b></obs"), False, True, False),
        (WEB.replace("r</obs", "<br>r</obs"), False, True, False),
        (WEB.replace("<plan>b", "<plan>a"), True, False, True),  # two bodies alike
        (WEB.replace("<plan>b", "<plan> "), True, True, False),
        (WEB + "<think>f</think>", False, True, False),
        (WEB.replace("</plan>", ""), False, True, False),
        (WEB + "<answer>e</answer>", True, True, False),
        ("<think><think>a</think></think><answer>b</answer>", True, True, False),
        ("", False, True, False),
    ],
)
def test_format_rewards_score_as_the_release_does(text, simple, repetition, validate):
    assert release_rewards.verify_format_simple(text) is simple
    assert release_rewards.verify_format_repetition(text) is repetition
    assert release_rewards.validate_format(text) is validate


CODE = (
    "<plan>p</plan><think>t</think><code>\n```py\nprint(1)\n```\n```sh\n1\n```\n</code>"
    "<observation>1</observation><reflection>r</reflection><think>u</think>"
    "<answer>\\boxed{1}</answer>"
)


@pytest.mark.parametrize(
    ("text", "correct", "quarters"),
    [
        (CODE, True, 4),
        (CODE.replace("```py", "```python"), False, 4),
        (CODE.replace("```\n</code>", "```\nmore</code>"), False, 4),
        (CODE.replace("<plan>p", "<plan> "), True, 3),
        (CODE.replace("</reflection>", ""), False, 1),
        ("<think>t</think><answer>a</answer>", False, 3),
    ],
)
def test_code_formats_score_as_the_release_does(text, correct, quarters):
    assert release_rewards.check_code_format_correctness(text) is correct
    assert release_rewards.calculate_reward(text) == quarters / 4


@pytest.mark.parametrize("unit", ["<a>", "<answer>", "</code><code>", "<code>", "<a></b>"])
def test_endless_tags_are_graded_at_once(unit):
    text, seconds = unit * 40_000, stopwatch()
    for reward in QA.values():
        assert reward(text, ["Mars"]) == 0.0
    release_rewards.verify_format_repetition(text)
    release_rewards.check_code_format_correctness(text)
    release_rewards.calculate_reward(text)
    assert seconds() < 20


@given(
    st.lists(st.sampled_from(["<a>", "</a>", "<code>", "</code>", "<answer>", "</answer>", "x"]))
)
def test_tags_are_paired_as_the_releases_expressions_do(pieces):
    text = "".join(pieces)
    pairs = release_rewards._pairs
    assert pairs(text) == re.findall(r"<(\w+)>(.*?)</\1>", text)
    assert [body for _, body in pairs(text, "code")] == re.findall("<code>(.*?)</code>", text)
