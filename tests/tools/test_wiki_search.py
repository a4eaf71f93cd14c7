"""The search tool on pages of its own, and its cache."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest

from coa_jax.errors import UserError
from coa_jax.tools.base import Tool, ToolContext, call_tool
from coa_jax.tools.bm25 import WikiIndex, load_index, tokenize
from coa_jax.tools.corpus import Passage
from coa_jax.tools.wiki_search import WikiSearch

SMALL = (
    Passage("Aland: Capital", "The capital of Aland is Mariehamn."),
    Passage("Bland: Capital", "The capital of Bland is Dull."),
    Passage("Bland: Area", "The area of Bland is 1,234 sq km."),
)
CAPITALS = {"Botswana": "Gaborone", "Chad": "N'Djamena"}
CAPITALS |= {f"Land{k}": f"Town{k}" for k in range(250)}
PASSAGES = tuple(
    Passage(f"{name}: {topic}", text)
    for name, capital in CAPITALS.items()
    for topic, text in (
        ("History", f"The first capital of {name} was a camp, and {capital} a market on a river."),
        ("Capital", f"The capital of {name} is {capital}."),
        ("Area", f"The area of {name} is {len(name)},000 sq km."),
    )
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the stored indexes of a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "coa_jax" / "wiki"


@pytest.fixture(scope="module")
def tool():
    tool = WikiSearch(load=lambda *_: WikiIndex.build(PASSAGES))
    tool.warm_up()
    return tool


def run(tool, query, history=()):
    return asyncio.run(call_tool(tool, query, ToolContext(history=history)))


def test_observations_have_the_form_of_the_release(tool):
    observation = run(tool, "capital of Botswana")
    assert isinstance(tool, Tool) and observation.ok and observation.outcome == "ok"
    documents = observation.text.split("\n\n")
    assert len(documents) == 3
    assert documents[0] == "Doc 1 (Title: Botswana: Capital)\nThe capital of Botswana is Gaborone."
    for k, document in enumerate(documents, 1):
        assert re.fullmatch(rf"Doc {k} \(Title: [^\n]+\)\n[^\n]+", document)


@pytest.mark.parametrize("query", ["Botswana capital", "capital Gaborone", "GABORONE CAPITAL?"])
def test_short_queries_find_the_fact_first(tool, query):
    assert tool.search(query)[0].passage.title == "Botswana: Capital"


def test_internet_codes_are_not_words():
    assert tokenize("The code .is is 1,234,5") == ["code", ".is", "1234", "5"]


def test_marks_are_dropped_only_where_they_are_accents():
    assert tokenize("Việt Ἀθῆναι") == ["viet", "αθηναι"]
    assert tokenize("Йод и ёж, Москва\u0301") == ["йод", "и", "ёж", "москва"]
    assert tokenize("змеи\u0306") == ["змей"]
    assert tokenize("हिन्दी") == ["हिन्दी"]


def test_corpora_of_any_script_are_searched():
    assert tokenize("Straße in Côte-d'Azur_2") == ["strasse", "cote", "d", "azur", "2"]
    assert tokenize("東京は日本のAI") == ["東", "京", "は", "日", "本", "の", "ai"]
    passages = (
        Passage("Москва", "Столица России, население 13 миллионов."),
        Passage("Αθήνα", "Πρωτεύουσα της Ελλάδας."),
        Passage("東京", "日本の首都である。"),
        Passage("القاهرة", "عاصمة مصر"),
        Passage("서울", "대한민국의 수도이다."),
        Passage("दिल्ली", "भारत की राजधानी है।"),
        Passage("กรุงเทพ", "เป็นเมืองหลวงของประเทศไทย"),
    )
    index = WikiIndex.build(passages)
    for query, title in (
        ("столица РОССИИ", "Москва"), ("πρωτευουσα", "Αθήνα"), ("日本首都", "東京"),
        ("عاصمة", "القاهرة"), ("수도이다", "서울"), ("राजधानी", "दिल्ली"), ("เมืองหลวง", "กรุงเทพ"),
    ):  # fmt: skip
        assert index.search(query, 1)[0].passage.title == title


def test_repeated_empty_and_hopeless_queries(tool):
    repeat = run(tool, " capital  of Chad ", (("wiki_search", "capital of Chad"),))
    assert repeat.outcome == "error" and "already searched" in repeat.text and not repeat.ok
    other_tool = run(tool, "capital of Chad", (("code", "capital of Chad"),))
    assert other_tool.ok
    assert run(tool, " \n ").outcome == "bad_call"
    for query in ("qqqzzz", "the of", "¿?"):
        nothing = run(tool, query)
        assert nothing.outcome == "error" and "Nothing was found" in nothing.text


def test_searches_leave_the_event_loop_free_and_agree(tool):
    gone_on = threading.Event()

    class Waiting:
        """An index whose searches last until the event loop has gone on."""

        def search(self, query, count):
            assert gone_on.wait(10)
            return tool.warm_up().search(query, count)

    waiting, queries = WikiSearch(load=lambda *_: Waiting()), [f"capital of {n}" for n in CAPITALS]

    async def many():
        calls = asyncio.gather(*(call_tool(waiting, q, ToolContext()) for q in queries))
        await asyncio.sleep(0.01)
        gone_on.set()
        return [observation.text for observation in await calls]

    assert asyncio.run(many()) == [run(tool, query).text for query in queries]


def test_ties_keep_the_order_of_the_corpus():
    copies = tuple(Passage(f"T{i}", "same words") for i in range(9))
    hits = WikiIndex.build(copies).search("same", 4)
    assert [hit.passage.title for hit in hits] == ["T0", "T1", "T2", "T3"]


def test_the_index_comes_back_from_the_cache(cache, monkeypatch):
    built = load_index(passages=PASSAGES)
    monkeypatch.setattr(WikiIndex, "build", None)
    for query in ("capital of Chad", "market on a river", "Land7 area"):
        assert load_index(passages=PASSAGES).search(query, 5) == built.search(query, 5)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "manifest"])
def test_a_damaged_cache_is_rebuilt(cache, damage):
    want = load_index(passages=SMALL).search("capital Dull", 3)
    (folder,) = cache.iterdir()
    victim = folder / ("manifest.json" if damage == "manifest" else "passages.jsonl")
    content = victim.read_bytes()
    if damage == "flip":
        victim.write_bytes(content.replace(b"Dull", b"Null"))
    elif damage == "remove":
        victim.unlink()
    else:
        victim.write_bytes(content[: len(content) // 2])
    assert load_index(passages=SMALL).search("capital Dull", 3) == want
    assert [p.name for p in cache.iterdir()] == [folder.name]
    assert (folder / "passages.jsonl").read_bytes().count(b"Dull") == 1


def test_corpora_and_settings_have_their_own_cache(cache):
    load_index(passages=SMALL)
    load_index(passages=SMALL[:2])
    assert len(list(cache.iterdir())) == 2
    assert not load_index(passages=SMALL[:2]).search("area", 1)


def test_a_cache_that_cannot_be_written_costs_nothing_else(cache):
    cache.parent.write_text("")
    assert load_index(passages=SMALL).search("area", 1)


def test_wrong_settings_are_explained():
    with pytest.raises(UserError, match=r"^wiki_search has no text"):
        load_index(passages=[])
