"""A tiny SFT or RL run on a mesh, by one process or several.

python -m tests.parallel.tiny_training FOLDER NAME CASE [DATA,FSDP,TENSOR[,DECODE[,ROLLOUT]] [STOP]]

FOLDER holds ``base``, ``model``, ``data.jsonl`` and ``tasks.jsonl``; the run is FOLDER/NAME.  In
CASE ``hang1``, process 1 has a tool that hangs; in ``kill0``, process 0 has a tool that kills the
process, and so on.  In ``stop01``, the tools of process 1 hang in step 2, while processes 0 and 1
receive SIGTERM.  In ``records``, each process names records of its own.  In ``ahead``, rollouts go
on during updates, and samples give way to others; ``again`` replays such a run.  The last process
requests an end in step STOP.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

from absl import flags

from coa_jax.evaluation.config import HeldOutConfig
from coa_jax.parallel import processes
from coa_jax.parallel.config import MeshConfig
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run.command import run_main
from coa_jax.run.run_dir import RunDir
from coa_jax.tools.base import Observation, ToolContext
from coa_jax.train import replay, rl, sft
from coa_jax.train.config import DistilledConfig
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.renaming import renaming
from coa_jax.train.rl_config import RLConfig
from tests import tiny_policy
from tests.train.tiny_runs import STREAM, pooled, rl_config, sft_config


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


class StopTool:
    """Works in the first step; later it never answers, but asks processes to stop."""

    deadline = 3600.0
    asked = False

    def __init__(self, tool: Any, run: Path, whom: str) -> None:
        self.name, self.tool, self.run, self.whom = tool.name, tool, run, whom

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        if not (self.run / "step1").exists():
            return await self.tool(arguments, context)
        if not StopTool.asked:
            StopTool.asked = True
            await asyncio.sleep(3.0)  # the others have come to where they wait
            (self.run / "asked").touch()
            for process in self.whom:
                os.kill(int((self.run / f"pid{process}").read_text()), signal.SIGTERM)
        await asyncio.sleep(3600)
        raise AssertionError


def note_steps(run: Path) -> None:
    """Leaves a file with the pid of this process, and one when the first step is done."""
    run.mkdir(exist_ok=True)  # the first process may not have come to it yet
    (run / f"pid{processes.index()}").write_text(str(os.getpid()))
    write = RunDir.metrics

    def metrics(this: RunDir, number: int, phase: str, **scalars: Any) -> None:
        write(this, number, phase, **scalars)
        (run / f"step{number}").touch()

    RunDir.metrics = metrics  # type: ignore[method-assign]


def stop_in(step: int) -> None:
    """Lets the last process have a SIGTERM when that step's metrics are written."""
    write = RunDir.metrics

    def metrics(run: RunDir, number: int, phase: str, **scalars: Any) -> None:
        write(run, number, phase, **scalars)
        if number == step and processes.index() == processes.count() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    RunDir.metrics = metrics  # type: ignore[method-assign]


def repeat(config: RLConfig, run: Path) -> None:
    """Replays a run; prints a JSON object with the outcome and the restarts of each sample."""
    update, restarts = replay.update, []

    def learn(*args: Any, groups: Any, **arguments: Any) -> Any:
        for t in (t for group in groups for t in group):
            restarts.append((t.metadata["prompt_id"], t.sample_id, t.metadata.get("restarts", [])))
        return update(*args, groups=groups, **arguments)

    replay.update = learn  # type: ignore[attr-defined]
    found = rl.replay_steps(config, run)
    print(json.dumps({"outcome": str(found), "same": found.identical, "restarts": restarts}))


def main(argv: list[str]) -> None:
    folder, name, case = Path(argv[1]), argv[2], argv[3]
    sizes = argv[4] if len(argv) > 4 else "2,2,2"
    mesh = MeshConfig(*map(int, sizes.split(",")), wait_seconds=200.0)
    if len(argv) > 5:
        stop_in(int(argv[5]))
    with RunDir(folder / name, active=processes.index() == 0) as run:
        if case == "sft":
            optimizer = OptimizerConfig(learning_rate=1e-2, total_steps=3, options={"eps": 1e-3})
            changes: dict[str, Any] = {"rows": 4, "batch_size": 6, "mesh": mesh}
            config = sft_config(
                folder / "base",
                folder / "data.jsonl",
                optimizer=optimizer,
                checkpoint_every=2,
                **changes,
            )
            sft.train(config, run, folder / name / "model", renaming(config.rename_share))
            return
        tools: list[Any] = list(tiny_policy.tools().values())
        if case[:-1] in ("hang", "kill") and processes.index() == int(case[-1]):
            tools = [BadTool(tool.name, case[:-1] == "kill") for tool in tools]
        if case.startswith("stop"):
            note_steps(run.path)
            if processes.index() == 1:
                tools = [StopTool(tool, run.path, case[4:]) for tool in tools]
        ahead = case in ("ahead", "again")
        steps = 3 if ahead or case == "measured" else 2
        more: dict[str, Any] = {"engine": STREAM["engine"]} if ahead else {}
        if case == "measured":
            held_out = HeldOutConfig(split="train", samples=2, temperature=0.7)
            more = {**pooled(folder / "tasks.jsonl"), "evaluate_every": 1, "held_out": held_out}
        if case == "records":
            records = folder / f"records{processes.index()}.jsonl"
            more = {"distilled": DistilledConfig(records=str(records))}
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
                learning_rate=1e-3,
                total_steps=steps,
                final_ratio=1.0,
                weight_decay=0.0,
                options={"eps": 1e-3},
            ),
            max_staleness=2 * int(ahead),
            **({"rollout": constrained, "temperature": 1.6} if case == "constrained" else {}),
            **more,
        )
        if case == "again":
            repeat(config, run.path)
            return
        rl.train(config, run, folder / name / "model", tools)


if __name__ == "__main__":
    # Flags are not ours to take: all arguments are positional.
    run_main(main, lambda: flags.FLAGS.set_gnu_getopt(False), positional=True)
