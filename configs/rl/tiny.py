r"""Makes one step of RL with a policy of one layer: the smallest possible run.

    coa-jax rl --config=configs/rl/tiny.py --workdir=runs/debug/rl

Needs: ``coa-jax debug-files``.
Takes: less than a minute on a CPU core, most of which is compilation.
Gives: a run directory with all files of a large run, and a model that has learned nothing. The
debug variants of the other configs in this folder, such as ``configs/rl/web.py:debug``, combine the
sizes of this config with their own settings.
"""

from __future__ import annotations

import ml_collections

from coa_jax.run.settings import complete_config
from coa_jax.run.variants import parse_variant
from coa_jax.tools.make import ToolsConfig
from coa_jax.train.rl_config import RLConfig


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration; the variant ``debug`` is the same."""
    parse_variant(arg)
    config = complete_config(
        RLConfig,
        {
            "model": "runs/debug/scratch/model",
            "tasks": "runs/debug/questions.jsonl",
            "num_tasks": 4,
            "seed": 0,
            "groups": 2,
            "group_size": 2,
            "max_sampled": 1.0,
            "format_reward": False,
            "temperature": 1.0,
            "rows": 1,
            "row_length": 128,
            "dtype": "float32",
            "export_dtype": "float32",
            "remat": "none",
            "algorithm": {"name": "dapo"},
            "optimizer": {"learning_rate": 1e-4, "total_steps": 1},
            "engine": {"slots": 4, "max_length": 128, "chunk": 8, "extend_buckets": (64,)},
            "rollout": {
                "max_tokens": 128,
                "max_turn_tokens": 32,
                "max_tool_calls": 2,
                "max_observation_tokens": 32,
                "prompt_style": "brief",
            },
            "checkpoint_every": 1,
        },
    )
    config.tools = complete_config(ToolsConfig, {"wiki_search": {"top_k": 1}})
    return config
