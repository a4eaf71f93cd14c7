"""The grammar of factbook questions: parsing undoes rendering, values come from passages alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.demo.factbook import items_of
from coa_jax.demo.grammar import (
    TEMPLATES,
    Arithmetic,
    Inverse,
    Lookup,
    Neighbour,
    Program,
    Ref,
    describe,
    kind_of,
    query_for,
    read_value,
    render,
    resolve_references,
    source_for,
    understand,
)
from coa_jax.demo.pages import load_entities, passages
from coa_jax.demo.relations import INVERTIBLE, RELATIONS

NAMES = st.one_of(
    st.sampled_from([entity.name for entity in load_entities()]),
    st.from_regex(r"[A-Z][a-z]{1,8}( and| of|-[A-Z]o)?( [A-Z][a-z']{1,6})?", fullmatch=True),
)
VALUES = st.one_of(
    st.sampled_from(["Washington, D.C.", ".is", "O Canada", "K2 and K3", "U.S. of A", "5N"]),
    st.from_regex(r"[A-Z][a-z]{1,8}([ ,.'-][A-Za-z]{1,6}){0,3}", fullmatch=True),
)
NUMBERS = [r.key for r in RELATIONS.values() if r.number]
OTHERS = [key for key in RELATIONS if key != "neighbour"]


@st.composite
def expressions(draw, offset=0):
    """(steps, subject) of a noun phrase whose first step has the index ``offset``."""
    steps: list = []
    subject = draw(NAMES)
    if draw(st.booleans()):
        steps.append(Inverse(draw(st.sampled_from(INVERTIBLE)), draw(VALUES)))
        subject = Ref(offset)
    for _ in range(draw(st.integers(0, 2))):
        steps.append(Neighbour(subject))
        subject = Ref(offset + len(steps) - 1)
    return tuple(steps), subject


@st.composite
def programs(draw):
    steps, subject = draw(expressions())
    shape = draw(st.integers(0, 3))
    if shape == 0 and steps:
        return Program(steps)
    if shape <= 1:
        return Program((*steps, Lookup(draw(st.sampled_from(OTHERS)), subject)))
    if shape == 2:
        n = len(steps)
        lookups = (Lookup("population", subject), Lookup("area", subject))
        return Program((*steps, *lookups, Arithmetic("ratio", Ref(n), Ref(n + 1))))
    first = (*steps, Lookup(draw(st.sampled_from(NUMBERS)), subject))
    steps, subject = draw(expressions(offset=len(first)))
    steps = (*first, *steps, Lookup(draw(st.sampled_from(NUMBERS)), subject))
    operation = draw(st.sampled_from(["sum", "difference", "ratio"]))
    return Program((*steps, Arithmetic(operation, Ref(len(first) - 1), Ref(len(steps) - 1))))


@given(programs(), st.integers(0, TEMPLATES - 1))
@settings(max_examples=500, deadline=None)
def test_understand_is_the_inverse_of_render(program, template):
    assert understand(render(program, template)) == program


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_generated_question_is_understood(split):
    for item in items_of(split)[::7]:
        for template in range(TEMPLATES):
            assert understand(render(item.program, template)) == item.program


@pytest.mark.parametrize(
    "text",
    [
        "",
        "What is the capital of ?",
        "What is the meaning of Botswana?",
        "What is the capital of the country whose colour is blue?",
        "What is the capital of botswana?",
        "What is the sum of the capital of Chad and the capital of Mali?",
        "Who is the president of Chad?",
    ],
)
def test_other_questions_are_not_understood(text):
    assert understand(text) is None


@given(st.text(max_size=80))
def test_understand_never_raises(text):
    program = understand(text)
    assert program is None or render(program)


def test_a_chain_is_carried_out_from_passages():
    question = (
        "What is the area of the longest-border neighbour of the country whose capital is X-y?"
    )
    program = understand(question)
    assert program is not None and program.hops == 3
    assert kind_of(program) == "inverse>neighbour>lookup"
    texts = [
        ("Aland: Capital", "The capital of Aland is X-y."),
        ("Aland: Longest border", "The longest border of Aland is with Bland."),
        ("Bland: Area", "The area of Bland is 1,234 sq km."),
    ]
    queries = ["capital X-y", "longest border of Aland", "area of Bland"]
    answers: list[str] = []
    for step, (title, text), query in zip(program.steps, texts, queries, strict=True):
        bound = resolve_references(step, answers)
        assert query_for(bound) == query
        value = read_value(bound, title, text)
        assert value is not None
        answers.append(value)
    assert answers == ["Aland", "Bland", "1,234"]


def test_a_passage_about_something_else_gives_no_value():
    step = Lookup("capital", "Guinea")
    assert (
        read_value(step, "Guinea-Bissau: Capital", "The capital of Guinea-Bissau is Bissau.")
        is None
    )
    assert read_value(step, "Guinea: Area", "The area of Guinea is 245,857 sq km.") is None
    assert read_value(step, "Guinea: Capital", "Conakry has a port.") is None
    inverse = Inverse("capital", "Lima")
    assert read_value(inverse, "Chile: Capital", "The capital of Chile is Santiago.") is None


def test_every_fact_sentence_is_read_back():
    for entity in load_entities():
        for key, value in entity.facts.items():
            relation = RELATIONS[key]
            step = Neighbour(entity.name) if key == "neighbour" else Lookup(key, entity.name)
            text = relation.sentence.format(entity=entity.name, value=value)
            title = f"{entity.name}: {relation.title}"
            assert read_value(step, title, text) == value.replace("; ", "|")


def test_prose_passages_are_never_taken_for_facts():
    facts = {(e.name, key): v for e in load_entities() for key, v in e.facts.items()}
    for passage in passages():
        entity, _, title = passage.title.partition(": ")
        for key, relation in RELATIONS.items():
            if relation.title == title and key != "neighbour":
                value = read_value(Lookup(key, entity), passage.title, passage.text)
                assert value is None or value == facts[entity, key].replace("; ", "|")


def test_arithmetic_programs_print_the_answer(capsys):
    step = Arithmetic("ratio", Ref(0), Ref(1))
    exec(source_for(step, ["1,234", "100"]))
    exec(source_for(Arithmetic("sum", Ref(0), Ref(1)), ["1,234", "1.5"]))
    exec(source_for(Arithmetic("difference", Ref(1), Ref(0)), ["1,234", "2,000"]))
    assert capsys.readouterr().out.split() == ["12.34", "1235.5", "766"]
    assert describe(step) == "#1 / #2"
