"""Builds a trajectory from the sampled tokens and the answers of the environment."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from coa_jax.data.trajectory import Author, SegmentSpan, StopReason, ToolCall, Trajectory
from coa_jax.model.encode import plain_frame
from coa_jax.model.tool_chat import Frames
from coa_jax.protocol import BAD_CALL, Monitor, Parser, Protocol, Segment, make_parser
from coa_jax.rollout.context_truncation import kept_spans
from coa_jax.rollout.detokenize import TextStream, TokenTable


@dataclasses.dataclass(frozen=True)
class ToolRequest:
    """A tool call that the policy has written. The policy now waits for the observation.

    Attributes:
        tool: tag of the tool.
        arguments: arguments of the call, as the policy wrote them.
        error: text of the observation for an invalid call, which is not run; "" for a valid call.
    """

    tool: str
    arguments: str
    error: str = ""


class Episode:
    """The record of a running sample on the host, from which `finish` makes the trajectory.

    An episode holds the token ids of the sample with the author of each token.

    Tokens are only appended, never changed. The parser reads only the text of the policy. Results
    of tools are appended as environment tokens and never parsed, so that the text of a tool cannot
    open or close a tag, or answer the question.

    Attributes:
        tokens: ids of all tokens: prompt, policy and environment.
        context: ids of the tokens that the policy reads. These are all tokens, unless `cut` has
            removed some from the context.
        versions: (position, policy version) pairs. Each policy version sampled the tokens from its
            position up to the position of the next pair, see `computed_by`.
        turn_over: whether the policy has ended a whole turn that an environment must answer.
        turn_tokens: number of tokens that the policy wrote since the prompt or the last
            observation.
    """

    def __init__(
        self,
        *,
        task_id: str,
        sample_id: int,
        question: str,
        protocol: Protocol,
        prompt: Sequence[int],
        table: TokenTable,
        end_tokens: frozenset[int],
        strict: bool = False,
        frames: Frames | None = None,
        reply: tuple[str, str] = ("", ""),
    ):
        """Starts the episode of a sample.

        Args:
            task_id: id of the task.
            sample_id: number of the sample.
            question: question of the task.
            protocol: protocol of the sample.
            prompt: token ids of the prompt.
            table: bytes of each token.
            end_tokens: ids of the tokens that end a turn.
            strict: whether the episode ends as soon as it violates a rule of its protocol.
            frames: text around tool results that the chat template writes; None for a format in
                which tool results are part of the assistant message.
            reply: text around an environment's answer to a whole turn, see `encode.reply_frame`.
        """
        self.task_id, self.sample_id, self.question = task_id, sample_id, question
        self.protocol = protocol
        self.tokens: list[int] = []
        self.context = self.tokens
        self.tool_calls: list[ToolCall] = []
        self._author: list[int] = []
        self._logp: list[float] = []
        self.begin(prompt, question)
        self.turn_over = False
        self.turn_tokens = 0
        self._turn_text = 0  # number of policy characters before the current turn
        self._parser = make_parser(protocol)
        self._frames, self._reply = frames, reply
        self._asked: list[ToolRequest] = []  # calls of this turn without an observation
        self._stream = TextStream(table)
        self._end_tokens = end_tokens
        self.versions: list[tuple[int, int]] = []
        self._monitor = Monitor(protocol) if strict and protocol.roles else None
        self._policy_text = ""
        # After each token with text: (number of policy characters, number of tokens).
        self._ends: list[tuple[int, int]] = []
        self._spans: list[SegmentSpan] = []
        self._emitted = 0  # number of policy characters that are in spans
        self._taken = 0  # number of policy characters that take_text has returned

    def feed(self, token: int, logp: float) -> ToolRequest | StopReason | None:
        """Appends a sampled token.

        Args:
            token: id of the token.
            logp: log-probability with which the token was sampled.

        Returns:
            A `ToolRequest` if the token completes a tool call, a stop reason if the token ends the
            episode, else None.
        """
        self._append((token,), Author.POLICY, logp)
        if token in self._end_tokens:
            return self._end_turn()
        text = self._stream.feed(token)
        self._policy_text += text
        self._ends.append((len(self._policy_text), len(self.tokens)))
        self.turn_tokens += 1
        return self._take(self._parser.feed(text))

    def _take(self, segments: Sequence[Segment]) -> ToolRequest | StopReason | None:
        """Adds completed segments to the record, and returns the event that `feed` returns."""
        broken = self._monitor is not None and self._monitor.update(self._parser, segments)
        for segment in segments:
            self._add_span(segment)
            if broken:
                continue
            if segment.role in self.protocol.tools or segment.role == BAD_CALL:
                request = self._request(segment)
                if self.protocol.format is None or not self.protocol.format.turns:
                    return request
                self._asked.append(request)  # in this format the turn must end first
            if segment.role == self.protocol.answer:
                return StopReason.ANSWER
        return StopReason.VIOLATION if broken else None

    def _request(self, segment: Segment) -> ToolRequest:
        form, role = self.protocol.format, str(segment.role)
        wrong = form.error(self.protocol, segment) if form and role == BAD_CALL else ""
        return ToolRequest(role, segment.body, wrong)

    def _end_turn(self) -> ToolRequest | StopReason:
        if self.protocol.format is None:
            return StopReason.EOS
        self._end_text()
        event = self._take(self._parser.end_turn())
        if self._spans and self._spans[-1].author == Author.POLICY:
            # The token that ends a turn has no text, so it is added to the preceding span.
            self._spans[-1] = dataclasses.replace(self._spans[-1], end=len(self.tokens))
        return event or self.next_call() or StopReason.EOS

    def next_call(self) -> ToolRequest | None:
        """Returns the next tool call of the turn that has just ended; None if no call is left.

        A turn may contain several calls. They run one after another, because the result of each is
        appended before the next call begins.
        """
        return self._asked.pop(0) if self._asked else None

    @property
    def frame(self) -> tuple[str, str]:
        """Text to put before and after the next observation, such as the tags of an observation."""
        if self.turn_over:
            return self._reply
        if self._frames is None:
            return plain_frame(self.protocol)
        head, between, tail = self._frames
        first = not self._spans or self._spans[-1].author == Author.POLICY
        return head if first else "", between if self._asked else tail

    def begin(self, prompt: Sequence[int], question: str) -> None:
        """Sets the prompt of an episode that was created without a prompt.

        Args:
            prompt: token ids of the prompt.
            question: question in the prompt; "" keeps the question of the task.
        """
        self._append(prompt, Author.PROMPT)
        self._prompt_length = len(prompt)
        self.question = question or self.question

    def _append(self, tokens: Sequence[int], author: Author, logp: float = 0.0) -> None:
        self.tokens.extend(tokens)
        if self.context is not self.tokens:
            self.context.extend(tokens)
        self._author.extend([author] * len(tokens))
        self._logp.extend([logp] * len(tokens))

    def end_turn(self) -> str:
        """Marks the end of a whole turn of the policy, which the next observation answers.

        Returns:
            The text that the policy wrote in this turn.
        """
        self._end_text()
        self.turn_over = True
        return self._policy_text[self._turn_text :]

    def computed_by(self, version: int) -> None:
        """Records which policy version computes the next forward passes of the sample.

        If the version has changed, the method adds (position, version) to ``versions``. The first
        position is 0, a later one the present number of tokens. The version samples the tokens from
        this position on. The KV cache has its keys and values from ``position - 1`` on, because the
        forward pass that samples a token computes those of the token before.
        """
        position = len(self.tokens) if self.versions else 0
        if self.versions and self.versions[-1] == (position, self.versions[-1][1]):
            self.versions.pop()  # the earlier version at this position has sampled no token
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((position, version))

    def take_text(self) -> str:
        """Returns the text that the policy wrote since the last call, for showing live text."""
        text = self._policy_text[self._taken :]
        self._taken = len(self._policy_text)
        return text

    def observe(self, tokens: Sequence[int], text: str, call: ToolCall) -> None:
        """Appends the result of a tool call as environment tokens.

        The last token of the call may end with the beginning of a tag or character. This beginning
        becomes plain text. If the call was a whole turn, a segment that is still open ends here.

        Args:
            tokens: token ids of the result, including the `frame` around the result. If empty, the
                policy gets no observation.
            text: text of the result, including the frame.
            call: record of the call.
        """
        self._end_text()
        self.tool_calls.append(call)
        if not tokens:
            return
        if self.turn_over:
            for segment in self._parser.finish():
                self._add_span(segment)
            if self.protocol.format is None:  # the parsers of other formats know turns
                self._parser = Parser(self.protocol, len(self._policy_text))
            self.turn_over = False
        self._parser.interrupt()
        self._add_rest()
        start, role = len(self.tokens), self.protocol.observation
        self._append(tokens, Author.ENVIRONMENT)
        content = call.observation if self.protocol.format is not None else None
        self._spans.append(
            SegmentSpan(role, Author.ENVIRONMENT, text, start, len(self.tokens), content)
        )
        self.turn_tokens, self._turn_text = 0, len(self._policy_text)
        if self._monitor is not None:
            self._monitor.observe(text)

    def cut(self, most: int) -> int:
        """Removes the oldest steps from the context, to make room for another turn.

        A step is the text of the policy up to a tool call, and the observation. This method must be
        called directly after `observe`. The trajectory keeps all tokens.

        Args:
            most: maximum number of tokens of the context, see `context_truncation.kept_spans`.

        Returns:
            The first position of the context whose token has changed. The KV cache must be computed
            again from this position on.
        """
        lengths = [span.end - span.start for span in self._spans]
        stays = kept_spans(self._spans, lengths, most - self._prompt_length)
        places = {*range(self._prompt_length)}
        places.update(index for span in stays for index in range(span.start, span.end))
        before = self.context
        self.context = [self.tokens[index] for index in sorted(places)]
        pairs = enumerate(zip(before, self.context, strict=False))
        same = min(len(before), len(self.context))
        return next((index for index, (old, new) in pairs if old != new), same)

    def last_body(self, role: str) -> str:
        """Returns the text of the last closed segment of a role, skipping empty segments.

        Args:
            role: name of the segment's tag, such as ``think``.

        Returns:
            The text inside the tags; "" if there is no such segment.
        """
        bodies = (span.body for span in reversed(self._spans) if span.role == role)
        return next((body for body in bodies if body), "")

    def finish(
        self, stop_reason: StopReason, gold: tuple[str, ...], metadata: dict[str, Any]
    ) -> Trajectory:
        """Ends the episode and returns its trajectory, without a reward.

        Args:
            stop_reason: why the episode ended.
            gold: accepted answers of the task.
            metadata: metadata of the trajectory, as JSON values.
        """
        self._end_text()
        for segment in self._parser.finish():
            self._add_span(segment)
        self._add_rest()
        return Trajectory(
            task_id=self.task_id,
            sample_id=self.sample_id,
            question=self.question,
            protocol=self.protocol.name,
            tokens=np.asarray(self.tokens, np.int32),
            author=np.asarray(self._author, np.uint8),
            logp=np.asarray(self._logp, np.float32),
            text="".join(span.text for span in self._spans),
            segments=tuple(self._spans),
            tool_calls=tuple(self.tool_calls),
            stop_reason=stop_reason,
            reward=None,
            gold=gold,
            metadata=metadata,
        )

    def _end_text(self) -> None:
        """Ends the text of the policy. An incomplete character becomes a replacement character."""
        tail = self._stream.flush()
        if tail:
            self._policy_text += tail
            self._ends.append((len(self._policy_text), len(self.tokens)))
            for segment in self._parser.feed(tail):
                self._add_span(segment)

    def _add_span(self, segment: Segment) -> None:
        """Adds a span for the part of a segment that no span contains yet.

        If the result of a tool splits a segment, an earlier span contains the first part.
        """
        start = max(segment.start, self._emitted)
        if start < segment.end:
            whole = start == segment.start and segment.role is not None
            content = segment.body if whole and self.protocol.format is not None else None
            self._append_policy(segment.role if whole else None, start, segment.end, content)

    def _add_rest(self) -> None:
        """Adds a span for policy text outside closed segments, such as a line end after a tag."""
        if self._emitted < len(self._policy_text):
            self._append_policy(None, self._emitted, len(self._policy_text))

    def _append_policy(
        self, role: str | None, start: int, end: int, content: str | None = None
    ) -> None:
        first, last = self._token_of(start), self._token_of(end - 1)
        text = self._policy_text[start:end]
        self._spans.append(SegmentSpan(role, Author.POLICY, text, first, last + 1, content))
        self._emitted = end

    def _token_of(self, character: int) -> int:
        """Returns the index of the token that completes a character of the policy's text."""
        index = bisect.bisect_right(self._ends, character, key=lambda end: end[0])
        return self._ends[min(index, len(self._ends) - 1)][1] - 1
