"""Defines the samples that a server runs, which report their progress to the client."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

from coa_jax.data.trajectory import Author, StopReason, ToolCall, Trajectory
from coa_jax.protocol import get_protocol
from coa_jax.rollout.episode import Episode, ToolRequest
from coa_jax.rollout.episodes import TextEpisodes
from coa_jax.rollout.request import Request
from coa_jax.serve.score import Scored


@dataclasses.dataclass(frozen=True)
class Event:
    """Progress of one sample of a request.

    Attributes:
        sample: index of the sample in the request.
        text: new text of the sample, which consists of whole characters.
        tokens: tokens sampled since the sample's last event, with the log-probability at which each
            was sampled. They may have more bytes than ``text``, because a character may consist of
            several tokens.
        author: who wrote ``text``, the policy or a tool.
        call: tool call whose observation is in ``text``; None if the policy wrote ``text``.
        finish: reason why the sample ended, ``stop``, ``length``, ``cancelled`` or ``fault``, in
            its last event; None in other events.
        stop: stop string that ended the sample; None if no stop string ended it.
        trajectory: the whole trajectory in the sample's last event; None in other events.
    """

    sample: int
    text: str = ""
    tokens: tuple[Scored, ...] = ()
    author: Author = Author.POLICY
    call: ToolCall | None = None
    finish: str | None = None
    stop: str | None = None
    trajectory: Trajectory | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ServedRequest(Request):
    """A client's request for completions, in the form that the rollout loop takes.

    Attributes:
        events: queue of the events of the request's samples. None in the queue means that the
            rollout loop has ended.
        agent: whether tags that the policy writes call tools. If False, the samples are completions
            without tools, to which the budgets of agents do not apply.
        stops: strings that end a completion; empty if ``agent`` is True.
        keep_stop: whether the text of a completion includes the stop string that ended it.
        calls: whether a completion may call functions of the client.
        name: random name, which becomes part of the ids of the function calls.
    """

    events: asyncio.Queue[Event | None] = dataclasses.field(default_factory=asyncio.Queue)
    agent: bool = False
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    calls: bool = False
    name: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))

    # Requests are compared by identity, because two clients may send equal requests.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class ServedSample(Episode):
    """A sample that sends its progress to the client.

    A sample of the agent writes tags, and the server runs the tools of these tags. Any other sample
    is a completion without tools. It ends at a stop string, an end token or its maximum length.
    """

    def __init__(self, served: ServedRequest, **options: Any):
        """Starts a sample.

        Args:
            served: the request in the rollout loop.
            options: arguments of `Episode`.
        """
        super().__init__(**options)
        self._served = served
        self._stops = StopStrings(served.stops, keep=served.keep_stop)

    def _send(self, text: str = "", **fields: Any) -> None:
        self._served.events.put_nowait(Event(self.sample_id, text, **fields))

    def feed(self, token: int, logp: float) -> ToolRequest | StopReason | None:
        """Adds a sampled token, and sends new text to the client.

        Arguments and result are those of `Episode.feed`. In a sample without tools, tags have no
        effect, and a stop string ends the sample.
        """
        event = super().feed(token, logp)
        if self._served.agent:
            if text := self.take_text():
                self._send(text)
            return event
        if event is StopReason.EOS:
            return event  # the end token is not part of the text
        self._send(self._stops.feed(self.take_text()), tokens=(Scored(token, logp),))
        return None if self._stops.match is None else StopReason.EOS

    def observe(self, tokens: Sequence[int], text: str, call: ToolCall) -> None:
        """Adds an observation, and sends its text to the client.

        The arguments are those of `Episode.observe`.
        """
        super().observe(tokens, text, call)
        self._send(text, author=Author.ENVIRONMENT, call=call)

    def finish(
        self, stop_reason: StopReason, gold: tuple[str, ...], metadata: dict[str, Any]
    ) -> Trajectory:
        """Ends the sample, and sends the last part of the streamed answer to the client.

        Arguments and result are those of `Episode.finish`.
        """
        trajectory = super().finish(stop_reason, gold, metadata)
        rest = self._stops.feed(self.take_text()) + self._stops.flush()
        finish, stop = finish_reason(stop_reason), self._stops.match
        self._send(rest, finish=finish, stop=stop, trajectory=trajectory)
        return trajectory


@dataclasses.dataclass(frozen=True)
class ServedEpisodes(TextEpisodes):
    """Creates the samples of a server, see `rollout.episodes.Episodes`."""

    def begin(self, request: Request, sample: int) -> ServedSample:
        """Starts a sample of a request."""
        assert isinstance(request, ServedRequest)
        agent, task = request.agent, request.task
        protocol = get_protocol(task.protocol)
        if not agent:
            # Without a conversation format, a token that ends a turn always ends the text.
            protocol = dataclasses.replace(protocol, format=None)
        return ServedSample(
            request,
            task_id=task.id,
            sample_id=sample,
            question=task.question if agent else "",
            protocol=protocol,
            prompt=request.prompt,
            table=self.table,
            end_tokens=self.end_tokens,
            strict=self.strict and agent,
            frames=self.frames(request),
        )


def finish_reason(reason: StopReason) -> str:
    """Converts the stop reason of a sample to OpenAI's finish reason.

    OpenAI has no finish reason for a cancelled sample or a broken model. The result is then
    ``cancelled`` or ``fault``. A client that requested no stream gets an error response instead.
    """
    if reason in (StopReason.CANCELLED, StopReason.FAULT):
        return str(reason)
    return "stop" if reason in (StopReason.EOS, StopReason.ANSWER) else "length"


# --- stop strings -------------------------------------------------------------------------


class StopStrings:
    """Finds the first stop string in a text, and holds back text that may begin a stop string.

    If several stop strings end at the same character, the longest of them is found.
    """

    def __init__(self, stops: Sequence[str] = (), *, keep: bool = False):
        """Starts with an empty text.

        Args:
            stops: nonempty strings that end the text.
            keep: whether the returned text includes the stop string that was found.
        """
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=1)
        self._keep = keep
        self._pending = ""
        self.match: str | None = None

    def feed(self, text: str) -> str:
        """Adds a piece of text; returns the text that can no longer be part of a stop string.

        After the object has found a stop string, the method always returns "".
        """
        if self.match is not None:
            return ""
        self._pending += text
        # The stop string that ends first counts.
        ends = {s: self._pending.find(s) + len(s) for s in self._stops if s in self._pending}
        if ends:
            self.match = min(ends, key=lambda stop: (ends[stop], -len(stop)))
            end = ends[self.match] - (0 if self._keep else len(self.match))
            out, self._pending = self._pending[:end], ""
            return out
        out = self._pending[: len(self._pending) - self._prefix()]
        self._pending = self._pending[len(out) :]
        return out

    def flush(self) -> str:
        """Ends the text; returns the part that might have been the start of a stop string."""
        out, self._pending = self._pending, ""
        return out

    def _prefix(self) -> int:
        """Returns the number of characters at the end of the text that may begin a stop string."""
        for size in range(min(self._longest - 1, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-size:]) for stop in self._stops):
                return size
        return 0
