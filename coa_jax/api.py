"""The package from Python: load a policy, ask it, train it, evaluate it (docs/api.md).

The commands call the same functions.  All of them also work where an event loop runs already, as
in Jupyter, and raise `coa_jax.errors.UserError` for what the caller can mend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from coa_jax import files
from coa_jax.bounds import Name, Place
from coa_jax.cli import load_config
from coa_jax.environments.base import tags_of
from coa_jax.evaluate.compare import Comparison, compare
from coa_jax.evaluate.endpoint import endpoint_policy
from coa_jax.evaluate.figures import table
from coa_jax.evaluate.run import EvaluateConfig, evaluate, evaluate_model, load, settings
from coa_jax.learn import rl, sft
from coa_jax.learn.command import run_at
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.sft import SFTConfig
from coa_jax.report.benchmark import write_page
from coa_jax.rollout.agent import Agent, load_policy
from coa_jax.run_dir import RunDir
from coa_jax.settings import build
from coa_jax.small.augment import renaming
from coa_jax.storage import model_folder, run_folder
from coa_jax.tasks import SOURCES, Task
from coa_jax.tasks.checks import REWARDS
from coa_jax.tasks.ready import check_ready
from coa_jax.tools.make import Tools, ToolsConfig, make_tools, named_tools
from coa_jax.tools.turns import apart
from coa_jax.trajectory import DistilledRecord, Trajectory, read_trajectories, write_records

__all__ = [
    "Agent",
    "Evaluation",
    "Trained",
    "evaluate_policy",
    "load_config",
    "load_policy",
    "train_rl",
    "train_sft",
]

Config: TypeAlias = ConfigDict | Mapping[str, Any]
"""Settings by name, such as `load_config` gives; a dataclass of settings will do as well."""

Tasks: TypeAlias = str | Sequence[Task] | Callable[..., Sequence[Task]]
"""A task source by name, tasks, or a function that gives them (docs/extending.md)."""

RewardFunction: TypeAlias = Callable[..., Any]
Rewards: TypeAlias = (
    RewardFunction | Mapping[str, float | RewardFunction | tuple[RewardFunction, float]]
)
"""A reward function, or several by name, each alone or with its weight (docs/extending.md).

A name with a weight and no function is a built-in reward; ``grader`` is that of the task itself.
"""


# --- training ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished training run.

    Attributes:
        path: directory of the run.
        rows: metrics of its steps, as in ``metrics.jsonl``.
    """

    path: Path
    rows: list[dict[str, Any]] = dataclasses.field(repr=False)

    @property
    def model(self) -> Path:
        """Directory of the policy, for `Agent`, `load_policy` and the setting ``model``."""
        return self.path / "model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLRun(RLConfig):
    """The settings of a run of RL and of its tools.

    Attributes:
        tools: tools of the policy.
    """

    tools: ToolsConfig


def train_sft(
    config: Config | SFTConfig,
    workdir: str | Path,
    *,
    records: Sequence[DistilledRecord] | None = None,
    wandb_project: str = "",
    **changes: Any,
) -> Trained:
    """Fine-tunes a policy on trajectories; called again with the same directory it goes on there.

    Args:
        config: see `learn.sft.SFTConfig`.
        workdir: directory of the run; the policy is written to its ``model``.
        records: what is learnt, in place of the files that ``config.data`` names.
        wandb_project: project of W&B that gets the metrics too; "" for none.
        changes: settings in place of those of the config; a group is replaced whole.

    Raises:
        UserError: what the caller can mend.
    """
    values, path = {**_values(config), **_plain(changes)}, run_folder(workdir)
    if records is not None:
        values["data"] = str(path / "records.jsonl")
    found = build(SFTConfig, values)

    def train() -> None:
        with run_at(path, values, wandb_project) as (run, output):
            if records is not None:
                write_records(values["data"], records)
            live = make_tools(found.tools) if found.evaluate_every else ()
            sft.train(found, run, output, renaming(found.rename_share), live)

    return _trained(train, path, "sft")


def train_rl(
    config: Config | RLConfig,
    workdir: str | Path,
    *,
    tasks: Tasks | None = None,
    rewards: Rewards | None = None,
    tools: Tools | None = None,
    wandb_project: str = "",
    **changes: Any,
) -> Trained:
    """Reinforces a policy; called again with the same directory it goes on there.

    Args:
        config: see `RLRun`.
        workdir: directory of the run; the policy is written to its ``model``.
        tasks: in place of ``config.tasks``.
        rewards: in place of ``config.graders.rewards``.
        tools: in place of ``config.tools``, or of the tools that it names.
        wandb_project: project of W&B that gets the metrics too; "" for none.
        changes: settings in place of those of the config; a group is replaced whole.

    Raises:
        UserError: what the caller can mend.
    """
    values = {**_given(config, tasks, rewards, tools), **_plain(changes)}
    found, path = build(RLRun, values), run_folder(workdir)

    def train() -> None:
        with run_at(path, values, wandb_project) as (run, output):
            tools = None if found.agent else found.tools  # a program brings its own
            live = [] if tools is None else make_tools(tools, tags_of(found.environment))
            check_ready(found.probe_s, graders=found.graders, tools=tools)
            rl.train(found, run, output, live)

    return _trained(train, path, "rl")


def _trained(train: Callable[[], None], path: Path, phase: str) -> Trained:
    apart(train)
    metrics = path / "metrics.jsonl"
    rows = files.read_jsonl(metrics) if metrics.exists() else []
    return Trained(path, [row for row in rows if row.get("phase") == phase])


# --- evaluation ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateRun(EvaluateConfig):
    """The settings of an evaluation and of its policy.

    Attributes:
        model: Hugging Face directory of the policy; not used with an endpoint.
        stage: name of the results in the work directory.
        tools: tools of the policy.
    """

    model: Place
    stage: Name
    tools: ToolsConfig


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """A finished evaluation; as text it is a table of the figures.

    Attributes:
        path: directory of the run.
        outcome: what the result file holds, see docs/benchmarks.md.
    """

    path: Path
    outcome: Mapping[str, Any] = dataclasses.field(repr=False)

    @property
    def figures(self) -> Mapping[str, Any]:
        """All figures."""
        found: Mapping[str, Any] = self.outcome["figures"]
        return found

    @property
    def pass_at_1(self) -> float | None:
        """Share of the samples that are right, as a mean over tasks; None without a verdict."""
        value: float | None = self.figures["pass_at_1"]
        return value

    @property
    def interval(self) -> tuple[float, float]:
        """Interval around ``pass_at_1`` that holds the true rate in 95 of 100 evaluations."""
        low, high = self.figures["ci95"]
        return low, high

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each sample: its task, number, value, end, tokens and calls."""
        return [
            {
                **{key: value for key, value in task.items() if key != "samples"},
                "number": number,
                **sample,
            }
            for task in self.outcome["tasks"]
            for number, sample in enumerate(task["samples"])
        ]

    @property
    def page(self) -> Path:
        """The page that shows the figures."""
        return self.path / "evaluate" / self.outcome["stage"] / "index.html"

    def trajectories(self) -> list[Trajectory]:
        """What the policy and its tools wrote."""
        found = read_trajectories(self.path / "traces.jsonl")
        stage = self.outcome["stage"]
        return [one for one in found if one.metadata.get("stage") == stage]

    def compared_to(self, other: Evaluation) -> Comparison:
        """How this evaluation differs from another of the same tasks, task by task.

        Raises:
            UserError: they have no task in common.
        """
        return compare(other.outcome, self.outcome)

    def __str__(self) -> str:
        return table(self.outcome)


def evaluate_policy(
    config: Config | EvaluateConfig,
    workdir: str | Path,
    *,
    policy: str | Path | None = None,
    tasks: Tasks | None = None,
    rewards: Rewards | None = None,
    tools: Tools | None = None,
    fresh: bool = False,
    **changes: Any,
) -> Evaluation:
    """Measures a policy; what is finished in the directory is not run again.

    Args:
        config: see `EvaluateRun`.
        workdir: directory of the run.
        policy: directory of the policy, in place of ``config.model``.
        tasks: in place of ``config.tasks``.
        rewards: in place of ``config.graders.rewards``.
        tools: in place of ``config.tools``, or of the tools that it names.
        fresh: drop the samples of the stage that are there.
        changes: settings in place of those of the config, such as ``stage``, the name of the
            results; a group is replaced whole.

    Raises:
        UserError: what the caller can mend; what is finished is kept.
    """
    values = {"stage": "policy", **_given(config, tasks, rewards, tools), **_plain(changes)}
    values |= {"model": str(policy)} if policy is not None else {}
    found, path = build(EvaluateRun, values), run_folder(workdir)

    def measure() -> Evaluation:
        with RunDir(path) as run:
            run.write_config(values)
            evaluation = Evaluation(path, _measured(found, run, fresh))
            write_page(evaluation.outcome, evaluation.page)
            return evaluation

    return apart(measure)


def _measured(config: EvaluateRun, run: RunDir, fresh: bool) -> dict[str, Any]:
    tags = tags_of(config.environment)
    # First: tools may bring the protocol that tasks name.  A program has tools of its own.
    live = [] if config.agent else make_tools(config.tools, tags)
    tasks = load(config)
    described = dataclasses.asdict(config.tools)
    described.pop("store")  # where answers are kept does not change them
    again: dict[str, Any] = {"servers": None if config.agent else config.tools, "fresh": fresh}
    if not config.endpoint:
        path = model_folder(config.model)
        return evaluate_model(path, tasks, config, run, config.stage, live, described, **again)
    policy = endpoint_policy(config.endpoint, config.sampling, config.seed, config.rollout, live)
    about = settings(config, f"{config.endpoint.model} (endpoint)", described)
    return evaluate(policy, tasks, config, run, config.stage, about, **again)


# --- what the functions take ---------------------------------------------------------------


def _values(config: Any) -> dict[str, Any]:
    """Settings by name."""
    if isinstance(config, ConfigDict):
        found: dict[str, Any] = config.to_dict()
        return found
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    return _plain(config)


def _plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, in which those that are dataclasses are groups by name, too."""
    return {
        name: _values(value) if dataclasses.is_dataclass(value) else value
        for name, value in changes.items()
    }


def _given(
    config: Any, tasks: Tasks | None, rewards: Rewards | None, tools: Tools | None
) -> dict[str, Any]:
    """Settings by name, in which code that was given has names, too."""
    values = _values(config)
    if tasks is not None:
        values["tasks"] = tasks if isinstance(tasks, str) else _source(tasks)
    if rewards is not None:
        values["graders"] = {**_values(values.get("graders", {})), "rewards": _rewards(rewards)}
    if tools is not None:
        values["tools"] = {**_values(values.get("tools", {})), **named_tools(tools)}
    return values


def _source(tasks: Sequence[Task] | Callable[..., Sequence[Task]]) -> str:
    """The name of a task source."""
    return SOURCES.name_of(tasks if callable(tasks) else lambda: tasks, "tasks")


def _rewards(rewards: Rewards) -> dict[str, dict[str, Any]]:
    """The setting ``graders.rewards``."""
    if callable(rewards):
        rewards = {getattr(rewards, "__name__", "reward").strip("<>"): rewards}
    found = {}
    for name, given in rewards.items():
        function, weight = given if isinstance(given, tuple) else (given, 1.0)
        if callable(function):
            found[name] = {"path": REWARDS.name_of(function, name), "weight": weight}
        else:
            found[name] = {"weight": function}
    return found
