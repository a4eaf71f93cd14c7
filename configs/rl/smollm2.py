r"""Trains the fine-tuned SmolLM2-135M-Instruct (Q4_1) by RL with live tools.

    coa-jax rl --config=configs/rl/smollm2.py --workdir=runs/smollm2-rl

Needs: the policy of configs/sft/smollm2.py in runs/smollm2-sft.
Takes: minutes per step. On 2 CPU cores with other load, a step that needed a second round of
sampling took 355 s for its 64 rollouts and 170 s for its update.
Gives: runs/smollm2-rl/model; configs/rl/factbook.py names the metrics to watch.

Choices: 4 groups of 8 samples keep a step to minutes on 2 cores; with so few groups the reward of a
step is noisy, so average it over all 8 steps. All 32 samples decode concurrently.
"""

from __future__ import annotations

import ml_collections

from coa_jax.run.command import load_config
from coa_jax.run.settings import complete_config
from coa_jax.run.variants import in_small, parse_variant
from coa_jax.tools.make import ToolsConfig
from coa_jax.train.rl_config import RLConfig


def get_config(arg: str | None = None) -> ml_collections.ConfigDict:
    """Returns the configuration; ``debug`` scales it down, see tiny.py."""
    _, debug = parse_variant(arg)
    quickstart = load_config("configs/quickstart/factbook.py")
    config = complete_config(
        RLConfig,
        {
            "model": "runs/smollm2-sft/model",
            "tasks": quickstart.rl.tasks,
            "num_tasks": quickstart.rl.num_tasks,
            "seed": 0,
            "groups": 4,
            "group_size": 8,
            "max_sampled": 2.0,
            "format_reward": True,
            "temperature": 1.0,
            "rows": 1,
            "row_length": 768,
            "dtype": "float32",
            "remat": "dots",
            "algorithm": {"name": "dapo", "overlong_buffer": 0},
            "optimizer": {
                "learning_rate": 1e-5,
                "total_steps": 8,
                "warmup_steps": 1,
                "final_ratio": 1.0,
                "weight_decay": 0.0,
            },
            "engine": {
                "slots": 32,
                "max_length": 768,
                "chunk": 16,
            },
            "rollout": {
                "max_tokens": 768,
                "max_turn_tokens": 256,
                "strict": True,
                "max_tool_calls": 8,
                "max_observation_tokens": 192,
                "prompt_style": "brief",
            },
            "checkpoint_every": 2,
        },
    )
    config.tools = complete_config(ToolsConfig, quickstart.tools)
    return in_small(config, "rl") if debug else config
