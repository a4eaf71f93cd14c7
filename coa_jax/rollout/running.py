"""A sample in a slot, and how far its plan lets it go with the published parameters."""

from __future__ import annotations

import asyncio
import dataclasses

from coa_jax.rollout.episode import Episode, ToolRequest
from coa_jax.rollout.request import Request
from coa_jax.tools.base import Observation


@dataclasses.dataclass
class Running:
    """A sample in a slot.

    Attributes:
        request, episode, slot: the sample.
        began: time of the event loop at which it began.
        paused: whether it waits for the parameters of a later version, by its plan.
        tool: the call that runs, with the time at which it began.
        tool_request: what the policy asked of the tool.
        tool_seconds: that its calls have taken.
    """

    request: Request
    episode: Episode
    slot: int
    began: float
    paused: bool = False
    tool: asyncio.Task[tuple[Observation, float]] | None = None
    tool_request: ToolRequest | None = None
    tool_seconds: float = 0.0

    def must_pause(self, version: int | None) -> bool:
        """Whether it needs parameters that are later than a version, by its plan."""
        tokens = len(self.episode.tokens)
        return any(at <= tokens and later > (version or 0) for at, later in self.request.plan)


def limit_now(request: Request, limit: int, version: int | None) -> int:
    """Tokens that a sample may have before it needs parameters later than a version.

    Args:
        request: the sample's; its plan and its end are read.
        limit: tokens of the whole trajectory.
        version: policy version that samples.
    """
    later = [position for position, planned in request.plan if planned > (version or 0)]
    end = [request.ends[0]] if request.ends else []
    return min([limit, *later[:1], *end])
