"""Compares a recorded trajectory with its replay, and finds the first difference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from coa_jax.data.trajectory import Author, StopReason, Trajectory
from coa_jax.model.tokenizer import decode_ids

# A clock or a fault causes these stop reasons, not the tokens. A replay may therefore continue
# where the recorded trajectory ended.
STOPPED_FROM_OUTSIDE = frozenset(
    {StopReason.DEADLINE, StopReason.TOOL_TIME, StopReason.FAULT, StopReason.CANCELLED}
)

_BEFORE, _AFTER = 16, 8  # number of tokens shown before and after a difference


@dataclasses.dataclass(frozen=True, eq=False)
class ReplayComparison:
    """The result of comparing a recorded trajectory with its replay.

    Attributes:
        recorded: the recorded trajectory.
        replayed: the replayed trajectory.
        same: number of leading tokens with equal ids and equal authors in both trajectories.
        identical: whether all tokens, the stop reason and the number of tool calls are equal. If a
            time limit or a fault ended the recorded trajectory, only its tokens must be equal, and
            the replay may be longer.
    """

    recorded: Trajectory
    replayed: Trajectory
    same: int
    identical: bool

    def logp_gaps(self) -> np.ndarray:
        """Returns the absolute differences between recorded and replayed log-probabilities.

        The result is float32 of shape ``[same]``, with one difference for each of the leading equal
        tokens, and 0 for tokens that the policy did not sample.
        """
        n = self.same
        return np.abs(self.recorded.logp[:n] - self.replayed.logp[:n])


def compare(recorded: Trajectory, replayed: Trajectory) -> ReplayComparison:
    """Compares a recorded trajectory with its replay, token by token.

    Args:
        recorded: the recorded trajectory.
        replayed: the trajectory that was sampled again with the recorded settings.

    Returns:
        Whether the two are identical, and how many leading tokens are equal.
    """
    size = min(len(recorded.tokens), len(replayed.tokens))
    differs = recorded.tokens[:size] != replayed.tokens[:size]
    differs |= recorded.author[:size] != replayed.author[:size]
    same = int(np.argmax(differs)) if differs.any() else size
    identical = same == len(recorded.tokens)
    if recorded.stop_reason not in STOPPED_FROM_OUTSIDE:
        identical &= same == len(replayed.tokens) and _end(recorded) == _end(replayed)
    return ReplayComparison(recorded, replayed, same, identical)


def describe_difference(tokenizer: Any, comparison: ReplayComparison) -> str:
    """Describes the first difference between two trajectories, in several lines of text.

    Args:
        tokenizer: tokenizer of the policy.
        comparison: result of a comparison whose ``identical`` is False.
    """
    recorded, replayed, at = comparison.recorded, comparison.replayed, comparison.same
    name = f"{recorded.task_id}, sample {recorded.sample_id}"
    if at == len(recorded.tokens) == len(replayed.tokens):
        head = f"{name}: the same {at} tokens end differently"
    else:
        head = f"{name}: token {at} differs, of {len(recorded.tokens)} recorded ones"
    before = decode_ids(tokenizer, recorded.tokens[max(at - _BEFORE, 0) : at].tolist())
    return "\n".join(
        [
            head,
            *_call_difference(comparison),
            f"  before    {before!r}",
            f"  recorded  {_side(tokenizer, recorded, at)}",
            f"  replayed  {_side(tokenizer, replayed, at)}",
        ]
    )


def _side(tokenizer: Any, trajectory: Trajectory, at: int) -> str:
    """Describes the tokens of one trajectory around a token index."""
    if at >= len(trajectory.tokens):
        reason, calls = _end(trajectory)
        return f"the end: {reason}, tool calls: {calls}"
    author = Author(trajectory.author[at]).name.lower()
    logp = f", log-probability {trajectory.logp[at]:.4f}" if author == "policy" else ""
    after = decode_ids(tokenizer, trajectory.tokens[at : at + _AFTER].tolist())
    return f"{trajectory.tokens[at]} by the {author}{logp}: {after!r}"


def _call_difference(comparison: ReplayComparison) -> list[str]:
    """Describes the tool call if the first difference lies in an observation.

    The result is a list with one line, or an empty list for a difference elsewhere.
    """
    recorded, replayed, at = comparison.recorded, comparison.replayed, comparison.same
    if at >= len(replayed.tokens) or replayed.author[at] != Author.ENVIRONMENT:
        return []
    starts = np.flatnonzero(np.diff(replayed.author[: at + 1] == Author.ENVIRONMENT, prepend=False))
    number = (len(starts) - 1) // 2  # starts and ends of observations alternate
    made = replayed.tool_calls[number]
    came = f"call {number + 1} is {made.tool} with {made.arguments!r}"
    if number >= len(recorded.tool_calls):
        return [f"  {came}; it is not among the {len(recorded.tool_calls)} recorded calls"]
    kept = recorded.tool_calls[number]
    if (kept.tool, kept.arguments) == (made.tool, made.arguments):
        return [f"  in the observation of {came}"]
    return [f"  {came}; recorded is {kept.tool} with {kept.arguments!r}"]


def _end(trajectory: Trajectory) -> tuple[StopReason, int]:
    return trajectory.stop_reason, len(trajectory.tool_calls)
