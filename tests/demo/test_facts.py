import asyncio

import pytest

from coa_jax.demo.author import FactsAuthor, fact_of
from coa_jax.demo.facts import solve
from coa_jax.demo.grammar import understand
from coa_jax.distillation.synthesis.drafts import Document

DOCUMENTS = {
    "capital": Document("Botswana: Capital", "The capital of Botswana is Gaborone."),
    "border": Document(
        "Botswana: Longest border", "The longest border of Botswana is with Namibia."
    ),
    "area": Document("Botswana: Area", "The area of Botswana is 581,730 sq km."),
    "other area": Document("Namibia: Area", "The area of Namibia is 824,292 sq km."),
    "coast": Document("Botswana: Coastline", "The coastline of Botswana is 0 km."),
    "prose": Document("Botswana: Background", "Botswana is known for its diamonds."),
    "currency": Document("Guam: Currency", "The currency of Guam is US dollars."),
}


@pytest.fixture(scope="module")
def author():
    return FactsAuthor(DOCUMENTS.values(), seed=3)


def atomic(author, name):
    return asyncio.run(author.atomic(DOCUMENTS[name]))


def test_a_sentence_gives_the_question_for_either_end(author):
    value, entity = atomic(author, "capital")
    assert (value.gold, entity.gold) == (("Gaborone",), ("Botswana",))
    assert "Botswana" in value.question
    assert "Gaborone" in entity.question


def test_prose_and_zeros_give_nothing(author):
    assert fact_of(DOCUMENTS["prose"]) is None
    assert atomic(author, "prose") == atomic(author, "coast") == []


def test_a_value_of_two_entities_does_not_stand_for_one():
    twice = Document("Nambia: Capital", "The capital of Nambia is Gaborone.")
    author = FactsAuthor([*DOCUMENTS.values(), twice], seed=3)
    assert len(atomic(author, "capital")) == 1


def test_numbers_are_accepted_in_every_form(author):
    (draft,) = atomic(author, "area")
    assert draft.gold == ("581,730", "581730", "581,730 sq km")


def test_a_further_hop_asks_about_the_answer_and_hides_it(author):
    by_capital = atomic(author, "capital")[1]
    deeper = asyncio.run(author.add_hop(by_capital, DOCUMENTS["border"]))
    assert deeper.gold == ("Namibia",)
    assert deeper.hidden == ("Botswana",)
    assert "Botswana" not in deeper.question
    assert "Gaborone" in deeper.question
    assert [answer for _, answer in deeper.steps] == ["Botswana", "Namibia"]
    deepest = asyncio.run(author.add_hop(deeper, DOCUMENTS["other area"]))
    assert deepest.hidden == ("Botswana", "Namibia")
    assert deepest.gold[0] == "824,292"
    assert understand(deepest.question).hops == 3


def test_only_a_document_on_the_answer_serves_a_further_hop(author):
    by_capital = atomic(author, "capital")[1]
    for name in ("other area", "prose", "coast"):
        assert asyncio.run(author.add_hop(by_capital, DOCUMENTS[name])) is None
    (number,) = atomic(author, "area")
    assert asyncio.run(author.add_hop(number, DOCUMENTS["area"])) is None


def test_two_numbers_of_a_kind_are_joined_larger_first(author):
    one, other = atomic(author, "area")[0], atomic(author, "other area")[0]
    wider = asyncio.run(author.join_drafts(one, other))
    assert wider == asyncio.run(author.join_drafts(other, one)) or wider.gold
    assert set(wider.hidden) == {"581,730", "824,292"}
    operation = understand(wider.question).steps[-1].operation
    x, y = 824292, 581730
    expected = {"sum": x + y, "difference": x - y, "ratio": round(x / y, 2)}[operation]
    assert wider.gold == (str(expected),)
    assert asyncio.run(author.join_drafts(one, one)) is None
    assert one.topic == other.topic == "area"
    assert atomic(author, "capital")[0].topic is None


def test_answers_are_those_of_the_structured_facts():
    """The author reads sentences; the facts behind the factbook tasks are read from the pages."""
    from coa_jax.demo.pages import passages
    from coa_jax.distillation.synthesis.drafts import document_of

    documents = [document_of(passage) for passage in passages()]
    author = FactsAuthor(documents, seed=0)

    async def write():
        return [draft for d in documents[::7] for draft in await author.atomic(d)]

    checked = 0
    for draft in asyncio.run(write()):
        solution = solve(understand(draft.question))
        if solution is not None:  # the European Union and the World are no subjects there
            assert set(draft.gold) == set(solution.gold), draft
            checked += 1
    assert checked > 500
