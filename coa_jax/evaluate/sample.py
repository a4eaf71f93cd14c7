"""The data of results: graded samples without their texts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.evaluate.exposure import Exposure
from coa_jax.tasks import Task
from coa_jax.trajectory import (
    Author,
    Reward,
    SegmentSpan,
    StopReason,
    Trajectory,
    format_valid,
)

Key = tuple[str, int]
"""Key of a sample: task id and sample number."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sample of a task.

    Attributes:
        task_id: id of the task.
        number: number of the sample, from 0.
        answer: answer of the policy, or None.
        stop: stop reason, see `StopReason`.
        broken: whether a fault of our own components ended it, so that it does not measure the
            policy.
        format_valid: whether the policy obeyed its protocol.
        tokens: number of tokens that the policy wrote.
        length: tokens of the whole trajectory, including prompt and observations.
        calls: (tool, outcome) of each call.
        blocked: number of calls with a blocked address.
        shown: number of observations that contained a question of the benchmark.
        value: grade, None if there is none.
        attempts: number of runs; tokens, length, calls and contacts are summed over all of them.
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

    def wanted(self, attempts: int) -> bool:
        """Returns whether the sample must be run again, given the maximum number of attempts."""
        return self.answer is None and not self.broken and self.attempts < attempts

    @property
    def key(self) -> Key:
        """Key of the sample."""
        return self.task_id, self.number

    @property
    def solved(self) -> bool:
        """Whether the sample was graded as right."""
        return self.value == 1.0

    def graded(self, reward: Reward | None) -> Sample:
        """Returns the sample with its grade; a broken sample gets none."""
        value = None if self.broken or reward is None else reward.value
        return dataclasses.replace(self, value=value)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields for a result file, without the answer or any other text."""
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
        """Returns the sample with the costs of earlier attempts (from `costs`) added."""
        return dataclasses.replace(
            self,
            tokens=self.tokens + earlier["tokens"],
            length=self.length + earlier["length"],
            calls=(*((tool, outcome) for tool, outcome in earlier["calls"]), *self.calls),
            blocked=self.blocked + earlier["blocked"],
            shown=self.shown + earlier["shown"],
            attempts=self.attempts + earlier["attempts"],
        )

    def costs(self) -> dict[str, Any]:
        """Returns the costs of the sample so far, as JSON values."""
        names = ("tokens", "length", "calls", "blocked", "shown", "attempts")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Measured:
    """A task with its finished samples, in the order of their numbers."""

    task: Task
    samples: tuple[Sample, ...]

    @property
    def values(self) -> list[float]:
        """Grades of the samples, without ungraded ones."""
        return [sample.value for sample in self.samples if sample.value is not None]

    @property
    def solved(self) -> list[bool]:
        """Whether each graded sample is right."""
        return [sample.solved for sample in self.samples if sample.value is not None]


def sample_of(trajectory: Trajectory, exposure: Exposure | None = None) -> Sample:
    """Extracts the data of a sample from a trajectory, including its grade if there is one."""
    # Set by a policy behind an endpoint, which has no token ids; a task's own metadata cannot
    # override it.
    usage = {} if len(trajectory.tokens) else trajectory.metadata.get("usage") or {}
    faults = any(call.outcome == "fault" for call in trajectory.tool_calls)
    ours = trajectory.stop_reason in (StopReason.FAULT, StopReason.CANCELLED)
    sample = Sample(
        task_id=trajectory.task_id,
        number=trajectory.sample_id,
        answer=trajectory.answer,
        stop=str(trajectory.stop_reason),
        broken=faults or ours,
        format_valid=format_valid(trajectory),
        tokens=int(usage.get("completion", trajectory.num_policy_tokens)),
        length=int(usage.get("length", len(trajectory.tokens))),
        calls=tuple((call.tool, call.outcome) for call in trajectory.tool_calls),
        blocked=exposure.blocked(trajectory) if exposure else 0,
        shown=exposure.shown(trajectory) if exposure else 0,
    )
    return sample.graded(trajectory.reward)


def by_last_suggestion(trajectory: Trajectory) -> Trajectory:
    """Returns a trajectory whose last suggested answer stands in for a missing answer.

    The release intends this rule but never applies it: its requests do not stop at a suggestion.
    """
    if trajectory.answer is not None:
        return trajectory
    bodies = [
        (span, span.body)
        for span in trajectory.segments
        if span.role == "suggested_answer" and span.author == Author.POLICY
    ]
    last = next(((span, body) for span, body in reversed(bodies) if body is not None), None)
    if last is None:
        return trajectory
    span, body = last
    answer = SegmentSpan("answer", Author.POLICY, f"<answer>{body}</answer>", span.end, span.end)
    segments = (*trajectory.segments, answer)
    return dataclasses.replace(trajectory, segments=segments, text=trajectory.text + answer.text)


def measured(tasks: Sequence[Task], samples: dict[Key, Sample], numbers: int) -> list[Measured]:
    """Groups samples by task.

    Args:
        tasks: the tasks.
        samples: finished samples by key.
        numbers: number of samples per task; samples with higher numbers are ignored.
    """
    return [
        Measured(
            task,
            tuple(samples[task.id, n] for n in range(numbers) if (task.id, n) in samples),
        )
        for task in tasks
    ]
