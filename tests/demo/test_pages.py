"""The pages of the Factbook, and the search tool on them."""

from __future__ import annotations

import re
import time

import pytest

from coa_jax.demo.facts import inverse_keys
from coa_jax.demo.grammar import Inverse, Lookup, Neighbour, query_for, read_value
from coa_jax.demo.pages import clean, load_entities, passages, split_text
from coa_jax.demo.relations import RELATIONS
from coa_jax.tools.bm25 import load_index
from coa_jax.tools.wiki_search import WikiSearch


@pytest.fixture(scope="module")
def tool(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        tool = WikiSearch()
        tool.warm_up()
        yield tool


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_each_relation_is_found_first_in_both_directions(tool, every):
    steps = [
        (key, Neighbour(e.name) if key == "neighbour" else Lookup(key, e.name))
        for e in load_entities()
        for key in e.facts
    ]
    steps += [(f"inverse {key}", Inverse(key, value)) for key, value in inverse_keys()]
    hits: dict[str, list[bool]] = {}
    for key, step in sorted(steps, key=lambda pair: pair[0])[::every]:
        best = tool.search(query_for(step))[0].passage
        hits.setdefault(key, []).append(read_value(step, best.title, best.text) is not None)
    rates = {key: sum(found) / len(found) for key, found in hits.items()}
    assert len(rates) == len(RELATIONS) + 6
    assert min(rates.values()) >= 0.95, rates


def test_passages_are_short_readable_and_unique():
    texts = list(passages())
    assert len(set(texts)) == len(texts) > 10_000
    assert max(len(p.text) for p in texts) <= 300
    for p in texts:
        assert p.text.isascii() and p.title.isascii() and p.text.strip() == p.text != ""
        assert not re.search(r"</?(p|br|strong|em|b|i)\b|&[a-z]+;|\s\s", p.text)
    facts = [v for e in load_entities() for k, v in e.facts.items() if k != "borders"]
    assert max(map(len, facts)) <= 60


def test_text_is_cleaned_and_split():
    markup = "<p>C&ocirc;te&nbsp;d&#39;Ivoire<br>&lt; 5 <strong>m</strong></p>"
    assert clean(markup) == "Cote d'Ivoire < 5 m"
    text = "One is here. Two is there; three " + "x" * 50 + " end."
    parts = split_text(text, 30)
    assert all(0 < len(part) <= 30 for part in parts)
    assert "".join(parts).replace(" ", "") == text.replace(" ", "")


def test_the_index_comes_back_from_the_cache_quickly(tool):
    start = time.perf_counter()
    index = load_index()
    assert time.perf_counter() - start < 10  # about 0.3 s on an idle core
    query = "longest border of Peru"
    assert index.search(query, 5) == tool.warm_up().search(query, 5)
