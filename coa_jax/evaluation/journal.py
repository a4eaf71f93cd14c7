"""Stores finished samples and verdicts on disk, so that no sample is run or graded twice.

When a sample ends, it is appended to ``traces.jsonl`` of the run. When a grader or a model gives a
verdict about a sample, the verdict is appended to ``evaluate/STAGE/verdicts.jsonl``. An incomplete
line, which a kill may leave in either file, does not count. At the end of the evaluation the
samples in ``traces.jsonl`` are sorted in the order of the tasks, and their rewards are added.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from coa_jax.data.trajectory import Reward, Trajectory, format_valid
from coa_jax.errors import UserError
from coa_jax.evaluation.exposure import Exposure
from coa_jax.evaluation.sample import Key, Sample, by_last_suggestion, digest, sample_of
from coa_jax.files import durable, jsonl, untrusted
from coa_jax.run.run_dir import RunDir
from coa_jax.tasks import Task
from coa_jax.tasks.graders import GRADED_BY


class Journal:
    """The finished samples of one evaluation, and the verdicts about these samples.

    Attributes:
        folder: folder of the evaluation, ``evaluate/STAGE``.
        samples: maps the key of each finished sample to the sample. A sample has its grade if a
            verdict about it exists.
        verdicts: maps the name of each verdict to its value.
    """

    def __init__(
        self,
        run: RunDir,
        stage: str,
        settings: Mapping[str, Any],
        grading: Mapping[str, Any],
        last_suggestion: bool = False,
    ):
        """Opens the files of an evaluation.

        Args:
            run: the run directory.
            stage: name of the evaluation.
            settings: settings on which the samples depend, as JSON values.
            grading: settings on which the verdicts depend, as JSON values.
            last_suggestion: whether the last suggested answer of a sample takes the place of a
                missing answer.

        Raises:
            UserError: ``stage`` is not a valid folder name.
        """
        if Path(stage).name != stage or stage.startswith("."):
            raise UserError(f"config.stage: {stage!r} cannot name a folder; use letters and digits")
        self._run, self.phase = run, f"evaluate-{stage}"
        self.folder = run.path / "evaluate" / stage
        self.folder.mkdir(parents=True, exist_ok=True)
        self.settings, self._settings = settings, digest(settings)
        self._grading = digest(grading)
        self._traces = run.path / "traces.jsonl"
        self._verdicts_file = self.folder / "verdicts.jsonl"
        self._places: dict[Key, tuple[int, int]] = {}  # offset and length of a sample's line
        self._changed = False
        self._last_suggestion = last_suggestion
        self._golds: dict[str, str] = {}  # task id -> digest of the accepted answers
        self.samples: dict[Key, Sample] = {}
        self.verdicts: dict[str, Any] = {}
        self._ungraded: dict[Key, str] = {}  # reasons why grades are missing

    # --- finished samples

    def load(
        self, tasks: Sequence[Task], exposure: Exposure, *, fresh: bool, retry_faults: bool
    ) -> None:
        """Reads the samples and verdicts that earlier processes stored.

        Args:
            tasks: tasks of the evaluation, in the order of their indices.
            exposure: counts signs that the policy found the questions on the web, see `Exposure`.
            fresh: whether to delete the stored samples instead of reading them.
            retry_faults: whether to discard samples that were ended by a fault of a tool or of the
                machine, so that they run again.

        Raises:
            UserError: the stored samples belong to another policy, other settings or other
                questions.
        """
        settings_file = self.folder / "settings.json"
        self._exposure = exposure
        if fresh:
            self._run.rewind(self.phase, 0)
            self._verdicts_file.unlink(missing_ok=True)
        # If an accepted answer is corrected, grades by the old answer become invalid.
        self._golds = {task.id: _graded_by(task) for task in tasks}
        places = {task.id: (index, task.question) for index, task in enumerate(tasks)}
        stored = settings_file.exists()
        earlier = durable.read_json_object(settings_file) if stored else self.settings
        for offset, length, row in self._rows():
            try:
                if row.get("metadata", {}).get("phase") != self.phase:
                    continue
                self._check_settings(earlier)  # settings may change while there are no samples
                trajectory = Trajectory.from_json(row)
            except untrusted.MALFORMED as error:
                why = untrusted.reason(error)
                raise UserError(f"{self._traces}, byte {offset}: not a trace: {why}") from error
            self._check(trajectory, places)
            sample = self._sample(trajectory).graded(None)
            if sample.broken and retry_faults:
                continue
            # A kill during `finish` leaves samples in the file without their rewards.
            self._changed |= trajectory.reward is None
            self.samples[sample.key] = sample
            self._places[sample.key] = offset, length
        durable.write_json(settings_file, dict(self.settings))
        self._load_verdicts()

    def _check_settings(self, earlier: Mapping[str, Any]) -> None:
        now = json.loads(json.dumps(self.settings))
        if earlier == now:
            return
        changed = [key for key in sorted({*earlier, *now}) if earlier.get(key) != now.get(key)]
        raise UserError(
            f"{self._run.path} holds samples of {self.folder.name!r} with another "
            f"{' and '.join(changed)}: give the same settings to continue, another --config.stage "
            "or --workdir to keep both, or --fresh to delete the existing samples"
        )

    def _check(self, trajectory: Trajectory, places: Mapping[str, tuple[int, str]]) -> None:
        if trajectory.task_id not in places:
            return  # from an evaluation with more tasks
        index = trajectory.metadata.get("prompt_id")
        same = places[trajectory.task_id] == (index, trajectory.question)
        if not same or trajectory.metadata.get("settings") != self._settings:
            raise UserError(
                f"{self._traces}: the sample {trajectory.sample_id} of {trajectory.task_id!r} has"
                " other questions or settings: use another --workdir, or --fresh to drop it"
            )

    def _rows(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yields (offset, length, row) of every trace."""
        if not self._traces.exists():
            return
        offset = 0
        for number, line in untrusted.lines(self._traces):
            try:
                yield offset, len(line), jsonl.loads(line)
            except (ValueError, RecursionError) as error:
                why = untrusted.reason(error)
                raise UserError(f"{self._traces}:{number}: not a trace: {why}") from error
            offset += len(line)

    def _load_verdicts(self) -> None:
        if not self._verdicts_file.exists():
            return
        durable.cut_torn_line(self._verdicts_file)
        for row in jsonl.read_lines(self._verdicts_file, _verdict):
            if row.get("grading") == self._grading and self._is_valid(row):
                self.verdicts[row["name"]] = row["value"]
        for key, sample in self.samples.items():
            if (value := self.verdicts.get(_grade(key))) is not None:
                self.samples[key] = sample.graded(Reward(**jsonl.fields(Reward, value)))

    def _is_valid(self, row: Mapping[str, Any]) -> bool:
        """Returns whether a stored verdict is still valid.

        A grade is valid if it was given by the present accepted answers, and invalid if it does not
        record its accepted answers. Other verdicts are always valid.
        """
        kind, _, sample = row["name"].partition("/")
        gold = self._golds.get(sample.rpartition("/")[0])
        return kind != "grade" or gold is None or row.get("gold") == gold

    # --- new samples

    def about(self) -> dict[str, Any]:
        """Returns metadata for the evaluation's trajectories: its name and a hash of its settings.

        A resumed evaluation refuses stored trajectories with another hash.
        """
        return {"stage": self.folder.name, "settings": self._settings}

    def add(self, trajectory: Trajectory) -> Sample:
        """Stores a sample that has just ended, and returns its data for the results."""
        offset = self._traces.stat().st_size if self._traces.exists() else 0
        key = trajectory.task_id, trajectory.sample_id
        if trajectory.metadata.get("attempt"):
            earlier = {"earlier": self.samples[key].costs()}
            trajectory = dataclasses.replace(trajectory, metadata=trajectory.metadata | earlier)
        sample = self._sample(trajectory)
        self._run.traces(1, self.phase, [trajectory.to_json()])
        self.samples[sample.key] = sample
        self._places[sample.key] = offset, self._traces.stat().st_size - offset
        self._changed = True
        return sample

    def grade(self, key: Key, reward: Reward) -> None:
        """Stores the grade of a sample, unless the reward has no value.

        A sample without a grade is graded again when the evaluation is repeated.
        """
        self.samples[key] = self.samples[key].graded(reward)
        if reward.reason:
            self._ungraded[key] = reward.reason
        if reward.value is not None:
            value = {"value": reward.value, "parts": reward.parts}
            self.add_verdict(_grade(key), value, gold=self._golds.get(key[0], ""))

    def add_verdict(self, name: str, value: Any, **more: str) -> None:
        """Stores a verdict about samples, such as the result of a vote.

        Args:
            name: name of the verdict.
            value: JSON value of the verdict.
            more: additional fields of the verdict's row in the file.
        """
        self.verdicts[name] = value
        row = {"name": name, "grading": self._grading, "value": value, **more}
        durable.append(self._verdicts_file, (jsonl.dumps(row) + "\n").encode())
        self._changed = True

    def trajectory(self, key: Key) -> Trajectory:
        """Reads the trajectory of a finished sample.

        If ``last_suggestion`` was True when the journal was created, the last suggested answer
        replaces a missing answer, see `by_last_suggestion`.
        """
        offset, length = self._places[key]
        with open(self._traces, "rb") as file:
            file.seek(offset)
            return self._with_suggestion(Trajectory.from_json(jsonl.loads(file.read(length))))

    def _with_suggestion(self, trajectory: Trajectory) -> Trajectory:
        """With ``last_suggestion``, replaces a missing answer by the last suggested answer."""
        return by_last_suggestion(trajectory) if self._last_suggestion else trajectory

    def _sample(self, trajectory: Trajectory) -> Sample:
        blocked, shown = self._exposure.blocked(trajectory), self._exposure.shown(trajectory)
        sample = sample_of(self._with_suggestion(trajectory))
        sample = dataclasses.replace(sample, blocked=blocked, shown=shown)
        if trajectory.answer is None:  # a chain of agents without an answer is not well-formed
            sample = dataclasses.replace(sample, format_valid=format_valid(trajectory))
        again = trajectory.metadata.get("attempt")
        return sample.after(trajectory.metadata["earlier"]) if again else sample

    # --- end of the evaluation

    def finish(self, order: Sequence[Key]) -> None:
        """Adds the rewards to ``traces.jsonl``, and sorts the evaluation's samples by ``order``.

        Rows of other evaluations come first, and samples of this evaluation that are not in
        ``order`` come last. The file is replaced atomically.
        """
        if not self._changed:
            return
        mine = set(self._places.values())
        places = {name: key for key, name in self._places.items()}
        listed = [self._places[key] for key in order]
        rest = sorted(mine - set(listed))
        others = [
            (offset, length)
            for offset, length, row in self._rows()
            if (offset, length) not in mine and row.get("metadata", {}).get("phase") != self.phase
        ]

        def write(new: IO[bytes]) -> None:
            with open(self._traces, "rb") as old:
                for offset, length in (*others, *listed, *rest):
                    old.seek(offset)
                    line, key = old.read(length), places.get((offset, length))
                    if key is not None:
                        row = jsonl.loads(line)
                        broken = self.samples[key].broken
                        verdict = None if broken else self.verdicts.get(_grade(key))
                        reason = self._ungraded.get(key, "")
                        row["reward"] = verdict or {"value": None, "parts": {}, "reason": reason}
                        line = (jsonl.dumps(row) + "\n").encode()
                        self._places[key] = new.tell(), len(line)
                    new.write(line)

        durable.replace_with(self._traces, write)
        self._changed = False


def _verdict(row: Any) -> dict[str, Any]:
    """Checks a row of ``verdicts.jsonl``; raises TypeError or KeyError if it is invalid."""
    if not isinstance(row["name"], str):
        raise TypeError("the field 'name' must be a string")
    if row["name"].startswith("grade/"):
        jsonl.fields(Reward, row["value"])
    return dict(row)


def _graded_by(task: Task) -> str:
    read = {key: task.metadata[key] for key in GRADED_BY if key in task.metadata}
    return digest([task.gold, read])


def _grade(key: Key) -> str:
    return f"grade/{key[0]}/{key[1]}"
