"""Finished trajectories with one token per span."""

from __future__ import annotations

import numpy as np

from coa_jax.data.trajectory import Author, SegmentSpan, StopReason, ToolCall, Trajectory


def finished(answer: str | None, protocol="web", stop=StopReason.ANSWER, outcome=None, gold=("x",)):
    texts = [("think", "<think>easy</think>"), (None, "\n")]
    if answer is not None:
        texts.append(("answer", f"<answer>{answer}</answer>"))
    spans = tuple(
        SegmentSpan(role, Author.POLICY, text, i, i + 1) for i, (role, text) in enumerate(texts)
    )
    call = ToolCall("web_search", "q", "o", outcome or "ok", False, 0.0, 1.0)
    return Trajectory(
        task_id="t", sample_id=0, question="What?", protocol=protocol,
        tokens=np.arange(len(spans), dtype=np.int32), author=np.ones(len(spans), np.uint8),
        logp=np.zeros(len(spans), np.float32), text="".join(text for _, text in texts),
        segments=spans, tool_calls=(call,) if outcome else (), stop_reason=stop, reward=None,
        gold=gold,
    )  # fmt: skip
