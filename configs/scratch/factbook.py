r"""Creates the untrained policy of the quickstart: its own tokenizer and random parameters.

    coa-jax scratch --config=configs/scratch/factbook.py --workdir=runs/scratch

Needs: the data of configs/distill/factbook.py in runs/distill.
Takes: the time of the stage ``base`` in the ``timings_s`` of a quickstart's summary.json.
Gives: runs/scratch/model, a policy with a pass@1 of 0. Names of places are not single tokens (see
``common_word``), so the policy must learn to copy names from observations, and can then copy names
that do not occur in training.
"""

from coa_jax import ConfigDict, complete_config, load_config
from coa_jax.demo.untrained_command import Command


def get_config() -> ConfigDict:
    """Returns the configuration."""
    quickstart = load_config("configs/quickstart/factbook.py")
    values = {name: quickstart[name] for name in ("prompt_style", "format", "policy")}
    return complete_config(Command, {**values, "data": "runs/distill/train.jsonl"})
