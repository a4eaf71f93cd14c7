"""Vector search: exact, stored on disk, fused with BM25, as a tool and on a server."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coa_jax.config.preflight import SECONDS, preflight
from coa_jax.errors import UserError
from coa_jax.serve import tool_server
from coa_jax.tools import dense
from coa_jax.tools.base import ToolContext, call_tool
from coa_jax.tools.bm25 import load_index
from coa_jax.tools.corpus import Passage
from coa_jax.tools.dense import DenseIndex, EncoderConfig, fuse, load_retriever, nearest
from coa_jax.tools.encoder import TextEncoder
from coa_jax.tools.make import ToolsConfig, make_tools
from coa_jax.tools.recorded import StoreConfig
from coa_jax.tools.wiki_search import RemoteSearch, WikiConfig, WikiSearch
from tests.tools import tiny_encoder
from tests.tools.live import serving

PASSAGES = (
    Passage("Aland: Capital", "the capital of Aland is Mariehamn"),
    Passage("Bland: Capital", "the capital of Bland is Dull"),
    Passage("Bland: Area", "the area of Bland is 1 2 3 sq km"),
    Passage("Dull: Lake", "a lake"),
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder") / "model"
    tiny_encoder.write(folder)
    return EncoderConfig(str(folder), query_prefix="", passage_prefix="")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of the stored indexes of a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "coa_jax" / "wiki"


def ask(tool, query):
    return asyncio.run(call_tool(tool, query, ToolContext()))


@given(
    hnp.arrays(np.int8, st.tuples(st.integers(1, 30), st.just(3)), elements=st.integers(-3, 3)),
    hnp.arrays(np.int8, st.tuples(st.integers(1, 4), st.just(3)), elements=st.integers(-3, 3)),
    st.integers(1, 40),
    st.integers(1, 9),
)
def test_the_nearest_are_exact_and_of_equal_ones_the_first(vectors, queries, top_k, rows):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "_ROWS", rows)
        found = nearest(vectors.astype(np.float32), queries.astype(np.float32), top_k)
    for query, best in zip(queries.astype(int), found, strict=True):
        products = (vectors.astype(int) @ query).tolist()
        wanted = sorted(range(len(products)), key=lambda i: (-products[i], i))[:top_k]
        assert best == [(i, products[i]) for i in wanted]


def test_ranks_are_fused_by_the_sum_of_their_reciprocals():
    found = fuse([[(7, 9.0), (3, 8.0), (5, 1.0)], [(3, 0.9), (2, 0.8)], []])
    assert [number for number, _ in found] == [3, 7, 2, 5]
    wanted = [1 / 62 + 1 / 61, 1 / 61, 1 / 62, 1 / 63]
    assert [score for _, score in found] == pytest.approx(wanted, rel=1e-12)
    assert fuse([[(4, 1.0)], [(1, 1.0)]]) == [(1, 1 / 61), (4, 1 / 61)]  # in the corpus's order


@pytest.mark.parametrize("retrieval", ["dense", "hybrid"])
def test_a_passage_is_found_by_its_own_words(encoder, retrieval):
    index = load_retriever(retrieval, encoder, passages=PASSAGES)
    assert tuple(index.passages) == PASSAGES
    for passage in PASSAGES:
        best, *_ = hits = index.search(f"{passage.title}\n{passage.text}", 4)
        assert best.passage == passage
        assert len(hits) == 4 and [h.score for h in hits] == sorted(h.score for h in hits)[::-1]
        if retrieval == "dense":
            assert best.score == pytest.approx(1.0, abs=1e-5)


def test_a_hybrid_ranks_what_words_and_vectors_rank(encoder):
    index = load_retriever("hybrid", encoder, passages=PASSAGES)
    parts = [load_retriever(name, encoder, passages=PASSAGES) for name in ("bm25", "dense")]
    query = "capital of Bland"
    assert index.rank(query, 3) == fuse([part.rank(query, 100) for part in parts])[:3]
    # No word of the corpus: the vectors decide alone, where BM25 finds nothing.
    assert parts[0].rank("xyzzy", 3) == []
    assert [i for i, _ in index.rank("xyzzy", 3)] == [i for i, _ in parts[1].rank("xyzzy", 3)]


def test_vectors_are_computed_once_for_each_model_and_corpus(cache, encoder, monkeypatch):
    query = "lake of Dull"
    want = load_retriever("dense", encoder, passages=PASSAGES).search(query, 4)
    (folder,) = cache.iterdir()
    computed, original = [], TextEncoder.passages

    def passages(self, texts):
        computed.append(len(texts))
        return original(self, texts)

    monkeypatch.setattr(TextEncoder, "passages", passages)

    def load(config=encoder, passages=PASSAGES):
        return load_retriever("dense", config, passages=passages).search(query, 4)

    assert load() == want and computed == []
    file = folder / "vectors.npy"
    content = file.read_bytes()
    for damage in (content[:-5], b"", content.replace(b"(4, ", b"(3, ")):
        file.write_bytes(damage)
        assert load() == want
    assert computed == [4, 4, 4]
    load(passages=PASSAGES[:3])
    load(EncoderConfig(encoder.path, "", "other: "))
    assert computed[3:] == [3, 4]
    assert len(list(cache.iterdir())) == 3


def test_the_vectors_are_mapped_and_not_read(encoder):
    index = load_retriever("dense", encoder, passages=PASSAGES)
    assert isinstance(index, DenseIndex) and isinstance(index._vectors, np.memmap)


def test_a_configuration_searches_any_corpus_by_vectors(tmp_path, encoder, monkeypatch):
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"title": p.title, "text": p.text} for p in PASSAGES]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = ToolsConfig(names=("wiki_search", "web_search"), wiki_search=WikiConfig(
        str(corpus), 2, retrieval="dense", encoder=encoder))  # fmt: skip
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    wiki, web = make_tools(config)
    seen = ask(wiki, "Dull: Lake a lake")
    assert seen.text.startswith("Doc 1 (Title: Dull: Lake)\na lake\n\nDoc 2 (")
    assert seen.detail["scores"][0] == pytest.approx(1.0, abs=1e-4)
    assert "1. [Dull: Lake]" in ask(web, "Dull: Lake a lake").text
    (check, *_) = preflight(config.probes(), SECONDS)
    assert check.ok and "dense index" in check.text


def test_kept_answers_are_those_of_the_corpus_and_of_how_it_was_searched(tmp_path, encoder):
    corpus = tmp_path / "corpus.jsonl"
    store = StoreConfig(path=str(tmp_path / "s.sqlite"), tools=("wiki_search",))

    def answer(**changes):
        config = ToolsConfig(names=("wiki_search",), store=store,
                             wiki_search=WikiConfig(str(corpus), 1, **changes))  # fmt: skip
        return ask(make_tools(config)[0], "capital")

    corpus.write_text('{"title": "One", "text": "the capital"}\n')
    assert "One" in answer().text
    assert answer().detail["stored"]
    assert "stored" not in answer(retrieval="dense", encoder=encoder).detail
    corpus.write_text('{"title": "Another", "text": "the capital"}\n')
    assert "Another" in answer().text


def test_a_server_shows_what_its_dense_index_shows(encoder):
    index = load_retriever("hybrid", encoder, passages=PASSAGES)
    with serving(index) as address:
        url = f"{address}/retrieve"
        local = WikiSearch(2, passages=PASSAGES, load=lambda *settings: index)
        for query in ("capital of Bland", "xyzzy"):
            assert ask(RemoteSearch(url, top_k=2), query).text == ask(local, query).text


def test_what_is_missing_is_said(tmp_path, encoder, capsys):
    with pytest.raises(UserError, match=r"hybrid retrieval needs an encoder.*encoder\.path"):
        make_tools(ToolsConfig(wiki_search=WikiConfig(retrieval="hybrid")))
    with pytest.raises(UserError, match=r"^wiki_search has no text"):
        load_retriever("dense", encoder, passages=[])
    arguments = ["--retrieval", "dense", "--encoder", str(tmp_path / "none"), "--no_code"]
    assert tool_server.main(arguments) == 2
    assert "config.json: cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trained_encoder_finds_what_shares_no_word_with_the_query():
    """all-MiniLM-L6-v2, which `coa-jax fetch minilm` downloads."""
    default = Path(__file__).parents[2] / "weights" / "all-MiniLM-L6-v2"
    path = Path(os.environ.get("COA_JAX_MINILM", default))
    if not path.is_dir():
        pytest.skip("all-MiniLM-L6-v2 is not here: run coa-jax fetch minilm")
    model = EncoderConfig(str(path), query_prefix="", passage_prefix="")
    passages = (
        Passage("Feline", "The cat slept on the warm sofa all afternoon."),
        Passage("Vehicle", "The automobile would not start in the cold."),
        Passage("Money", "The bank raised its interest rates by half a percent."),
        Passage("Sky", "Rain and thunder are expected over the mountains tonight."),
    )
    queries = {"why did my car break down in winter": "Vehicle", "kitten napping": "Feline",
               "storm forecast": "Sky", "what borrowers pay": "Money"}  # fmt: skip
    for retrieval in ("dense", "hybrid"):
        index = load_retriever(retrieval, model, passages=passages)
        found = {query: index.search(query, 1)[0].passage.title for query in queries}
        assert found == queries
    words = load_index(passages=passages)
    assert any(not words.search(query, 1) for query in queries)
