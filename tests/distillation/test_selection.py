import pytest

from coa_jax.distillation import contamination as shown
from coa_jax.distillation.pipeline import DistillConfig, as_run
from coa_jax.distillation.selection import SelectionConfig, further_filters, query_terms
from coa_jax.errors import UserError
from coa_jax.tasks.base import Task
from tests.distillation.logs import log_of


def test_entities_are_names_and_numbers():
    assert shown.entities(
        "In which year did Mara Delling leave the Institute of Tidal Physics?"
    ) == {
        "mara delling",
        "institute of tidal physics",
    }
    assert shown.entities("What happened in 1931?") == {"1931"}
    assert shown.entities("who is it?") == frozenset()


@pytest.mark.parametrize(
    ("question", "found"),
    [
        ("What is France's capital?", {"france"}),
        ("What is France\u2019s capital?", {"france"}),
        ("Who led the Teachers' Guild of Oslo?", {"teachers", "guild of oslo"}),
        ("In which city did \u00c9mile Zola die?", {"emile zola"}),
        ("In which city did E\u0301mile Zola die?", {"emile zola"}),
        ("Was \u0141\u00f3d\u017a home to Artur Rubinstein?", {"\u0142odz", "artur rubinstein"}),
        ("Which of the 1,000 ships of the U.S. Navy left Rome. In May?",
         {"1000", "us navy", "rome", "may"}),
    ],
)  # fmt: skip
def test_names_are_the_same_in_every_spelling(question, found):
    assert shown.entities(question) == found


def test_a_question_about_one_thing_is_compared_by_its_words_too():
    task = Task("e", "What is the capital of Botswana?", "web", ("Gaborone",), "test")
    same = shown.contamination([task]).same_question
    assert same("Tell me the name of Botswana's capital city.", ["Gaborone"])
    assert same("which city serves as the Capital of Botswana?", ["gaborone"])
    assert not same("Which city is the largest of Botswana?", ["Gaborone"])
    assert not same("What is the capital of Namibia?", ["Gaborone"])
    assert not same("What is the capital of Botswana?", ["Windhoek"])
    assert not shown.contamination([task], entity_share=0.0).same_question(
        "What is the capital of Botswana?", ["Gaborone"]
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Peru capital", "capital Peru?"),
        ("S\u00e3o Paulo population", "Sa\u0303o Paulo population"),
        ("\uff21\uff22\uff23 news", "ABC news"),
        ("Stra\u00dfe", "STRASSE"),
        ("low of \u22125", "low of -5"),
        ("2010-2015", "2010 2015"),
    ],
)
def test_searches_of_the_same_words_repeat_each_other(one, other):
    assert query_terms(one) == query_terms(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("C++ release year", "C# release year"),
        ("C release year", "C++ release year"),
        ("flights from Paris to London", "flights from London to Paris"),
        ("flights from New York to New Jersey", "flights from New Jersey to New York"),
        ("is Peru larger than Chile", "is Chile larger than Peru"),
        ("temperature -5 C", "temperature 5 C"),
        ("jaguar -car", "jaguar car"),
        ("!!", "??"),
    ],
)
def test_searches_that_ask_for_something_else_do_not(one, other):
    rows = [("call", one, "First."), ("observation", "a"), ("call", other, "Then.")]
    rows += [("observation", "b"), ("suggestion", "x"), ("verdict", "4"), ("answer", "x")]
    task = Task("e", "q", "generalist", ("x",), "test")
    (near,) = further_filters(SelectionConfig(near_query=0.75))
    assert near.keeps(as_run(task, log_of(("plan", "1. look"), *rows)))


def test_an_address_is_blocked_by_a_host_and_the_beginning_of_a_path():
    def run(query):
        rows = [("plan", "1. look"), ("call", query), ("observation", "a"), ("answer", "x")]
        return as_run(Task("e", "q", "generalist", ("x",), "test"), log_of(*rows))

    blocked = ("example.org/data",)
    assert shown.opens_blocked(run("https://www.Example.org/data/x | https://b.org"), blocked)
    assert shown.opens_blocked(run("http://example.org/data"), blocked)
    assert not shown.opens_blocked(run("https://example.org/database"), blocked)
    assert not shown.opens_blocked(run("https://b.org/?from=example.org/database"), blocked)
    assert not shown.opens_blocked(run("https://b.org/my-example.org/data"), blocked)
    # Nobody can tell what only mentions a page from what passes it on.
    assert shown.opens_blocked(run("https://b.org/?from=example.org/data"), blocked)
    assert shown.opens_blocked(run("https://b.org/v1/example.org/data/x"), blocked)


def test_mistakes_of_the_user_are_explained():
    with pytest.raises(UserError, match=r"near_duplicate is 2"):
        SelectionConfig(near_duplicate=2.0)
    with pytest.raises(UserError, match="max_tokens needs a tokenizer"):
        DistillConfig(selection=SelectionConfig(max_tokens=5)).filters()
