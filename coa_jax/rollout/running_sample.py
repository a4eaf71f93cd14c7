"""Holds the state of a running sample, and computes where the sample must stop or pause."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from absl import logging

from coa_jax.data.trajectory import StopReason, ToolCall
from coa_jax.protocol import THINK
from coa_jax.rollout.environments.base import ANSWER, TURN
from coa_jax.rollout.environments.session import ToolLoop
from coa_jax.rollout.episode import Episode, ToolRequest
from coa_jax.rollout.request import Request, RolloutConfig, tool_context
from coa_jax.tools.base import Observation, ToolContext


@dataclasses.dataclass
class RunningSample:
    """The state of a sample that has begun and not ended.

    The sample occupies a slot of the engine. If the KV cache is full, the sample may lose its slot.
    It continues later with a *restart*, which computes its KV cache again.

    Attributes:
        request: request to which the sample belongs.
        episode: tokens of the sample.
        number: number of the sample in the order in which the engine's samples have begun.
        slot: index of the slot in the engine; of the last slot if the sample has lost it.
        limit: maximum number of tokens of the context.
        began: start time of the sample on the clock of the event loop, in seconds.
        environment: environment that responds to the policy's tool calls or turns.
        tool: task of the running tool call or reset; None if the sample waits for no tool.
        tool_request: the running tool call; None during a reset of the environment.
        tool_seconds: total duration of the tool calls so far, in seconds.
        called: start time of the running tool call on the clock of the event loop, in seconds.
        rule: state of the constraint when the sample lost its slot, see `Engine.give_way`.
        restarts: (number of tokens, policy version) at each restart.
        repeated: number of entries of `Request.restarts` that have been repeated.
    """

    request: Request
    episode: Episode
    number: int
    slot: int
    limit: int
    began: float
    environment: ToolLoop
    tool: asyncio.Task[tuple[Observation, float]] | None = None
    tool_request: ToolRequest | None = None
    tool_seconds: float = 0.0
    called: float = 0.0
    rule: int = 0
    restarts: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    repeated: int = 0

    def asked(self, event: ToolRequest | StopReason) -> ToolRequest | StopReason:
        """Converts an event to a call of the environment, for environments that answer whole turns.

        Such an environment answers the end of a turn, or the final answer. In a format whose turns
        call tools, a turn without a call is a turn, not the final answer. Any other event is
        returned unchanged.

        Args:
            event: result of `Episode.feed`: a tool call, or the reason to stop.
        """
        form = self.episode.protocol.format
        spoken = event is StopReason.ANSWER and form is not None and form.turns
        if self.environment.whole_turns and (event is StopReason.EOS or spoken):
            return ToolRequest(TURN, self.episode.end_turn())
        if event is StopReason.ANSWER and ANSWER in self.environment.own:
            return ToolRequest(ANSWER, self.episode.last_body(self.episode.protocol.answer))
        return event

    def context(self, config: RolloutConfig, now: float) -> ToolContext:
        """Returns the context of the next tool call, see `tool_context`.

        Args:
            config: budgets of the trajectory.
            now: present time on the clock of the event loop, in seconds.
        """
        return tool_context(
            config,
            f"{self.request.task.id}/{self.episode.sample_id}",
            self.episode.tool_calls,
            question=self.episode.question,
            think=self.episode.last_body(THINK),
            seconds=now - self.began,
            tool_seconds=self.tool_seconds,
        )

    def described(self) -> dict[str, Any]:
        """Returns the metadata of the trajectory that only become known while the sample runs.

        These are the policy versions, the messages with which the environment began, and where the
        sample was restarted.
        """
        metadata: dict[str, Any] = {}
        if self.episode.versions:
            metadata["policy_versions"] = [list(pair) for pair in self.episode.versions]
        if self.restarts:
            metadata["restarts"] = [list(pair) for pair in self.restarts]
        if self.environment.begun:
            metadata["begun"] = {
                "whole_turns": self.environment.whole_turns,
                "own": sorted(self.environment.own),
                "messages": [list(message) for message in self.environment.begun],
            }
        return metadata

    @property
    def is_reset(self) -> bool:
        """Whether the environment has been reset, but its first prompt is not prefilled yet."""
        return self.tool is not None and self.tool_request is None and self.tool.done()

    def take_result(self) -> tuple[Observation, float]:
        """Returns the result of the finished tool call or reset, and clears the running call.

        Returns:
            The observation, and the start time of the call on the clock of the event loop, in
            seconds.
        """
        assert self.tool is not None
        result = self.tool.result()
        self.tool, self.tool_request = None, None
        return result

    def ended_by(self, request: ToolRequest, observation: Observation) -> StopReason | None:
        """Returns the stop reason if the answer to a call ends the trajectory, else None.

        A failure of the environment ends the trajectory. A failure of a tool does not end it,
        because the policy can continue without the tool.

        Args:
            request: the call.
            observation: answer to the call.
        """
        if observation.outcome == "fault" and request.tool in self.environment.own:
            return StopReason.FAULT
        if request.tool == ANSWER:
            return StopReason.ANSWER
        return StopReason.ENVIRONMENT if observation.done else None

    def must_pause(self, version: int | None) -> bool:
        """Returns whether the sample must wait for a later policy version before it continues.

        Only a sample that repeats a recorded one must wait, for the versions in `Request.plan` and
        `Request.restarts`.

        Args:
            version: policy version of the present parameters; None, if versions are not recorded,
                counts as 0.
        """
        tokens, planned = len(self.episode.tokens), (*self.request.plan, *self._left)
        return any(at <= tokens and later > (version or 0) for at, later in planned)

    @property
    def _left(self) -> tuple[tuple[int, int], ...]:
        """The recorded restarts that have not been repeated yet."""
        return self.request.restarts[self.repeated :]

    def can_decode(self, version: int | None) -> bool:
        """Returns whether the policy can write the next token now, without waiting for anything.

        Args:
            version: policy version of the present parameters; None counts as 0.
        """
        restart = any(at <= len(self.episode.tokens) for at, _ in self._left)
        return self.tool is None and not restart and not self.must_pause(version)

    def take_restarts(self, version: int | None) -> bool:
        """Returns whether the KV cache must be computed again now, and marks this as done.

        This repeats the restarts of a recorded sample, see `Request.restarts`.

        Args:
            version: policy version of the present parameters; None counts as 0.
        """
        tokens = len(self.episode.tokens)
        due = [pair for pair in self._left if pair[0] <= tokens and pair[1] <= (version or 0)]
        self.restarts += due
        self.repeated += len(due)
        return bool(due)

    def limit_now(self, version: int | None) -> int:
        """Returns the number of tokens up to which the sample can decode at present.

        The result is the smallest of these numbers:

        - ``limit``,
        - the first position from which ``Request.plan`` requires a policy version that is not
          published yet,
        - the next position of ``Request.restarts``,
        - the number of tokens with which ``Request.ends`` ends the sample.

        Args:
            version: policy version of the present parameters; None counts as 0.
        """
        plan, ends = self.request.plan, self.request.ends
        later = [position for position, planned in plan if planned > (version or 0)]
        restarts = [position for position, _ in self._left]
        return min([self.limit, *later[:1], *restarts[:1], *([ends[0]] if ends else [])])

    def used_up(self, config: RolloutConfig, now: float) -> StopReason | None:
        """Returns the stop reason if a budget of the trajectory is exhausted, else None.

        Args:
            config: budgets of the trajectory.
            now: present time on the clock of the event loop, in seconds.
        """
        ends = self.request.ends
        if ends is not None and len(self.episode.tokens) >= ends[0]:
            return ends[1]
        if len(self.episode.context) >= self.limit:
            return StopReason.LENGTH
        if not self.request.agent:
            return None
        if config.max_tool_seconds and self.tool_seconds >= config.max_tool_seconds:
            return StopReason.TOOL_TIME
        if config.max_seconds and now - self.began > config.max_seconds:
            return StopReason.DEADLINE
        return None

    def record(self, request: ToolRequest, observation: Observation, start: float) -> ToolCall:
        """Returns the record of a finished tool call.

        Args:
            request: the call.
            observation: result of the call.
            start: start time of the call on the clock of the event loop, in seconds.
        """
        return ToolCall(
            tool=request.tool,
            arguments=request.arguments,
            observation=observation.text,
            outcome=observation.outcome,
            ok=observation.ok,
            start=start - self.began,
            end=start - self.began + observation.seconds,
            detail=observation.detail,
            reward=observation.reward,
            done=observation.done,
        )


def prefills_of(
    prompts: Mapping[tuple[int, ...], Sequence[RunningSample]],
) -> tuple[list[tuple[int, int, Sequence[int]]], dict[int, list[int]], dict[int, int]]:
    """Plans the prefill of prompts. A prompt that several samples share is computed only once.

    Args:
        prompts: token ids of a prompt -> samples with this prompt.

    Returns:
        Three values:

        - the argument of `Engine.extend`: a tuple (slot, start position, token ids) for each prompt
          to compute;
        - a dictionary from each slot that computes a prompt to the slots that copy the prompt;
        - a dictionary from each slot that computes a prompt to the prompt's number of tokens.
    """
    slots = {prompt: [run.slot for run in runs] for prompt, runs in prompts.items()}
    prefills: list[tuple[int, int, Sequence[int]]] = [
        (first, 0, prompt) for prompt, (first, *_) in slots.items()
    ]
    forks = {first: others for first, *others in slots.values() if others}
    return prefills, forks, {first: len(prompt) for prompt, (first, *_) in slots.items()}


def source_of(
    request: Request, cached: Mapping[int, Request], free: Collection[int]
) -> tuple[int | None, int]:
    """Finds a slot from whose KV cache the prompt of a new sample can be copied.

    The first slot in this list is chosen:

    1. a slot whose cache holds the prompt of the same request, even if the slot is in use,
    2. a free slot whose prompt is a beginning of the new prompt, as in the turns of a conversation;
       of several, the one with the longest prompt.

    Only the keys and values of prompts are copied. With those of decoded tokens, which are rounded
    differently, the new sample would depend on the slot from which it copies.

    Args:
        request: request of a sample without a slot.
        cached: slot -> request whose prompt is in the slot's cache.
        free: slots without a sample.

    Returns:
        (slot, number of tokens that can be copied); (None, 0) if there is no such slot.
    """
    prompt, common, source = request.prompt, 0, None
    for slot, other in cached.items():
        size = len(other.prompt)
        if other is request and size:
            return slot, size
        if common < size <= len(prompt) and slot in free and prompt[:size] == other.prompt:
            source, common = slot, size
    return source, common


def unstarted(request: Request, limit: int, version: int | None) -> dict[str, Any]:
    """Returns the metadata of a sample that ends before it gets a slot.

    If the prompt alone has ``limit`` tokens or more, the function logs a warning, once per process.

    Args:
        request: request of the sample.
        limit: maximum number of tokens of the whole trajectory.
        version: current version of the policy; None if it does not change.
    """
    if len(request.prompt) >= limit:
        warning = (
            f"task {request.task.id}: the prompt has {len(request.prompt)} tokens, but a "
            f"trajectory has at most {limit} (the smaller of rollout.max_tokens and "
            "engine.max_length), so the policy writes nothing; raise this limit or choose a "
            "shorter prompt_style"
        )
        logging.log_first_n(logging.WARNING, "%s", 1, warning)
    return {} if version is None else {"policy_versions": [[0, version]]}
