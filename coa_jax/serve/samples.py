"""The kinds of samples that a server runs; each reports its progress to its client."""

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
        data: its bytes.
        logp: natural logarithm of the probability under which it was sampled.
    """

    id: int
    data: bytes
    logp: float


@dataclasses.dataclass(frozen=True)
class Event:
    """Progress of a sample of a request.

    Attributes:
        sample: number of the sample.
        text: new text of the sample; whole characters.
        tokens: tokens sampled since the last event; their bytes may be ahead of the text.
        author: author of the text.
        call: call that the text answers, in an agent's trajectory.
        finish: ``stop``, ``length`` or ``cancelled`` in the last event of the sample, else None.
        stop: the stop string that ended it, if one did.
        trajectory: the whole trajectory, in the last event.
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
    """A request of a client.

    Attributes:
        events: queue for the events of its samples.
        agent: whether the policy's tags call tools. Otherwise the samples are plain completions,
            and the budgets of agents do not apply.
        stops: strings that end a completion.
        keep_stop: whether a completion's text includes the string that ended it.
        calls: whether a completion may call functions of the client.
    """

    events: asyncio.Queue[Event] = dataclasses.field(default_factory=asyncio.Queue)
    agent: bool = False
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    calls: bool = False

    # Two clients may send equal requests.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Completion(Episode):
    """A sample without tools, which ends at a stop string, an end token or its limit."""

    def __init__(self, visit: Visit, sample: int, table: TokenTable, ends: frozenset[int]):
        """Starts a sample.

        Args:
            visit: the client's request in the rollout loop.
            sample: number of the sample.
            table: bytes of each token.
            ends: ids of the tokens that end the text.
        """
        super().__init__(
            task_id=visit.task.id,
            sample_id=sample,
            question="",
            # No conversation format: a token that ends a turn ends the text, whatever the text
            # contains.
            protocol=dataclasses.replace(get_protocol(visit.task.protocol), format=None),
            prompt=visit.prompt,
            table=table,
            end_tokens=ends,
        )
        self._visit, self._table = visit, table
        self._stops = StopStrings(visit.stops, keep=visit.keep_stop)

    def feed(self, token: int, logp: float) -> ToolRequest | StopReason | None:
        """See `Episode.feed`; the tags of the protocol have no effect."""
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
        """See `Episode.finish`."""
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
    """A sample whose tags call tools; its client receives every part as it is written."""

    def __init__(self, visit: Visit, episode_options: dict[str, Any]):
        super().__init__(**episode_options)
        self._visit = visit

    def feed(self, token: int, logp: float) -> ToolRequest | StopReason | None:
        """See `Episode.feed`."""
        event = super().feed(token, logp)
        self._tell()
        return event

    def observe(self, tokens: Sequence[int], text: str, call: ToolCall) -> None:
        """See `Episode.observe`."""
        super().observe(tokens, text, call)
        event = Event(self.sample_id, text, author=Author.ENVIRONMENT, call=call)
        self._visit.events.put_nowait(event)

    def finish(
        self, stop_reason: StopReason, gold: tuple[str, ...], metadata: dict[str, Any]
    ) -> Trajectory:
        """See `Episode.finish`."""
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
    """Completions and agents together (see `coa_jax.rollout.episodes.Episodes`)."""

    def begin(self, request: Request, sample: int) -> Episode:
        """See `Episodes`."""
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
    """Returns OpenAI's finish reason for the end of a sample."""
    if reason is StopReason.CANCELLED:
        return "cancelled"
    return "stop" if reason in (StopReason.EOS, StopReason.ANSWER) else "length"
