r"""Measures the value of distillation filters and roles by SFT on different training sets.

    coa-jax ablation --config=configs/ablation/factbook.py --workdir=runs/ablation

For each seed, the teacher solves the training tasks once. Each arm (one setting of the filters)
selects its training set from these runs of the teacher, and may remove the text of some roles, such
as all reflections. Then every arm fine-tunes the same initial policy on its training set for the
same number of updates, and the fine-tuned policies answer the same held-out tasks with live tools.

The command writes ``report.md`` and ``summary.json`` to the work directory. Each arm of each seed
also has its own run directory. After a kill, the same command continues the ablation.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import ml_collections
import numpy as np
from absl import flags

from coa_jax.config.fields import (
    Bounded,
    Count,
    Items,
    Name,
    OneOf,
    Place,
    Seed,
    check,
    format_value,
)
from coa_jax.data.intervals import rates
from coa_jax.data.records import read_records
from coa_jax.data.trajectory import DistilledRecord, write_records
from coa_jax.demo.untrained import ScratchConfig, write_policy
from coa_jax.distillation.dataset import DistilledSplit, distill_split, statistics_of
from coa_jax.distillation.pipeline import DistillConfig, graded_runs, select
from coa_jax.errors import UserError
from coa_jax.evaluation.config import EvaluateConfig
from coa_jax.evaluation.metrics import student_t
from coa_jax.evaluation.results import shown_rate
from coa_jax.evaluation.run import evaluate_model, load
from coa_jax.files import durable
from coa_jax.files.markdown import table
from coa_jax.model.peft_io import copy_model
from coa_jax.run.command import config_flag, run_main, workdir_flag
from coa_jax.run.progress import progress
from coa_jax.run.run_dir import RunDir
from coa_jax.run.settings import build_config, merged
from coa_jax.storage import run_folder
from coa_jax.tasks import Task
from coa_jax.tasks.mixture import load_shares
from coa_jax.tasks.prompts import load_prompt
from coa_jax.tools.base import Tool
from coa_jax.tools.make import ToolsConfig, make_tools
from coa_jax.train import sft
from coa_jax.train.config import SFTConfig
from coa_jax.train.renaming import renaming

UNFILTERED = "unfiltered"
"""Name of the arm that trains on all runs of the teacher, without a filter."""

_Role = Annotated[str, OneOf("think", "plan", "reflection", "suggested_answer", "double_check")]
_OF_RUNS = ("mistake_rate", "unrecovered_rate", "seed", "concurrency", "max_messages")
"""Settings of the teacher that affect its runs. All arms share the runs, so no arm may set them."""


@dataclasses.dataclass(frozen=True)
class Tasks(Bounded):
    """The tasks that the teacher solves.

    Attributes:
        tasks: task source, see `tasks.load_tasks`; "" if ``mixture`` names the sources.
        train: number of tasks that are taken from the training split.
        task_options: options of the task source ``tasks``.
        mixture: maps names to task sources, see `tasks.mixture.Part`. The number of tasks from each
            source is in proportion to its weight.
    """

    tasks: Place
    train: Count
    task_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mixture: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Command(Bounded):
    """The settings of an ablation.

    Attributes:
        seeds: seeds, each given once. A seed determines the tasks, the initial policy and the order
            of the training records.
        references: names of the arms with which the report compares every other arm.
        arms: maps the name of each arm to its filter settings, which override those of ``teacher``.
        prompt_style: prompt style of the policies, see `load_prompt`.
        tools: tools of the teacher and of the policies.
        distill: tasks that the teacher solves.
        teacher: settings of the teacher and the default settings of the filters.
        policy: sizes of the untrained policy from which every arm starts.
        model: pretrained initial policy, a model directory or a GGUF file; "" for an untrained one.
        without_roles: maps the name of an arm to the roles whose text its records lack.
        sft: settings of SFT, except the paths of its model and data, which the command sets.
        evaluate: settings of the evaluation of each trained policy on the held-out tasks.
    """

    seeds: Annotated[tuple[Seed, ...], Items(1, 1000)]
    references: tuple[Name, ...]
    prompt_style: Place
    tools: ToolsConfig
    distill: Tasks
    teacher: DistillConfig
    arms: Annotated[Mapping[str, Any], Items(1, 1000)]
    policy: ScratchConfig
    sft: Mapping[str, Any]
    evaluate: EvaluateConfig
    model: Place = ""
    without_roles: Mapping[str, tuple[_Role, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.arms:
            check(name, Name, "arms")
        if UNFILTERED in self.arms:
            raise UserError(f"arms.{UNFILTERED} is the arm without filters; choose another name")
        annotation = tuple[Annotated[str, OneOf(UNFILTERED, *self.arms)], ...]
        check(self.references, annotation, "references")
        for name, roles in self.without_roles.items():
            check(name, Annotated[str, OneOf(*self.arms)], "without_roles")
            check(roles, tuple[_Role, ...], f"without_roles.{name}")
        twice = [seed for seed, n in collections.Counter(self.seeds).items() if n > 1]
        if twice:
            raise UserError(f"seeds contains {twice[0]} twice; give each seed once")
        self.filters()

    def filters(self) -> dict[str, DistillConfig]:
        """Returns the complete distillation settings of each arm, keyed by the name of the arm."""
        teacher = dataclasses.asdict(self.teacher)
        return {
            name: build_config(DistillConfig, _arm(teacher, arm, where), where)
            for name, arm in self.arms.items()
            for where in (f"arms.{name}",)
        }

    def sft_config(self, folder: Path, name: str, seed: int) -> SFTConfig:
        """Returns the SFT settings of one arm for one seed.

        Args:
            folder: folder of the seed, which holds the initial policy and a folder for each arm.
            name: name of the arm.
            seed: seed of the training.
        """
        values = {
            **self.sft,
            "model": str(folder / "base"),
            "data": str(folder / name / "train.jsonl"),
            "validation": "",
            "prompt_style": self.prompt_style,
            "seed": seed,
        }
        return build_config(SFTConfig, values, "config.sft")


class Ablation:
    """The stages of an ablation (distillation, SFT, evaluation), in the same work directory."""

    def __init__(self, config: ml_collections.ConfigDict, workdir: Path):
        """Reads the settings and creates the tools.

        Raises:
            UserError: a setting is wrong.
        """
        self.config, self.workdir = config.to_dict(), workdir
        self.command = build_config(Command, config)
        self.teacher, self.evaluation = self.command.teacher, self.command.evaluate
        self.arms = self.command.filters()
        if any(arm.selection.max_tokens for arm in self.arms.values()):
            raise UserError("an ablation cannot count tokens: set max_tokens of all arms to 0")
        self.command.sft_config(workdir, UNFILTERED, 0)  # fails now if wrong
        self.tools: list[Tool] = make_tools(self.command.tools)
        self.held_out = load(self.evaluation)

    def data(self, seed: int) -> dict[str, dict[str, Any]]:
        """Distils the tasks for one seed and writes the training records of every arm.

        Returns:
            Maps the name of each arm to the statistics of its training set. Their entry ``dropped``
            maps the name of each filter to the number of runs that it dropped.
        """
        folder, source = self.workdir / f"seed{seed}", self.command.distill
        teacher = dataclasses.replace(self.teacher, seed=seed)
        tasks = load_shares(source, "train", source.train, seed)
        tools = {tool.name: tool for tool in self.tools}
        with progress(f"distil seed {seed}", total=len(tasks)) as bar:
            split = distill_split(
                "train", tasks, tools, teacher, folder / "data", self.config["tools"], bar.reach
            )
        statistics = {}
        for name, records, dropped in self._sets(tasks, split, seed):
            write_records(folder / name / "train.jsonl", records)
            statistics[name] = {"dropped": dropped, **statistics_of(records)}
        return statistics

    def _sets(
        self, tasks: Sequence[Task], split: DistilledSplit, seed: int
    ) -> Sequence[tuple[str, Sequence[DistilledRecord], dict[str, int]]]:
        """Returns for each arm (name, records, number of runs that each filter dropped)."""
        sets: list[tuple[str, Sequence[DistilledRecord], dict[str, int]]]
        sets = [(UNFILTERED, [run.record for run in split.runs], dict[str, int]())]
        for name, arm in self.arms.items():
            runs = split.runs
            if arm.judges.answer != self.teacher.judges.answer:
                runs = graded_runs(tasks, [run.log for run in runs], arm.judges)
            records, report = select(runs, dataclasses.replace(arm, seed=seed))
            if roles := self.command.without_roles.get(name):
                records = [without(record, roles) for record in records]
            sets.append((name, records, {k: n for k, n in report.dropped.items() if n}))
        return sets

    def base(self, seed: int) -> Path:
        """Returns the folder of a seed's initial policy; the first call creates the policy."""
        path = self.workdir / f"seed{seed}" / "base"
        if (path / "config.json").is_file():
            return path
        if self.command.model:
            copy_model(self.command.model, path)
        else:
            records = read_records(self.workdir / f"seed{seed}" / UNFILTERED / "train.jsonl")
            policy, prompt = self.command.policy, load_prompt(self.command.prompt_style)
            write_policy(dataclasses.replace(policy, seed=seed), records, prompt, path)
        return path

    def arm(self, seed: int, name: str) -> dict[str, Any]:
        """Fine-tunes and evaluates one arm for one seed, unless an earlier call has finished it.

        Returns:
            The summary of the arm: the grade of each held-out task and the time of each stage.
        """
        folder = self.workdir / f"seed{seed}" / name
        with RunDir(folder) as run:
            if "grades" not in run.blocks():
                began = time.monotonic()
                self.base(seed)
                config = self.command.sft_config(folder.parent, name, seed)
                sft.train(config, run, folder / "model", renaming(config.rename_share))
                trained = time.monotonic()
                tools = self.tools, self.config["tools"]
                outcome = evaluate_model(
                    folder / "model", self.held_out, self.evaluation, run, "policy", *tools
                )
                took = {"sft": trained - began, "evaluate": time.monotonic() - trained}
                run.summary({"grades": _grades(outcome), "timings_s": took})
            return run.blocks()


def _arm(teacher: Mapping[str, Any], arm: Any, where: str) -> dict[str, Any]:
    """Returns the teacher's settings, in which the settings of an arm replace the teacher's.

    Raises:
        UserError: the arm sets something that would change the teacher's runs.
    """
    if not isinstance(arm, Mapping):
        raise UserError(f"{where} is {format_value(arm)}; it is a group of settings of the filters")
    fixed = next((name for name in _OF_RUNS if name in arm), None)
    if fixed is not None:
        raise UserError(f"{where}.{fixed}: all arms select from the same runs; set config.teacher")
    return merged(teacher, arm)


def without(record: DistilledRecord, roles: Sequence[str]) -> DistilledRecord:
    """Returns a record without the text that the policy writes in some roles.

    Args:
        record: a training record with all roles.
        roles: tags of one or more roles, such as ``reflection``.
    """
    text = re.compile(rf"<({'|'.join(roles)})>.*?</\1>\n?", re.DOTALL)
    parts = [(who, text.sub("", part) if who == "policy" else part) for who, part in record.parts]
    metadata = record.metadata | {f"{role}s": 0 for role in roles}
    return dataclasses.replace(record, parts=tuple(parts), metadata=metadata)


def _grades(outcome: Mapping[str, Any]) -> list[float | None]:
    """Returns the rate of each task, see `rates`; None for a task without graded samples."""
    rate = rates(outcome)
    return [float(rate[task["id"]]) if task["id"] in rate else None for task in outcome["tasks"]]


# --- statistics ----------------------------------------------------------------------------


def mean_over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Returns the mean over seeds, and its 95 % confidence interval by Student's t-distribution.

    Args:
        values: one value for each seed.

    Returns:
        ``mean``, ``ci95`` (low and high bound, or None for a single seed) and ``seeds`` (the
        values).
    """
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return {"mean": mean, "ci95": None, "seeds": list(values)}
    half = student_t(n) * float(np.std(values, ddof=1)) / n**0.5
    return {"mean": mean, "ci95": [mean - half, mean + half], "seeds": list(values)}


def paired_difference(one: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    """Returns the mean of ``one - other``, the grades of two arms, with two confidence intervals.

    Args:
        one, other: grades of the two arms from 0 to 1, float ``[seeds, tasks]``; NaN for a task
            without a grade.

    Returns:
        The entries of `mean_over_seeds`; the value of a seed is the mean of ``one - other`` over
        its tasks. ``ci95_tasks`` is a second 95 % confidence interval, which describes the
        variation between tasks. It is the normal approximation for the mean over tasks, where the
        value of a task is its mean of ``one - other`` over the seeds. ``tasks`` is the number of
        tasks with a grade in both arms.
    """
    difference = one - other
    by_task = np.nanmean(difference, axis=0)
    by_task = by_task[~np.isnan(by_task)]
    over_seeds = mean_over_seeds([float(np.nanmean(row)) for row in difference])
    half = 1.959964 * float(np.std(by_task, ddof=1)) / len(by_task) ** 0.5
    mean = float(np.mean(by_task))
    return {**over_seeds, "ci95_tasks": [mean - half, mean + half], "tasks": len(by_task)}


def results(grades: Mapping[str, np.ndarray], references: Sequence[str]) -> dict[str, Any]:
    """Returns pass@1 of every arm, and the differences between each arm and the reference arms.

    Args:
        grades: maps the name of each arm to its grades from 0 to 1, float ``[seeds, tasks]``.
        references: names of the reference arms.

    Returns:
        Maps the name of each arm to its ``pass_at_1`` (see `mean_over_seeds`) and to ``minus``.
        This maps the name of each reference to the arm's grades minus those of the reference (see
        `paired_difference`).
    """
    return {
        name: {
            "pass_at_1": mean_over_seeds([float(np.nanmean(row)) for row in values]),
            "minus": {
                other: paired_difference(values, grades[other])
                for other in references
                if other != name
            },
        }
        for name, values in grades.items()
    }


def report(
    figures: Mapping[str, Any], sets: Mapping[str, Sequence[Mapping[str, Any]]], updates: int
) -> str:
    """Formats the results as Markdown.

    Args:
        figures: result of `results`.
        sets: for each arm, the statistics of its training set for each seed.
        updates: number of SFT updates of each policy.
    """
    rates, differences, dropped = [], [], []
    for name, entry in figures.items():
        rate, records = entry["pass_at_1"], ", ".join(str(one["records"]) for one in sets[name])
        seeds = ", ".join(f"{value:.3f}" for value in rate["seeds"])
        rates.append((name, records, seeds, _with_interval(rate["mean"], rate["ci95"], "")))
        for other, less in entry["minus"].items():
            over = (_with_interval(less["mean"], less[key], "+") for key in ("ci95", "ci95_tasks"))
            differences.append((f"{name} - {other}", *over))
    for name, by_seed in sets.items():
        for number, one in enumerate(by_seed, 1):
            shares = [f"{one[key]:.3f}" for key in ("with_reflection", "with_correction")]
            why = ", ".join(f"{why} {count}" for why, count in one["dropped"].items())
            dropped.append((name, number, *shares, why or "nothing"))
    means = "mean (over seeds)", "mean (over tasks, with these seeds)"
    lines = [
        "# SFT on differently filtered sets",
        "",
        f"Every policy makes {updates} updates from the same start; the same held-out tasks. "
        "Intervals are 95 %.",
        "",
        *table(("arm", "records", "pass@1 by seed", "mean (over seeds, Student's t)"), rates),
        "",
        *table(("difference", *means), differences),
        "",
        *table(("arm", "set", "with reflection", "with correction", "dropped"), dropped),
        "",
    ]
    return "\n".join(lines)


def _with_interval(mean: float, interval: Sequence[float] | None, sign: str) -> str:
    if interval is None:
        return f"{mean:{sign}.3f}"
    return f"{mean:{sign}.3f} ({interval[0]:{sign}.3f} to {interval[1]:{sign}.3f})"


def run_ablation(config: ml_collections.ConfigDict, workdir: Path) -> dict[str, Any]:
    """Runs the ablation: every arm for every seed, except those that are already finished.

    Args:
        config: settings of the ablation, see `Command`.
        workdir: work directory.

    Returns:
        The content of ``summary.json``.
    """
    with RunDir(workdir) as run:
        run.keep_config(config)
        work = Ablation(config, workdir)
        run.write_config(config)
        names, seeds = (UNFILTERED, *work.arms), work.command.seeds
        sets: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        rows: dict[str, list[list[float | None]]] = {name: [] for name in names}
        took: dict[str, float] = {}
        for seed in seeds:
            figures = work.data(seed)
            for name in names:
                print(f"seed {seed}, {name} ...", flush=True)
                done = work.arm(seed, name)
                sets[name].append(figures[name])
                rows[name].append(done["grades"])
                took[f"seed{seed}/{name}"] = sum(done["timings_s"].values())
                rate = shown_rate(done["policy"]["pass_at_1"])
                print(f"  pass@1 {rate}, {figures[name]['records']} records")
        grades = {name: np.array(values, float) for name, values in rows.items()}
        arms = results(grades, work.command.references)
        summary = {"arms": arms, "sets": sets, "timings_s": took}
        run.summary(summary)
        text = report(arms, sets, work.config["sft"]["optimizer"]["total_steps"])
        durable.replace(workdir / "report.md", text.encode())
    return summary


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax ablation``."""
    config_flag("configs/ablation/factbook.py", Command)
    workdir_flag("where the runs are written", "runs/ablation")


def main(argv: list[str]) -> None:
    """Runs ``coa-jax ablation``: runs the ablation and prints the report."""
    workdir = run_folder(flags.FLAGS.workdir)
    run_ablation(flags.FLAGS.config, workdir)
    print((workdir / "report.md").read_text())


if __name__ == "__main__":
    run_main(main, define_flags)
