"""An evaluation of the tiny policy; run as a program, it may be killed.

python -m tests.evaluation.tiny_evaluation FOLDER NAME
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from coa_jax.data.trajectory import Trajectory
from coa_jax.engine.config import EngineConfig
from coa_jax.evaluation.config import EvaluateConfig
from coa_jax.evaluation.policy import load_sampler
from coa_jax.evaluation.run import evaluate, settings
from coa_jax.model.api import Model, load_model
from coa_jax.rollout.request import Request, RolloutConfig
from coa_jax.rollout.sampler import Sampler
from coa_jax.run.run_dir import RunDir
from coa_jax.tasks.prompts import load_prompt
from tests import tiny_policy

CONFIG = EvaluateConfig(
    tasks="tests",
    split="test",
    num_tasks=3,
    samples=2,
    seed=0,
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    engine=EngineConfig(4, 192, 8, (64,)),
    rollout=RolloutConfig(192, 3, 48),
    probe_s=0.0,  # tests count what they ask of servers
)
MANY = dataclasses.replace(CONFIG, samples=24, temperature=1.2)
ONE = dataclasses.replace(CONFIG, samples=1)


def policy_of(
    config: EvaluateConfig, load: Callable[[], Model] = tiny_policy.policy
) -> Callable[[], Sampler]:
    tools = list(tiny_policy.tools().values())
    return functools.partial(load_sampler, load, config, tools, tiny_policy.TASKS)


class Scripted:
    """A sampler whose trajectories a function makes of a request and the number of a sample."""

    tokenizer = None

    def __init__(self, make: Callable[[Request, int], Trajectory]):
        self.make = make
        self.requests: list[Request] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)

    async def finished(self) -> AsyncGenerator[Trajectory, None]:
        while self.requests:
            request = self.requests.pop(0)
            for number in request.samples:
                yield self.make(request, number)


def run(
    folder: Path,
    config: EvaluateConfig = CONFIG,
    load: Callable[[], Any] | None = None,
    tasks: Any = tiny_policy.TASKS,
    name: str = "tiny",
    **options: Any,
) -> dict[str, Any]:
    prompt = load_prompt(config.rollout.prompt_style)
    about = settings(config, name, {}, prompt)
    with RunDir(folder) as directory:
        return evaluate(
            load or policy_of(config), tasks, config, directory, "sft", about, prompt, **options
        )


def refuse(*_: Any) -> Any:
    """Loads the policy where there is nothing to run."""
    raise AssertionError("there is nothing to run")


def results(folder: Path) -> bytes:
    return (folder / "evaluate" / "sft" / "results.json").read_bytes()


if __name__ == "__main__":
    root, name = Path(sys.argv[1]), sys.argv[2]
    run(root / name, MANY, policy_of(MANY, lambda: load_model(root / "model")))
