import asyncio

import pytest

from coa_jax.demo.author import Prior
from coa_jax.distillation.synthesis.drafts import Document
from coa_jax.tasks.base import Task

ODD = Task("c", "Why is the sea salt?", "generalist", ("rivers",), "test")


def test_the_prior_guesses_what_is_common():
    documents = [
        Document(f"Land {k}: Currency", f"The currency of Land {k} is euros.") for k in range(9)
    ]
    documents.append(Document("Land 9: Currency", "The currency of Land 9 is kroner."))
    common = Task("e", "What is the currency of Land 3?", "generalist", ("euros",), "test")
    guesses = asyncio.run(Prior(documents, 0)([common, ODD], 2000))
    # Nine in ten; the standard error of 2,000 draws is 0.0067.
    assert guesses[0].count("euros") / 2000 == pytest.approx(0.9, abs=0.027)
    assert set(guesses[0]) == {"euros", "kroner"}
    assert set(guesses[1]) == {""}
