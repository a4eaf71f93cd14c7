"""A sample in a slot, and how far its plan lets it go with the published parameters."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.environments.base import ANSWER, TURN
from coa_jax.environments.session import ToolLoop
from coa_jax.rollout.episode import Episode, ToolRequest
from coa_jax.rollout.request import Request, RolloutConfig, tool_context
from coa_jax.tools.base import Observation, ToolContext
from coa_jax.trajectory import StopReason, ToolCall


@dataclasses.dataclass
class Running:
    """A sample in a slot.

    Attributes:
        request, episode, slot: the sample.
        began: time of the event loop at which it began.
        environment: what answers it.
        paused: whether it waits for the parameters of a later version, by its plan.
        tool: the call that runs, with the time at which it began.
        tool_request: what the policy asked of the tool; None while the environment is reset.
        tool_seconds: that its calls have taken.
    """

    request: Request
    episode: Episode
    slot: int
    began: float
    environment: ToolLoop
    paused: bool = False
    tool: asyncio.Task[tuple[Observation, float]] | None = None
    tool_request: ToolRequest | None = None
    tool_seconds: float = 0.0

    def asked(self, event: ToolRequest | StopReason) -> ToolRequest | StopReason:
        """What the environment shall answer, where it sees how the policy ends; else the event."""
        if event is StopReason.EOS and self.environment.whole_turns:
            return ToolRequest(TURN, self.episode.end_turn())
        if event is StopReason.ANSWER and ANSWER in self.environment.own:
            return ToolRequest(ANSWER, self.episode.last_answer)
        return event

    def context(self, config: RolloutConfig, now: float) -> ToolContext:
        """What its next call may know; see `tool_context`."""
        return tool_context(
            config,
            f"{self.request.task.id}/{self.episode.sample_id}",
            self.episode.tool_calls,
            question=self.episode.question,
            think=self.episode.last_think,
            seconds=now - self.began,
            tool_seconds=self.tool_seconds,
        )

    def described(self) -> dict[str, Any]:
        """What describes its trajectory besides its request."""
        found: dict[str, Any] = {}
        if self.episode.versions:
            found["policy_versions"] = [list(pair) for pair in self.episode.versions]
        if self.environment.begun:
            messages = [list(message) for message in self.environment.begun]
            found["begun"] = {
                "whole_turns": self.environment.whole_turns,
                "own": sorted(self.environment.own),
                "messages": messages,
            }
        return found

    @property
    def is_reset(self) -> bool:
        """Whether its environment has been reset, and its prompt is not computed yet."""
        return self.tool is not None and self.tool_request is None and self.tool.done()

    def take_result(self) -> tuple[Observation, float]:
        """What the call that has ended gave, and when it began."""
        assert self.tool is not None
        result = self.tool.result()
        self.tool, self.tool_request = None, None
        return result

    def ended_by(self, request: ToolRequest, observation: Observation) -> StopReason | None:
        """Why the environment's answer ends the trajectory; None if it does not.

        An environment that failed cannot go on, while a policy may do without a tool.
        """
        if observation.outcome == "fault" and request.tool in self.environment.own:
            return StopReason.FAULT
        if request.tool == ANSWER:
            return StopReason.ANSWER
        return StopReason.ENVIRONMENT if observation.done else None

    def must_pause(self, version: int | None) -> bool:
        """Whether it needs parameters that are later than a version, by its plan."""
        tokens = len(self.episode.tokens)
        return any(at <= tokens and later > (version or 0) for at, later in self.request.plan)


def prefills_of(
    prompts: Mapping[tuple[int, ...], Sequence[Running]],
) -> tuple[list[tuple[int, int, Sequence[int]]], dict[int, list[int]], dict[int, int]]:
    """How prompts come into the cache: each is computed once, for all samples that have it.

    Returns:
        What `Engine.extend` takes; slots by the slot of whose prompt they get a copy, and the
        prompts' lengths.
    """
    slots = {prompt: [run.slot for run in runs] for prompt, runs in prompts.items()}
    prefills: list[tuple[int, int, Sequence[int]]] = [
        (first, 0, prompt) for prompt, (first, *_) in slots.items()
    ]
    forks = {first: others for first, *others in slots.values() if others}
    return prefills, forks, {first: len(prompt) for prompt, (first, *_) in slots.items()}


def recorded(
    run: Running, request: ToolRequest, observation: Observation, start: float
) -> ToolCall:
    """The record of a call that began at a time of the event loop."""
    return ToolCall(
        tool=request.tool,
        arguments=request.arguments,
        observation=observation.text,
        outcome=observation.outcome,
        ok=observation.ok,
        start=start - run.began,
        end=start - run.began + observation.seconds,
        detail=observation.detail,
        reward=observation.reward,
        done=observation.done,
    )


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


def used_up(run: Running, config: RolloutConfig, limit: int) -> StopReason | None:
    """The budget of a whole trajectory that is used up, if one is.

    Args:
        run: its sample.
        config: budgets.
        limit: tokens of the context.
    """
    ends = run.request.ends
    if ends is not None and len(run.episode.tokens) >= ends[0]:
        return ends[1]
    if len(run.episode.context) >= limit:
        return StopReason.LENGTH
    if not run.request.agent:
        return None
    if config.max_tool_seconds and run.tool_seconds >= config.max_tool_seconds:
        return StopReason.TOOL_TIME
    seconds = asyncio.get_running_loop().time() - run.began
    if config.max_seconds and seconds > config.max_seconds:
        return StopReason.DEADLINE
    return None
