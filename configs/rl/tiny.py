r"""Makes one step of RL with a policy of one layer: the smallest possible run.

    coa-jax rl --config=configs/rl/tiny.py --workdir=runs/debug/rl

Needs: ``coa-jax debug-files``.
Takes: less than a minute on a CPU core, most of which is compilation.
Gives: a run directory with all files of a large run, and a model that has learned nothing. The
debug variants of the other configs in this folder, such as ``configs/rl/web.py:debug``, combine the
sizes of this config with their own settings.
"""

from coa_jax import ConfigDict, complete_config
from coa_jax.run.variants import parse_variant
from coa_jax.train.rl_config import RLRun


def get_config(arg: str | None = None) -> ConfigDict:
    """Returns the configuration; the variant ``debug`` is the same."""
    parse_variant(arg)
    values = {
        "model": "runs/debug/scratch/model",
        "tasks": "runs/debug/questions.jsonl",
        "engine": {"slots": 4, "max_length": 128, "extend_buckets": (64,)},
        "tools": {"wiki_search": {"top_k": 1}},
    }
    config = complete_config(RLRun, values)
    config.update(num_tasks=4, groups=2, group_size=2, max_sampled=1.0)
    config.update(rows=1, row_length=128, remat="none", checkpoint_every=1)
    config.update(dtype="float32", export_dtype="float32")
    config.algorithm.name = "dapo"
    config.optimizer.update(learning_rate=1e-4, total_steps=1)
    config.rollout.update(max_tokens=128, max_turn_tokens=32)
    config.rollout.update(max_tool_calls=2, max_observation_tokens=32)
    return config
