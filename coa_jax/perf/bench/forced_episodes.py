"""Episodes of the benchmarks: a workload fixes their lengths, tool calls and observations.

The agent loop of training runs these episodes. They differ from the episodes of training in only
three points: what ends a turn, what a tool does, and which token ids a tool returns. Sampled tokens
are still detokenised and parsed, because the host does this work during training too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Iterator

from coa_jax.data.trajectory import StopReason
from coa_jax.engine.config import SamplingParams
from coa_jax.perf.bench.workload import Script, Workload
from coa_jax.protocol import get_protocol
from coa_jax.rollout.detokenize import TokenTable
from coa_jax.rollout.episode import Episode, ToolRequest
from coa_jax.rollout.episodes import Episodes
from coa_jax.rollout.request import Request
from coa_jax.tasks import Task
from coa_jax.tools.base import Observation, ToolContext

_PROTOCOL = "generalist"


class _Words(TokenTable):
    """A token table in which every token is the same short word.

    A sampled text therefore never contains a tag.
    """

    def __init__(self) -> None:
        pass

    def __getitem__(self, token_id: int) -> bytes:
        return b"word"


class ForcedEpisode(Episode):
    """An episode whose turns end after the number of tokens that a workload fixes.

    So the number of turns and their lengths do not depend on the tokens that the policy samples.
    """

    def __init__(self, request: Request, sample: int, script: Script):
        """Starts the episode of a sample.

        Args:
            request: request of the sample.
            sample: index of the sample.
            script: lengths, calls and observations of the sample.
        """
        super().__init__(
            task_id=request.task.id,
            sample_id=sample,
            question=request.task.question,
            protocol=get_protocol(_PROTOCOL),
            prompt=request.prompt,
            table=_Words(),
            end_tokens=frozenset(),
        )
        self.script = script

    def feed(self, token: int, logp: float) -> ToolRequest | StopReason | None:
        """Adds a token, see `Episode.feed`.

        The turn ends when it has as many tokens as ``script.lengths`` says. The last turn ends the
        episode; every other turn ends with a tool call.
        """
        super().feed(token, logp)
        call = len(self.tool_calls)
        if self.turn_tokens < self.script.lengths[call]:
            return None
        if call == len(self.script.calls):
            return StopReason.EOS
        return ToolRequest(Sleep.name, repr(self.script.calls[call].seconds))


class ForcedEpisodes(Episodes):
    """Base class for running the samples of a workload in the agent loop of training."""

    def encode(self, episode: Episode, text: str, room: int) -> tuple[list[int], str]:
        """Returns the workload's observation in place of the tool's text.

        Args:
            episode: the episode, which knows its next observation.
            text: text of the tool, which does not change the token ids.
            room: number of tokens for which the slot has room. It is ignored, because every rollout
                of the workload fits into a slot.

        Returns:
            The token ids of the observation, and ``text``.
        """
        assert isinstance(episode, ForcedEpisode)
        return list(episode.script.calls[len(episode.tool_calls)].observation), text

    def frame(self, episode: Episode) -> int:
        """Returns 0, because the workload's observations need no tokens around them."""
        return 0


@dataclasses.dataclass(frozen=True)
class Rollouts(ForcedEpisodes):
    """The rollouts of a workload, for the agent loop (see `coa_jax.rollout.episodes.Episodes`).

    Attributes:
        workload: the workload, which fixes the lengths of turns, the tool calls and the
            observations.
        temperature: sampling temperature.
    """

    workload: Workload
    temperature: float = 1.0

    def requests(self) -> Iterator[Request]:
        """Yields a request per prompt of the workload.

        The sample numbers of a request are the indices, in ``workload.scripts``, of the rollouts
        with this prompt.
        """
        for number, prompt in enumerate(self.workload.prompts):
            scripts = enumerate(self.workload.scripts)
            samples = tuple(i for i, script in scripts if script.prompt == number)
            task = Task(f"prompt-{number}", "", _PROTOCOL, (), "bench")
            sampling = SamplingParams(self.temperature)
            yield Request(task, prompt, self.workload.seed, number, samples, sampling)

    def begin(self, request: Request, sample: int) -> Episode:
        """Starts the episode of a rollout, see `Episodes.begin`."""
        return ForcedEpisode(request, sample, self.workload.scripts[sample])


class Sleep:
    """A tool that sleeps instead of working; the argument of a call is the number of seconds."""

    name = "sleep"
    deadline = math.inf

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Sleeps and returns an empty observation; any number of calls may run at the same time."""
        began = time.monotonic()
        await asyncio.sleep(float(arguments))
        return Observation("", True, "ok", time.monotonic() - began)
