r"""Fine-tunes the small policy of the quickstart on the teacher's trajectories.

    coa-jax sft --config=configs/sft/factbook.py --workdir=runs/sft

Needs: the data of configs/distill/factbook.py in runs/distill and the policy of
configs/scratch/factbook.py in runs/scratch.
Takes: the time of the stage ``sft`` in the ``timings_s`` of a quickstart's summary.json.
Gives: runs/sft/model. ``validation/loss`` is measured on places that occur in no training question,
so it falls only if the policy copies names and figures from observations.
"""

from coa_jax import ConfigDict, SFTConfig, complete_config, load_config
from coa_jax.run.variants import in_small, parse_variant


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration; ``debug`` scales it down, see tiny.py."""
    _, debug = parse_variant(arg)
    values = load_config("configs/quickstart/factbook.py").sft.to_dict()
    values["model"], values["data"] = "runs/scratch/model", "runs/distill/train.jsonl"
    values["validation"] = "runs/distill/validation.jsonl"
    config = complete_config(SFTConfig, values)
    return in_small(config, "sft") if debug else config
