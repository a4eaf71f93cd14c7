"""Grammars of bodies accept the surface forms of the paper, and nothing ambiguous."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.protocol import (
    CRITERIA,
    format_code,
    format_double_check,
    format_reflection,
    parse_boxed,
    parse_code,
    parse_double_check,
    parse_inspection,
    parse_reflection,
    parse_solution,
    parse_urls,
    split_answers,
)


def reflection(conflict: str, tools: str, path: str) -> dict[str, str]:
    return dict(zip(CRITERIA, (conflict, tools, path), strict=True))


def test_fair_and_average_are_the_same_grade():
    body = "information_conflict: Fair\ntool_effectiveness: Average\ntrajectory_monitoring: Good"
    assert parse_reflection(body) == reflection("average", "average", "good")


@pytest.mark.parametrize(
    "body",
    [
        "Information Conflict : GOOD, tool-effectiveness: good; trajectory_monitoring: poor.",
        "\ntrajectory_monitoring: Poor\n\ntool_effectiveness: Good\ninformation_conflict: Good\n",
    ],
)
def test_case_order_and_separators_of_a_reflection_do_not_matter(body):
    assert parse_reflection(body) == reflection("good", "good", "poor")


@pytest.mark.parametrize(
    "body",
    [
        "",
        "All is well.",
        "information_conflict: Good\ntool_effectiveness: Good",
        "information_conflict: Good\ntool_effectiveness: Good\ntrajectory_monitoring: Great",
        "information_conflict: Good\ninformation_conflict: Good\ntrajectory_monitoring: Good",
        format_reflection(dict.fromkeys(CRITERIA, "good")) + "\nmood: Good",
    ],
)
def test_incomplete_or_strange_reflections_are_refused(body):
    assert parse_reflection(body) is None


@given(st.tuples(*[st.sampled_from(("good", "average", "poor"))] * 3))
def test_written_reflections_read_back(grades):
    assert parse_reflection(format_reflection(reflection(*grades))) == reflection(*grades)


@pytest.mark.parametrize(
    ("body", "score"),
    [
        ("3", 3),
        (" 4/4.", 4),
        ("The score I give is 2.", 2),
        ("Score: 1", 1),
        ("On the scale 1-4 the suggested answer has the score 3", 3),
        ("On a scale of 1 to 4, I rate it with a score of **4**.", 4),
        ("The score out of 4 is 3.", 3),
        ("Score 3 out of 4. I repeat, score 3.", 3),
        ("The 2 sources agree; rating = 4", 4),
        ("", None),
        ("The answer is right.", None),
        ("The score is 5", None),
        ("The score is 10", None),
        ("The score is 3.5", None),
        ("The score is 0", None),
        ("score 2, no, score 3", None),
        ("In 3 of 4 cases it holds.", None),
    ],
)
def test_score_of_a_double_check(body, score):
    assert parse_double_check(body) == score


@given(st.integers(1, 4))
def test_written_double_checks_read_back(score):
    assert parse_double_check(format_double_check(score)) == score


@pytest.mark.parametrize("fence", ["py", "python"])
def test_a_fenced_program(fence):
    assert parse_code(f"\n```{fence}\nx = 1\nprint(x)\n```\n") == ("x = 1\nprint(x)", None)


@pytest.mark.parametrize("fence", ["sh", "bash"])
def test_a_second_fence_is_the_standard_input(fence):
    body = f"```py\nprint(input())\n```\n```{fence}\n3 4\n5\n```"
    assert parse_code(body) == ("print(input())", "3 4\n5\n")


@pytest.mark.parametrize(
    "body",
    [
        "",
        "print(1)",
        "```\nprint(1)\n```",
        "```py\nprint(1)",
        "```py\n\n```",
        "```sh\n1\n```",
        "Here it is:\n```py\nprint(1)\n```",
        "```py\nprint(1)\n```\nDone.",
        "```py\n1\n```\n```py\n2\n```",
        "```py\n1\n```\n```sh\n1\n```\n```sh\n2\n```",
        "```py print(1)```",
    ],
)
def test_code_without_the_form_is_refused(body):
    assert parse_code(body) is None


def test_fences_inside_a_line_and_line_separators_belong_to_the_program():
    source = "s = '''``` ```py'''\nt = '\u2028\x0c'"
    assert parse_code(f"```py\n{source}\n```") == (source, None)


def test_windows_line_ends_are_read():
    assert parse_code("```py\r\nx = 1\r\n```\r\n```sh\r\n1\r\n```") == ("x = 1", "1\n")


LINES = st.lists(st.text(st.characters(exclude_characters="`\r\n"), max_size=8), min_size=1)


@given(LINES.map("\n".join).filter(lambda s: s.strip()), st.none() | LINES.map("\n".join))
def test_written_programs_read_back(source, stdin):
    expected = stdin and stdin.removesuffix("\n") + "\n"
    assert parse_code(format_code(source, stdin)) == (source, expected)


@pytest.mark.parametrize(
    ("body", "answers"),
    [
        ("Paris", ("Paris",)),
        (" a | b|c ", ("a", "b", "c")),
        ("a|", ("a",)),
        ("a| ", ("a",)),
        ("|", ()),
        ("  ", ()),
    ],
)
def test_answers_are_joined_by_bars(body, answers):
    assert split_answers(body) == answers


@pytest.mark.parametrize(
    ("body", "boxed"),
    [
        (r"\boxed{204}", "204"),
        (r"So $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{\{1, 2}", r"\{1, 2"),
        (r"\boxed{\{}\}}", r"\{"),
        (r"\boxed{1", None),
        ("204", None),
    ],
)
def test_boxed_results(body, boxed):
    assert parse_boxed(body) == boxed


def test_a_solution_is_a_boxed_result_or_one_program():
    assert parse_solution(r"The result is \boxed{7}.") == "7"
    assert parse_solution("```py\nprint(7)\n```") == "print(7)"
    assert parse_solution(r"\boxed{}") is None
    assert parse_solution("7") is None
    assert parse_solution("```py\nprint(7)\n```\n```sh\n1\n```") is None


def test_urls_plain_and_as_links():
    body = "https://a.org/x | [A page](http://b.org/y_(z)?q=1) | not a page| https://c.org/a b"
    assert parse_urls(body) == ("https://a.org/x", "http://b.org/y_(z)?q=1")
    assert parse_urls("") == ()


def test_arguments_of_the_visual_inspector():
    assert parse_inspection('{"file_path": "a.png"}') == ("a.png", None)
    fenced = '```json\n{"file_path": "a.png", "question": "Which colour?"}\n```'
    assert parse_inspection(fenced) == ("a.png", "Which colour?")
    for bad in ("", "a.png", "[]", '{"file_path": 3}', '{"file_path": ""}', "{" * 100_000):
        assert parse_inspection(bad) is None


ANY_READER = st.sampled_from(
    [parse_reflection, parse_double_check, parse_code, parse_boxed, parse_solution, parse_urls,
     parse_inspection, split_answers]
)  # fmt: skip
DENSE = st.lists(
    st.sampled_from(["```", "py", "sh", "\n", "{", "}", "\\", "\\boxed{", "|", "score", "3", ":",
                     "1-4", "information_conflict", "Fair", ",", " ", '"file_path"', "http://a"])
).map("".join)  # fmt: skip


@given(ANY_READER, st.one_of(st.text(), DENSE))
def test_every_reader_takes_any_text(reader, body):
    reader(body)
