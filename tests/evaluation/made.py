"""Handmade trajectories, samples and result files."""

from __future__ import annotations

import numpy as np

from coa_jax.data.trajectory import Author, Reward, SegmentSpan, StopReason, ToolCall, Trajectory
from coa_jax.evaluation.results import result_file_content
from coa_jax.evaluation.sample import TaskSamples, sample_of
from coa_jax.tasks import Task


def task(identity="t", gold=("4",), grader="exact_match", protocol="generalist", **metadata):
    metadata = {"grader": grader, **metadata}
    return Task(identity, f"Question {identity}?", protocol, gold, "made", metadata)


def trajectory(answer="4", *, identity="t", number=0, calls=(), stop=StopReason.ANSWER, tokens=4,
               seen=(), reward=None, **metadata):  # fmt: skip
    """One that writes an answer after some calls ``(tool, arguments, observation, outcome)``."""
    texts = [] if answer is None else [f"<answer>{answer}</answer>"]
    authors = [Author.PROMPT] * 3 + [Author.POLICY] * tokens + [Author.ENVIRONMENT] * 2
    return Trajectory(
        task_id=identity,
        sample_id=number,
        question=f"Question {identity}?",
        protocol="generalist",
        tokens=np.arange(len(authors)),
        author=np.asarray(authors),
        logp=np.zeros(len(authors)),
        text="".join(texts),
        segments=tuple(SegmentSpan("answer", Author.POLICY, t, 3, 4) for t in texts),
        tool_calls=tuple(
            ToolCall(tool, arguments, text, outcome, outcome == "ok", 0.0, 1.0)
            for tool, arguments, text, outcome in calls
        ),
        stop_reason=stop,
        reward=reward,
        gold=("4",),
        metadata=metadata,
    )


def sample(value, number=0, identity="t", answer="4", **options):
    made = trajectory(answer, identity=identity, number=number, **options)
    return sample_of(made).graded(Reward(value))


def group(values, identity="t", answers=None, **metadata):
    """A task with a sample for each value."""
    answers = answers or ["4"] * len(values)
    samples = tuple(
        sample(value, number, identity, answer)
        for number, (value, answer) in enumerate(zip(values, answers, strict=True))
    )
    return TaskSamples(task(identity, **metadata), samples)


def outcome(rows, stage="a", scaling=None, **settings):
    """A result file of tasks ``{id: values}``."""
    groups = [group(values, name) for name, values in rows.items()]
    numbers = max(map(len, rows.values()))
    return result_file_content(stage, settings, groups, numbers, scaling or {})
