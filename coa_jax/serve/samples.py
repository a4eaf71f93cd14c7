"""Defines the samples that a server runs, which report their progress to the client."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

from coa_jax.protocol import get_protocol
from coa_jax.rollout.detokenize import TokenTable
from coa_jax.rollout.episode import Episode, ToolRequest
from coa_jax.rollout.episodes import TextEpisodes
from coa_jax.rollout.request import Request
from coa_jax.serve.stops import StopStrings
from coa_jax.trajectory import Author, StopReason, ToolCall, Trajectory


@dataclasses.dataclass(frozen=True)
class Token:
    """A sampled token.

    Attributes:
        id: token id.
        data: bytes of the token.
        logp: natural logarithm of the probability with which the token was sampled.
    """

    id: int
    data: bytes
    logp: float


@dataclasses.dataclass(frozen=True)
class Event:
    """Progress of one sample of a request.

    Attributes:
        sample: index of the sample in the request.
        text: new text of the sample, which consists of whole characters.
        tokens: tokens sampled since the sample's last event. They may have more bytes than
            ``text``, because a character may consist of several tokens.
        author: author of ``text``.
        call: tool call that the observation ``text`` answers; None if ``text`` is not an
            observation.
        finish: reason why the sample ended, ``stop``, ``length`` or ``cancelled``, in its last
            event; None in other events.
        stop: stop string that ended the sample; None if no stop string ended it.
        trajectory: the whole trajectory in the sample's last event; None in other events.
    """

    sample: int
    text: str = ""
    tokens: tuple[Token, ...] = ()
    author: Author = Author.POLICY
    call: ToolCall | None = None
    finish: str | None = None
    stop: str | None = None
    trajectory: Trajectory | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Visit(Request):
    """The request of a client, in the form that the rollout loop takes.

    Attributes:
        events: queue that receives the events of the request's samples.
        agent: whether tags that the policy writes call tools. If False, the samples are completions
            without tools, to which the budgets of agents do not apply.
        stops: stop strings, which end a completion.
        keep_stop: whether the text of a completion includes the stop string that ended it.
        calls: whether a completion may call functions of the client.
    """

    events: asyncio.Queue[Event] = dataclasses.field(default_factory=asyncio.Queue)
    agent: bool = False
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    calls: bool = False

    # Requests are compared by identity, because two clients may send equal requests.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Completion(Episode):
    """A sample without tools; it ends at a stop string, an end token or its maximum length."""

    def __init__(self, visit: Visit, sample: int, table: TokenTable, ends: frozenset[int]):
        """Starts a sample.

        Args:
            visit: the request in the rollout loop.
            sample: index of the sample in the request.
            table: bytes of each token id.
            ends: ids of the tokens that end the text.
        """
        super().__init__(
            task_id=visit.task.id,
            sample_id=sample,
            question="",
            # There is no conversation format, so a token that ends a turn always ends the text.
            protocol=dataclasses.replace(get_protocol(visit.task.protocol), format=None),
            prompt=visit.prompt,
            table=table,
            end_tokens=ends,
        )
        self._visit, self._table = visit, table
        self._stops = StopStrings(visit.stops, keep=visit.keep_stop)

    def feed(self, token: int, logp: float) -> ToolRequest | StopReason | None:
        """Adds a sampled token like `Episode.feed`, except that protocol tags have no effect."""
        event = super().feed(token, logp)
        if event is StopReason.EOS:
            return event  # the end token is not part of the text
        text = self._stops.feed(self.take_text())
        sampled = Token(token, self._table[token], logp)
        self._visit.events.put_nowait(Event(self.sample_id, text, (sampled,)))
        return None if self._stops.found is None else StopReason.EOS

    def finish(
        self, stop_reason: StopReason, gold: tuple[str, ...], metadata: dict[str, Any]
    ) -> Trajectory:
        """Ends the sample like `Episode.finish`, and sends its last event to the client."""
        trajectory = super().finish(stop_reason, gold, metadata)
        rest = self._stops.feed(self.take_text()) + self._stops.flush()
        self._visit.events.put_nowait(
            Event(
                self.sample_id,
                rest,
                finish=finish_reason(stop_reason),
                stop=self._stops.found,
                trajectory=trajectory,
            )
        )
        return trajectory


class Agent(Episode):
    """A sample whose tags call tools; its parts are sent to the client while they are written."""

    def __init__(self, visit: Visit, episode_options: dict[str, Any]):
        super().__init__(**episode_options)
        self._visit = visit

    def feed(self, token: int, logp: float) -> ToolRequest | StopReason | None:
        """Adds a sampled token, like `Episode.feed`, and sends new text to the client."""
        event = super().feed(token, logp)
        self._tell()
        return event

    def observe(self, tokens: Sequence[int], text: str, call: ToolCall) -> None:
        """Adds an observation, like `Episode.observe`, and sends it to the client."""
        super().observe(tokens, text, call)
        event = Event(self.sample_id, text, author=Author.ENVIRONMENT, call=call)
        self._visit.events.put_nowait(event)

    def finish(
        self, stop_reason: StopReason, gold: tuple[str, ...], metadata: dict[str, Any]
    ) -> Trajectory:
        """Ends the sample like `Episode.finish`, and sends its last event to the client."""
        trajectory = super().finish(stop_reason, gold, metadata)
        self._tell()
        reason = finish_reason(stop_reason)
        event = Event(self.sample_id, finish=reason, trajectory=trajectory)
        self._visit.events.put_nowait(event)
        return trajectory

    def _tell(self) -> None:
        if text := self.take_text():
            self._visit.events.put_nowait(Event(self.sample_id, text))


@dataclasses.dataclass(frozen=True)
class ServedEpisodes(TextEpisodes):
    """Creates the samples of both kinds, see `coa_jax.rollout.episodes.Episodes`."""

    def begin(self, request: Request, sample: int) -> Episode:
        """Starts a sample of a request, which is an `Agent` or a `Completion`."""
        assert isinstance(request, Visit)
        if not request.agent:
            return Completion(request, sample, self.table, self.end_tokens)
        options = {
            "task_id": request.task.id,
            "sample_id": sample,
            "question": request.task.question,
            "protocol": get_protocol(request.task.protocol),
            "prompt": request.prompt,
            "table": self.table,
            "end_tokens": self.end_tokens,
            "strict": self.strict,
            "frames": self.frames(request),
        }
        return Agent(request, options)


def finish_reason(reason: StopReason) -> str:
    """Converts the stop reason of a sample to OpenAI's finish reason."""
    if reason is StopReason.CANCELLED:
        return "cancelled"
    return "stop" if reason in (StopReason.EOS, StopReason.ANSWER) else "length"
