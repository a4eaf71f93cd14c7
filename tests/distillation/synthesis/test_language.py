"""A model behind a real endpoint writes questions on a corpus of a few documents."""

import asyncio
import json
import re

import pytest

from coa_jax.distillation.endpoint import Endpoint, EndpointConfig
from coa_jax.distillation.synthesis.drafts import Document
from coa_jax.distillation.synthesis.language import LanguageAuthor
from tests.distillation.chat_server import serving

LAB = Document("Brell Laboratory", "Brell Laboratory was founded in Oskar by Ina Voss.")
VOSS = Document("Ina Voss", "Ina Voss was born in 1931 and studied tides.")
Q_LAB = {"question": "Who founded the Brell Laboratory?", "answer": "Ina Voss"}


def run(tmp_path, reply, what):
    """(what the author gave, requests) with a model that answers by the function `reply`."""

    async def work(server):
        endpoint = Endpoint(EndpointConfig(url=server.url, model="m"), tmp_path / "calls.jsonl")
        try:
            return await what(LanguageAuthor(endpoint))
        finally:
            await endpoint.close()

    with serving(reply) as server:
        return asyncio.run(work(server)), server.seen


def says(*replies):
    left = list(replies)
    return lambda chat: left.pop(0) if isinstance(left[0], str) else json.dumps(left.pop(0))


@pytest.fixture
def founder(tmp_path):
    ((draft,), _) = run(
        tmp_path / "first", says({"tasks": [Q_LAB]}), lambda author: author.atomic(LAB)
    )
    return draft


def test_a_document_is_shown_as_data_and_its_questions_are_read(tmp_path):
    (drafts, seen) = run(tmp_path, says({"tasks": [Q_LAB]}), lambda a: a.atomic(LAB))
    assert [(d.question, d.gold, d.documents) for d in drafts] == [
        (Q_LAB["question"], ("Ina Voss",), (LAB,))
    ]
    shown = re.search(r"^document: (.*)$", seen[0]["messages"][1]["content"], re.MULTILINE)[1]
    assert json.loads(shown) == {"title": LAB.title, "text": LAB.text}


@pytest.mark.parametrize(
    ("nonsense", "why"),
    [
        ("I would rather not.", "no JSON object"),
        ({"tasks": "none"}, "not a list"),
        ({"tasks": [{"question": "Who founded the Brell Laboratory?"}]}, "'answer' is missing"),
        ({"tasks": [{**Q_LAB, "answer": "Otto"}]}, "does not stand in the document"),
        ({"tasks": [{**Q_LAB, "question": "Whom does this passage name?"}]}, "do not see"),
        ({"tasks": [{**Q_LAB, "question": "Did Ina Voss found Brell?"}]}, "tells its own answer"),
    ],
)
def test_nonsense_costs_a_retry_that_says_what_was_wrong(tmp_path, nonsense, why):
    ((draft,), seen) = run(tmp_path, says(nonsense, {"tasks": [Q_LAB]}), lambda a: a.atomic(LAB))
    assert draft.gold == ("Ina Voss",)
    assert why in seen[1]["messages"][-1]["content"]


def test_a_model_that_only_talks_nonsense_costs_its_draft_and_not_the_run(tmp_path):
    with pytest.raises(ValueError, match="no usable reply in 3 attempts"):
        run(tmp_path, says("a", "b", "c"), lambda author: author.atomic(LAB))


def test_a_document_without_a_question_gives_none(tmp_path):
    assert run(tmp_path, says({"tasks": []}), lambda author: author.atomic(LAB))[0] == []


def test_a_further_hop_hides_the_bridge(tmp_path, founder):
    good = {
        "question": "When was Ina Voss born?",
        "answer": 1931,
        "merged": "When was the founder of the Brell Laboratory born?",
    }
    replies = (
        {**good, "question": "When was she born?"},
        {**good, "merged": "When was Ina Voss, who founded the Brell Laboratory, born?"},
    )
    (draft, seen) = run(tmp_path, says(*replies, good), lambda a: a.add_hop(founder, VOSS))
    assert (draft.question, draft.gold, draft.hidden) == (good["merged"], ("1931",), ("Ina Voss",))
    assert draft.steps == ((Q_LAB["question"], "Ina Voss"), (good["question"], "1931"))
    assert "does not name the bridge 'Ina Voss'" in seen[1]["messages"][-1]["content"]
    assert "names the bridge" in seen[2]["messages"][-1]["content"]


def test_a_merged_question_that_forgets_a_part_is_asked_for_again(tmp_path, founder):
    lost = {"question": "When was Ina Voss born?", "answer": "1931", "merged": "When was she born?"}
    with pytest.raises(ValueError, match="names none of brell laboratory"):
        run(tmp_path, says(lost, lost, lost), lambda author: author.add_hop(founder, VOSS))


def test_a_document_that_says_nothing_of_the_bridge_gives_no_hop(tmp_path, founder):
    assert run(tmp_path, says({"merged": None}), lambda a: a.add_hop(founder, VOSS))[0] is None


def test_joined_questions_ask_for_both_answers(tmp_path, founder):
    works = Document("Otto Works", "The Otto Works make clocks in Rell.")
    place = {"question": "In which town are the Otto Works?", "answer": "Rell"}
    ((other,), _) = run(tmp_path / "a", says({"tasks": [place]}), lambda a: a.atomic(works))
    tells = {"merged": "Who founded Brell Laboratory, and are the Otto Works in Rell?"}
    half = {"merged": "Who founded the Brell Laboratory, and where are the works?"}
    good = {"merged": "Who founded the Brell Laboratory, and where are the Otto Works?"}
    (draft, seen) = run(tmp_path, says(tells, half, good), lambda a: a.join_drafts(founder, other))
    assert draft.gold == ("Ina Voss|Rell",)
    assert draft.question == f"{good['merged']} Give both answers, joined by |."
    assert "tells its own answer" in seen[1]["messages"][-1]["content"]
    assert "names none of otto works" in seen[2]["messages"][-1]["content"]
