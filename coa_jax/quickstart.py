"""The whole pipeline on one machine: distil, SFT, evaluate, RL, evaluate, report.

    python -m coa_jax.quickstart --workdir=runs/quickstart

Each stage leaves its result in the work directory; given again, the command goes on after the last
one that finished, and within SFT and RL after the last checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags

from coa_jax.bounds import MAX_INT, Bounded, Natural, Place, Seed
from coa_jax.cli import config_flag, run_main, workdir_flag
from coa_jax.distill import DistillConfig, evaluate_teacher
from coa_jax.distill.dataset import distill_split
from coa_jax.evaluate.figures import shown_rate, table
from coa_jax.evaluate.run import EvaluateConfig, evaluate_model, load
from coa_jax.installed import warn_untested
from coa_jax.learn import rl, sft
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.sft import SFTConfig
from coa_jax.model.api import load_model
from coa_jax.model.tokenizer import encode_plain
from coa_jax.progress import Bar, progress
from coa_jax.protocol import TAGS, FormatName, Level
from coa_jax.records import read_records
from coa_jax.report import build_report
from coa_jax.run_dir import RunDir
from coa_jax.settings import build
from coa_jax.small.augment import renaming
from coa_jax.small.scratch import ScratchConfig, write_policy
from coa_jax.storage import run_folder
from coa_jax.tasks import load_splits
from coa_jax.tasks.base import with_level
from coa_jax.tasks.prompts import load_prompt
from coa_jax.tools.make import ToolsConfig, make_tools


@dataclasses.dataclass(frozen=True)
class Tasks(Bounded):
    """Which tasks the teacher solves, and at which level of the protocols' rules.

    The names of the splits are those of `load_splits`.

    Attributes:
        tasks: source of the tasks, see `tasks.load_tasks`.
        train, validation: number of tasks of each split.
        seed: seed of the choice of tasks.
        level: level of the protocols' rules; "" for the level of each task.
    """

    tasks: Place
    train: Natural
    validation: Natural
    seed: Seed = 0
    level: Level = ""


@dataclasses.dataclass(frozen=True)
class Command(Bounded):
    """The settings of the command, by stage; those of SFT and RL lack the paths.

    Attributes:
        prompt_style: prompt of the policy, see `tasks.prompts.load_prompt`.
        format: conversation format of all stages, see `RolloutConfig.format`; the teacher's work
            is the same.
        tools: tools of the teacher and of the policy.
        distill: tasks that the teacher solves.
        teacher: how the teacher works, and which of its trajectories are kept.
        policy: shape of the untrained policy.
        sft: settings of fine-tuning, as in the command ``sft``.
        rl: settings of reinforcement learning, as in the command ``rl``.
        evaluate: settings of each evaluation.
    """

    prompt_style: Place
    tools: ToolsConfig
    distill: Tasks
    teacher: DistillConfig
    policy: ScratchConfig
    sft: Mapping[str, Any]
    rl: Mapping[str, Any]
    evaluate: EvaluateConfig
    format: FormatName = ""

    def sft_config(self, path: Path) -> SFTConfig:
        """The settings of SFT in a work directory."""
        values = {
            **self.sft,
            "model": str(path / "models" / "base"),
            "data": str(path / "data" / "train.jsonl"),
            "validation": str(path / "data" / "validation.jsonl"),
            "prompt_style": self.prompt_style,
            "format": self.format,
        }
        return build(SFTConfig, values, "config.sft")

    def rl_config(self, path: Path) -> RLConfig:
        """The settings of RL in a work directory."""
        values = {**self.rl, "model": str(path / "models" / "sft")}
        if self.format:
            values["rollout"] = {**values["rollout"], "format": self.format}
        return build(RLConfig, values, "config.rl")


class Pipeline:
    """The stages over one work directory."""

    def __init__(self, config: ml_collections.ConfigDict, run: RunDir):
        """Reads all settings, those of the last stage too.

        Raises:
            UserError: a setting is wrong.
        """
        self.config, self.run = build(Command, config), run
        self.sft_config = self.config.sft_config(run.path)
        self.rl_config = self.config.rl_config(run.path)
        self.told_tools = config.tools.to_dict()
        self.data, self.models = run.path / "data", run.path / "models"
        self.tools = make_tools(self.config.tools)
        self.evaluation, self.teacher = self.config.evaluate, self.config.teacher
        if form := self.config.format:
            budgets = dataclasses.replace(self.evaluation.rollout, format=form)
            self.evaluation = dataclasses.replace(self.evaluation, rollout=budgets)
        rollout = self.evaluation.rollout
        self.held_out = with_level(load(self.evaluation), rollout.level, rollout.format)

    def distill(self) -> None:
        """Lets the teacher solve training tasks, and held-out ones to measure it."""
        source = self.config.distill
        named = {tool.name: tool for tool in self.tools}
        sizes = {split: getattr(source, split) for split in ("train", "validation")}
        for split, tasks in load_splits(source.tasks, sizes, source.seed).items():
            with progress(f"distil {split}", total=len(tasks)) as bar:
                distill_split(
                    split,
                    with_level(tasks, source.level),
                    named,
                    self.teacher,
                    self.data,
                    self.told_tools,
                    functools.partial(_show, bar),
                )

    def base(self) -> None:
        """Makes the untrained policy."""
        write_policy(
            self.config.policy,
            with_level(read_records(self.data / "train.jsonl"), "", self.config.format),
            load_prompt(self.config.prompt_style),
            self.models / "base",
        )

    def evaluate_teacher(self) -> None:
        """Measures the teacher, unfiltered, on the held-out tasks."""
        tokenizer = load_model(self.models / "base").tokenizer
        named = {tool.name: tool for tool in self.tools}
        tasks = self.held_out
        if self.config.format:  # the teacher is a chain of agents, whatever the policy is
            tasks = with_level(tasks, "", TAGS)
        block = evaluate_teacher(
            tasks, named, self.teacher, lambda text: len(encode_plain(tokenizer, text))
        )
        self.run.summary({"teacher": block})

    def sft(self) -> None:
        """Fine-tunes the untrained policy on the distilled trajectories."""
        config = self.sft_config
        output = self.models / "sft"
        sft.train(config, self.run, output, renaming(config.rename_share), self.tools)

    def rl(self) -> None:
        """Reinforces the fine-tuned policy with live tools."""
        rl.train(self.rl_config, self.run, self.models / "rl", self.tools)

    def evaluate(self, stage: str) -> None:
        """Measures a policy on the held-out tasks."""
        outcome = evaluate_model(
            self.models / stage,
            self.held_out,
            self.evaluation,
            self.run,
            stage,
            self.tools,
            self.told_tools,
        )
        print(table(outcome), flush=True)

    def report(self) -> None:
        """Builds the page."""
        build_report(self.run.path)


def run_pipeline(config: ml_collections.ConfigDict, workdir: Path) -> dict[str, Any]:
    """Runs every stage that has not finished yet; returns the summary."""
    with RunDir(workdir) as run:
        run.keep_config(config)
        pipeline = Pipeline(config, run)
        stages: list[tuple[str, Callable[[], None]]] = [
            ("distill", pipeline.distill),
            ("base", pipeline.base),
            ("evaluate_teacher", pipeline.evaluate_teacher),
            ("evaluate_base", lambda: pipeline.evaluate("base")),
            ("sft", pipeline.sft),
            ("evaluate_sft", lambda: pipeline.evaluate("sft")),
            ("rl", pipeline.rl),
            ("evaluate_rl", lambda: pipeline.evaluate("rl")),
        ]
        timings = dict(_summary(run).get("timings_s", {}))
        for name, stage in stages:
            if name in timings:
                print(f"{name}: done before", flush=True)
                continue
            print(f"{name} ...", flush=True)
            start = time.monotonic()
            stage()
            timings[name] = round(time.monotonic() - start, 2)
            run.summary({"timings_s": timings})
        pipeline.report()
        return _summary(run)


def _show(bar: Bar, done: int) -> None:
    bar.update(done - bar.done)


def _summary(run: RunDir) -> dict[str, Any]:
    path = run.path / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


def define_flags() -> None:
    """The flags of the command."""
    config_flag("configs/quickstart/factbook.py")
    workdir_flag("where the run is written", "runs/quickstart")
    flags.DEFINE_integer(
        "seed", None, "short for the seeds of data, policy, SFT and RL", 0, MAX_INT
    )


def main(argv: list[str]) -> None:
    """Entry point."""
    config, seed = flags.FLAGS.config, flags.FLAGS.seed
    if seed is not None:
        for part in ("distill", "teacher", "policy", "sft", "rl", "evaluate"):
            config[part].seed = seed
    warn_untested()
    summary = run_pipeline(config, run_folder(flags.FLAGS.workdir))
    for stage in ("teacher", "base", "sft", "rl"):
        block = summary[stage]
        low, high = block["ci95"]
        print(f"{stage:8} pass@1 {shown_rate(block['pass_at_1'])}  95 % {low:.3f}-{high:.3f}")
    print(f"report -> {flags.FLAGS.workdir}/report/index.html")


if __name__ == "__main__":
    run_main(main, define_flags)
