r"""Distil Factbook questions from a language model behind an OpenAI-compatible endpoint.

    python -m coa_jax.distill --config=configs/distill/endpoint.py --workdir=runs/endpoint

Needs: the extra ``endpoint`` and a server with ``/v1/chat/completions``, such as vLLM or a cloud
service.  ``--config.endpoint.url=... --config.endpoint.model=...`` name it;
the key is read from the environment variable ``endpoint.key_env``.
Takes: ten to thirty calls per task; ``teacher.concurrency`` tasks run concurrently.
Gives: the files of configs/distill/factbook.py and ``calls/SPLIT.jsonl`` with every prompt and
reply.  The run stops before a call that would exceed a limit (``endpoint.max_calls``,
``max_total_tokens``, ``max_money`` with ``endpoint.prices``; the price below is an example, replace
it by that of your provider).  Started again, the run continues; no recorded reply is paid twice.
"""

from __future__ import annotations

import ml_collections

from coa_jax.cli import load_config
from coa_jax.distill.endpoint import EndpointConfig
from coa_jax.settings import complete


def get_config() -> ml_collections.ConfigDict:
    """The configuration."""
    config = load_config("configs/distill/factbook.py")
    with config.unlocked():
        config.tasks.train, config.tasks.validation = 200, 50
        config.teacher.concurrency = 16
        config.endpoint = complete(
            EndpointConfig,
            {
                "url": "http://localhost:8000/v1",
                "model": "Qwen/Qwen2.5-72B-Instruct",
                "prices": (("Qwen/Qwen2.5-72B-Instruct", 0.0, 0.0),),
                "max_calls": 20_000,
            },
        )
    return config
