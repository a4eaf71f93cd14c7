"""Real tools over the pages of the small world, for the tests of the teacher."""

from __future__ import annotations

import pytest

from coa_jax.tools.bm25 import WikiIndex
from coa_jax.tools.code import CodeTool
from coa_jax.tools.net import chat
from coa_jax.tools.wiki_search import WikiSearch
from tests.distillation.small_team import PASSAGES


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Failed requests to models are repeated at once."""
    monkeypatch.setattr(chat, "_BACKOFF_S", 0.001)


@pytest.fixture(scope="session")
def tools():
    search = WikiSearch(top_k=2, load=lambda *_: WikiIndex.build(PASSAGES))
    search.warm_up()
    return {"wiki_search": search, "code": CodeTool()}
