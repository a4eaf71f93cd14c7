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

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.cli.serve import Command


def get_config() -> ConfigDict:
    """Returns the configuration."""
    quickstart = load_config("configs/quickstart/factbook.py")
    values = {name: quickstart.evaluate[name] for name in ("engine", "rollout")}
    values |= {"model": "runs/quickstart/models/rl", "tools": quickstart.tools}
    config = complete_config(Command, values)
    config.rollout.prompt_style = "model"
    return config
