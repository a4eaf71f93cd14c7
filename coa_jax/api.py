"""The Python API to load, ask, train and evaluate a policy (docs/api.md).

The commands call the same code. All functions also work inside a running event loop, as in Jupyter.
They raise `coa_jax.errors.UserError` for errors that the caller can correct.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
from ml_collections import ConfigDict

from coa_jax.config.fields import Name, Place
from coa_jax.data.trajectory import DistilledRecord, Trajectory, read_trajectories, write_records
from coa_jax.errors import UserError
from coa_jax.evaluate.compare import Comparison, compare
from coa_jax.evaluate.config import EvaluateConfig
from coa_jax.evaluate.endpoint import endpoint_policy
from coa_jax.evaluate.figures import table
from coa_jax.evaluate.run import evaluate, evaluate_model, load, settings
from coa_jax.files import durable, jsonl
from coa_jax.model.api import load_weights
from coa_jax.model.export import save_model
from coa_jax.model.policy import Model
from coa_jax.report.benchmark import write_page
from coa_jax.rollout.agent import Agent
from coa_jax.rollout.environments.base import ENVIRONMENTS, tags_of
from coa_jax.run.command import load_config
from coa_jax.run.run_dir import RunDir
from coa_jax.run.settings import build_config
from coa_jax.storage import is_url, local, model_folder, run_folder
from coa_jax.tasks import SOURCES, Task
from coa_jax.tasks.checks import REWARDS
from coa_jax.tasks.ready import check_ready, look
from coa_jax.tools.concurrency import apart
from coa_jax.tools.make import Tools, ToolsConfig, make_tools, named_tools
from coa_jax.tools.net.budget import spending
from coa_jax.train import rl, sft
from coa_jax.train.command import run_at
from coa_jax.train.optimizer import name_optimizer
from coa_jax.train.renaming import renaming
from coa_jax.train.rl_config import RLConfig

__all__ = [
    "Agent",
    "Evaluation",
    "Trained",
    "evaluate_policy",
    "load_config",
    "train_rl",
    "train_sft",
]

Config: TypeAlias = ConfigDict | Mapping[str, Any]
"""Settings by name, for example from `load_config`."""

Tasks: TypeAlias = str | Sequence[Task] | Callable[..., Sequence[Task]]
"""The name of a task source, a list of tasks, or a function that returns tasks (docs/extending.md).
"""

RewardFunction: TypeAlias = Callable[..., Any]
Rewards: TypeAlias = (
    RewardFunction | Mapping[str, float | RewardFunction | tuple[RewardFunction, float]]
)
"""A reward function, or a mapping from names to reward functions (docs/extending.md).

In a mapping, a value is a function, a pair (function, weight), or a weight alone. A weight alone
selects the built-in reward of that name; the name ``grader`` selects the reward of the task itself.
"""


# --- training ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of a finished training run.

    Attributes:
        path: directory of the run.
        rows: metrics of each step of the run, as in ``metrics.jsonl``.
    """

    path: Path
    rows: list[dict[str, Any]] = dataclasses.field(repr=False)

    @property
    def model(self) -> Path:
        """Directory of the trained policy, for `load` or for the setting ``model``."""
        return self.path / "model"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLRun(RLConfig):
    """The settings of a run of RL together with the settings of its tools.

    Attributes:
        tools: tools that the policy can call.
    """

    tools: ToolsConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        self.graders.check_judge()


def train_sft(
    config: Config | sft.SFTConfig,
    workdir: str | Path,
    *,
    records: Sequence[DistilledRecord] | None = None,
    wandb_project: str = "",
    **changes: Any,
) -> Trained:
    """Fine-tunes a policy on trajectories, or continues the unfinished run in the work directory.

    Args:
        config: settings of SFT, see `train.config.SFTConfig`.
        workdir: directory of the run. The trained policy is written to the subdirectory ``model``.
        records: training records; None to read the files that ``config.data`` names.
        wandb_project: name of a Weights & Biases project that also receives the metrics; "" for
            none.
        changes: settings that override those of ``config``. A new value for a group of settings
            replaces the whole group. ``model`` may be a `Model`, and ``optimizer`` an optax object.

    Raises:
        UserError: an error that the caller can correct, such as a wrong setting.
    """
    values, path = {**_values(config), **_plain(changes)}, run_folder(workdir)
    policy = _take_objects(values, config, path)
    if records is not None:
        values["data"] = str(path / "records.jsonl")
    found = build_config(sft.SFTConfig, values)

    def train() -> None:
        with run_at(path, found, wandb_project) as (run, output):
            _keep_model(path / _INITIAL, policy)
            if records is not None:
                _keep_records(path / "records.jsonl", records)
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
    environment: Callable[..., Any] | None = None,
    wandb_project: str = "",
    **changes: Any,
) -> Trained:
    """Trains a policy by RL, or continues the unfinished run in the work directory.

    Args:
        config: settings of RL and of the tools, see `RLRun`.
        workdir: directory of the run. The trained policy is written to the subdirectory ``model``.
        tasks: training tasks; None for those that ``config.tasks`` names.
        rewards: reward functions; None for those of ``config.graders.rewards``.
        tools: tools of the policy, given as a list of tools to call, or as settings that override
            those in ``config.tools``; None for ``config.tools``.
        environment: environment class (docs/environments.md); None to use ``config.environment``.
        wandb_project: name of a Weights & Biases project that also receives the metrics; "" for
            none.
        changes: settings that override those of ``config``. A new value for a group of settings
            replaces the whole group. ``model`` may be a `Model`, and ``optimizer`` an optax object.

    Raises:
        UserError: an error that the caller can correct, such as a wrong setting.
    """
    values = {**_given(config, tasks, rewards, tools, environment), **_plain(changes)}
    path = run_folder(workdir)
    policy = _take_objects(values, config, path)
    found = build_config(RLRun, values)

    def train() -> None:
        with run_at(path, found, wandb_project) as (run, output):
            _keep_model(path / _INITIAL, policy)
            tools = None if found.agent else found.tools  # an agent program has its own tools
            live = [] if tools is None else make_tools(tools, tags_of(found.environment))
            check_ready(look(found.probe_s, graders=found.graders, tools=tools, made=True))
            rl.train(found, run, output, live)

    return _trained(train, path, "rl")


_INITIAL = "initial"
"""Folder, in a work directory, of an initial model that was given as an object."""


def _take_objects(values: dict[str, Any], config: Any, path: Path) -> Model | None:
    """Puts names in the place of a model and an optax object among the settings.

    Args:
        values: the settings, which the function changes.
        config: the settings before the changes.
        path: the work directory.

    Returns:
        The model; None if the setting names a model.
    """
    optimizer = values.get("optimizer", {})
    if not isinstance(optimizer, Mapping):
        group = _values(config).get("optimizer", {})
        values["optimizer"] = {**group, "path": name_optimizer(optimizer), "options": {}}
    policy = values.get("model")
    if not isinstance(policy, Model):
        return None
    values["model"] = str(path / _INITIAL)
    return policy


def _keep_model(path: Path, policy: Model | None) -> None:
    """Writes the initial model of a run, unless the folder has it already."""
    if policy is None:
        return
    if not path.exists():
        return save_model(policy, path)
    kept, given = load_weights(path), policy.merged().params
    if jax.tree.structure(kept) != jax.tree.structure(given) or not jax.tree.all(
        jax.tree.map(lambda a, b: a.shape == b.shape and bool((a == b).all()), kept, given)
    ):
        raise UserError(
            f"{path} has the initial model of another run: give the same model to continue it, or "
            "another work directory"
        )


def _keep_records(path: Path, records: Sequence[DistilledRecord]) -> None:
    """Writes the training records, unless the file has the records of another run."""
    given = [json.loads(jsonl.dumps(record.to_json())) for record in records]
    if path.exists() and jsonl.read_objects(path) != given:
        raise UserError(
            f"{path} has the records of another run: give the same records to continue it, or "
            "another work directory"
        )
    write_records(path, records)


def _trained(train: Callable[[], None], path: Path, phase: str) -> Trained:
    apart(train)
    rows = jsonl.read_objects(path / "metrics.jsonl")
    return Trained(path, [row for row in rows if row.get("phase") == phase])


# --- evaluation ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateRun(EvaluateConfig):
    """The settings of an evaluation, with the policy and its tools.

    Attributes:
        model: Hugging Face directory of the policy; ignored if ``endpoint`` names a server.
        stage: name of the evaluation, under which the work directory stores its results.
        tools: tools that the policy can call.
    """

    model: Place
    stage: Name
    tools: ToolsConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        self.graders.check_judge()


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation; ``str`` converts it to a table of its figures.

    Attributes:
        path: directory of the run.
        outcome: content of the file ``results.json``, see docs/benchmarks.md.
    """

    path: Path
    outcome: Mapping[str, Any] = dataclasses.field(repr=False)

    @property
    def figures(self) -> Mapping[str, Any]:
        """All results of the evaluation by name, such as ``pass_at_1``, see docs/benchmarks.md."""
        return self.outcome["figures"]

    @property
    def pass_at_1(self) -> float | None:
        """Share of right samples, averaged over tasks; None if no sample was graded."""
        return self.figures["pass_at_1"]

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of ``pass_at_1``."""
        return tuple(self.figures["ci95"])

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per sample, with task, number, grade, stop reason, tokens and tool calls."""
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
        """Path of the HTML page with the results."""
        return self.path / "evaluate" / self.outcome["stage"] / "index.html"

    def trajectories(self) -> list[Trajectory]:
        """Reads the sampled trajectories of this evaluation from ``traces.jsonl``."""
        found = read_trajectories(self.path / "traces.jsonl")
        stage = self.outcome["stage"]
        return [one for one in found if one.metadata.get("stage") == stage]

    def compared_to(self, other: Evaluation) -> Comparison:
        """Compares this evaluation with another evaluation of the same tasks, task by task.

        Raises:
            UserError: the two evaluations have no task in common.
        """
        return compare(other.outcome, self.outcome)

    def __str__(self) -> str:
        return table(self.outcome)


def evaluate_policy(
    config: Config | EvaluateConfig,
    workdir: str | Path,
    *,
    policy: Model | str | Path | None = None,
    tasks: Tasks | None = None,
    rewards: Rewards | None = None,
    tools: Tools | None = None,
    environment: Callable[..., Any] | None = None,
    fresh: bool = False,
    **changes: Any,
) -> Evaluation:
    """Evaluates a policy; samples that the work directory already holds are not sampled again.

    Args:
        config: settings of the evaluation, see `EvaluateRun`.
        workdir: directory of the run.
        policy: the policy or its directory; None for ``config.model``.
        tasks: tasks to answer; None for those that ``config.tasks`` names.
        rewards: reward functions; None for those of ``config.graders.rewards``.
        tools: tools of the policy, given as a list of tools to call, or as settings that override
            those in ``config.tools``; None for ``config.tools``.
        environment: environment class (docs/environments.md); None to use ``config.environment``.
        fresh: whether to delete the existing samples of this stage first.
        changes: settings that override those of ``config``, for example ``stage``, the name of the
            evaluation. A new value for a group of settings replaces the whole group.

    Raises:
        UserError: an error that the caller can correct. Samples that have finished before the error
            are kept.
    """
    values = {
        "stage": "policy",
        **_given(config, tasks, rewards, tools, environment),
        **_plain(changes),
    }
    path = run_folder(workdir)
    given = path / "policies" / str(values["stage"])
    if policy is not None:
        values["model"] = str(given if isinstance(policy, Model) else policy)
    found = build_config(EvaluateRun, values)

    def measure() -> Evaluation:
        with RunDir(path) as run, spending(path / "spent"):
            if isinstance(policy, Model):
                save_model(policy, given, overwrite=True)
            evaluation = Evaluation(path, _measured(found, run, fresh))
            known = path / "config.json"
            # The config of a training run is not replaced.
            if not known.exists() or "stage" in durable.read_json_object(known):
                run.write_config(values)
            write_page(evaluation.outcome, evaluation.page)
            return evaluation

    return apart(measure)


def _measured(config: EvaluateRun, run: RunDir, fresh: bool) -> dict[str, Any]:
    tags = tags_of(config.environment)
    # Tools are created before the tasks are loaded because tasks may name a protocol that a tool
    # defines. An agent program has its own tools.
    live = [] if config.agent else make_tools(config.tools, tags)
    tasks = load(config)
    described = dataclasses.asdict(config.tools)
    for setting in ("store", "budgets"):  # neither group affects the answers
        described.pop(setting)
    again: dict[str, Any] = {"servers": None if config.agent else config.tools, "fresh": fresh}
    if not config.endpoint:
        # The policy is named by a hash of its weights, which `model_folder` leaves in the bucket.
        path = Path(local(config.model)) if is_url(config.model) else model_folder(config.model)
        return evaluate_model(path, tasks, config, run, config.stage, live, described, **again)
    policy = endpoint_policy(config.endpoint, config.sampling, config.seed, config.rollout, live)
    about = settings(config, f"{config.endpoint.model} (endpoint)", described)
    return evaluate(policy, tasks, config, run, config.stage, about, **again)


# --- arguments of the functions -----------------------------------------------------------


def _values(config: Any) -> dict[str, Any]:
    """Returns settings by name."""
    if isinstance(config, ConfigDict):
        return config.to_dict()
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    return _plain(config)


def _plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by name, with nested dataclasses converted to groups by name."""
    return {
        name: _values(value) if dataclasses.is_dataclass(value) else value
        for name, value in changes.items()
    }


def _given(
    config: Any,
    tasks: Tasks | None,
    rewards: Rewards | None,
    tools: Tools | None,
    environment: Callable[..., Any] | None,
) -> dict[str, Any]:
    """Returns settings by name; Python objects among the arguments are registered under names."""
    values = _values(config)
    if tasks is not None:
        values["tasks"] = tasks if isinstance(tasks, str) else _source(tasks)
    if rewards is not None:
        values["graders"] = {**_values(values.get("graders", {})), "rewards": _rewards(rewards)}
    if tools is not None:
        values["tools"] = {**_values(values.get("tools", {})), **named_tools(tools)}
    if environment is not None:
        path = ENVIRONMENTS.name_of(environment, "environment")
        values["environment"] = {**_values(values.get("environment", {})), "path": path}
    return values


def _source(tasks: Sequence[Task] | Callable[..., Sequence[Task]]) -> str:
    """Returns a name for a task source."""
    return SOURCES.name_of(tasks if callable(tasks) else lambda: tasks, "tasks")


def _rewards(rewards: Rewards) -> dict[str, dict[str, Any]]:
    """Returns the setting ``graders.rewards``."""
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
