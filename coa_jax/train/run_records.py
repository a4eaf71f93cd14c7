"""Files of a reinforcement-learning run that record its trajectories and steps.

``spool/`` holds trajectories from the time that they finish until a checkpoint makes them
superfluous. For each step, ``steps.jsonl`` records which trajectories the step trained on, which
policy version sampled each of their tokens, and the results of their tool calls. With
``steps.jsonl`` a run can be replayed. A run that was killed uses both to repeat the steps after its
newest checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from coa_jax.data.trajectory import Reward, Trajectory
from coa_jax.files import durable, jsonl
from coa_jax.parallel import processes
from coa_jax.train.admission import Composition

Versions = list[list[int]]
"""``[[position, policy version], ...]``: from each position on, the version sampled the tokens."""


def versions_of(trajectory: Trajectory) -> Versions:
    """Returns the policy versions that sampled the tokens of a trajectory.

    The result is a list of pairs (position, version); a version sampled the tokens from its
    position up to the position of the next pair.
    """
    versions: Versions = trajectory.metadata["policy_versions"]
    return versions


def oldest_of(group: Iterable[Trajectory]) -> int:
    """Returns the oldest policy version that sampled a token of a group."""
    return min(versions_of(one)[0][1] for trajectory in group for one in trajectory.sequences)


def newest_of(trajectory: Trajectory) -> int:
    """Returns the newest policy version that sampled a token of a trajectory."""
    return max(versions_of(one)[-1][1] for one in trajectory.sequences)


# --- finished trajectories -----------------------------------------------------------------


GRADING = "grading"
"""Entry of the metadata of a trajectory that was stored while it was still being graded."""


class Spool:
    """Stores the finished trajectories of this process until a checkpoint makes them unnecessary.

    The folder has one file per process and per version of the policy with which trajectories
    started.
    """

    def __init__(self, folder: Path):
        """Opens the folder, and removes a partial row that a killed process may have left."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._tasks: dict[Path, set[int]] = defaultdict(set)
        for path in folder.glob("*.jsonl"):
            if self._is_mine(path):
                durable.cut_torn_line(path)

    def _is_mine(self, path: Path) -> bool:
        """Returns whether this process maintains a file.

        A process maintains its own files. Process 0 also maintains the files of processes that no
        longer exist, because a resumed run may have fewer processes than before.
        """
        process = int(path.stem.split("-")[0])
        return processes.index() == (process if process < processes.count() else 0)

    def read(self) -> dict[tuple[int, int], list[Trajectory]]:
        """Reads the stored trajectories of the tasks that this process samples.

        Returns:
            Trajectories by (task index, sample index). Trajectories of the same sample are sorted
            by the policy version under which they started, oldest version first. A trajectory that
            must be graded again, because its grades were not stored, has the key `GRADING` in its
            metadata.
        """
        groups: dict[tuple[int, int], list[Trajectory]] = defaultdict(list)
        paths = sorted(self.folder.glob("*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
        for path in paths:
            for row in jsonl.read_objects(path):
                trajectory = Trajectory.from_json(row)
                index = trajectory.metadata["prompt_id"]
                if self._is_mine(path):
                    self._tasks[path].add(index)
                if index % processes.count() == processes.index():
                    known = groups[index, trajectory.sample_id]
                    # The folder may have a trajectory twice: with `GRADING`, and with its grades.
                    # In files of different processes, either row may come first.
                    if known and GRADING in known[-1].metadata:
                        known.pop()
                    twice = known and oldest_of(known[-1:]) == oldest_of([trajectory])
                    if not (twice and GRADING in trajectory.metadata):
                        known.append(trajectory)
        return groups

    def add(self, trajectory: Trajectory) -> None:
        """Appends a trajectory to the file of the policy version under which it started.

        Raises:
            OSError: the row cannot be written, for example because the disk is full; earlier rows
                stay intact.
        """
        name = f"{processes.index()}-{oldest_of([trajectory])}.jsonl"
        path = self.folder / name
        durable.append(path, (jsonl.dumps(trajectory.to_json()) + "\n").encode())
        self._tasks[path].add(trajectory.metadata["prompt_id"])

    def prune(self, state: Mapping[str, Any], max_staleness: int) -> None:
        """Removes files that are no longer needed, after the checkpoint of a step was written.

        A file is needed as long as a run that resumes from this checkpoint could use a trajectory
        in it. The trajectory must not be too old, and no step up to the checkpoint may have used
        its task.

        Args:
            state: `admission.Composition.state` of the step. When the step was composed, the tasks
                from the index ``state["next"]`` on had not been requested. Trajectories of these
                tasks may exist by now, and are needed.
            max_staleness: see `admission.AdmissionRules`.
        """
        still_open = {index for index, _ in state["open"]}
        for path, indices in list(self._tasks.items()):
            too_old = int(path.stem.split("-")[1]) < state["step"] - max_staleness
            if too_old or not any(i >= state["next"] or i in still_open for i in indices):
                self._remove(path)

    def clear(self) -> None:
        """Removes all files of this process."""
        for path in list(self._tasks):
            self._remove(path)

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        del self._tasks[path]

    def forget(self, version: int) -> None:
        """Removes the trajectories that were sampled by a policy version after ``version``.

        The run calls this if it samples recorded steps again, because the later policy versions
        will then have other parameters.
        """
        for path in self._tasks:
            rows = [Trajectory.from_json(row) for row in jsonl.read_objects(path)]
            jsonl.write_lines(path, [t.to_json() for t in rows if newest_of(t) <= version])


# --- steps ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """The record of a step, which is a row of ``steps.jsonl``.

    Attributes:
        composition: names the groups that the step uses.
        samples: for each used group, the records of its trajectories, see `sample_record`.
        unused: for each group that the step examined but does not use, the sample index, checksum
            and reward of each trajectory. A resumed run finds the stored trajectories by the
            checksums, and computes the same metrics from them.
    """

    composition: Composition
    samples: list[list[dict[str, Any]]]
    unused: list[list[dict[str, Any]]] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, composition: Composition, examined: Iterable[Sequence[Trajectory]]) -> StepRecord:
        """Creates the record of a step from the trajectories of its groups.

        Args:
            composition: names the groups that the step uses.
            examined: trajectories of each group that the step examined.
        """
        groups = dict(zip(composition.examined, examined, strict=True))
        return cls(
            composition,
            [[sample_record(t) for t in groups[index]] for index in composition.used],
            [[_grade_record(t) for t in groups[index]] for index in composition.unused],
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the row of ``steps.jsonl`` for this record, as a JSON object."""
        row = dataclasses.asdict(self.composition)
        row |= {"samples": self.samples, "unused": self.unused}
        return {**row, "counts": {name: row.pop(name) for name in ("discarded", "given_up")}}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> StepRecord:
        """Creates the record from a row of ``steps.jsonl``; the inverse of `to_json`."""
        composition = Composition(
            step=row["step"],
            used=tuple(row["used"]),
            examined=tuple(row["examined"]),
            dropped=tuple(row["dropped"]),
            state=row["state"],
            scores=tuple((solved, graded) for solved, graded in row["scores"]),
            **row["counts"],
        )
        return cls(composition, row["samples"], row["unused"])


def sample_record(trajectory: Trajectory) -> dict[str, Any]:
    """Returns a JSON object with the data that a replay of a trajectory needs.

    The object includes a checksum of the tokens, by which the replay is checked.
    """
    metadata = trajectory.metadata
    return {
        **_grade_record(trajectory),
        "versions": versions_of(trajectory),
        "length": len(trajectory.tokens),
        "stop_reason": str(trajectory.stop_reason),
        "calls": [call.to_json() for call in trajectory.tool_calls],
        **{k: metadata[k] for k in ("begun", "recorded_turns", "restarts") if k in metadata},
    }


def _grade_record(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "sample": trajectory.sample_id,
        "checksum": checksum(trajectory),
        "reward": None if trajectory.reward is None else dataclasses.asdict(trajectory.reward),
    }


def checksum(trajectory: Trajectory) -> int:
    """Returns a checksum (CRC-32) of a trajectory's token ids and log-probabilities.

    The checksum includes all branches (further sequences) of the trajectory.
    """
    checksum = 0
    for one in trajectory.sequences:
        checksum = zlib.crc32(one.logp.tobytes(), zlib.crc32(one.tokens.tobytes(), checksum))
    return checksum


class StepLog:
    """Reads and writes the ``steps.jsonl`` of a run.

    Process 0 writes the file, and all processes read it.
    """

    def __init__(self, path: Path, active: bool):
        """Opens the file, and removes a partial row if this process writes.

        Args:
            path: path of the file.
            active: whether this process writes to the file.
        """
        self.path, self._active = path, active
        if active:
            durable.cut_torn_line(path)
        self._parameters = self.parameters()

    def read(self, after: int = 0) -> list[StepRecord]:
        """Reads the records of the consecutive steps that follow step ``after``.

        If a step was recorded more than once, only its last record is returned.
        """
        rows = jsonl.read_objects(self.path)
        records = {row["step"]: StepRecord.from_json(row) for row in rows if "used" in row}
        steps: list[StepRecord] = []
        while (step := after + len(steps) + 1) in records:
            steps.append(records[step])
        return steps

    def parameters(self) -> dict[int, int]:
        """Returns the checksum of the parameters after each step, by step number."""
        rows = jsonl.read_objects(self.path)
        return {row["step"]: row["parameters"] for row in rows if "parameters" in row}

    def write(self, record: StepRecord) -> None:
        """Appends the record of a step; must be called before the update of the step."""
        self._append(record.to_json())

    def learned(self, step: int, parameters: int) -> None:
        """Appends the checksum of the parameters after a step, against which a replay is checked.

        If an earlier entry for the same step has another checksum, a warning is logged.
        """
        if step not in self._parameters:
            self._append({"step": step, "parameters": parameters})
        elif self._parameters[step] != parameters:
            logging.warning(
                "step %d was repeated, and its parameters differ from those of the first time", step
            )

    def forget(self, step: int) -> None:
        """Removes the records of all steps after ``step``, so that a replay ends at ``step``.

        The run calls this if trajectories of a recorded step are missing, and samples the step
        again.
        """
        self._parameters = {s: known for s, known in self._parameters.items() if s <= step}
        if self._active:
            durable.drop_last_rows(self.path, lambda row: True if row["step"] > step else None)

    def _append(self, row: Mapping[str, Any]) -> None:
        if self._active:
            durable.append(self.path, (json.dumps(row) + "\n").encode())


def recorded_groups(
    record: StepRecord, spool: Mapping[tuple[int, int], Sequence[Trajectory]]
) -> dict[int, list[Trajectory]] | None:
    """Returns the groups of a recorded step that belong to this process.

    Args:
        record: record of the step.
        spool: saved trajectories, see `Spool.read`.

    Returns:
        The trajectories of each group, by task index; None if the spool lacks a trajectory of the
        step.
    """
    groups: dict[int, list[Trajectory]] = {}
    samples = dict(zip(record.composition.used, record.samples, strict=True))
    samples |= dict(zip(record.composition.unused, record.unused, strict=True))
    for index in record.composition.examined:
        if index % processes.count() != processes.index():
            continue
        members = []
        for sample in samples[index]:
            matching = [
                trajectory
                for trajectory in spool.get((index, sample["sample"]), ())
                if checksum(trajectory) == sample["checksum"]
            ]
            if not matching:
                return None
            reward = Reward(**sample["reward"]) if sample["reward"] else matching[-1].reward
            members.append(dataclasses.replace(matching[-1], reward=reward))
        groups[index] = members
    return groups
