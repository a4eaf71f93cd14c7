r"""Creates the untrained policy of the quickstart: its own tokenizer and random parameters.

    coa-jax scratch --config=configs/scratch/factbook.py --workdir=runs/scratch

Needs: the data of configs/distill/factbook.py in runs/distill.
Takes: the time of the stage ``base`` in the ``timings_s`` of a quickstart's summary.json.
Gives: runs/scratch/model, a policy with the sizes of the quickstart's and a pass@1 of 0. Names of
places are not single tokens (see ``common_word``). So the policy must learn to copy names from
observations, and it can then also copy names that do not occur in training.
"""

from __future__ import annotations

import ml_collections

from coa_jax.demo.untrained import ScratchConfig
from coa_jax.run.command import load_config
from coa_jax.run.settings import complete_config


def get_config() -> ml_collections.ConfigDict:
    """Returns the configuration."""
    quickstart = load_config("configs/quickstart/factbook.py")
    config = ml_collections.ConfigDict()
    config.data = "runs/distill/train.jsonl"
    config.prompt_style = quickstart.prompt_style
    config.format = quickstart.format
    config.policy = complete_config(ScratchConfig, quickstart.policy)
    return config
