r"""Distils Factbook questions from a language model behind an OpenAI-compatible endpoint.

    coa-jax distill --config=configs/distill/endpoint.py --workdir=runs/endpoint

Needs: the extra ``endpoint`` and a server with ``/v1/chat/completions``, such as vLLM or a cloud
service. Name the server by ``--config.endpoint.url=... --config.endpoint.model=...``. The API key
is read from the environment variable that ``endpoint.key_env`` names.
Takes: ten to thirty calls of the model per task; ``teacher.concurrency`` tasks run at the same
time.
Gives: the files of configs/distill/factbook.py and ``calls/SPLIT.jsonl`` with every prompt and
reply. The run stops before a call that would exceed one of the limits ``endpoint.max_calls``,
``max_total_tokens`` and ``max_money``. ``max_money`` needs ``endpoint.prices``; the price below is
an example, to be replaced by the price of your provider. If the command is started again, it
continues, and no recorded reply is paid twice.
"""

from __future__ import annotations

import ml_collections

from coa_jax.distillation.endpoint import EndpointConfig
from coa_jax.run.command import load_config
from coa_jax.run.settings import complete_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    config = load_config("configs/distill/factbook.py")
    with config.unlocked():
        config.tasks.train, config.tasks.validation = 200, 50
        config.teacher.concurrency = 16
        config.endpoint = complete_config(
            EndpointConfig,
            {
                "url": "http://localhost:8000/v1",
                "model": "Qwen/Qwen2.5-72B-Instruct",
                "prices": (("Qwen/Qwen2.5-72B-Instruct", 0.0, 0.0),),
                "max_calls": 20_000,
            },
        )
    return config
