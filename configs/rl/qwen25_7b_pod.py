r"""Reinforces Qwen2.5-7B on a TPU pod slice with the settings of the paper's web agent (DAPO).

    python -m coa_jax.rl --config=configs/rl/qwen25_7b_pod.py --workdir=/mnt/runs/qwen-rl

Needs: the policy of configs/sft/qwen25_7b_pod.py in /mnt/runs/qwen-sft; ``launch/tpu_pod.sh ... run
rl`` starts it on every host.
Takes: no figure: this config was not run on a pod by its authors.

From the paper (§3.2 and its scripts): 64 prompts of 8 samples at temperature 1, one update a step,
60 steps, learning rate 1e-6 after 3 steps of warm-up, weight decay 0.1, clip 0.2 and 0.28, dual
clip 10, no KL term, 2,048 tokens of prompt and 30,720 of answer, at most 24 tool calls, an hour a
trajectory.  The paper samples until 64 groups have a signal; here at most ``max_rounds`` times.

The tasks are those of the built-in encyclopaedia; ``--config.tasks=/mnt/questions.jsonl`` takes
your own.  A slot's cache at 32,768 tokens is 28 layers x 2 x 4 heads x 128 x 2 bytes x 32,768 =
1.9 GB, and ``engine.slots`` of them have to fit beside the parameters; 4-way ``tensor`` gives each
chip one key/value head.
"""

from __future__ import annotations

import ml_collections

from coa_jax.learn.rl_config import RLConfig
from coa_jax.settings import complete
from coa_jax.tools.make import ToolsConfig


def get_config() -> ml_collections.ConfigDict:
    """The configuration."""
    config = complete(
        RLConfig,
        {
            "model": "/mnt/runs/qwen-sft/model",
            "tasks": "factbook",
            "num_tasks": 4000,
            "seed": 0,
            "groups": 64,
            "group_size": 8,
            "max_rounds": 4,
            "format_reward": False,
            "updates": 1,
            "temperature": 1.0,
            "rows": 64,
            "row_length": 32_768,
            "dtype": "bfloat16",
            "remat": True,
            "loss": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0},
            "optimizer": {
                "learning_rate": 1e-6,
                "total_steps": 60,
                "warmup_steps": 3,
                "final_ratio": 1.0,
                "b2": 0.999,
                "weight_decay": 0.1,
            },
            "engine": {
                "slots": 16,
                "max_length": 32_768,
                "chunk": 32,
                "extend_buckets": (256, 1024, 4096),
                "dtype": "bfloat16",
            },
            "rollout": {
                "max_tokens": 32_768,
                "max_tool_calls": 24,
                "max_observation_tokens": 4096,
                "max_seconds": 3600.0,
                "prompt_style": "full",
            },
            "checkpoint_every": 5,
            "mesh": {"data": 1, "fsdp": -1, "tensor": 4},
        },
    )
    config.tools = complete(ToolsConfig, {"top_k": 3})
    return config
