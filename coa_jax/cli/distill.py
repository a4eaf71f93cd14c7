"""Creates a distilled data set from runs in which a teacher solves tasks with real tools.

    coa-jax distill --config=configs/distill/factbook.py --workdir=runs/distill

Filters select the runs that become training data. The command writes ``train.jsonl`` and
``validation.jsonl``, which ``coa-jax sft`` reads, the message logs of the teacher
(``journal/``), a few runs that each filter dropped (``dropped/``), ``config.json`` and
``summary.json``. If the command is killed, give it again to continue. A work directory that has
a data set with other settings is refused.

With configs/distill/endpoint.py a language model decides what the agents do, and ``calls/`` stores
every call of the model; with its variant smolagents, the teacher consists of smolagents
agents. With configs/distill/traces.py there is no teacher: the command reads logs of other systems.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags

from coa_jax.config.fields import Bounded, Place
from coa_jax.config.preflight import (
    SECONDS,
    ProbeSeconds,
    preflight,
    require,
    settings_probes,
)
from coa_jax.distillation.dataset import distill_split, statistics_of
from coa_jax.distillation.endpoint import Endpoint, EndpointConfig
from coa_jax.distillation.filters import FilterReport, why_nothing
from coa_jax.distillation.pipeline import DistillConfig, teacher_block
from coa_jax.distillation.readers.tool_calls import REQUEST
from coa_jax.distillation.smolagents_runs import (
    SmolConfig,
    bind_settings,
    endpoint_model,
    run_smolagents,
)
from coa_jax.distillation.tasks import Tasks
from coa_jax.distillation.token_counts import CountTokens, compare_tokens
from coa_jax.distillation.traces import TraceFilesConfig, distill_traces
from coa_jax.errors import UserError
from coa_jax.model.tokenizer import encode_plain, load_tokenizer
from coa_jax.protocol import TOOL_FORMS
from coa_jax.run.command import config_flag, run_main, workdir_flag
from coa_jax.run.progress import progress
from coa_jax.run.run_dir import RunDir
from coa_jax.run.settings import build_config
from coa_jax.storage import run_folder, with_urls
from coa_jax.tasks import Task
from coa_jax.tools.base import Tool
from coa_jax.tools.make import ToolsConfig, make_tools


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(Bounded):
    """The settings of a distillation: its teacher, the tasks and the tools.

    By default the teacher is a team of agents with scripted rules. With ``endpoint``, a language
    model decides for these agents. With ``smolagents``, two smolagents agents are the teacher. With
    ``traces`` alone there is no teacher: the runs are read from logs.

    Attributes:
        teacher: settings of the team of agents and of the filters.
        tokenizer: folder of a tokenizer, with which tokens are counted; "" to count no tokens.
        tasks, tools: tasks that the teacher solves, and the tools of its agents. Both are required
            unless the teacher's runs are read from logs.
        endpoint: language model that decides what the agents do; None if scripted rules decide.
        smolagents: settings of two smolagents agents that solve the tasks in place of the team;
            None if the team solves them. They need ``endpoint``, their model, and ``traces``.
        traces: how to read logs: the logs that the smolagents agents write or, without
            ``smolagents``, finished logs of any system; None for the team.
        probe_s: time limit, in seconds, of a check before the first run, in which each server that
            the teacher needs must respond; 0 skips this check.
    """

    teacher: DistillConfig
    tokenizer: Place = ""
    tasks: Tasks | None = None
    tools: ToolsConfig | None = None
    endpoint: EndpointConfig | None = None
    smolagents: SmolConfig | None = None
    traces: TraceFilesConfig | None = None
    probe_s: ProbeSeconds = SECONDS

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = ["tasks", "tools"] if self.smolagents or not self.traces else []
        needed += ["endpoint", "traces"] if self.smolagents else []
        for name in needed:
            if getattr(self, name) is None:
                raise UserError(f"{name} is missing; give it in the config file")


SPLITS = ("train", "validation")
MAY_CHANGE = (
    *("probe_s", "*.concurrency", "*.cache", "tools.budgets", "tools.store", "endpoint.url"),
    *("*.max_calls", "*.max_total_tokens", "*.max_money", "*.max_per_second", "*.prices"),
)
"""Settings that may differ from those of a finished data set, see docs/runs.md."""


def _others(folder: Path, name: str) -> list[Path]:
    """Returns the call files of the other splits; their costs count against the same budget."""
    return [folder / f"{other}.jsonl" for other in SPLITS if other != name]


def _counter(path: str) -> CountTokens | None:
    """Returns a function that counts the tokens of a text; None without a tokenizer."""
    if not path:
        return None
    tokenizer = load_tokenizer(path)
    return lambda text: len(encode_plain(tokenizer, text))


def read(config: ml_collections.ConfigDict, workdir: Path) -> dict[str, Any]:
    """Creates a data set from log files of another system; the config names the files.

    Returns:
        The content of ``summary.json``.
    """
    command = build_config(Command, config)
    assert command.traces
    with RunDir(workdir) as run:
        _check_finished(run, command)
        summary = {"data": {"train": _converted(command, command.traces, workdir, "train")}}
        _finish(run, config, summary)
    return summary


def _check_finished(run: RunDir, command: Command) -> None:
    """Checks that a data set in the directory was made with these settings, and says it is there.

    Raises:
        UserError: another setting than those of `MAY_CHANGE` differs.
    """
    run.check_config(command, MAY_CHANGE)
    if (run.path / "config.json").exists():
        place = with_urls(str(run.path))
        print(f"{place} has a data set with these settings; it is made again", file=sys.stderr)


def _finish(run: RunDir, config: ml_collections.ConfigDict, summary: dict[str, Any]) -> None:
    """Writes the summary and, if there are training data, the config, to which the data are bound.

    Raises:
        UserError: see `_check_records`. The settings may still change.
    """
    run.summary(summary)
    _check_records(summary)
    run.write_config(config)


def _check_records(summary: Mapping[str, Any]) -> None:
    """Checks that a distillation has training data.

    Raises:
        UserError: there were runs, but none of them became training data.
    """
    data = summary["data"].get("train", {"records": 1})
    if data["records"]:
        return
    if any(data["filters"]["dropped"].values()):
        raise UserError(why_nothing(data["filters"]["dropped"], "train"))
    if data.get("unknown_tools"):
        raise UserError(f"train: no record became a trajectory; {_untagged(data['unknown_tools'])}")
    if refused := data.get("refused"):
        reason, number = next(iter(refused.items()))
        raise UserError(
            f"train: no record became a trajectory; most often ({number} times): "
            f"{data['examples'][reason]}; look at refused/train.jsonl in the work directory"
        )
    if "reading" in data:
        files = ", ".join(file["path"] for file in data["reading"])
        raise UserError(f"train: there is no run in {files}")


def _untagged(calls: Mapping[str, int]) -> str:
    """Returns a message about tools that have no tag, given the number of calls of each."""
    counts = ", ".join(f"{name} ({number})" for name, number in calls.items())
    setting = ",".join(f"{name}=TAG" for name in calls)
    return (
        f"calls of tools without a tag: {counts}; add --config.traces.tools={setting} where TAG is "
        f"{', '.join(TOOL_FORMS)}, a name of your own such as {next(iter(calls)).lower()}, or "
        f"{REQUEST} if the tool asks another agent"
    )


def _converted(
    command: Command,
    traces: TraceFilesConfig,
    workdir: Path,
    name: str,
    tasks: Mapping[str, Task] | None = None,
) -> dict[str, Any]:
    """Converts and writes one set of traces, prints what was dropped, and returns statistics."""
    count = _counter(command.tokenizer)
    records, stats = distill_traces(traces, command.teacher, workdir, count, name, tasks)
    report = FilterReport(**stats["filters"])
    for file in stats["reading"]:
        form = f" of the format {file['format']}" if "format" in file else ""
        broken = f", {file['problems']} of them not readable" if file["problems"] else ""
        print(f"{file['path']}: {file['records']} records{form}{broken}")
    for reason, number in stats["refused"].items():
        print(f"no trajectory for {number}, for example {stats['examples'][reason]}")
    if stats["refused"]:
        print(f"refused/{name}.jsonl in the work directory lists all records without a trajectory")
    if stats["unknown_tools"] and records:
        print(_untagged(stats["unknown_tools"]))
    print("\n".join(report.lines()) or "dropped by filters: nothing")
    if ungraded := sum(not record.gold for record in records):
        print(
            f"{ungraded} of {len(records)} kept runs have no accepted answer and were not graded; "
            "write accepted answers to the field gold of the logs, or drop such runs with "
            "--config.teacher.keep_without_gold=False"
        )
    if stats["invented"]["records"]:
        print("{records} records contain {segments} invented segments".format(**stats["invented"]))
    return {**statistics_of(records), **stats}


def _ready_tools(command: Command) -> dict[str, Tool]:
    """Returns the teacher's tools by name; checks that all parts of the distillation can start.

    Raises:
        UserError: a part cannot start.
    """
    assert command.tools
    tools = {tool.name: tool for tool in make_tools(command.tools)}
    # The endpoint is not asked: its budget covers each call, also those of earlier processes.
    parts = {"tools": command.tools, "teacher": command.teacher}
    require(preflight(settings_probes(parts), command.probe_s))
    return tools


def run_and_read(config: ml_collections.ConfigDict, workdir: Path) -> dict[str, Any]:
    """Lets smolagents agents solve the tasks, and creates a data set from their logs.

    Returns:
        The content of ``summary.json``.
    """
    command = build_config(Command, config)
    how, limits, traces = command.smolagents, command.endpoint, command.traces
    assert how and limits and traces and command.tasks
    tools = _ready_tools(command)
    model, data = endpoint_model(limits), {}
    fingerprint = {
        **{k: getattr(limits, k) for k in ("model", "temperature", "max_tokens")},
        **{k: getattr(how, k) for k in ("max_steps", "planning_interval")},
        "tools": config.tools.to_dict(),
    }
    with RunDir(workdir) as run:
        _check_finished(run, command)
        for name, tasks in command.tasks.load().items():
            folder = workdir / "smolagents"
            file, others = folder / f"{name}.jsonl", _others(folder, name)
            with progress(f"run {name}", total=len(tasks)) as bar:
                bind_settings(file, fingerprint)
                spent = run_smolagents(
                    *(tasks, tools, lambda *_: model, file, how, limits, bar.reach, others)
                )
            traces = dataclasses.replace(traces, files=(str(file),))
            tasks_by_id = {task.id: task for task in tasks}
            data[name] = _converted(command, traces, workdir, name, tasks_by_id)
            data[name]["spent"] = spent.to_json()
        _finish(run, config, {"data": data})
    return {"data": data}


def distill(config: ml_collections.ConfigDict, workdir: Path) -> dict[str, Any]:
    """Lets the teacher solve the tasks, and creates a data set from its runs.

    Returns:
        The content of ``summary.json``.
    """
    command = build_config(Command, config)
    teacher, settings = command.teacher, config.tools.to_dict()
    assert command.tasks
    tools = _ready_tools(command)
    count, calls = _counter(command.tokenizer), workdir / "calls"
    summary: dict[str, Any] = {"data": {}, "timings_s": {}}
    with RunDir(workdir) as run:
        _check_finished(run, command)
        for name, tasks in command.tasks.load().items():
            start, endpoint = time.monotonic(), None
            if command.endpoint:
                file, others = calls / f"{name}.jsonl", _others(calls, name)
                endpoint = Endpoint(command.endpoint, file, beside=others)
            with progress(f"distil {name}", total=len(tasks)) as bar:
                split = distill_split(
                    *(name, tasks, tools, teacher, workdir, settings, bar.reach, count, endpoint)
                )
            seconds, report = time.monotonic() - start, split.report
            print(
                f"{name}: {report.total} runs in {seconds:.1f} s"
                + (f", {split.resumed} of them from before" if split.resumed else "")
                + f"; kept {report.kept}, dropped {report.total - report.kept}",
                *report.lines(),
                sep="\n",
                file=sys.stderr,
            )
            data = {**statistics_of(split.records), "filters": dataclasses.asdict(report)}
            if endpoint is not None:
                data["spent"] = endpoint.spent.to_json()
            summary["timings_s"][name], summary["data"][name] = seconds, data
            if name == "validation":
                summary["teacher"] = teacher_block(split.runs, count)
                if count is not None:
                    summary["economy"] = compare_tokens(split.runs, list(tools), count)
        _finish(run, config, summary)
    return summary


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax distill``."""
    config_flag("configs/distill/factbook.py", Command)
    workdir_flag("where the data set is written")


def main(argv: list[str]) -> None:
    """Runs ``coa-jax distill``: creates a distilled data set."""
    config, workdir = flags.FLAGS.config, run_folder(flags.FLAGS.workdir)
    kinds = (("smolagents", run_and_read), ("traces", read))
    summary = next((f for key, f in kinds if key in config), distill)(config, workdir)
    if "teacher" in summary:
        block = summary["teacher"]
        low, high = block["ci95"]
        share = "unknown" if block["pass_at_1"] is None else f"{block['pass_at_1']:.3f}"
        print(f"teacher pass@1 {share} (95 % {low:.3f}-{high:.3f}, n {block['n']})")
    for name, data in summary["data"].items():
        print(f"{name}: {data['records']} records -> {flags.FLAGS.workdir}/{name}.jsonl")


if __name__ == "__main__":
    run_main(main, define_flags)
