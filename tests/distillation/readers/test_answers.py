import pytest

from coa_jax.distillation.readers.answers import marked_answer

PROGRAM = "```python\na = 1\n\nprint(a)\n```"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("Final answer: $\\boxed{42}$", "42"),
        ("Final answer: .5", ".5"),
        ("Final answer: \u22125", "\u22125"),
        ("Final answer: -5", "-5"),
        ("Final Answer: $5,000", "$5,000"),
        ('Final answer: "Paris"', "Paris"),
        ("Final answer: `Paris`", "Paris"),
        ("Final answer: $x^2$", "x^2"),
        ("Final answer: $a$ or $b$", "$a$ or $b$"),
        ("Final answer: (a) 5", "(a) 5"),
        ("Final answer: [Paris, Lyon]", "[Paris, Lyon]"),
        ("Final Answer: **Paris**, France", "**Paris**, France"),
        ("**Final Answer:** **Paris**", "Paris"),
        ("**Final Answer: Paris**", "Paris"),
        ("**Final Answer**: Paris\nSources: one", "Paris"),
        ("So the final answer is: Paris", "Paris"),
        ("Final answer: \u300a\u7ea2\u697c\u68a6\u300b", "\u300a\u7ea2\u697c\u68a6\u300b"),
        ("Final answer:\nParis", "Paris"),
        ("**Final Answer**\n\nParis\n\nThat is it.", "Paris"),
        (f"**Final answer:**\n{PROGRAM}\nDone.", PROGRAM),
        ("Final answer: a\nFinal answer: b", "b"),
        ("<answer>**Paris**</answer>\nFinal answer: Lyon", "Paris"),
        ("<answer></answer>", ""),
        ("<answer>a</answer> or <Answer>b</ANSWER> <answer>", "b"),
        ("The answer is in the page. Final answer: Porto", "Porto"),
        ("It is clear! **Final answer:** Porto", "Porto"),
        ("**Answer:** Porto", "Porto"),
        ("I found it. The answer is Porto.", "Porto"),
        ("So the answer is: **Porto**", "Porto"),
        ("The final answer is Douro.", "Douro"),
        ("Final answer is **Douro**.", "Douro"),
        ("<final_answer>Douro</final_answer>", "Douro"),
        ("<final_answer>a</final_answer> <answer>b</answer>", "b"),
        ('{"answer": "Porto", "confidence": 0.9}', "Porto"),
        ('```json\n{"final_answer": 42}\n```', "42"),
        (r'{"answer": "\\boxed{7}"}', "7"),
        ("So $x = \\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
    ],
)
def test_an_answer_is_taken_whole_without_the_marks_around_it(words, answer):
    assert marked_answer(words)[1] == answer


def test_what_stands_before_an_answer_is_the_way_to_it():
    assert marked_answer("It is old.\nFinal answer: Paris\nDone.")[0] == "It is old."
    boxed = "It is e.g. 42.\nThe answer is \\boxed{42}."
    assert marked_answer(boxed) == ("It is e.g. 42.\nThe answer is 42.", "42")
    assert marked_answer("$\\boxed{42}$.") == ("", "42")


@pytest.mark.parametrize(
    "words",
    [
        "Paris",
        "It is my final answer",
        "The final answer is in it. Look!",
        "The answer is in it. Look!",
        "An answer is Lima",
        "[1, 2]",
        "\\boxed{",
        "\\boxed{}",
        "",
    ],
)
def test_where_no_answer_is_marked_there_is_none(words):
    assert marked_answer(words) is None


def test_tags_that_stay_open_are_looked_through_once():
    assert marked_answer("<answer>" * 200_000) is None
