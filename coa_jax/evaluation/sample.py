"""Holds the data of samples that results are computed from: grades and costs, without texts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.data.trajectory import Author, Reward, SegmentSpan, Trajectory, format_valid
from coa_jax.tasks import Task
from coa_jax.tasks.graders import is_broken

Key = tuple[str, int]
"""Key of a sample: (task id, sample number)."""
_COSTS = ("tokens", "length", "calls", "blocked", "shown", "attempts")


@dataclasses.dataclass(frozen=True)
class Sample:
    """The data of one sample of a task.

    Attributes:
        task_id: id of the task.
        number: index of the sample among the samples of the task, from 0.
        answer: answer of the policy; None if the policy gave no answer.
        stop: stop reason, see `trajectory.StopReason`.
        broken: whether a tool or the machine had a fault, or the sample was cancelled. Such a
            sample does not measure the policy and is not graded.
        format_valid: whether the policy obeyed its protocol.
        tokens: number of tokens that the policy wrote.
        length: number of tokens of the trajectory, including prompt and observations.
        calls: pairs (tool, outcome), one for each tool call.
        blocked: number of tool calls with a blocked web address, which may hold the benchmark's
            questions and answers.
        shown: number of observations that contained a question of the benchmark, see
            `Exposure.shown`.
        value: grade; None if the sample is not graded.
        attempts: number of times that the sample was run. ``tokens``, ``length``, ``calls``,
            ``blocked`` and ``shown`` are sums over all attempts.
    """

    task_id: str
    number: int
    answer: str | None
    stop: str
    broken: bool
    format_valid: bool
    tokens: int
    length: int
    calls: tuple[tuple[str, str], ...]
    blocked: int = 0
    shown: int = 0
    value: float | None = None
    attempts: int = 1

    def must_rerun(self, attempts: int) -> bool:
        """Returns whether the sample must run again.

        A sample runs again if it has no answer, no fault ended it, and it was run fewer than
        ``attempts`` times.
        """
        return self.answer is None and not self.broken and self.attempts < attempts

    def is_ungraded(self, attempts: int) -> bool:
        """Returns whether the sample must be graded: it has no grade, and will not run again.

        A sample that a fault ended is never graded.
        """
        return self.value is None and not self.broken and not self.must_rerun(attempts)

    @property
    def key(self) -> Key:
        """Key of the sample: (task id, sample number)."""
        return self.task_id, self.number

    @property
    def solved(self) -> bool:
        """Whether the sample's grade is 1, that is, its answer is right."""
        return self.value == 1.0

    def graded(self, reward: Reward | None) -> Sample:
        """Returns a copy of the sample with the value of a reward as its grade; None for no grade.

        A broken sample, which a fault ended, never gets a grade.
        """
        value = None if self.broken or reward is None else reward.value
        return dataclasses.replace(self, value=value)

    def to_json(self) -> dict[str, Any]:
        """Returns the sample's data for the result file, without the answer or any other text."""
        return {
            "value": self.value,
            "stop": self.stop,
            "answered": self.answer is not None,
            "broken": self.broken,
            "format_valid": self.format_valid,
            "tokens": self.tokens,
            "length": self.length,
            "calls": dict(sorted(Counter(tool for tool, _ in self.calls).items())),
            "blocked": self.blocked,
            "shown": self.shown,
            **({"attempts": self.attempts} if self.attempts > 1 else {}),
        }

    def after(self, earlier: Mapping[str, Any]) -> Sample:
        """Returns a copy of the sample to which the costs of its earlier attempts are added.

        Args:
            earlier: result of `costs` for the earlier attempts.
        """
        sums = {name: getattr(self, name) + earlier[name] for name in _COSTS if name != "calls"}
        calls = tuple((tool, outcome) for tool, outcome in earlier["calls"])
        return dataclasses.replace(self, **sums, calls=(*calls, *self.calls))

    def costs(self) -> dict[str, Any]:
        """Returns the costs of the sample by name, such as its tokens, over all attempts so far."""
        return {name: getattr(self, name) for name in _COSTS}


@dataclasses.dataclass(frozen=True)
class TaskSamples:
    """A task with its finished samples.

    Attributes:
        task: the question and its accepted answers.
        samples: finished samples, sorted by number.
    """

    task: Task
    samples: tuple[Sample, ...]

    @property
    def values(self) -> list[float]:
        """Grades of the graded samples, in the order of the samples."""
        return [sample.value for sample in self.samples if sample.value is not None]

    @property
    def solved(self) -> list[bool]:
        """Whether each graded sample is right, in the order of the samples."""
        return [sample.solved for sample in self.samples if sample.value is not None]


def sample_of(trajectory: Trajectory) -> Sample:
    """Extracts the data of a sample from its trajectory, which may have no reward.

    ``blocked`` and ``shown`` remain 0; an `Exposure` counts them.
    """
    # A policy behind an endpoint has no token ids and stores the usage instead. The test of the
    # tokens prevents that metadata of a task counts as usage.
    usage = {} if len(trajectory.tokens) else trajectory.metadata.get("usage") or {}
    sample = Sample(
        task_id=trajectory.task_id,
        number=trajectory.sample_id,
        answer=trajectory.answer,
        stop=str(trajectory.stop_reason),
        broken=is_broken(trajectory),
        format_valid=format_valid(trajectory),
        tokens=int(usage.get("completion", trajectory.num_policy_tokens)),
        length=int(usage.get("length", len(trajectory.tokens))),
        calls=tuple((call.tool, call.outcome) for call in trajectory.tool_calls),
    )
    return sample.graded(trajectory.reward)


def by_last_suggestion(trajectory: Trajectory) -> Trajectory:
    """Returns the trajectory, in which the last suggested answer replaces a missing answer.

    A suggested answer is the text of a tag ``suggested_answer``. The evaluator of the authors of
    the Chain-of-Agents paper has this rule only for generations that stop at a suggested answer. No
    generation stops there, so the rule has no effect in their results.
    """
    for span in reversed(trajectory.segments) if trajectory.answer is None else ():
        suggested = span.role == "suggested_answer" and span.author == Author.POLICY
        if suggested and span.body is not None:
            text, end = f"<answer>{span.body}</answer>", span.end
            answer = SegmentSpan("answer", Author.POLICY, text, end, end)
            segments = (*trajectory.segments, answer)
            return dataclasses.replace(trajectory, segments=segments, text=trajectory.text + text)
    return trajectory


def group_by_task(
    tasks: Sequence[Task], samples: dict[Key, Sample], numbers: int
) -> list[TaskSamples]:
    """Groups finished samples by task.

    Args:
        tasks: the tasks of the evaluation, in the order of the result.
        samples: finished samples by key.
        numbers: number of samples per task. Samples whose index is ``numbers`` or more are ignored.
    """
    return [
        TaskSamples(
            task, tuple(samples[task.id, n] for n in range(numbers) if (task.id, n) in samples)
        )
        for task in tasks
    ]


def digest(value: Any) -> str:
    """Returns a short hash of a JSON value; equal values have equal hashes."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
