"""An evaluation of the tiny policy; run as a program, it may be killed.

python -m tests.evaluate.tiny_evaluation FOLDER NAME
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coa_jax.engine.config import EngineConfig
from coa_jax.evaluate.config import EvaluateConfig
from coa_jax.evaluate.measure import Policy
from coa_jax.evaluate.run import evaluate, local_policy, settings
from coa_jax.model.api import Model, load_model
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run.run_dir import RunDir
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


def policy_of(config: EvaluateConfig, load: Callable[[], Model] = tiny_policy.policy) -> Policy:
    return local_policy(load, config, list(tiny_policy.tools().values()), tiny_policy.TASKS)


def run(
    folder: Path,
    config: EvaluateConfig = CONFIG,
    policy: Policy | None = None,
    tasks: Any = tiny_policy.TASKS,
    name: str = "tiny",
    **options: Any,
) -> dict[str, Any]:
    about = settings(config, name, {})
    with RunDir(folder) as directory:
        return evaluate(
            policy or policy_of(config), tasks, config, directory, "sft", about, **options
        )


def refuse(*_: Any) -> Any:
    """A policy where there is nothing to run."""
    raise AssertionError("there is nothing to run")


def results(folder: Path) -> bytes:
    return (folder / "evaluate" / "sft" / "results.json").read_bytes()


if __name__ == "__main__":
    root, name = Path(sys.argv[1]), sys.argv[2]
    run(root / name, MANY, policy_of(MANY, lambda: load_model(root / "model")))
