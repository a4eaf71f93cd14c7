"""What goes into the agent loop, and what of a sample comes out before it is finished."""

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
    """Budgets of a trajectory; the `StopReason` of each stands behind it.

    Attributes:
        max_tokens: tokens of a whole trajectory, prompt and observations included (``length``).  An
            observation is cut to the room that is left; a call that leaves none for it is not run.
        max_turn_tokens: tokens that the policy may write in a row, 0 for any number
            (``turn_length``).
        max_tool_calls: calls after which the next one ends the trajectory (``turns``).
        max_observation_tokens: the body of an observation is cut to this many tokens.
        max_seconds: wall time of a trajectory, 0 for any (``deadline``).
        max_tool_seconds: wall time that a trajectory may wait for its tools, all calls together, 0
            for any (``tool_time``); a call has no more than what is left of it.
        prompt_style: how questions are put to the policy, see `tasks.prompts`.
        level: level of the protocols' rules, ``lenient`` or ``paper``, for instructions, format
            rewards and constraints; "" for that of each task.
        strict: whether the first broken rule of the protocol ends a trajectory (``violation``).
            Where a reward counts well-formed trajectories only, this changes no reward and saves
            what would have been written in vain.
        constrain: whether the policy can only write what its protocol allows, see
            `rollout.constrain`; the engine needs the constraint.
        cut_context: whether the oldest steps are taken out of a context that has no room for
            another turn, see `rollout.cut`: ``max_tokens`` is then the length of the context, and
            the trajectory may be longer.  For evaluation only: nothing is trained on contexts
            that were cut.
        format: how the policy writes calls and its answer: ``tags`` for a chain of agents,
            ``hermes``, ``react``, or a format of your own (docs/formats.md); "" for that of each
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
                raise UserError(f"{name} is for the format {TAGS}; the format is {self.format}")
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
        prompt: how it is put to the policy.
    """
    return message_ids(tokenizer, messages_of(asked, prompt))


def message_ids(tokenizer: Any, messages: Messages) -> tuple[int, ...]:
    """Returns token ids of messages, with the tools that they name, as `prompt_ids`."""
    if messages.tools:
        return tuple(tool_conversation_ids(tokenizer, messages.turns, messages.tools))
    return tuple(conversation_ids(tokenizer, messages.turns))


@dataclasses.dataclass(frozen=True)
class Request:
    """Samples wanted of one task.

    Attributes:
        task: the task.
        prompt: its prompt's tokens; () where the environment's reset says what is asked.
        seed, prompt_id: with the sample's number, the key of its randomness.
        samples: sample numbers; they share one prefill.
        sampling: how tokens are drawn.
        max_tokens: of a whole trajectory, 0 for as many as `RolloutConfig` allows.
        agent: whether the budgets of `RolloutConfig` and its ``constrain`` hold for the samples;
            else they only write on, up to ``max_tokens``.
        metadata: goes into every trajectory.
        plan: where the policy version changes, as (position, version) pairs beginning with
            position 0: a replay waits there for the parameters of that version.  () for a sample
            that goes on with whatever parameters are published.
        ends: (tokens, reason) of a replayed sample that the clock ended; None for others.
        environment: makes what answers a sample; None for the loop of tools.
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
    """Text of a sample, as soon as it is there; a sample's texts join to `Trajectory.text`.

    Attributes:
        task_id, sample_id: the sample.
        author: the policy, whose text comes token by token, or the environment.
        text: whole characters; what the policy sampled beyond a closing tag is never among them.
        call: the call that the environment answers, None for the policy.
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
    """What a trajectory's next call may know, and how long it may take.

    Args:
        config: budgets.
        trajectory_id, question, think: see `ToolContext`.
        calls: the earlier ones.
        seconds: since the trajectory began.
        tool_seconds: that its calls have taken.
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
    """What describes a trajectory, with what a replay needs besides its tokens and calls.

    Args:
        request: that asked for it.
        config: budgets.
        shapes: of decoding.
        seconds: that it took.
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
            "extend_buckets": list(shapes.extend_buckets),  # as JSON has it
        },
    }
