"""What results are made of: graded samples without their texts."""

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
"""Which sample: the task's id, and the sample's number."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sample of a task.

    Attributes:
        task_id: the task.
        number: which of its samples, from 0.
        answer: what was answered, or None.
        stop: why it ended, see `StopReason`.
        broken: whether a part of ours broke, so that it says nothing about the policy.
        format_valid: whether the policy kept to its protocol.
        tokens: that the policy wrote.
        length: tokens of the whole, prompt and observations included.
        calls: (tool, outcome) of each call.
        blocked: calls that named an address of the block list.
        shown: observations that showed a question of the benchmark.
        value: what a grader gave, None where there is no grade.
        attempts: how often it was run; tokens, length, calls and contacts are those of all.
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
        """Whether it shall be run again, of so many attempts in all."""
        return self.answer is None and not self.broken and self.attempts < attempts

    @property
    def key(self) -> Key:
        """Which sample it is."""
        return self.task_id, self.number

    @property
    def solved(self) -> bool:
        """Whether it was graded as right."""
        return self.value == 1.0

    def graded(self, reward: Reward | None) -> Sample:
        """The same with its grade; what broke has none."""
        value = None if self.broken or reward is None else reward.value
        return dataclasses.replace(self, value=value)

    def to_json(self) -> dict[str, Any]:
        """What a result file says of it: neither its answer nor any other text."""
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
        """The same with the costs of earlier attempts, as `costs` gave them."""
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
        """What it took so far; JSON values."""
        names = ("tokens", "length", "calls", "blocked", "shown", "attempts")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Measured:
    """A task with those of its samples that are finished, by their numbers."""

    task: Task
    samples: tuple[Sample, ...]

    @property
    def values(self) -> list[float]:
        """Grades; samples without one are left out."""
        return [sample.value for sample in self.samples if sample.value is not None]

    @property
    def solved(self) -> list[bool]:
        """Of each graded sample whether it was right."""
        return [sample.solved for sample in self.samples if sample.value is not None]


def sample_of(trajectory: Trajectory, exposure: Exposure | None = None) -> Sample:
    """What of a trajectory the results need; its grade, if it has one, included."""
    # Of a policy behind an endpoint, which tells no tokens; a task's own metadata may say anything.
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
    """The tasks with the first ``numbers`` of their samples, as far as they are there."""
    return [
        Measured(
            task,
            tuple(samples[task.id, n] for n in range(numbers) if (task.id, n) in samples),
        )
        for task in tasks
    ]
