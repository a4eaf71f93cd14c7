r"""Generates questions with checked answers from any corpus, with a language model.

    coa-jax synthesize --config=configs/synthesize/endpoint.py --workdir=runs/questions

Needs: the extra ``endpoint``, an OpenAI-compatible endpoint (``endpoint.url``, ``endpoint.model``)
and a corpus (``tools.wiki_search.corpus=FILE.jsonl``; the Factbook if none is given).
Takes: for each question, one call of the model to write the question, ten to thirty calls for the
team that solves it with tools, and ``without_tools.samples`` (32) calls for the answers without
tools. ``synthesis.batch`` questions are processed at the same time.
Gives: the files of configs/synthesize/factbook.py and ``calls/`` with every request and reply.

``config.solver`` is the model that answers without tools (Qwen2.5-72B-Instruct in the paper). If
``solver.url`` or ``solver.model`` is empty, the value of ``endpoint`` is used. If ``solver.url`` is
empty, ``endpoint.key_env`` is used, too. Prices that ``solver.prices`` lacks are taken from
``endpoint.prices``. Each of the two models has its own budget. A judge (``judge.chat.url`` and
``judge.chat.model``) decides if the answer of the team does not literally equal the accepted
answer.
"""

from __future__ import annotations

import ml_collections

from coa_jax.distillation.endpoint import EndpointConfig
from coa_jax.run.command import load_config
from coa_jax.run.settings import complete_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = load_config("configs/synthesize/factbook.py")
    endpoint = {
        "url": "http://localhost:8000/v1",
        "model": "Qwen/Qwen2.5-72B-Instruct",
        "prices": (("Qwen/Qwen2.5-72B-Instruct", 0.0, 0.0),),
        "max_calls": 50_000,
    }
    solver = {
        "key_env": "",
        "temperature": 1.0,
        "prices": (("", 0.0, 0.0),),  # an example of the form; it prices no model
        "max_calls": 50_000,
    }
    with config.unlocked():
        config.tools.names = ("wiki_search",)
        config.synthesis.batch = 16
        config.synthesis.candidates = 3
        config.with_tools.attempts = 2
        config.without_tools.who = "endpoint"
        config.endpoint = complete_config(EndpointConfig, endpoint)
        config.solver = complete_config(EndpointConfig, solver)
    return config
