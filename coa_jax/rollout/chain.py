"""Collects the chain of agents of a policy whose server returns text instead of token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coa_jax.data.trajectory import Author, SegmentSpan, StopReason, ToolCall, Trajectory
from coa_jax.protocol import THINK, Parser, Protocol, Segment
from coa_jax.rollout.context_truncation import kept_spans
from coa_jax.tasks import Task


class Chain:
    """The assistant message of a running sample: the policy's text and the observations.

    Only the policy's text is parsed. Therefore the text of a tool can neither open nor close a tag,
    and cannot count as the answer. Token ids are unknown, so every span begins and ends at token
    position 0.

    Attributes:
        text: the message so far, as the policy reads it; parts that `cut` removed are left out.
        calls: tool calls so far.
    """

    def __init__(self, protocol: Protocol):
        self.protocol = protocol
        self.text = ""
        self.calls: list[ToolCall] = []
        self._parser = Parser(protocol)
        self._written = ""  # all text of the policy
        self._spans: list[SegmentSpan] = []
        self._stops = re.compile(f"({'|'.join(map(re.escape, protocol.stops))})")

    def missing_stop(self, text: str) -> str | None:
        """Returns the closing tag that a server has left out at the end of the policy's text.

        Servers do not return the stop string, that is, the closing tag at which the policy stopped.

        The result is None if the text ends outside the tags of tool calls and of the answer.
        """
        trial = Parser(self.protocol)
        trial.feed(self._written + text)
        stop = f"</{trial.open_role}>"
        return stop if stop in self.protocol.stops else None

    @property
    def last_think(self) -> str:
        """Body of the last closed ``think`` segment; "" if there is none."""
        bodies = (span.body for span in reversed(self._spans) if span.role == THINK)
        return next((body for body in bodies if body), "")

    def write(self, text: str) -> Segment | None:
        """Appends text of the policy, up to the end of the first tool call or answer.

        Text after a closed tool call is dropped, because the policy wrote it before the observation
        was available.

        Returns:
            The closed segment of the tool call or answer; None if the text closes neither.
        """
        # A closing tag may occur inside the body of another tag, where it closes nothing.
        for piece in self._stops.split(text):
            self.text += piece
            self._written += piece
            for segment in self._parser.feed(piece):
                self._add(segment)
                if segment.closed and f"</{segment.role}>" in self.protocol.stops:
                    return segment
        return None

    def observe(self, text: str, call: ToolCall) -> None:
        """Appends the observation of a tool call, with the tags around it.

        Args:
            text: text of the observation.
            call: record of the tool call.
        """
        self.text += text
        self.calls.append(call)
        role = self.protocol.observation
        self._spans.append(SegmentSpan(role, Author.ENVIRONMENT, text, 0, 0))

    def cut(self, share: float) -> None:
        """Shortens the text that the policy reads, by removing the oldest steps of the message.

        A step is the text up to the end of an observation. The newest step is never removed. In
        older steps, plans and reflections are removed last, only if the text is still too long
        without all other parts, see `coa_jax.rollout.context_truncation`.

        Args:
            share: maximum length of the shortened text, as a share of the present number of
                characters.
        """
        lengths = [len(span.text) for span in self._spans]
        stays = kept_spans(self._spans, lengths, share * len(self.text))
        self.text = "".join(span.text for span in stays)

    def finish(
        self, stop_reason: StopReason, task: Task, sample_id: int, metadata: dict[str, Any]
    ) -> Trajectory:
        """Ends the sample and returns its trajectory.

        Args:
            stop_reason: why the sample ended.
            task: the task. The tests of a programming task are not copied to the result.
            sample_id: index of the sample among the samples of the task.
            metadata: further data, as JSON values by name.
        """
        for segment in self._parser.finish():
            self._add(segment)
        calls = tuple(self.calls)
        return text_trajectory(task, sample_id, self._spans, stop_reason, calls, metadata)

    def _add(self, segment: Segment) -> None:
        role, text = segment.role, segment.body
        if role is not None:
            text = f"<{role}>{segment.body}" + (f"</{role}>" if segment.closed else "")
        self._spans.append(SegmentSpan(role, Author.POLICY, text, 0, 0))


def text_trajectory(
    task: Task,
    sample_id: int,
    spans: Sequence[SegmentSpan],
    stop_reason: StopReason = StopReason.ANSWER,
    tool_calls: tuple[ToolCall, ...] = (),
    metadata: Mapping[str, Any] | None = None,
) -> Trajectory:
    """Creates the trajectory, without a reward, of a sample whose token ids are unknown.

    Args:
        task: the task. The tests of a programming task are not copied to the result.
        sample_id: index of the sample among the samples of the task.
        spans: text of the trajectory.
        stop_reason: why the sample ended.
        tool_calls: tool calls of the sample.
        metadata: further data, as JSON values by name; None for none.
    """
    none = np.zeros(0)
    text, gold = "".join(span.text for span in spans), task.without_tests().gold
    return Trajectory(
        task.id, sample_id, task.question, task.protocol, none, none, none, text, tuple(spans),
        tool_calls, stop_reason, None, gold, dict(metadata or {}),
    )  # fmt: skip
