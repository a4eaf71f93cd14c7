r"""Serves the policy of launch/pretrained.sh.

    coa-jax serve --config=configs/serve/pretrained.py

Needs: ``pip install -e .[serve]`` and the policy of configs/pretrained/factbook.py in
runs/pretrained, or another policy, which ``--config.model=DIR`` names.
Takes: seconds to load and compile; then the server runs until Ctrl-C or SIGTERM.
Gives: the same as configs/serve/factbook.py, with the tools and budgets of this policy.
"""

from ml_collections import ConfigDict

from coa_jax import ToolsConfig, complete_config, load_config


def get_config() -> ConfigDict:
    """Returns the configuration."""
    pretrained = load_config("configs/pretrained/factbook.py")
    config = load_config("configs/serve/factbook.py", {"model": "runs/pretrained/models/rl"})
    config.engine, config.rollout = pretrained.evaluate.engine, pretrained.evaluate.rollout
    config.rollout.prompt_style = "model"
    config.tools = complete_config(ToolsConfig, pretrained.tools)
    return config
