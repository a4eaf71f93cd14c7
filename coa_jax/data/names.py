"""Lists usual names of roles and of accepted answers in the data and the logs of other projects."""

from __future__ import annotations

from typing import Any

GOLD = (
    *("gold", "golden_answers", "ground_truth", "true_answer", "expected", "expected_answer"),
    *("expected_output", "correct_answer", "reference_answer"),
)
"""Names of the accepted answers of a row or a run."""

_ROLES = {
    **dict.fromkeys(("system", "developer", "systemmessage"), "system"),
    **dict.fromkeys(("user", "human", "humanmessage", "humanmessagechunk"), "user"),
    **dict.fromkeys(("assistant", "ai", "gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(("aimessage", "aimessagechunk"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "ipython", "environment"), "tool"),
    **dict.fromkeys(("tool_response", "function_response"), "tool"),
    **dict.fromkeys(("toolmessage", "functionmessage"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}


def role_of(name: Any) -> str | None:
    """Returns the role for its name, or for the type or class of a message; case does not matter.

    Returns:
        ``system``, ``user``, ``assistant``, ``tool`` for a result, or ``call`` for a message that
        is nothing but a call; None if the name is unknown or no string.
    """
    return _ROLES.get(name.lower()) if isinstance(name, str) else None
