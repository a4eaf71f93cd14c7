r"""Fine-tunes a policy with one layer for two updates: the smallest possible run.

    coa-jax sft --config=configs/sft/tiny.py --workdir=runs/debug/sft

Needs: ``coa-jax debug-files``.
Takes: less than a minute on a CPU core, most of which is compilation.
Gives: a run directory with all files of a large run, and a model that has learned nothing. The
debug variants of the other configs in this folder, such as ``configs/sft/web.py:debug``, combine
the sizes of this config with their own settings.
"""

from coa_jax import ConfigDict, SFTConfig, complete_config
from coa_jax.run.variants import parse_variant


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration; the variant ``debug`` is the same."""
    parse_variant(arg)
    values = {"model": "runs/debug/scratch/model", "data": "runs/debug/distill/train.jsonl"}
    config = complete_config(SFTConfig, values)
    config.validation = "runs/debug/distill/validation.jsonl"
    config.update(rows=1, batch_size=2, row_length=2048, remat="none", checkpoint_every=1)
    config.update(dtype="float32", export_dtype="float32")
    config.optimizer.update(learning_rate=1e-3, total_steps=2, warmup_steps=1)
    return config
