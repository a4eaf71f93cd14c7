"""Reads the files of a run directory, for pages, notebooks and comparisons."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from coa_jax.data import trace_shards
from coa_jax.data.trajectory import Trajectory, read_trajectories
from coa_jax.errors import UserError
from coa_jax.files import durable, jsonl
from coa_jax.report.page import as_number, step_of
from coa_jax.report.traces import stage_of, stage_rank

_FILES = ("config.json", "metrics.jsonl", "traces.jsonl", "traces", "summary.json", "evaluate")


@dataclasses.dataclass(frozen=True)
class Run:
    """The contents of a run's files, for pages and notebooks.

    A file that does not exist yet is treated as empty.

    Attributes:
        path: directory of the run.
        config: content of ``config.json``.
        summary: content of ``summary.json``.
        rows: rows of ``metrics.jsonl``.
    """

    path: Path
    config: Mapping[str, Any] = dataclasses.field(repr=False)
    summary: Mapping[str, Any] = dataclasses.field(repr=False)
    rows: Sequence[Mapping[str, Any]] = dataclasses.field(repr=False)

    @property
    def results(self) -> dict[str, Mapping[str, Any]]:
        """Results of the run's evaluations by stage, in the order in which the stages run."""
        blocks = {k: v for k, v in self.summary.items() if isinstance(v, dict) and v.get("ci95")}
        return {stage: blocks[stage] for stage in sorted(blocks, key=stage_rank)}

    @cached_property
    def trajectories(self) -> list[Trajectory]:
        """All trajectories of the run, in the order in which they were written."""
        return read_trajectories(self.path) if trace_shards.trace_files_of_run(self.path) else []

    def of_stage(self, stage: str) -> list[Trajectory]:
        """Returns the trajectories of a stage of the run.

        Args:
            stage: name of the stage, such as ``rl-train`` for those that RL trained on, or ``sft``
                for those of the evaluation after SFT.
        """
        return [one for one in self.trajectories if stage_of(one) == stage]

    def curve(self, phase: str, metric: str) -> tuple[list[float], list[float]]:
        """Returns the values of a metric in a phase, for drawing a curve.

        Args:
            phase: training phase, such as ``rl``.
            metric: name of the metric.

        Returns:
            The steps that have the metric, and the value at each of these steps.
        """
        points = [
            (step_of(row), value)
            for row in self.rows
            if row.get("phase") == phase and (value := as_number(row.get(metric))) is not None
        ]
        return [step for step, _ in points], [value for _, value in points]


def is_run(root: Path) -> bool:
    """Returns whether a directory has at least one of the files of a run."""
    return any((root / name).exists() for name in _FILES)


def check_run(root: Path) -> None:
    """Checks that a directory is the work directory of a run.

    Raises:
        UserError: the directory does not exist or contains none of the files of a run.
    """
    if not root.is_dir():
        raise UserError(f"{root}: no such run directory; pass the --workdir of a run")
    if not is_run(root):
        raise UserError(f"{root}: not a run directory: it has none of {', '.join(_FILES)}")


def read_run(path: str | Path) -> Run:
    """Reads the files of a run.

    Args:
        path: directory of the run.

    Raises:
        UserError: the directory holds no run, or a file is malformed.
    """
    root = Path(path)
    check_run(root)

    def read(name: str) -> Mapping[str, Any]:
        return durable.read_json_object(root / name) if (root / name).exists() else {}

    rows = jsonl.read_objects(root / "metrics.jsonl")
    return Run(root, read("config.json"), read("summary.json"), rows)
