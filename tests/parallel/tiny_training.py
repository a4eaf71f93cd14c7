"""A tiny SFT or RL run on a mesh of 8 devices, by one process or several.

python -m tests.parallel.tiny_training FOLDER NAME CASE

FOLDER holds ``base``, ``model``, ``data.jsonl`` and ``tasks.jsonl``; the run is FOLDER/NAME.  Of
CASE ``hang`` and ``kill``, process 1 has a tool that hangs, or one that kills its process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from absl import flags

from coa_jax.cli import run_main
from coa_jax.learn import rl, sft
from coa_jax.learn.step import OptimizerConfig
from coa_jax.parallel import processes
from coa_jax.parallel.placement import MeshConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run_dir import RunDir
from coa_jax.tools.base import Observation, ToolContext
from tests import tiny_policy
from tests.learn.tiny_runs import rl_config, sft_config


class BadTool:
    """Takes the place of a tool, and never answers."""

    deadline = 2.0

    def __init__(self, name: str, kill: bool) -> None:
        self.name, self.kill = name, kill

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(3600)
        raise AssertionError


def main(argv: list[str]) -> None:
    folder, name, case = Path(argv[1]), argv[2], argv[3]
    mesh = MeshConfig(2, 2, 2, wait_seconds=200.0)
    with RunDir(folder / name, active=processes.index() == 0) as run:
        if case == "sft":
            optimizer = OptimizerConfig(learning_rate=1e-2, total_steps=3, eps=1e-3)
            changes: dict[str, Any] = {"rows": 4, "batch_size": 6, "mesh": mesh}
            config = sft_config(
                folder / "base",
                folder / "data.jsonl",
                optimizer=optimizer,
                checkpoint_every=2,
                **changes,
            )
            sft.train(config, run, folder / name / "model")
            return
        tools: list[Any] = list(tiny_policy.tools().values())
        if case in ("hang", "kill") and processes.index() == 1:
            tools = [BadTool(tool.name, case == "kill") for tool in tools]
        constrained = RolloutConfig(192, 3, 48, constrain=True, strict=True)
        config = rl_config(
            folder / "model",
            folder / "tasks.jsonl",
            mesh=mesh,
            rows=4,
            groups=2,
            group_size=4,
            checkpoint_every=2,
            optimizer=OptimizerConfig(
                learning_rate=1e-3, total_steps=2, final_ratio=1.0, weight_decay=0.0, eps=1e-3
            ),
            **({"rollout": constrained, "temperature": 1.6} if case == "constrained" else {}),
        )
        rl.train(config, run, folder / name / "model", tools)


if __name__ == "__main__":
    # Flags are not ours to take: all arguments are positional.
    run_main(main, lambda: flags.FLAGS.set_gnu_getopt(False), positional=True)
