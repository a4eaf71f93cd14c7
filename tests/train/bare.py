"""Trajectories of tokens alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from coa_jax.data.trajectory import StopReason, Trajectory


def bare(tokens, author, **fields: Any) -> Trajectory:
    """Returns a trajectory without text, for tests that read only a few of its fields."""
    others = {
        "task_id": "t", "sample_id": 0, "question": "", "protocol": "generalist",
        "logp": np.zeros(len(tokens)), "text": "", "segments": (), "tool_calls": (),
        "stop_reason": StopReason.LENGTH, "reward": None, "gold": (),
    }  # fmt: skip
    return Trajectory(tokens=tokens, author=author, **{**others, **fields})
