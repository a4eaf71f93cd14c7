"""Short runs of the tiny policy by each trainer; run as a program, one may be killed.

python -m tests.train.tiny_runs {dpo,rft,rl,agents,stream,pool,leave_out} FOLDER RUN
"""

from __future__ import annotations

import json
import operator
import os
from pathlib import Path
from typing import Any

import numpy as np

from coa_jax.data.trajectory import Author, Reward
from coa_jax.engine.config import EngineConfig
from coa_jax.rollout.agent_config import AgentConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run.command import run_main
from coa_jax.run.run_dir import RunDir
from coa_jax.train import preference, rejection, rl, sft
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.config import DPOConfig, RFTConfig
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.renaming import renaming
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.task_pool import PoolConfig
from tests import forked, tiny_policy
from tests.train.bare import bare
from tests.train.slow_tools import slow_tools
from tests.trajectory_files import write_trajectories

SFT_STEPS = 24
PHASE = {"sft": "sft", "dpo": "dpo", "rft": "rft"} | dict.fromkeys(
    ("rl", "agents", "stream", "pool", "leave_out"), "rl"
)
"""Kind of run -> the phase in its metrics and checkpoints."""
STEPS = {"sft": 12, "dpo": 6, "rft": 6, "rl": 3, "agents": 3, "stream": 8}


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
    # A whole trajectory has 12 pages, so samples give way to others.
    "engine": EngineConfig(6, 192, 8, (64,), page_size=16, pages=14),
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
        "pool": PoolConfig(rest_steps=1, rest_above=0.7),
    }


def baseline_settings(folder: Path, **changes: object) -> dict[str, object]:
    """Settings that DPO and RFT share, for the trajectories of `write_graded`."""
    return {
        "model": str(folder / "model"),
        "traces": str(folder / "traces.jsonl"),
        "phase": "rl",
        "per_task": 2,
        "seed": 0,
        "batch_size": 2,
        "rows": 2,
        "row_length": 48,
        "dtype": "float32",
        "remat": "none",
        "optimizer": OptimizerConfig(learning_rate=3e-3, total_steps=4, weight_decay=0.0),
        "checkpoint_every": 2,
        **changes,
    }


def write_graded(path: Path) -> None:
    """Writes a right and a wrong trajectory, of drawn tokens, of each of two tasks."""
    rng = np.random.default_rng(0)
    size = len(tiny_policy.policy().tokenizer)
    traces = []
    for task in range(2):
        for sample, reward in enumerate((1.0, 0.0)):
            author = [Author.PROMPT] * 2 + [Author.POLICY] * 12
            tokens = rng.integers(3, size, len(author))
            traces.append(
                bare(
                    tokens, author, task_id=f"t{task}", sample_id=sample, reward=Reward(reward),
                    metadata={"phase": "rl"},
                )
            )  # fmt: skip
    write_trajectories(path, traces)


def config_of(kind: str, folder: Path) -> Any:
    """The settings of a kind: SFT, DPO, RFT, or RL; RL may ask programs, stream, or have a pool."""
    if kind == "sft":
        optimizer = OptimizerConfig(1e-2, total_steps=STEPS[kind], warmup_steps=2)
        return sft_config(folder / "base", folder / "data.jsonl", optimizer=optimizer)
    if kind in ("dpo", "rft"):
        optimizer = OptimizerConfig(3e-3, total_steps=STEPS[kind], weight_decay=0.0)
        settings = baseline_settings(folder, optimizer=optimizer, checkpoint_every=1)
        return (
            DPOConfig(**settings, beta=0.5, min_gap=0.5)
            if kind == "dpo"
            else RFTConfig(**settings, min_reward=1.0)
        )
    agent = AgentConfig(function="tests.serve.agents.functions:brevity", seconds=600.0)
    changes: dict[str, object] = {
        "rl": {}, "agents": {"agent": agent, "temperature": 2.0}, "leave_out": LEAVE_OUT
    }.get(kind, STREAM)  # fmt: skip
    if kind == "pool":
        changes = {**changes, **pooled(folder / "tasks.jsonl")}
    return rl_config(folder / "model", folder / "tasks.jsonl", **changes)


def words_of(kind: str, folder: Path, name: str) -> list[str]:
    """What comes behind ``python`` on the command line of a run; SFT runs by its own command."""
    if kind != "sft":
        return ["-m", "tests.train.tiny_runs", kind, str(folder), name]
    config = config_of(kind, folder)
    settings = (
        *("model", "data", "validation", "prompt_style", "rename_share", "seed", "batch_size"),
        *("rows", "row_length", "dtype", "export_dtype", "remat"),
        *("validate_every", "checkpoint_every", "optimizer.learning_rate"),
        *("optimizer.total_steps", "optimizer.warmup_steps"),
    )
    values = {name: operator.attrgetter(name)(config) for name in settings}
    flags = [f"--config.{name}={value}" for name, value in values.items()]
    return ["-m", "coa_jax", "sft", "--config=configs/sft/tiny.py", *flags,
            f"--workdir={folder / name}"]  # fmt: skip


def run_kind(kind: str, folder: Path, name: str) -> None:
    """Runs a kind to its end; SFT by its own command, the others in this process."""
    config = config_of(kind, folder)
    if kind == "sft":
        done = forked.run(words_of(kind, folder, name))
        assert done.returncode == 0, done.stderr
    elif isinstance(config, RLConfig):
        run_rl(folder / name, config)
    else:
        trainer = preference if kind == "dpo" else rejection
        with RunDir(folder / name) as run:
            trainer.train(config, run, folder / name / "model")


def main(argv: list[str]) -> None:
    run_kind(argv[1], Path(argv[2]), argv[3])


if __name__ == "__main__":
    run_main(main, positional=True)
