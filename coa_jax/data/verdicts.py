"""Says whether a trajectory is right, and why it is wrong."""

from __future__ import annotations

from coa_jax.data.trajectory import Author, StopReason, Trajectory


def verdict_of(trajectory: Trajectory) -> str:
    """Returns the verdict on a trajectory: ``correct``, ``partial``, ``wrong`` or ``ungraded``."""
    if trajectory.reward is None or trajectory.reward.value is None:
        return "ungraded"
    if trajectory.reward.value >= 1:
        return "correct"
    return "partial" if trajectory.reward.value > 0 else "wrong"


def failure_of(trajectory: Trajectory) -> str:
    """Returns why a trajectory has no right answer, in a few words; "" if it has one.

    The result is the first of these reasons that applies:

    1. The trajectory stopped without an answer.
    2. The policy called no tool.
    3. An observation contained an accepted answer, but the policy wrote another answer.
    4. A tool call failed.
    5. No observation contained an accepted answer.

    If the trajectory has no grade, only the first reason can apply. If moreover the environment
    ended it, the result is "".
    """
    verdict, stopped = verdict_of(trajectory), trajectory.stop_reason
    quiet = verdict == "ungraded" and stopped == StopReason.ENVIRONMENT
    if verdict == "correct" or quiet:
        return ""
    if stopped != StopReason.ANSWER:
        return f"stopped without an answer: {stopped.value}"
    if verdict == "ungraded":
        return ""
    if not trajectory.tool_calls:
        return "answered without a tool"
    tool_text = "\n".join(s.text for s in trajectory.segments if s.author == Author.ENVIRONMENT)
    if any(gold.lower() in tool_text.lower() for gold in trajectory.gold):
        return "read the answer, wrote another"
    if not all(call.ok for call in trajectory.tool_calls):
        return "a tool call failed"
    return "no tool returned the answer" if trajectory.gold else "wrong answer"
