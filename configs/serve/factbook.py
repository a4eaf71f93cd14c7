r"""Serves the policy of the quickstart, and its chain of agents, to OpenAI clients and browsers.

    python -m coa_jax.serve --config=configs/serve/factbook.py

Needs: the extra ``serve`` and the policy of the quickstart; another one by its
directory, as in ``--config.model=weights/SmolLM2-135M-Instruct --config.engine.max_length=2048``.
The budgets of the agent (``--config.rollout...``) are those that the policy was trained with.
Takes: seconds to load and compile; then it runs until Ctrl-C or SIGTERM.
Gives: ``http://127.0.0.1:8000`` with a page to ask questions, and ``/v1`` for clients.  With
``COA_JAX_API_KEY`` set in the environment clients have to send it.
"""

from __future__ import annotations

import ml_collections

from coa_jax.cli import load_config
from coa_jax.serve.config import ServeConfig
from coa_jax.settings import complete
from coa_jax.tools.make import ToolsConfig


def get_config() -> ml_collections.ConfigDict:
    """The configuration."""
    quickstart = load_config("configs/quickstart/factbook.py")
    config = complete(
        ServeConfig,
        {
            "model": "runs/quickstart/models/rl",
            "name": "",
            "host": "127.0.0.1",
            "port": 8000,
            "api_key_env": "COA_JAX_API_KEY",
            "protocol": "generalist",
            "max_waiting": 256,
            "max_samples": 16,
            "max_body": 4 * 2**20,
            "shutdown_seconds": 30.0,
            "seed": 0,
            "engine": quickstart.evaluate.engine,
            "rollout": quickstart.evaluate.rollout,
        },
    )
    config.tools = complete(ToolsConfig, quickstart.tools)
    return config
