"""Runs the whole pipeline on one machine: distil, SFT, evaluate, RL, evaluate, report.

    coa-jax quickstart --workdir=runs/quickstart

Each stage writes its result to the work directory. If the command is started again, it skips the
complete stages. It continues a stage of SFT or RL from the last checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags

from coa_jax.config.fields import MAX_INT, Bounded, Name, Natural, Place
from coa_jax.config.installed import warn_untested
from coa_jax.data.records import read_records
from coa_jax.demo.untrained import ScratchConfig, write_policy
from coa_jax.distillation.dataset import distill_split
from coa_jax.distillation.filters import TeacherRun
from coa_jax.distillation.pipeline import DistillConfig, graded_runs, run_teacher, teacher_block
from coa_jax.distillation.tasks import Tasks
from coa_jax.distillation.token_counts import compare_policy_tokens
from coa_jax.errors import UserError
from coa_jax.evaluation.config import EvaluateConfig
from coa_jax.evaluation.results import shown_rate, table
from coa_jax.evaluation.run import evaluate_model, load
from coa_jax.model.api import describe_model, load_model
from coa_jax.model.peft_io import copy_model
from coa_jax.model.tokenizer import load_tokenizer
from coa_jax.paper.release import release
from coa_jax.paper.token_savings import read_phase, token_counter
from coa_jax.protocol import TAGS, FormatName
from coa_jax.report import build_report
from coa_jax.run.command import config_flag, run_main, workdir_flag
from coa_jax.run.progress import progress
from coa_jax.run.run_dir import RunDir
from coa_jax.run.settings import build_config, merged
from coa_jax.storage import run_folder
from coa_jax.tasks.base import with_level
from coa_jax.tasks.prompts import load_prompt
from coa_jax.tools.make import ToolsConfig, make_tools, with_names
from coa_jax.train import rejection, rl, sft
from coa_jax.train.config import RFTConfig, SFTConfig
from coa_jax.train.renaming import renaming
from coa_jax.train.rl_config import RLConfig


@dataclasses.dataclass(frozen=True)
class FurtherEvaluation(Bounded):
    """The settings of an additional evaluation after the training stages.

    Attributes:
        policy: name of the evaluated policy's directory in ``models``, such as ``rl``.
        evaluate: settings that override the shared settings ``evaluate`` in this evaluation only.
        tools: settings that override the run's settings of the tools in this evaluation only.
    """

    policy: Name
    evaluate: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tools: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Command(Bounded):
    """The settings of the pipeline, by stage.

    Attributes:
        prompt_style: prompt style of the policy, see `load_prompt`.
        format: conversation format of the policy, see `RolloutConfig.format`.
        tools: tools of the teacher and of the policy.
        distill: tasks that the teacher solves.
        teacher: settings of the teacher and of the filters that select its trajectories.
        policy: sizes of the untrained policy.
        model: pretrained policy, a Hugging Face directory or a GGUF file; "" for an untrained one.
        sft: settings of fine-tuning as in the command ``sft``, without the paths.
        rl: settings of reinforcement learning as in the command ``rl``, except the path of the
            model; {} skips this stage.
        evaluate: settings of the evaluations.
        base: settings that override those of ``evaluate`` for the base model.
        sft_more: whether to continue SFT, for a policy that is compared with the policy of RL.
        sft_more_updates: number of updates when SFT continues; 0 for as many as take the time of
            RL. That number depends on what else runs on the machine.
        rft: settings of fine-tuning as in the command ``rft``, without the paths; {} skips this
            stage. It trains on RL's trajectories with correct answers, and its policy is compared
            with that of RL.
        economy: whether to count how many tokens the policy of RL saves compared with the teacher.
        measures: maps names to additional evaluations, see `FurtherEvaluation`.
        release: whether to write ``release/``, see `paper.release`; needs training with adapters.
        minutes: expected minutes of each stage on 2 CPU cores, to estimate the remaining time.
    """

    prompt_style: Place
    tools: ToolsConfig
    distill: Tasks
    teacher: DistillConfig
    policy: ScratchConfig
    sft: Mapping[str, Any]
    evaluate: EvaluateConfig
    rl: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    format: FormatName = ""
    model: Place = ""
    base: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sft_more: bool = False
    sft_more_updates: Natural = 0
    rft: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    economy: bool = False
    measures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    release: bool = False
    minutes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def sft_config(self, path: Path) -> SFTConfig:
        """Returns the settings of SFT, with the paths of model and data in a work directory."""
        values = {
            **self.sft,
            "model": str(path / "models" / "base"),
            "data": str(path / "data" / "train.jsonl"),
            "validation": str(path / "data" / "validation.jsonl"),
            "prompt_style": self.prompt_style,
            "format": self.format,
        }
        return build_config(SFTConfig, values, "config.sft")

    def rl_config(self, path: Path) -> RLConfig | None:
        """Returns the settings of RL, with the path of the SFT policy; None to skip RL.

        Args:
            path: work directory, which contains the SFT policy.
        """
        if not self.rl:
            return None
        values = {**self.rl, "model": str(path / "models" / "sft")}
        config = build_config(RLConfig, values, "config.rl")
        if not self.format:
            return config
        rollout = dataclasses.replace(config.rollout, format=self.format)
        return dataclasses.replace(config, rollout=rollout)

    def rft_config(self, path: Path) -> RFTConfig | None:
        """Returns the settings of rejection-sampling fine-tuning (RFT); None to skip this stage.

        Model and traces are files of the work directory ``path``.
        """
        if not self.rft:
            return None
        paths = {"model": str(path / "models" / "sft"), "traces": str(path / "traces.jsonl")}
        return build_config(RFTConfig, {**self.rft, **paths, "phase": "rl"}, "config.rft")

    def further(self) -> dict[str, FurtherEvaluation]:
        """Returns the settings of the additional evaluations (setting ``measures``) by name."""
        return {
            name: build_config(FurtherEvaluation, values, f"config.measures.{name}")
            for name, values in self.measures.items()
        }


class Pipeline:
    """The stages of the quickstart pipeline, one method per stage.

    All stages write to the same work directory.
    """

    def __init__(self, config: ml_collections.ConfigDict, run: RunDir):
        """Checks the settings of all stages.

        Raises:
            UserError: a setting is wrong.
        """
        self.config, self.run = build_config(Command, config), run
        self.sft_config = self.config.sft_config(run.path)
        self.rl_config = self.config.rl_config(run.path)
        self.rft_config = self.config.rft_config(run.path)
        self.measures = self.config.further()
        if self.config.model:
            describe_model(self.config.model)  # raises now instead of after distillation
        self.tool_settings = config.tools.to_dict()
        self.data, self.models = run.path / "data", run.path / "models"
        self.tools = make_tools(self.config.tools)
        self.tools_by_name = {tool.name: tool for tool in self.tools}
        self.evaluation, self.teacher = self.config.evaluate, self.config.teacher
        if form := self.config.format:
            budgets = dataclasses.replace(self.evaluation.rollout, format=form)
            self.evaluation = dataclasses.replace(self.evaluation, rollout=budgets)
        rollout = self.evaluation.rollout
        self.held_out = with_level(load(self.evaluation), rollout.level, rollout.format)
        self.evaluations = {
            name: self._changed(measure.evaluate, f"config.measures.{name}.evaluate")
            for name, measure in self.measures.items()
        }
        self.evaluations["base"] = self._changed(self.config.base, "config.base")

    def _changed(self, changes: Mapping[str, Any], where: str) -> EvaluateConfig:
        """Returns the settings of the evaluations with changes."""
        if not changes:
            return self.evaluation
        settings = dataclasses.asdict(self.evaluation)
        if "mixture" in changes:
            settings["mixture"] = {}
        return build_config(EvaluateConfig, merged(settings, changes), where)

    def distill(self) -> None:
        """Lets the teacher solve the training tasks and the validation tasks."""
        for split, tasks in self.config.distill.load().items():
            with progress(f"distil {split}", total=len(tasks)) as bar:
                settings = self.teacher, self.data, self.tool_settings
                distill_split(split, tasks, self.tools_by_name, *settings, bar.reach)

    def base(self) -> None:
        """Creates the untrained policy, or copies the pretrained policy."""
        records = with_level(read_records(self.data / "train.jsonl"), "", self.config.format)
        if self.config.model:
            copy_model(self.config.model, self.models / "base")
            return
        prompt = load_prompt(self.config.prompt_style)
        write_policy(self.config.policy, records, prompt, self.models / "base")

    def evaluate_teacher(self) -> None:
        """Evaluates the teacher on the held-out tasks, without filters on its runs."""
        counter = token_counter(load_model(self.models / "base").tokenizer)
        self.run.summary({"teacher": teacher_block(self._teacher_runs, counter)})

    @functools.cached_property
    def _teacher_runs(self) -> Sequence[TeacherRun]:
        """The teacher's graded runs of the held-out tasks, written in the format ``tags``."""
        tasks = with_level(self.held_out, "", TAGS)
        logs = asyncio.run(run_teacher(tasks, self.tools_by_name, self.teacher))
        return graded_runs(tasks, logs, self.teacher.judges)

    def sft(self) -> None:
        """Fine-tunes the base policy, untrained or pretrained, on the distilled trajectories."""
        config = self.sft_config
        output = self.models / "sft"
        sft.train(config, self.run, output, renaming(config.rename_share), self.tools)

    def rl(self) -> None:
        """Trains the fine-tuned policy by reinforcement learning with live tools."""
        assert self.rl_config is not None
        rl.train(self.rl_config, self.run, self.models / "rl", self.tools)

    def sft_more(self) -> None:
        """Continues SFT; the result is compared with the policy of RL."""
        config, updates = self.sft_config, self.config.sft_more_updates
        if not updates:
            # The timing of a resumed stage lacks the time before the kill: step times are summed.
            seconds = {
                phase: sum(row["time/step"] for row in self.run.rows(phase))
                for phase in ("sft", "rl")
            }
            updates = max(1, round(config.optimizer.total_steps * seconds["rl"] / seconds["sft"]))
        optimizer = dataclasses.replace(
            config.optimizer, total_steps=updates, warmup_steps=min(5, updates - 1)
        )
        config = dataclasses.replace(
            config, model=str(self.models / "sft"), seed=config.seed + 1, optimizer=optimizer
        )
        with RunDir(self.run.path / "controls" / "sft_more") as run:
            output = self.models / "sft_more"
            sft.train(config, run, output, renaming(config.rename_share), self.tools)

    def rft(self) -> None:
        """Fine-tunes the SFT policy on correct trajectories of RL, for a comparison with RL."""
        assert self.rft_config is not None
        with RunDir(self.run.path / "controls" / "rft") as run:
            rejection.train(self.rft_config, run, self.models / "rft")

    def evaluate(self, policy: str, stage: str = "") -> None:
        """Evaluates a policy on the held-out tasks with live tools.

        Args:
            policy: name of the policy's directory in ``models``.
            stage: name of an additional evaluation; "" for the evaluation of the pipeline.
        """
        stage = stage or policy
        config = self.evaluations.get(stage, self.evaluation)
        tasks, tools, tool_settings = self.held_out, self.tools, self.tool_settings
        if stage in self.measures and (changes := self.measures[stage].tools):
            tool_settings = merged(tool_settings, changes)
            tools_config = build_config(
                ToolsConfig, tool_settings, f"config.measures.{stage}.tools"
            )
            # The settings of tools that only the other evaluations have are no mistake.
            tools = make_tools(with_names(tools_config, tools_config.names))
        if config is not self.evaluation:
            tasks = with_level(load(config), config.rollout.level, config.rollout.format)
        path = self.models / policy
        outcome = evaluate_model(path, tasks, config, self.run, stage, tools, tool_settings)
        print(table(outcome), flush=True)

    def economy(self) -> None:
        """Counts the tokens that the teacher and RL's policy need for the held-out tasks."""
        tokenizer = load_tokenizer(self.models / "rl")
        traces = read_phase(str(self.run.path / "traces.jsonl"), "evaluate-rl")
        by_task = {run.task.id: run for run in self._teacher_runs}
        counter = token_counter(tokenizer)
        savings = compare_policy_tokens(by_task, traces, list(self.tools_by_name), counter)
        self.run.summary({"economy": savings}, anew=True)

    def release(self) -> None:
        """Collects the adapter, data and trajectories in a directory that can be published."""
        output = self.run.path / "release"
        shutil.rmtree(output, ignore_errors=True)
        release(self.run.path, output)


def stages_of(pipeline: Pipeline) -> list[tuple[str, Callable[[], None]]]:
    """Returns (name, function) for each stage, in the order of execution.

    Raises:
        UserError: an additional evaluation names an unknown policy, or has the name of a stage, or
            a stage needs the policy of RL and there is none.
    """
    config = pipeline.config
    trained = {"rl": config.rl, "sft_more": config.sft_more, "rft": config.rft}
    names = ["base", "sft", *(name for name, enabled in trained.items() if enabled)]
    if not config.rl:
        timed = config.sft_more and not config.sft_more_updates
        after_rl = {"rft": config.rft, "economy": config.economy, "release": config.release}
        wrong = [name for name, enabled in {**after_rl, "sft_more": timed}.items() if enabled]
        if wrong:
            raise UserError(f"config.rl is empty, but these stages need it: {', '.join(wrong)}")
    stages: list[tuple[str, Callable[[], None]]] = [("distill", pipeline.distill)]
    for name in names:
        stages.append((name, getattr(pipeline, name)))
        if name == "base":
            stages.append(("evaluate_teacher", pipeline.evaluate_teacher))
        stages.append((f"evaluate_{name}", functools.partial(pipeline.evaluate, name)))
    if config.economy:
        stages.append(("economy", pipeline.economy))
    for name, measure in pipeline.measures.items():
        if measure.policy not in names or name in names:
            raise UserError(
                f"config.measures.{name}: policy {measure.policy!r} is none of {', '.join(names)}, "
                "or the name of the measure is one of these"
            )
        measured = functools.partial(pipeline.evaluate, measure.policy, name)
        stages.append((f"evaluate_{name}", measured))
    if config.release:
        stages.append(("release", pipeline.release))
    return stages


def left_minutes(
    expected: Mapping[str, Any], timings: Mapping[str, float], stages: Sequence[str]
) -> float | None:
    """Estimates the remaining minutes; None if no remaining stage has an expected time.

    Args:
        expected: maps the name of a stage to its expected minutes.
        timings: seconds that each complete stage took, from which the speed of this machine is
            estimated.
        stages: names of all stages.
    """
    timed = [name for name in timings if name in expected]
    took, should = sum(timings[n] / 60 for n in timed), sum(float(expected[n]) for n in timed)
    speed = took / should if should >= 1 else 1.0
    minutes = [float(expected[name]) for name in stages if name not in timings and name in expected]
    return speed * sum(minutes) if minutes else None


def run_pipeline(
    config: ml_collections.ConfigDict, workdir: Path, until: str = ""
) -> dict[str, Any]:
    """Runs the stages of the pipeline that are not complete yet.

    Args:
        config: settings of the pipeline, see `Command`.
        workdir: work directory.
        until: name of the last stage to run; "" for all stages.

    Returns:
        The content of ``summary.json``.

    Raises:
        UserError: a setting is wrong, or there is no stage ``until``.
    """
    with RunDir(workdir) as run:
        run.keep_config(config)
        pipeline = Pipeline(config, run)
        stages = stages_of(pipeline)
        names = [name for name, _ in stages]
        if until and until not in names:
            raise UserError(f"--until={until}: the stages are {', '.join(names)}")
        if until:
            stages = stages[: names.index(until) + 1]
            names = names[: len(stages)]
        run.write_config(config)
        timings = dict(run.blocks().get("timings_s", {}))
        for number, (name, stage) in enumerate(stages, 1):
            if name in timings:
                print(f"{name}: done before", flush=True)
                continue
            minutes = left_minutes(pipeline.config.minutes, timings, names)
            estimate = "" if minutes is None else f" (about {minutes:.0f} minutes left)"
            print(f"{number}/{len(stages)} {name} ...{estimate}", flush=True)
            start = time.monotonic()
            stage()
            timings[name] = round(time.monotonic() - start, 2)
            run.summary({"timings_s": timings})
        build_report(run.path)
        return run.blocks()


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax quickstart``."""
    config_flag("configs/quickstart/factbook.py", Command)
    workdir_flag("directory of the run", "runs/quickstart")
    flags.DEFINE_string("model", "", "initial pretrained policy; short for --config.model")
    flags.DEFINE_string("until", "", "last stage to run, such as evaluate_sft")
    flags.DEFINE_integer("seed", None, "sets all seeds of data, policy, SFT and RL", 0, MAX_INT)


def main(argv: list[str]) -> None:
    """Runs ``coa-jax quickstart``: all stages of the pipeline."""
    config, seed = flags.FLAGS.config, flags.FLAGS.seed
    if model := flags.FLAGS.model:
        with config.unlocked():
            config.model = model
    if seed is not None:
        parts = ("distill", "teacher", "policy", "sft", "rl", "evaluate", "rft")
        for part in (part for part in parts if config.get(part)):
            config[part].seed = seed
    warn_untested()
    summary = run_pipeline(config, run_folder(flags.FLAGS.workdir), flags.FLAGS.until)
    for stage in ("teacher", "base", "sft", "rl", "sft_more", "rft"):
        if block := summary.get(stage):
            low, high = block["ci95"]
            print(f"{stage:8} pass@1 {shown_rate(block['pass_at_1'])}  95 % {low:.3f}-{high:.3f}")
    print(f"report -> {flags.FLAGS.workdir}/report/index.html")


if __name__ == "__main__":
    run_main(main, define_flags)
