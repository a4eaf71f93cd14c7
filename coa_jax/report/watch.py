"""Shows a run on the terminal while it trains: curves, warnings and the newest trajectories.

    coa-jax watch --workdir=runs/rl

The command only reads files of the run directory. So it can be started and ended at any time, also
on another machine that mounts the directory. If stdout is not a terminal, or with ``--once``, the
command prints the current state and ends. For a run in a bucket it shows the state of the last
upload, without trajectories.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coa_jax.data.trajectory import Trajectory
from coa_jax.data.verdicts import verdict_of
from coa_jax.files import jsonl, untrusted
from coa_jax.report.charts import number
from coa_jax.report.page import as_number, phase_of, phase_title, step_of
from coa_jax.report.run import check_run
from coa_jax.report.terminal import COLOURS, clean
from coa_jax.run.command import run_main, workdir_flag
from coa_jax.storage.mirror import NAMES_ONLY, visited
from coa_jax.train.run_records import GRADING
from coa_jax.train.run_warnings import warnings_of

SHOWN = (
    "loss", "validation/loss", "eval/pass_at_1", "reward/mean", "reward/masked_frac",
    "group/frac_zero_std", "policy/entropy", "policy/kl_old", "mismatch/abs_logp_max",
    "optim/grad_norm", "len/mean", "format/valid", "tool/calls", "tool/fail_frac", "stale/mean",
    "perf/occupancy", "perf/rollout_tok_s", "perf/train_tok_s", "time/rollout_wait", "time/data",
    "time/update", "time/step",
)  # fmt: skip
"""Metrics that the command shows if the run has them; docs/metrics.md explains each metric."""

_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 32  # number of characters of a curve
_RECENT = 10  # number of newest rows over which the shown mean is taken
_WARNINGS = 3
_TAIL = 1 << 21  # number of bytes that are read from the end of a file of trajectories
_COLOUR = {"correct": COLOURS["answer"], "partial": COLOURS["reflection"],
           "wrong": COLOURS["fault"], "ungraded": COLOURS["think"]}  # fmt: skip


def newest_trajectories(run: Path, count: int) -> list[Trajectory]:
    """Returns the ``count`` trajectories that a run finished last, the newest first.

    A run writes a graded trajectory to ``spool/`` as soon as the trajectory finishes, and later to
    ``traces.jsonl``. The function reads both, but not the compressed shards in ``traces/``.
    """
    plain = [*(run / "spool").glob("*.jsonl"), run / "traces.jsonl"]
    trajectories: list[Trajectory] = []
    for path in sorted(plain, key=lambda path: (_modified(path), path), reverse=True):
        if (
            len(trajectories) == count
        ):  # the other files are older, and a spool may have many of them
            break
        for line in _last_lines(path, count - len(trajectories)):
            with contextlib.suppress(*untrusted.MALFORMED):
                trajectory = Trajectory.from_json(json.loads(line))
                if GRADING not in trajectory.metadata:  # else another row will have the grades
                    trajectories.append(trajectory)
    return trajectories


def _modified(path: Path) -> float:
    """Returns the modification time of a file; 0 if the file does not exist."""
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _last_lines(path: Path, count: int) -> list[bytes]:
    """Returns the last complete lines of a file, the last line first; [] if there is no file."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - _TAIL)
            file.seek(start)
            lines = file.read().split(b"\n")[bool(start) : -1]
    except OSError:
        return []
    return lines[::-1][:count]


def sparkline(values: Sequence[float]) -> str:
    """Draws values as a curve of block characters in one line of text.

    The lowest block is the smallest value, the highest block the largest value.
    """
    shown = [v for v in values if v - v == 0]  # finite
    if not shown:
        return ""
    if len(shown) > _POINTS:  # each column shows the mean of an equal part
        edges = [round(i * len(shown) / _POINTS) for i in range(_POINTS + 1)]
        parts = [shown[a:b] for a, b in itertools.pairwise(edges)]
        shown = [sum(part) / len(part) for part in parts]
    low, high = min(shown), max(shown)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    return "".join(_BARS[round((value - low) / step)] for value in shown)


def picture(run: Path, trajectories: int) -> RenderableType:
    """Renders the state of a run for a terminal.

    Args:
        run: directory of the run.
        trajectories: number of newest trajectories to show.

    Raises:
        UserError: a file cannot be read.
    """
    metrics = run / "metrics.jsonl"
    every = jsonl.read_objects(metrics)
    if not every:
        return Text(f"{run}: no step yet", style=COLOURS["think"])
    phase = phase_of(every[-1])
    rows = [row for row in every if phase_of(row) == phase]
    parts: list[RenderableType] = [_head(metrics, phase, rows), _curves(rows), *_warnings(rows)]
    if newest := newest_trajectories(run, trajectories):
        parts.append(_trajectories(newest))
    return Group(*parts)


def _head(metrics: Path, phase: str, rows: Sequence[Mapping[str, Any]]) -> Text:
    text = Text(f"{metrics.parent.resolve().name}  ", style="bold")
    text.append(f"{phase_title(phase)} step {number(step_of(rows[-1]))}")
    if total := _total_steps(metrics.parent, phase):
        text.append(f" of {total}")
    seconds = [s for row in rows[-_RECENT:] if (s := as_number(row.get("time/step")))]
    if seconds:
        text.append(f", {3600 * len(seconds) / sum(seconds):,.0f} steps per hour")
    text.append(f", last row {time.time() - _modified(metrics):,.0f} s ago")
    return text


def _total_steps(run: Path, phase: str) -> int:
    """Returns the number of steps of a phase by the run's config; 0 if it is not in the config."""
    try:
        config = json.loads((run / "config.json").read_text())
        return int(config.get(phase, config)["optimizer"]["total_steps"])
    except (OSError, *untrusted.MALFORMED):
        return 0


def _curves(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("metric")
    table.add_column("now", justify="right")
    table.add_column(f"mean of {_RECENT}", justify="right")
    table.add_column("whole run")
    for name in SHOWN:
        numbers = (as_number(row.get(name)) for row in rows)
        if values := [value for value in numbers if value is not None]:
            recent = values[-_RECENT:]
            mean = sum(recent) / len(recent)
            curve = Text(sparkline(values), style=COLOURS["tool"])
            table.add_row(name, number(values[-1]), number(mean), curve)
    return table


def _warnings(rows: Sequence[Mapping[str, Any]]) -> list[Text]:
    return [
        Text(f"step {number(step)}: {clean(text)}", style=COLOURS["fault"])
        for _, step, text in warnings_of(rows)[-_WARNINGS:]
    ]


def _trajectories(trajectories: Sequence[Trajectory]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    for name, width in (("newest", 9), ("reward", 6), ("stop", 9), ("tokens", 6), ("calls", 5)):
        is_text = name in ("newest", "stop")
        table.add_column(
            name, justify="left" if is_text else "right", min_width=width, no_wrap=True
        )
    for name, ratio in (("question", 2), ("answer", 1)):
        table.add_column(name, ratio=ratio, no_wrap=True, overflow="ellipsis")
    for trajectory in trajectories:
        verdict = verdict_of(trajectory)
        reward = trajectory.reward.value if trajectory.reward else None
        table.add_row(
            Text(verdict, style=_COLOUR[verdict]),
            "" if reward is None else number(reward),
            str(trajectory.stop_reason),
            str(trajectory.num_policy_tokens),
            str(len(trajectory.tool_calls)),
            Text(clean(" ".join(trajectory.question.split()))),
            Text(clean(" ".join((trajectory.answer or "").split()))),
        )
    return table


def fetched(workdir: str) -> Path:
    """Returns a local folder with the files of a run.

    For a URL, this is a mirror of the run directory without trajectories.

    Args:
        workdir: the run directory, a local path or a URL of a bucket.

    Raises:
        UserError: the bucket cannot be read, or has no such folder.
    """
    with visited(
        workdir, names_only=(*NAMES_ONLY, "traces.jsonl", "steps.jsonl", "spool")
    ) as folder:
        return folder


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax watch``."""
    workdir_flag("directory of the run")
    flags.DEFINE_integer("trajectories", 8, "number of newest trajectories shown", lower_bound=0)
    flags.DEFINE_float("every", 2.0, "seconds between two updates of the view", lower_bound=0.1)
    flags.DEFINE_bool("once", False, "print the current state and end")


def main(argv: list[str]) -> None:
    """Runs ``coa-jax watch``: shows the run until Ctrl-C."""
    workdir = flags.FLAGS.workdir
    run = fetched(workdir)
    check_run(run)
    draw = functools.partial(picture, run, flags.FLAGS.trajectories)
    console = Console()
    if flags.FLAGS.once or not console.is_terminal:
        console.print(draw())
        return
    try:
        with Live(draw(), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(flags.FLAGS.every)
                fetched(workdir)
                live.update(draw(), refresh=True)
    except KeyboardInterrupt:
        console.print(draw())


if __name__ == "__main__":
    run_main(main, define_flags)
