"""Short SFT and RL runs of the tiny policy; run as a program, one may be killed.

python -m tests.train.tiny_runs {sft,rl,stream,pool,leave_out} FOLDER RUN
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from coa_jax.engine.config import EngineConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run.command import run_main
from coa_jax.run.run_dir import RunDir
from coa_jax.train import rl, sft
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.pool import PoolConfig
from coa_jax.train.renaming import renaming
from coa_jax.train.rl_config import RLConfig
from tests import tiny_policy
from tests.train.slow_tools import slow_tools

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
        "export_dtype": "float32",
        "remat": "none",
        "optimizer": OptimizerConfig(learning_rate=1e-2, total_steps=SFT_STEPS, warmup_steps=2),
        "validate_every": 100,
        "checkpoint_every": 2,
    }
    return sft.SFTConfig(**{**values, **changes})


def rl_config(model: Path, tasks: Path, /, **changes: object) -> RLConfig:
    values = {
        "model": str(model),
        "tasks": str(tasks),
        "num_tasks": 3,
        "seed": 5,
        "groups": 2,
        "group_size": 4,
        "max_sampled": 2.0,
        "format_reward": False,
        "temperature": 1.2,
        "rows": 2,
        "row_length": 192,
        "dtype": "float32",
        "export_dtype": "float32",
        "remat": "none",
        "algorithm": Algorithm("dapo", overlong_buffer=0),
        "optimizer": OptimizerConfig(
            learning_rate=1e-3, total_steps=3, final_ratio=1.0, weight_decay=0.0
        ),
        "engine": EngineConfig(4, 192, 8, (64,)),
        "rollout": RolloutConfig(192, 3, 48),
        "checkpoint_every": 1,
    }
    return RLConfig(**{**values, **changes})


def run_sft(workdir: Path, config: sft.SFTConfig) -> None:
    with RunDir(workdir) as run:
        sft.train(config, run, workdir / "model", renaming(config.rename_share))


def rows(workdir: Path, phase: str) -> list[dict[str, float]]:
    path = workdir / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [row for row in map(json.loads, lines) if row["phase"] == phase]


def run_rl(workdir: Path, config: RLConfig) -> None:
    tools = list(tiny_policy.tools().values())
    if config.max_staleness:
        tools = slow_tools(seed=os.getpid())
    with RunDir(workdir) as run:
        rl.train(config, run, workdir / "model", tools)


STREAM = {
    "max_staleness": 2,
    "optimizer": OptimizerConfig(1e-3, total_steps=8, final_ratio=1.0, weight_decay=0.0),
    "checkpoint_every": 3,
}
"""Settings of a run whose rollouts go on while it learns."""

LEAVE_OUT = {**STREAM, "late_samples": "leave_out", "max_staleness": 1, "groups_in_flight": 8}
"""Such a run that learns from groups without their late samples."""


def pooled(tasks: Path) -> dict[str, object]:
    """Settings of a run that asks two sources, and lets tasks rest."""
    return {
        "tasks": "",
        "mixture": {
            "many": {"tasks": str(tasks), "weight": 2.0},
            "few": {"tasks": str(tasks), "num_tasks": 2},
        },
        "pool": PoolConfig(rest_steps=1, rest_most=4, rest_above=0.7, memory=0.5),
    }


def config_of(kind: str, folder: Path) -> sft.SFTConfig | RLConfig:
    """The run of a kind: SFT, RL, RL that streams, or a stream that lets tasks rest."""
    if kind == "sft":
        return sft_config(folder / "base", folder / "data.jsonl")
    streams = {"stream": STREAM, "pool": STREAM, "leave_out": LEAVE_OUT}
    changes: dict[str, object] = streams.get(kind, {})
    if kind == "pool":
        changes = {**changes, **pooled(folder / "tasks.jsonl")}
    return rl_config(folder / "model", folder / "tasks.jsonl", **changes)


def main(argv: list[str]) -> None:
    kind, folder, name = argv[1], Path(argv[2]), argv[3]
    config = config_of(kind, folder)
    if isinstance(config, RLConfig):
        run_rl(folder / name, config)
    else:
        run_sft(folder / name, config)


if __name__ == "__main__":
    run_main(main, positional=True)
