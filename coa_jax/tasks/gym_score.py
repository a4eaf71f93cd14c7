"""Scores answers to tasks of reasoning-gym, in the sandbox.

Some scorers of reasoning-gym evaluate an answer as Python code. `coa_jax.tools.isolated` therefore
runs `score` in the sandbox, so this module imports nothing of `coa_jax`.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

PACKAGES = ("reasoning-gym",)
"""Distributions that `score` imports."""


def score(generator: str, answer: str, entry: dict[str, Any]) -> float:
    """Returns the score of an answer, from 0 to 1, computed in a new process.

    Some scorers evaluate an answer as code. The process ends after the call, so that an answer
    cannot change the score of another answer.

    Args:
        generator: name of the generator of the task.
        answer: answer of the policy.
        entry: the task, as the generator made it.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(write, 1)
            os.closerange(2, 256)  # the answer must not reach the channel of the worker
            import reasoning_gym

            value = float(reasoning_gym.get_score_answer_fn(generator)(answer, entry))
            os.write(1, repr(value).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as result:
        text = result.read(64)
    os.waitpid(child, 0)
    with contextlib.suppress(ValueError):
        return float(text)
    return 0.0  # some scorers raise errors for unreadable answers, which are wrong
