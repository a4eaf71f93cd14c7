"""Real tools and tasks for the tests of the scripted teacher."""

from __future__ import annotations

import pytest

from coa_jax.tasks import load_tasks
from coa_jax.tools.code import CodeTool
from coa_jax.tools.wiki_search import WikiSearch


@pytest.fixture(scope="session")
def tools():
    search = WikiSearch(top_k=2)
    search.warm_up()
    return {"wiki_search": search, "code": CodeTool()}


@pytest.fixture(scope="session")
def factbook_tasks():
    return load_tasks("factbook", "train", 120, 0)


@pytest.fixture(scope="session")
def arithmetic_tasks():
    return load_tasks(
        "arithmetic:chain_sum,basic_arithmetic,products,decimal_chain_sum,gcd,lcm,simple_equations,"
        "count_bits,count_primes",
        "train",
        36,
        0,
    )
