"""Records of a reinforcement-learning run on disk, in addition to its checkpoints.

``spool/`` holds graded trajectories, from the time they finish until a checkpoint makes them
superfluous.  ``steps.jsonl`` records for each step which trajectories it trained on, which policy
version sampled each of their tokens, and the results of their tool calls.  From it a run can be
replayed, and a run that was killed repeats the steps after its newest checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from coa_jax import files, jsonl
from coa_jax.parallel import processes
from coa_jax.trajectory import Reward, Trajectory

Versions = list[list[int]]
"""``[[position, policy version], ...]``: the version that samples from each position on."""


def versions_of(trajectory: Trajectory) -> Versions:
    """The policy versions that sampled the tokens of a trajectory."""
    versions: Versions = trajectory.metadata["policy_versions"]
    return versions


def oldest_of(group: Iterable[Trajectory]) -> int:
    """The oldest policy version that sampled a token of a group."""
    return min(versions_of(one)[0][1] for trajectory in group for one in trajectory.sequences)


# --- finished trajectories -----------------------------------------------------------------


class Spool:
    """The finished trajectories of this process that no checkpoint has made superfluous.

    There is one file per process and per policy version under which trajectories started.
    """

    def __init__(self, folder: Path):
        """Opens the folder, and removes a partial row that a killed process may have left."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._tasks: dict[Path, set[int]] = defaultdict(set)
        for path in folder.glob("*.jsonl"):
            if self._is_mine(path):
                files.cut_torn_line(path)

    def _is_mine(self, path: Path) -> bool:
        """Whether this process maintains a file: its own, or, as process 0, one without a process.

        A resumed run may have fewer processes than before.
        """
        process = int(path.stem.split("-")[0])
        return processes.index() == (process if process < processes.count() else 0)

    def read(self) -> dict[tuple[int, int], list[Trajectory]]:
        """Trajectories of this process's tasks by (task index, sample), oldest version first."""
        found: dict[tuple[int, int], list[Trajectory]] = defaultdict(list)
        paths = sorted(self.folder.glob("*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
        for path in paths:
            for row in jsonl.read_objects(path):
                trajectory = Trajectory.from_json(row)
                index = trajectory.metadata["prompt_id"]
                if self._is_mine(path):
                    self._tasks[path].add(index)
                if index % processes.count() == processes.index():
                    found[index, trajectory.sample_id].append(trajectory)
        return found

    def add(self, trajectory: Trajectory) -> None:
        """Appends a trajectory to its file.

        Raises:
            OSError: e.g. the disk is full; the earlier rows are intact.
        """
        name = f"{processes.index()}-{oldest_of([trajectory])}.jsonl"
        path = self.folder / name
        files.append(path, (jsonl.dumps(trajectory.to_json()) + "\n").encode())
        self._tasks[path].add(trajectory.metadata["prompt_id"])

    def prune(self, step: int, still_open: Collection[int]) -> None:
        """Removes files that the run does not need to resume from the checkpoint of a step.

        Args:
            step: number of the step.
            still_open: indices of tasks that were requested, but are in no step up to this one.
        """
        for path, indices in list(self._tasks.items()):
            if int(path.stem.split("-")[1]) < step and indices.isdisjoint(still_open):
                path.unlink(missing_ok=True)
                del self._tasks[path]


# --- steps ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """A row of ``steps.jsonl``.

    Attributes:
        step: number of the step.
        used: task index of each group that the step trained on.
        examined: task index of each group that the step examined, see `admission.Composition`.
        dropped: task index of each group that was too old, see `admission.Composition`.
        samples: records of the trajectories of each used group, see `sample_record`.
        state: state of the ledger after the step.
        counts: ``discarded`` and ``given_up`` of the composition.
        scores: ``scores`` of the composition; [] for a run without a pool.
    """

    step: int
    used: list[int]
    examined: list[int]
    dropped: list[int]
    samples: list[list[dict[str, Any]]]
    state: dict[str, Any]
    counts: dict[str, int]
    scores: list[list[int]] = dataclasses.field(default_factory=list)


def sample_record(trajectory: Trajectory) -> dict[str, Any]:
    """The data that a replay of a trajectory needs, and a checksum of its tokens."""
    return {
        "sample": trajectory.sample_id,
        "versions": versions_of(trajectory),
        "length": len(trajectory.tokens),
        "checksum": checksum(trajectory),
        "stop_reason": str(trajectory.stop_reason),
        "reward": None if trajectory.reward is None else dataclasses.asdict(trajectory.reward),
        "calls": [call.to_json() for call in trajectory.tool_calls],
        **({"begun": begun} if (begun := trajectory.metadata.get("begun")) else {}),
    }


def checksum(trajectory: Trajectory) -> int:
    """CRC-32 of all tokens and of the bits of their log-probabilities, including branches."""
    found = 0
    for one in trajectory.sequences:
        found = zlib.crc32(one.logp.tobytes(), zlib.crc32(one.tokens.tobytes(), found))
    return found


class StepLog:
    """``steps.jsonl`` of a run; process 0 writes it, and all processes read it."""

    def __init__(self, path: Path, active: bool):
        """Opens the file.

        Args:
            path: path of the file.
            active: whether this process writes to the file.
        """
        self.path, self._active = path, active
        if active:
            files.cut_torn_line(path)
        self._parameters = self.parameters()

    def read(self, after: int = 0) -> list[StepRecord]:
        """Consecutive records of the steps after step ``after``, each as last written."""
        rows = jsonl.read_objects(self.path)
        records = {row["step"]: StepRecord(**row) for row in rows if "used" in row}
        steps: list[StepRecord] = []
        while (step := after + len(steps) + 1) in records:
            steps.append(records[step])
        return steps

    def parameters(self) -> dict[int, int]:
        """Checksum of the parameters after each step."""
        rows = jsonl.read_objects(self.path)
        return {row["step"]: row["parameters"] for row in rows if "parameters" in row}

    def write(self, record: StepRecord) -> None:
        """Appends the record of a step, before the step's update."""
        self._append(dataclasses.asdict(record))

    def learned(self, step: int, parameters: int) -> None:
        """Appends the checksum of the parameters after a step; warns if a repeated step differs."""
        if step not in self._parameters:
            self._append({"step": step, "parameters": parameters})
        elif self._parameters[step] != parameters:
            logging.warning(
                "step %d was repeated, and its parameters differ from those of the first time", step
            )

    def forget(self, step: int) -> None:
        """Removes the records of the steps after ``step``, which cannot be repeated."""
        self._parameters = {s: known for s, known in self._parameters.items() if s <= step}
        if self._active:
            files.drop_last_rows(self.path, lambda row: True if row["step"] > step else None)

    def _append(self, row: Mapping[str, Any]) -> None:
        if self._active:
            files.append(self.path, (json.dumps(row) + "\n").encode())


def recorded_groups(
    record: StepRecord, spool: Mapping[tuple[int, int], Sequence[Trajectory]], size: int
) -> dict[int, list[Trajectory]] | None:
    """The groups of a recorded step that belong to this process.

    Args:
        record: record of the step.
        spool: saved trajectories, see `Spool.read`.
        size: samples of a full group.

    Returns:
        Trajectories by task index; None if the spool lacks a trajectory of the step.
    """
    groups: dict[int, list[Trajectory]] = {}
    wanted = dict(zip(record.used, record.samples, strict=True))
    for index in record.examined:
        if index % processes.count() != processes.index():
            continue
        known = {sample["sample"]: sample for sample in wanted.get(index, ())}
        members = []
        # A step may have trained on a group without the group's late samples.
        there = [number for number in range(size) if (index, number) in spool]
        for number in known or there or [0]:
            mark = known.get(number, {})
            found = [
                trajectory
                for trajectory in spool.get((index, number), ())
                if mark.get("checksum") in (None, checksum(trajectory))
            ]
            if not found:
                return None
            reward = Reward(**mark["reward"]) if mark.get("reward") else found[-1].reward
            members.append(dataclasses.replace(found[-1], reward=reward))
        groups[index] = members
    return groups
