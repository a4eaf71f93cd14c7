"""A growing trajectory: tokens sampled by the policy, and answers of the environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from coa_jax.model.tool_chat import Frames
from coa_jax.protocol import BAD_CALL, THINK, Monitor, Parser, Protocol, Segment, make_parser
from coa_jax.rollout.cut import kept_spans
from coa_jax.rollout.detokenize import TextStream, TokenTable
from coa_jax.rollout.observation import REPLY, plain_frame
from coa_jax.trajectory import Author, SegmentSpan, StopReason, ToolCall, Trajectory


@dataclasses.dataclass(frozen=True)
class ToolRequest:
    """A request to run a tool: the policy has closed the tool's tag and waits for the observation.

    Attributes:
        tool, arguments: the call.
        error: observation to return at once, if the call is invalid.
    """

    tool: str
    arguments: str
    error: str = ""


class Episode:
    """Host-side record of one sample: append-only token ids with their authors.

    The parser reads the policy's text alone. Results of tools are appended as environment tokens
    and never parsed, so no tool text can open or close a tag, or answer the question.

    Attributes:
        tokens: the whole record.
        context: the tokens that the policy reads: all of them, until `cut` removes some.
        versions: (position, policy version) wherever the version changes, see `computed_by`.
        turn_over: whether an environment must answer the whole turn that has just ended.
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
            strict: whether the first broken rule of the protocol ends the episode.
            frames: text around tool results in a format of turns; None otherwise.
        """
        self.task_id, self.sample_id, self.question = task_id, sample_id, question
        self.protocol = protocol
        self.tokens: list[int] = list(prompt)
        self.context = self.tokens
        self._prompt_length = len(prompt)
        self.tool_calls: list[ToolCall] = []
        self._author: list[int] = [Author.PROMPT] * len(prompt)
        self._logp: list[float] = [0.0] * len(prompt)
        self.turn_over = False
        self._turn_text = 0  # policy characters before the current turn
        self._parser = make_parser(protocol)
        self._frames = frames
        self._asked: list[ToolRequest] = []  # calls of this turn without an observation
        self._stream = TextStream(table)
        self._end_tokens = end_tokens
        self.versions: list[tuple[int, int]] = []
        self._monitor = Monitor(protocol) if strict and protocol.roles else None
        self._policy_text = ""
        self._ends: list[tuple[int, int]] = []  # (policy characters so far, token index after)
        self._spans: list[SegmentSpan] = []
        self._emitted = 0  # policy characters that are in spans
        self._turn = 0  # policy tokens since the prompt or last observation
        self._taken = 0  # policy characters that take_text returned

    def feed(self, token: int, logp: float) -> ToolRequest | StopReason | None:
        """Appends one sampled token.

        Returns:
            A request once a tool's tag is closed, a stop reason once the episode is over, else
            None.
        """
        self.tokens.append(token)
        if self.context is not self.tokens:
            self.context.append(token)
        self._author.append(Author.POLICY)
        self._logp.append(logp)
        if token in self._end_tokens:
            return self._end_turn()
        text = self._stream.feed(token)
        self._policy_text += text
        self._ends.append((len(self._policy_text), len(self.tokens)))
        self._turn += 1
        return self._take(self._parser.feed(text))

    def _take(self, segments: Sequence[Segment]) -> ToolRequest | StopReason | None:
        """Processes completed segments; returns the same as `feed`."""
        broken = self._monitor is not None and self._monitor.update(self._parser, segments)
        for segment in segments:
            self._add_span(segment)
            if broken:
                continue
            if segment.role in self.protocol.tools or segment.role == BAD_CALL:
                request = self._request(segment)
                if self.protocol.format is None or not self.protocol.format.turns:
                    return request
                self._asked.append(request)  # until the turn has ended
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
            # The token that ends a turn has no text; it belongs to the text before it.
            self._spans[-1] = dataclasses.replace(self._spans[-1], end=len(self.tokens))
        return event or self.next_call() or StopReason.EOS

    def next_call(self) -> ToolRequest | None:
        """Returns the next call of the turn that has ended.

        Results are appended one after another.
        """
        return self._asked.pop(0) if self._asked else None

    @property
    def frame(self) -> tuple[str, str]:
        """Returns the text before and after the next observation."""
        if self.turn_over:
            return REPLY
        if self._frames is None:
            return plain_frame(self.protocol)
        head, between, tail = self._frames
        first = not self._spans or self._spans[-1].author == Author.POLICY
        return head if first else "", between if self._asked else tail

    def begin(self, prompt: Sequence[int], question: str) -> None:
        """Sets the prompt of an episode that was created without one; the record must be empty.

        Args:
            prompt: token ids of the prompt.
            question: question of the prompt; "" keeps the known question.
        """
        self.tokens.extend(prompt)
        self._prompt_length = len(prompt)
        self._author.extend([Author.PROMPT] * len(prompt))
        self._logp.extend([0.0] * len(prompt))
        self.question = question or self.question

    def end_turn(self) -> str:
        """Ends a whole turn, which the environment will answer.

        Returns the policy's text of the turn.
        """
        self._end_text()
        self.turn_over = True
        return self._policy_text[self._turn_text :]

    def computed_by(self, version: int) -> None:
        """Records the policy version of the forward passes from here on.

        An entry (position, version) means that this version computed the cache from the token
        before ``position`` on, and sampled the tokens from ``position`` on.
        """
        position = len(self.tokens) if self.versions else 0
        if self.versions and self.versions[-1] == (position, self.versions[-1][1]):
            self.versions.pop()  # that version sampled nothing
        if not self.versions or self.versions[-1][1] != version:
            self.versions.append((position, version))

    def take_text(self) -> str:
        """Returns the text that the policy wrote since the last call, for streaming."""
        text = self._policy_text[self._taken :]
        self._taken = len(self._policy_text)
        return text

    def observe(self, tokens: Sequence[int], text: str, call: ToolCall) -> None:
        """Appends the result of a tool, with its `frame`, as environment tokens.

        Text that the policy began after the tag of its call (a partial character or tag) ends here;
        at the end of a whole turn, a segment ends too.

        Args:
            tokens: ids of the result and its frame; if empty, the policy reads nothing.
            text: text of the result.
            call: record of the call.
        """
        self._end_text()
        self.tool_calls.append(call)
        if not tokens:
            return
        if self.turn_over:
            for segment in self._parser.finish():
                self._add_span(segment)
            if self.protocol.format is None:  # other formats track turns themselves
                self._parser = Parser(self.protocol, len(self._policy_text))
            self.turn_over = False
        self._parser.interrupt()
        self._add_rest()
        start = len(self.tokens)
        self.tokens.extend(tokens)
        if self.context is not self.tokens:
            self.context.extend(tokens)
        self._author.extend([Author.ENVIRONMENT] * len(tokens))
        self._logp.extend([0.0] * len(tokens))
        self._spans.append(
            SegmentSpan(
                self.protocol.observation,
                Author.ENVIRONMENT,
                text,
                start,
                len(self.tokens),
                call.observation if self.protocol.format is not None else None,
            )
        )
        self._turn, self._turn_text = 0, len(self._policy_text)
        if self._monitor is not None:
            self._monitor.observe(text)

    def cut(self, most: int) -> int:
        """Removes the oldest steps from the context, right after an observation.

        Args:
            most: maximum number of tokens of the context; see `cut.kept_spans`.

        Returns:
            The first position at which the context has a different token than before.
        """
        lengths = [span.end - span.start for span in self._spans]
        stays = kept_spans(self._spans, lengths, most - self._prompt_length)
        places = {*range(self._prompt_length)}
        places.update(place for span in stays for place in range(span.start, span.end))
        before = self.context
        self.context = [self.tokens[place] for place in sorted(places)]
        pairs = enumerate(zip(before, self.context, strict=False))
        same = min(len(before), len(self.context))
        return next((place for place, (old, new) in pairs if old != new), same)

    @property
    def turn_tokens(self) -> int:
        """Number of tokens that the policy wrote since the prompt or the last observation."""
        return self._turn

    @property
    def last_think(self) -> str:
        """Body of the last closed ``think``, or ""."""
        return self._last_body(THINK)

    @property
    def last_answer(self) -> str:
        """Body of the closed answer, or ""."""
        return self._last_body(self.protocol.answer)

    def _last_body(self, role: str) -> str:
        bodies = (span.body for span in reversed(self._spans) if span.role == role)
        return next((body for body in bodies if body), "")

    def finish(
        self, stop_reason: StopReason, gold: tuple[str, ...], metadata: dict[str, Any]
    ) -> Trajectory:
        """Returns the finished trajectory.

        Args:
            stop_reason: why the episode ended.
            gold: accepted answers.
            metadata: JSON values.
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
        """Ends the text; bytes of an incomplete character become replacement characters."""
        tail = self._stream.flush()
        if tail:
            self._policy_text += tail
            self._ends.append((len(self._policy_text), len(self.tokens)))
            for segment in self._parser.feed(tail):
                self._add_span(segment)

    def _add_span(self, segment: Segment) -> None:
        """Adds the part of a segment that no span has yet.

        A tool result may split a segment's text.
        """
        start = max(segment.start, self._emitted)
        if start < segment.end:
            whole = start == segment.start and segment.role is not None
            content = segment.body if whole and self.protocol.format is not None else None
            self._append_policy(segment.role if whole else None, start, segment.end, content)

    def _add_rest(self) -> None:
        """Adds policy text outside of closed segments, such as a line end after a tag."""
        if self._emitted < len(self._policy_text):
            self._append_policy(None, self._emitted, len(self._policy_text))

    def _append_policy(
        self, role: str | None, start: int, end: int, content: str | None = None
    ) -> None:
        self._spans.append(
            SegmentSpan(
                role,
                Author.POLICY,
                self._policy_text[start:end],
                self._token_of(start),
                self._token_of(end - 1) + 1,
                content,
            )
        )
        self._emitted = end

    def _token_of(self, character: int) -> int:
        """Returns the index of the token that completes a character of the policy's text."""
        low, high = 0, len(self._ends) - 1
        while low < high:
            middle = (low + high) // 2
            if self._ends[middle][0] > character:
                high = middle
            else:
                low = middle + 1
        return self._ends[low][1] - 1
