r"""The small policy of the quickstart: its own tokenizer, random parameters.

    python -m coa_jax.scratch --config=configs/scratch/factbook.py --workdir=runs/scratch

Needs: the data of configs/distill/factbook.py in runs/distill.
Takes: as long as the stage ``base`` in the ``timings_s`` of a quickstart's summary.json.
Gives: runs/scratch/model, which knows nothing yet: its pass@1 is 0.  Sizes are those of the
quickstart; names of places are no tokens of their own (see ``common_word``), so that the policy
has to copy them from what it reads and does so for places that it never saw in training.
"""

from __future__ import annotations

import ml_collections

from coa_jax.cli import load_config
from coa_jax.settings import complete
from coa_jax.small.scratch import ScratchConfig


def get_config() -> ml_collections.ConfigDict:
    """The configuration."""
    quickstart = load_config("configs/quickstart/factbook.py")
    config = ml_collections.ConfigDict()
    config.data = "runs/distill/train.jsonl"
    config.prompt_style = quickstart.prompt_style
    config.format = quickstart.format
    config.policy = complete(ScratchConfig, quickstart.policy)
    return config
