r"""Serves the policy of launch/pretrained.sh.

    coa-jax serve --config=configs/serve/pretrained.py

Needs: ``pip install -e .[serve]`` and the policy of configs/pretrained/factbook.py in
runs/pretrained, or another policy, which ``--config.model=DIR`` names.
Takes: seconds to load and compile; then the server runs until Ctrl-C or SIGTERM.
Gives: the same as configs/serve/factbook.py, with the tools and budgets of this policy.
"""

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.cli.serve import Command


def get_config() -> ConfigDict:
    """Returns the configuration."""
    pretrained = load_config("configs/pretrained/factbook.py")
    values = {name: pretrained.evaluate[name] for name in ("engine", "rollout")}
    values |= {"model": "runs/pretrained/models/rl", "tools": pretrained.tools}
    config = complete_config(Command, values)
    config.rollout.prompt_style = "model"
    return config
