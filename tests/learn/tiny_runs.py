"""Short SFT and RL runs of the tiny policy; as a program, an SFT run that may be killed.

python -m tests.learn.tiny_runs WORKDIR
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from coa_jax.engine.config import EngineConfig
from coa_jax.learn import sft
from coa_jax.learn.algorithms import Algorithm
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.step import OptimizerConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run_dir import RunDir

SFT_STEPS = 24


def sft_config(model: Path, data: Path, **changes: object) -> sft.SFTConfig:
    values = {
        "model": str(model),
        "data": str(data),
        "validation": str(data),
        "prompt_style": "brief",
        "rename_share": 0.5,
        "seed": 3,
        "batch_size": 2,
        "rows": 1,
        "row_length": 192,
        "dtype": "float32",
        "remat": "none",
        "optimizer": OptimizerConfig(learning_rate=1e-2, total_steps=SFT_STEPS, warmup_steps=2),
        "validate_every": 100,
        "checkpoint_every": 2,
    }
    return sft.SFTConfig(**{**values, **changes})


def rl_config(model: Path, tasks: Path, **changes: object) -> RLConfig:
    values = {
        "model": str(model),
        "tasks": str(tasks),
        "num_tasks": 3,
        "seed": 5,
        "groups": 2,
        "group_size": 4,
        "max_rounds": 2,
        "format_reward": False,
        "updates": 1,
        "temperature": 1.2,
        "rows": 2,
        "row_length": 192,
        "dtype": "float32",
        "remat": "none",
        "algorithm": Algorithm("dapo", overlong_buffer=0),
        "optimizer": OptimizerConfig(
            learning_rate=1e-3, total_steps=3, final_ratio=1.0, weight_decay=0.0
        ),
        "engine": EngineConfig(4, 192, 8, (32, 64)),
        "rollout": RolloutConfig(192, 3, 48),
        "checkpoint_every": 1,
    }
    return RLConfig(**{**values, **changes})


def run_sft(workdir: Path, config: sft.SFTConfig) -> None:
    with RunDir(workdir) as run:
        sft.train(config, run, workdir / "model")


def rows(workdir: Path, phase: str) -> list[dict[str, float]]:
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [row for row in map(json.loads, lines) if row["phase"] == phase]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run_sft(folder / "run", sft_config(folder / "base", folder / "data.jsonl"))
