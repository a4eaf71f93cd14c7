r"""Serves the policy of the quickstart, and its chain of agents, to OpenAI clients and browsers.

    coa-jax serve --config=configs/serve/factbook.py

Needs: the extra ``serve`` and the policy of the quickstart, or the directory of another policy:
``--config.model=weights/SmolLM2-135M-Instruct --config.engine.max_length=2048`` (``coa-jax fetch
smollm2``, in Q4_1). The agent works best with the budgets (``--config.rollout...``) of the policy's
training. Protocol and prompt come from ``agent.json`` in the policy's directory, unless
``--config.protocol`` or ``--config.rollout.prompt_style`` is set.
Takes: seconds to load and compile; then the server runs until Ctrl-C or SIGTERM.
Gives: ``http://127.0.0.1:8000`` with a web page for questions, and ``/v1`` for clients. If the
environment variable ``COA_JAX_API_KEY`` is set, clients must send its value as their API key. Other
machines (``--config.host=0.0.0.0``) are only served if a key is set.
"""

from __future__ import annotations

import ml_collections

from coa_jax.run.command import load_config
from coa_jax.run.settings import complete_config
from coa_jax.serve.config import ServeConfig
from coa_jax.tools.make import ToolsConfig


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    quickstart = load_config("configs/quickstart/factbook.py")
    config = complete_config(
        ServeConfig,
        {
            "model": "runs/quickstart/models/rl",
            "name": "",
            "host": "127.0.0.1",
            "port": 8000,
            "api_key_env": "COA_JAX_API_KEY",
            "protocol": "",
            "max_waiting": 256,
            "max_samples": 16,
            "max_body": 0,
            "shutdown_seconds": 30.0,
            "seed": 0,
            "engine": quickstart.evaluate.engine,
            "rollout": {**quickstart.evaluate.rollout.to_dict(), "prompt_style": "model"},
        },
    )
    config.tools = complete_config(ToolsConfig, quickstart.tools)
    return config
