"""Defines the input of the rollout loop, and the text that a sample produces before it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.config.fields import Bounded, Natural, Place, SecondsOrNone, Size
from coa_jax.data.trajectory import Author, StopReason, ToolCall
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.errors import UserError
from coa_jax.model.encode import message_ids
from coa_jax.protocol import TAGS, FormatName, Level, Messages, Prompt, messages_of
from coa_jax.rollout.environments.session import Environments, Opener
from coa_jax.tasks import Task
from coa_jax.tools.base import ToolContext


@dataclasses.dataclass(frozen=True)
class RolloutConfig(Bounded):
    """The budgets of a trajectory, and the settings for its prompt and protocol.

    If a budget is exhausted, the trajectory ends with the stop reason in parentheses.

    Attributes:
        max_tokens: maximum number of tokens of a trajectory, including prompt and observations
            (``length``). An observation is truncated to the remaining number of
            tokens. If no token remains for an observation, the tool is not called.
        max_turn_tokens: maximum number of tokens that the policy writes between two observations
            (``turn_length``); 0 for no limit.
        max_tool_calls: maximum number of tool calls. A further call ends the trajectory
            (``turns``).
        max_observation_tokens: maximum number of tokens of the body of an observation. A longer
            body is truncated.
        max_seconds: maximum duration of a trajectory in seconds (``deadline``); 0 for no limit.
        max_tool_seconds: maximum time in seconds that a trajectory waits for its tools in total
            (``tool_time``); 0 for no limit. The time limit of a tool call is at most the remaining
            time.
        prompt_style: how questions are put to the policy: ``full``, ``brief``, ``data``, ``model``
            or the path of a file, see `tasks.prompts`.
        level: which rules of the protocol hold, in instructions, format rewards and constraints:
            ``lenient``; ``paper`` for further rules of the Chain-of-Agents paper
            (docs/protocol.md); "" for the level that the protocol of each task names.
        strict: whether a trajectory ends as soon as it violates a rule of its protocol
            (``violation``), which saves the time to sample its other tokens. Rewards stay the same
            if a trajectory with a violation gets no reward anyway.
        constrain: whether decoding allows only tokens that the protocol permits, see
            `rollout.constrain`. The engine must have been created with the constraint.
        cut_context: whether the oldest steps are removed from the context when no room is left for
            another turn, see `rollout.context_truncation`. ``max_tokens`` then limits the context,
            not the trajectory. This setting is for evaluation; training refuses it.
        format: format of calls and answers; "" for that of the task's protocol. The others are
            ``tags`` (a chain of agents), ``hermes``, ``react`` and custom formats
            (docs/formats.md).
    """

    max_tokens: Size = 1024
    max_tool_calls: Natural = 12
    max_observation_tokens: Natural = 512
    max_seconds: SecondsOrNone = 0.0
    max_tool_seconds: SecondsOrNone = 0.0
    prompt_style: Place = "brief"
    max_turn_tokens: Natural = 0
    strict: bool = False
    constrain: bool = False
    level: Level = ""
    cut_context: bool = False
    format: FormatName = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("constrain", "cut_context"):
            if getattr(self, name) and self.format not in ("", TAGS):
                raise UserError(f"{name} needs the format {TAGS}; the format is {self.format}")
        if self.cut_context and not 0 < 3 * self.max_turn_tokens < self.max_tokens:
            raise UserError(
                f"cut_context needs max_turn_tokens from 1 to less than a third of max_tokens, to "
                f"know when the context is full; it is {self.max_turn_tokens}"
            )


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to sample one or more trajectories of a task.

    Attributes:
        task: the question, with its accepted answers and its protocol.
        prompt: token ids of the prompt; () if the environment provides the prompt when it is reset.
        seed, prompt_id: the first two parts of the random key of each sample. The sample number is
            the third part.
        samples: the number of each sample, which distinguishes the samples of the request. The
            prompt is prefilled once for all samples.
        sampling: sampling settings, such as the temperature.
        max_tokens: maximum number of tokens of a trajectory, including the prompt; 0 for the limit
            in `RolloutConfig`.
        agent: whether the samples call tools, so that the budgets and the constraint of
            `RolloutConfig` apply. If False, the policy only continues the prompt, up to
            ``max_tokens``.
        metadata: values that are copied into the metadata of every trajectory.
        plan: (number of tokens, policy version) pairs, if the request repeats a recorded sample.
            When the sample has this number of tokens, it waits until this policy version is
            published. () for a new sample, which always uses the newest published parameters.
        restarts: (number of tokens, policy version) pairs, if the request repeats a recorded sample
            that lost its slot to other samples. When the sample has this number of tokens, its KV
            cache is computed again with the parameters of this policy version, as that of the
            recorded sample was when it continued.
        ends: (number of tokens, stop reason) with which a repeated sample ends, if a time limit
            ended the recorded sample; else None.
        environment: function that creates the environment of a sample; None for the default
            environment, which only runs tools.
        messages: messages of the prompt, if `make_request` made the request; else None. A policy
            behind an endpoint gets these messages instead of ``prompt``.
    """

    task: Task
    prompt: tuple[int, ...]
    seed: int
    prompt_id: int
    samples: tuple[int, ...]
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    max_tokens: int = 0
    agent: bool = True
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    plan: tuple[tuple[int, int], ...] = ()
    restarts: tuple[tuple[int, int], ...] = ()
    ends: tuple[int, StopReason] | None = None
    environment: Opener | None = None
    messages: Messages | None = None

    def encoded(self, tokenizer: Any) -> Request:
        """Returns the request with the token ids of its messages as the prompt.

        A request whose environment provides the prompt is returned unchanged.

        Args:
            tokenizer: tokenizer of the policy; None for a policy behind an endpoint, which encodes
                the messages itself.
        """
        if tokenizer is None or self.messages is None or self.environment is not None:
            return self
        return dataclasses.replace(self, prompt=message_ids(tokenizer, self.messages))


def make_request(
    task: Task,
    prompt: Prompt,
    seed: int,
    prompt_id: int,
    samples: Sequence[int],
    sampling: SamplingParams,
    *,
    metadata: Mapping[str, Any] | None = None,
    environments: Environments | None = None,
) -> Request:
    """Makes the request for samples of a task; `Request.encoded` adds the token ids of the prompt.

    Args:
        task, seed, prompt_id, samples, sampling, metadata: see `Request`.
        prompt: prompt style in which the policy sees the task.
        environments: creates the environment of each sample, which also provides the prompt; None
            for the default environment, which only runs tools.
    """
    opener = environments.opener(task, seed, prompt_id, samples) if environments else None
    return Request(
        task, (), seed, prompt_id, tuple(samples), sampling, metadata=metadata or {},
        environment=opener, messages=messages_of(task, prompt),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A piece of text that a running sample has produced.

    All pieces of a sample, joined, are `Trajectory.text`.

    Attributes:
        task_id: id of the task.
        sample_id: number that identifies the sample within its request.
        author: who wrote the text: the policy, whose text arrives token by token, or the
            environment.
        text: the text, which never contains a partial character. Tokens that were sampled after the
            closing tag of a call are not included.
        call: the tool call that this text answers; None for text of the policy.
    """

    task_id: str
    sample_id: int
    author: Author
    text: str
    call: ToolCall | None = None


def tool_context(
    config: RolloutConfig,
    trajectory_id: str,
    calls: Sequence[ToolCall],
    *,
    question: str,
    think: str,
    seconds: float,
    tool_seconds: float,
) -> ToolContext:
    """Returns the context of the next tool call of a trajectory, including the call's deadline.

    The deadline is the smaller of two numbers: the time that remains of ``max_seconds``, and the
    time that remains of ``max_tool_seconds``. A limit of 0 does not count.

    Args:
        config: budgets of the trajectory.
        trajectory_id, question, think: see `ToolContext`.
        calls: earlier calls of the trajectory.
        seconds: time since the trajectory began, in seconds.
        tool_seconds: total duration of the earlier calls, in seconds.
    """
    left = []
    if config.max_seconds:
        left.append(config.max_seconds - seconds)
    if config.max_tool_seconds:
        left.append(config.max_tool_seconds - tool_seconds)
    return ToolContext(
        trajectory_id=trajectory_id,
        call_index=len(calls),
        deadline=max(min(left), 0.0) if left else None,
        history=tuple((call.tool, call.arguments) for call in calls),
        outcomes=tuple(call.outcome for call in calls),
        question=question,
        think=think,
    )


def described(
    request: Request, config: RolloutConfig, seconds: float, shapes: EngineConfig | None = None
) -> dict[str, Any]:
    """Returns the metadata of a trajectory.

    The metadata include the random key and the settings of rollout and engine, because a replay
    needs these values in addition to the tokens and tool calls.

    Args:
        request: the request for which the trajectory was sampled.
        config: budgets of the trajectory.
        seconds: duration of the trajectory in seconds.
        shapes: settings of the engine that sampled the trajectory; None if the policy ran behind an
            endpoint, or several requests of an agent program make up the trajectory.
    """
    about = {
        **request.task.metadata,
        **request.metadata,
        "source": request.task.source,
        "prompt_id": request.prompt_id,
        "seconds": round(seconds, 3),
        "sampling": {"seed": request.seed, **dataclasses.asdict(request.sampling)},
        "rollout": dataclasses.asdict(config),
    }
    if shapes is not None:
        buckets = list(shapes.extend_buckets)  # a list, as in JSON
        about["engine"] = {**dataclasses.asdict(shapes), "extend_buckets": buckets}
    return about
