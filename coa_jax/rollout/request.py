"""Input of the rollout loop, and the output of a sample before it is finished."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from coa_jax.bounds import Bounded, Natural, Place, SecondsOrNone, Size
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.environments.session import Opener
from coa_jax.errors import UserError
from coa_jax.model.tokenizer import conversation_ids
from coa_jax.model.tool_chat import tool_conversation_ids
from coa_jax.protocol import TAGS, Asked, FormatName, Level, Messages, Prompt, messages_of
from coa_jax.tasks import Task
from coa_jax.tools.base import ToolContext
from coa_jax.trajectory import Author, StopReason, ToolCall


@dataclasses.dataclass(frozen=True)
class RolloutConfig(Bounded):
    """Budgets of a trajectory, each with the `StopReason` of an exhausted budget in parentheses.

    Attributes:
        max_tokens: tokens of a whole trajectory, including prompt and observations (``length``). An
            observation is truncated to the remaining tokens; a call whose observation would get no
            token is not run.
        max_turn_tokens: tokens that the policy may write in a row (``turn_length``); 0 for no
            limit.
        max_tool_calls: number of calls; a further call ends the trajectory (``turns``).
        max_observation_tokens: length to which the body of an observation is truncated, in tokens.
        max_seconds: wall time of a trajectory (``deadline``); 0 for no limit.
        max_tool_seconds: wall time that a trajectory may wait for all its tool calls together
            (``tool_time``); 0 for no limit. The deadline of a call is at most the remaining time.
        prompt_style: how questions are put to the policy, see `tasks.prompts`.
        level: level of the protocols' rules, ``lenient`` or ``paper``, for instructions, format
            rewards and constraints; "" for the level of each task.
        strict: whether the first broken rule of the protocol ends a trajectory (``violation``). If
            only well-formed trajectories are rewarded, this changes no reward and saves useless
            tokens.
        constrain: whether the policy can only write text that its protocol allows, see
            `rollout.constrain`; the engine needs the constraint.
        cut_context: whether the oldest steps are removed from a context that has no room for
            another turn, see `rollout.cut`. ``max_tokens`` is then the length of the context, and
            the trajectory may be longer. Only for evaluation: training does not support cut
            contexts.
        format: how the policy writes calls and its answer: ``tags`` for a chain of agents,
            ``hermes``, ``react``, or a custom format (docs/formats.md); "" for the format of each
            task.
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


def prompt_ids(tokenizer: Any, asked: Asked, prompt: Prompt) -> tuple[int, ...]:
    """Returns token ids of a prompt: its messages, and the opening of the assistant's turn.

    Args:
        tokenizer: tokenizer of the policy.
        asked: a task or a record.
        prompt: how the question is put to the policy.
    """
    return message_ids(tokenizer, messages_of(asked, prompt))


def message_ids(tokenizer: Any, messages: Messages) -> tuple[int, ...]:
    """Returns token ids of messages and their tools, see `prompt_ids`."""
    if messages.tools:
        return tuple(tool_conversation_ids(tokenizer, messages.turns, messages.tools))
    return tuple(conversation_ids(tokenizer, messages.turns))


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for samples of one task.

    Attributes:
        task: the task.
        prompt: token ids of its prompt; () if the environment's reset provides the prompt.
        seed, prompt_id: the random key, together with the sample number.
        samples: sample numbers; the samples share one prefill.
        sampling: how tokens are sampled.
        max_tokens: length of a whole trajectory in tokens; 0 for the limit of `RolloutConfig`.
        agent: whether the budgets of `RolloutConfig` and its ``constrain`` apply. If false, the
            samples are plain continuations of up to ``max_tokens``.
        metadata: copied into every trajectory.
        plan: (position, policy version) pairs, from position 0 on, of a replay, which waits at each
            position for the parameters of that version. () for a sample that continues with any
            parameters that are published.
        ends: (tokens, reason) of a replayed sample that the clock ended; None for others.
        environment: creates the environment of a sample; None for the default loop of tools.
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
    ends: tuple[int, StopReason] | None = None
    environment: Opener | None = None


@dataclasses.dataclass(frozen=True)
class Arrival:
    """New text of a sample; the texts of a sample join to `Trajectory.text`.

    Attributes:
        task_id, sample_id: the sample.
        author: the policy, whose text arrives token by token, or the environment.
        text: whole characters; tokens sampled beyond a closing tag are never included.
        call: the call that the environment answers; None for text of the policy.
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
    """Returns the context of a trajectory's next call, with its deadline.

    Args:
        config: budgets.
        trajectory_id, question, think: see `ToolContext`.
        calls: earlier calls of the trajectory.
        seconds: time since the trajectory began.
        tool_seconds: total time of its calls so far.
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
    request: Request, config: RolloutConfig, shapes: EngineConfig, seconds: float
) -> dict[str, Any]:
    """Returns a trajectory's metadata, including what a replay needs besides tokens and calls.

    Args:
        request: request of the trajectory.
        config: budgets.
        shapes: shapes of the engine.
        seconds: duration of the trajectory.
    """
    return {
        **request.task.metadata,
        **request.metadata,
        "source": request.task.source,
        "prompt_id": request.prompt_id,
        "seconds": round(seconds, 3),
        "sampling": {"seed": request.seed, **dataclasses.asdict(request.sampling)},
        "rollout": dataclasses.asdict(config),
        "engine": {
            **dataclasses.asdict(shapes),
            "extend_buckets": list(shapes.extend_buckets),  # a list, as in JSON
        },
    }
