"""The Python API to load, ask, train and evaluate a policy (docs/api.md).

The room holds the functions that train, distil and evaluate, and the conversion of their arguments.
It may import every room but `cli`, whose commands call the same code.

All functions also work inside a running event loop, as in Jupyter. They raise
`coa_jax.errors.UserError` for errors that the caller can correct.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.api.arguments import (
    Config,
    Rewards,
    Tags,
    Tasks,
    changed_settings,
    settings_with,
    task_source,
    values_of,
    with_tags,
)
from coa_jax.config.preflight import preflight, require, settings_probes, used_settings
from coa_jax.data.records import records_of_rows
from coa_jax.data.trajectory import DistilledRecord, Trajectory, read_trajectories, write_records
from coa_jax.distillation import function_team
from coa_jax.errors import UserError
from coa_jax.evaluation.compare import Comparison, compare
from coa_jax.evaluation.config import EvaluateConfig, EvaluateRun
from coa_jax.evaluation.results import table
from coa_jax.evaluation.run import evaluate_model, load
from coa_jax.files import durable, jsonl
from coa_jax.model.api import load_weights
from coa_jax.model.export import save_model
from coa_jax.model.foreign import Foreign
from coa_jax.model.policy import Model
from coa_jax.protocol import find_protocols
from coa_jax.report.evaluation_page import write_page
from coa_jax.rollout.agent import Agent
from coa_jax.rollout.environments.base import EnvironmentConfig, tags_of
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run.command import load_config
from coa_jax.run.run_dir import RunDir
from coa_jax.run.settings import build_config
from coa_jax.storage import is_url, run_folder
from coa_jax.tasks import load_tasks
from coa_jax.tools.base import Tool
from coa_jax.tools.concurrency import run_outside_event_loop
from coa_jax.tools.function import function_schema
from coa_jax.tools.make import Tools, make_tools
from coa_jax.tools.net.budget import charge_to_run
from coa_jax.train import foreign, rl, sft
from coa_jax.train.command import run_at
from coa_jax.train.defaults import with_defaults
from coa_jax.train.renaming import renaming
from coa_jax.train.rl_config import RLConfig, RLRun

__all__ = [
    "Agent",
    "Distilled",
    "Evaluation",
    "Trained",
    "distill",
    "evaluate",
    "load_config",
    "train_rl",
    "train_sft",
]

# --- training ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of a finished training run.

    Attributes:
        path: directory of the run.
        metrics: metrics of each step of the run, as in ``metrics.jsonl``.
        tools: tools with which the policy was trained.
        rollout: limits on the tokens, tool calls and time of a trajectory; None after SFT.
        module: the Flax module that you gave, after training, see `Foreign`; None if you gave a
            model of coa_jax.
    """

    path: Path
    metrics: list[dict[str, Any]] = dataclasses.field(repr=False)
    tools: Tools = dataclasses.field(default=(), repr=False)
    rollout: RolloutConfig | None = dataclasses.field(default=None, repr=False)
    module: Foreign | None = dataclasses.field(default=None, repr=False)

    @functools.cached_property
    def policy(self) -> Agent:
        """The trained policy with its tools; ``policy("...")`` returns the answer to a question."""
        if self.module:
            raise UserError(
                "a module of your own cannot decode, because it has no cache of coa_jax; call the "
                "module itself, or train a model of coa_jax"
            )
        return Agent(self.model, self.tools, rollout=self.rollout)

    @property
    def model(self) -> Path:
        """Directory of the trained policy, for `load` or for the setting ``model``."""
        return self.path / "model"


def train_sft(
    model: Model | Foreign | str | Path | Config | sft.SFTConfig,
    workdir: str | Path,
    *,
    data: str | Path | Iterable[DistilledRecord | Mapping[str, Any]] | None = None,
    wandb_project: str = "",
    **changes: Any,
) -> Trained:
    """Fine-tunes a policy on trajectories, or continues the unfinished run in the work directory.

    Args:
        model: the model, its path or its name on the Hub; a Flax module of your own, see `Foreign`;
            or settings, see `train.config.SFTConfig`. A setting that is left out has its default,
            see `train.defaults`.
        workdir: directory of the run. The trained policy is written to the subdirectory ``model``.
        data: training records, rows (a list of dicts or a ``datasets.Dataset``, see
            docs/data.md), or the files that contain them; None to use the setting ``data``.
        wandb_project: name of a Weights & Biases project that also receives the metrics; "" for
            none.
        changes: settings that override those of ``model``. A new value for a group of settings
            replaces the whole group; ``**{"optimizer.total_steps": 9}`` changes one setting of a
            group. ``optimizer`` may be an optax object.

    Raises:
        UserError: an error that the caller can correct, such as a wrong setting.
    """
    path = run_folder(workdir)
    module = model if isinstance(model, Foreign) else None
    values = changed_settings({"model": "module"} if module else model, changes)
    if module:
        values["lora"] = {"rank": 0, **values_of(values.get("lora", {}))}
    policy = _take_model(values, path)
    if data is not None:
        named = isinstance(data, str | Path)
        values["data"] = str(data if named else path / "records.jsonl")
    open_config = build_config(sft.SFTConfig, with_defaults("sft", values))

    def train() -> None:
        shapes = policy.config if policy else None
        with run_at(path, open_config, wandb_project, shapes) as (run, output, config):
            _keep_model(path / _INITIAL, policy)
            if data is not None and not isinstance(data, str | Path):
                _keep_records(path / "records.jsonl", records_of_rows(data))
            if module:
                return foreign.train(module, config, run, output)
            live = _ready_tools(config)
            sft.train(config, run, output, renaming(config.rename_share), live)

    return dataclasses.replace(_trained(train, path, "sft"), module=module)


def train_rl(
    model: Model | str | Path | Config | RLConfig,
    workdir: str | Path,
    *,
    tasks: Tasks | None = None,
    rewards: Rewards | None = None,
    tools: Tools | None = None,
    tags: Tags | None = None,
    environment: Callable[..., Any] | None = None,
    wandb_project: str = "",
    **changes: Any,
) -> Trained:
    """Trains a policy by RL, or continues the unfinished run in the work directory.

    Args:
        model: the model, its path or its name on the Hub; or settings of RL and of the tools, see
            `RLRun`. A setting that is left out has its default, see `train.defaults`.
        workdir: directory of the run. The trained policy is written to the subdirectory ``model``.
        tasks: training tasks; None to use the setting ``tasks``.
        rewards: reward functions; None to use the setting ``graders.rewards``.
        tools: tools of the policy: a list of names, tools and typed functions, or a single tool or
            function; or values that override single settings of the group ``tools``; None to use
            this group as it is. If there is a function, the policy calls all tools in the format
            ``hermes``, unless the settings name another format, or the policy was trained to call
            the same tools in tags.
        tags: maps tags to typed functions, in addition to ``tools``. The policy then writes a chain
            of agents, and calls a function by ``<tag>arguments</tag>``.
        environment: environment class (docs/environments.md); None to use the setting
            ``environment``.
        wandb_project: name of a Weights & Biases project that also receives the metrics; "" for
            none.
        changes: settings that override those of ``model``. A new value for a group of settings
            replaces the whole group; ``**{"optimizer.total_steps": 9}`` changes one setting of a
            group. ``optimizer`` may be an optax object.

    Raises:
        UserError: an error that the caller can correct, such as a wrong setting.
    """
    tools = with_tags(tools, tags)
    values = settings_with(changed_settings(model, changes), tasks, rewards, tools, environment)
    path = run_folder(workdir)
    policy = _take_model(values, path)
    open_config = build_config(RLRun, with_defaults("rl", values))
    own_tools = open_config.tools if tools is None or isinstance(tools, Mapping) else tools

    def train() -> None:
        shapes = policy.config if policy else None
        with run_at(path, open_config, wandb_project, shapes) as (run, output, config):
            _keep_model(path / _INITIAL, policy)
            rl.train(config, run, output, _ready_tools(config))

    rollout = dataclasses.replace(open_config.rollout, prompt_style="model")
    return dataclasses.replace(_trained(train, path, "rl"), tools=own_tools, rollout=rollout)


def _ready_tools(config: sft.SFTConfig | RLRun) -> list[Tool]:
    """Creates the tools of a training run; checks that all parts of the run can start.

    Raises:
        UserError: a part cannot start.
    """
    used = used_settings(config)
    tools, environment = used.get("tools"), used.get("environment", EnvironmentConfig())
    live = make_tools(tools, tags_of(environment)) if tools else []
    require(preflight(settings_probes(used), config.probe_s))
    return live


_INITIAL = "initial"
"""Folder, in a work directory, of an initial model that was given as an object."""


def _take_model(values: dict[str, Any], path: Path) -> Model | None:
    """Puts the name of a folder in the place of a model among the settings.

    Args:
        values: the settings, which the function changes.
        path: the work directory.

    Returns:
        The model; None if the setting names a model.
    """
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
    kept, params = load_weights(path), policy.merged().params
    one, other = (dict(jax.tree.leaves_with_path(tree)) for tree in (kept, params))
    if {*one} != {*other} or not all(jnp.array_equal(one[key], other[key]) for key in one):
        raise UserError(
            f"{path} has the initial model of another run: give the same model to continue it, or "
            "another work directory"
        )


def _keep_records(path: Path, records: Sequence[DistilledRecord]) -> None:
    """Writes the training records, unless the file has the records of another run."""
    rows = [json.loads(jsonl.dumps(record.to_json())) for record in records]
    if path.exists() and jsonl.read_objects(path) != rows:
        raise UserError(
            f"{path} has the records of another run: give the same records to continue it, or "
            "another work directory"
        )
    write_records(path, records)


def _trained(train: Callable[[], None], path: Path, phase: str) -> Trained:
    try:
        run_outside_event_loop(train)
    except KeyboardInterrupt:
        print(f"interrupted; the same call continues the run in {path}", file=sys.stderr)
        raise
    rows = jsonl.read_objects(path / "metrics.jsonl")
    return Trained(path, [row for row in rows if row.get("phase") == phase])


# --- distillation --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Distilled:
    """Training data from the runs of a multi-agent system.

    Attributes:
        path: directory of the distillation; ``runs.jsonl`` holds all runs.
        records: records of the runs with a right answer, for the argument ``data`` of `train_sft`.
        dropped: maps each reason to the number of runs that were dropped for this reason.
    """

    path: Path
    records: list[DistilledRecord] = dataclasses.field(repr=False)
    dropped: Mapping[str, int]


def distill(
    team: function_team.Team,
    workdir: str | Path,
    *,
    tasks: Tasks,
    num_tasks: int = 0,
    tools: Sequence[Callable[..., Any]] = (),
    task_options: Mapping[str, Any] | None = None,
    concurrency: int = 8,
) -> Distilled:
    """Lets a multi-agent system solve tasks, and keeps the runs whose answers are right.

    To distil log files of finished runs, or the teams of agents of this package, use the command
    ``coa-jax distill``.

    Args:
        team: function that takes a question, solves it, and returns the messages of its run, a list
            of dicts as in OpenAI's API. It may be asynchronous. A task for which the function
            raises an exception is left out, and tried again by the next call.
        workdir: directory of the distillation. Runs that it holds are not repeated.
        tasks: as in `train_rl`; each task needs an accepted answer.
        num_tasks: number of tasks to load if ``tasks`` is the name of a source; 0 for all.
        tools: typed functions that the team calls, which the policy's prompt then describes.
        task_options: which columns of rows hold the question and the answer, as in `train_rl`.
        concurrency: number of tasks that are solved at the same time.

    Raises:
        UserError: no run was right, or an argument is wrong.
    """
    if not callable(team):
        raise UserError(
            f"team is {type(team).__name__}; give a function that takes a question and returns the "
            "messages of a run (coa-jax distill reads logs)"
        )
    columns = {"task_options": dict(task_options or {})}
    named = isinstance(tasks, str | Path)
    source = str(tasks) if named else task_source(tasks, columns)
    options = task_options if named else None
    loaded = load_tasks(source, "train", num_tasks or None, options=options)
    path = run_folder(workdir)
    schemas = [{"type": "function", "function": function_schema(tool)} for tool in tools]

    def solve() -> Distilled:
        with RunDir(path) as run:
            runs = asyncio.run(
                function_team.solve_all(team, loaded, path / "runs.jsonl", concurrency)
            )
            records, dropped = function_team.select(loaded, runs, schemas)
            write_records(path / "train.jsonl", records)
            run.summary({"tasks": len(loaded), "kept": len(records), "dropped": dict(dropped)})
        if not records:
            reason, number = dropped.most_common(1)[0]
            raise UserError(f"no run of the team was right; {number} of {len(loaded)}: {reason}")
        return Distilled(path, records, dropped)

    return run_outside_event_loop(solve)


# --- evaluation ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation; ``str`` converts it to a table of its figures.

    Attributes:
        path: directory of the run.
        outcome: all results and settings: the content of ``results.json``, see docs/benchmarks.md.
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
        """One dict per sample, with the data of the sample in ``results.json``.

        Keys are, among others, ``id`` of the task, ``number`` (index among the samples of the task,
        from 0), ``value`` (the grade), ``stop`` (the stop reason), ``tokens`` and ``calls``.
        """
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
        trajectories = read_trajectories(self.path / "traces.jsonl")
        stage = self.outcome["stage"]
        return [t for t in trajectories if t.metadata.get("stage") == stage]

    def compared_to(self, other: Evaluation) -> Comparison:
        """Compares this evaluation with another evaluation of the same tasks, task by task.

        Raises:
            UserError: the two evaluations have no task in common.
        """
        return compare(other.outcome, self.outcome)

    def __str__(self) -> str:
        return table(self.outcome)


def evaluate(
    model: Model | str | Path | Config | EvaluateConfig,
    workdir: str | Path,
    *,
    policy: Model | str | Path | None = None,
    tasks: Tasks | None = None,
    rewards: Rewards | None = None,
    tools: Tools | None = None,
    tags: Tags | None = None,
    environment: Callable[..., Any] | None = None,
    fresh: bool = False,
    **changes: Any,
) -> Evaluation:
    """Evaluates a policy; samples that the work directory already holds are not sampled again.

    Args:
        model: the policy, its path or its name on the Hub; or settings, see `EvaluateRun`. A
            setting that is left out has its default, see `train.defaults`.
        workdir: directory of the run.
        policy: a policy or its path, if ``model`` holds settings that name another policy or none.
            None if ``model`` is the policy itself, or holds settings that name the policy.
        tasks, rewards, tools, tags, environment: as in `train_rl`.
        fresh: whether to delete existing samples of this evaluation (``stage``) first.
        changes: settings that override those of ``model``, for example ``stage``, the name of the
            evaluation. A new value for a group of settings replaces the whole group.

    Raises:
        UserError: an error that the caller can correct. Samples that have finished before the error
            are kept.
    """
    tools = with_tags(tools, tags)
    values = changed_settings(model, changes)
    if policy is not None:  # its protocol decides how the tools are called
        values["model"] = policy
    values = settings_with(values, tasks, rewards, tools, environment)
    policy = values.pop("model", None)
    values = with_defaults("evaluate", values).to_dict()
    path = run_folder(workdir)
    copied = path / "policies" / str(values["stage"])
    if policy is not None:
        values["model"] = str(copied if isinstance(policy, Model) else policy)
    settings = build_config(EvaluateRun, values)

    def measure() -> Evaluation:
        with RunDir(path) as run, charge_to_run(path / "spent"):
            if isinstance(policy, Model):
                save_model(policy, copied, overwrite=True)
            evaluation = Evaluation(path, _measured(settings, run, fresh))
            stored = path / "config.json"
            # The config of a training run is not replaced.
            if not stored.exists() or "stage" in durable.read_json_object(stored):
                run.write_config(values)
            write_page(evaluation.outcome, evaluation.page)
            return evaluation

    return run_outside_event_loop(measure)


def _measured(config: EvaluateRun, run: RunDir, fresh: bool) -> dict[str, Any]:
    tags = tags_of(config.environment)
    # Tools are created before the tasks are loaded because tasks may name a protocol that a tool
    # defines. An agent program has its own tools.
    live = [] if config.agent else make_tools(config.tools, tags)
    if not config.endpoint and not is_url(str(config.model)):
        find_protocols(config.model)  # of which the tasks may name one
    tasks = load(config)
    described = dataclasses.asdict(config.tools)
    for setting in ("store", "budgets"):  # neither group affects the answers
        described.pop(setting)
    return evaluate_model(
        config.model, tasks, config, run, config.stage, live, described,
        servers=None if config.agent else config.tools, fresh=fresh,
    )  # fmt: skip
