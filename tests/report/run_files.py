"""Files of a small run for the tests of the report."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np

from coa_jax.data.trajectory import Author, Reward, SegmentSpan, StopReason, ToolCall, Trajectory
from coa_jax.protocol import CRITERIA, format_double_check, format_reflection
from tests.trajectory_files import append_trajectories

PLACES = ("Lesotho", "Bhutan", "Eswatini", "Andorra", "Paraguay", "Laos", "Chad", "Moldova")
HOSTILE = "<script>document.title='broken in'</script><img src=x onerror=\"document.title='in'\">"


def episode(place: str, stage: str, correct: bool, **changes: Any) -> Trajectory:
    """An episode of the generalist protocol: a search, a program, a reflection, an answer."""
    program = "```py\nprint(round(30355 / 2, 1))\n```"
    passage = f"Doc 1 (Title: {place})\nArea: 30,355 sq km. It is landlocked.\n{HOSTILE}"
    grades = format_reflection(dict.fromkeys(CRITERIA, "good"))
    answer = "15177.5" if correct else "30355"
    said: list[tuple[str | None, Author, str]] = []

    def policy(role: str, body: str, thought: str | None = None) -> None:
        if thought is not None:
            policy("think", thought)
        said.append((role, Author.POLICY, f"<{role}>{body}</{role}>"))
        said.append((None, Author.POLICY, "\n"))

    def observe(text: str) -> None:
        said[-1] = (
            "observation",
            Author.ENVIRONMENT,
            f"\n<observation>\n{text}\n</observation>\n\n",
        )

    policy("plan", f"1. Look up the area of {place}.\n2. Halve it.", "Two facts are needed.")
    policy("wiki_search", f"{place} area", f"First the page of {place}.")
    observe(passage)
    policy("code", program, "Half of 30,355 & no more < that.")
    observe("15177.5")
    policy("reflection", grades, "Search and program agree.")
    policy("suggested_answer", answer, "This settles it.")
    policy("double_check", format_double_check(4), "The figure matches the page.")
    policy("answer", answer)
    spans, authors = [], [Author.PROMPT] * 40
    for role, author, text in said:
        count = max(1, len(text) // 4)
        spans.append(SegmentSpan(role, author, text, len(authors), len(authors) + count))
        authors += [author] * count
    call = ToolCall("wiki_search", f"{place} area", passage, "ok", True, 0.41, 0.55)
    second = ToolCall("code", program, "15177.5", "ok", True, 1.2, 1.83)
    fields: dict[str, Any] = {
        "task_id": f"factbook/half-area/{place.lower()}",
        "sample_id": 0,
        "question": f"What is half of the area of {place}, in square kilometres?",
        "protocol": "generalist",
        "tokens": np.arange(len(authors)),
        "author": np.array(authors),
        "logp": np.zeros(len(authors)),
        "text": "".join(text for _, _, text in said),
        "segments": tuple(spans),
        "tool_calls": (call, second),
        "stop_reason": StopReason.ANSWER,
        "reward": Reward(float(correct), {"exact_match": float(correct), "format": 1.0}),
        "gold": ("15177.5",),
        "metadata": {"stage": stage, "hops": 1 + len(place) % 3},
    }
    return Trajectory(**{**fields, **changes})


def metric_rows() -> list[dict[str, Any]]:
    """120 steps of SFT and 300 of RL, noisy, with a gap."""
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for step in range(120):
        loss = 0.4 + 2.6 * math.exp(-step / 25) + rng.gauss(0, 0.05)
        lr = 1e-3 * min(1, step / 12) * (0.5 + 0.5 * math.cos(step / 120 * math.pi))
        rows.append({"step": step, "phase": "sft", "loss": loss, "tokens": 8000 * (step + 1),
                     "optim/grad_norm": abs(rng.gauss(1, 0.3)), "optim/lr": lr,
                     "time/step": 0.8 + rng.random() / 5})  # fmt: skip
    for step in range(300):
        gain = 1 - math.exp(-step / 90)
        rows.append({
            "step": step, "phase": "rl",
            "reward/mean": None if step == 150 else 0.3 + 0.5 * gain + rng.gauss(0, 0.06),
            "reward/std": 0.4 - 0.1 * gain, "group/frac_zero_std": 0.2 + 0.3 * gain,
            "adv/abs_mean": 0.6, "policy/entropy": 0.9 - 0.5 * gain + rng.gauss(0, 0.02),
            "policy/clip_low": abs(rng.gauss(0.004, 0.001)),
            "policy/clip_high": abs(rng.gauss(0.008, 0.002)),
            "mismatch/abs_logp_mean": 2e-6 + rng.random() * 1e-6,
            "mismatch/abs_logp_max": 3e-5 + rng.random() * 1e-5,
            "optim/grad_norm": abs(rng.gauss(0.6, 0.2)), "optim/lr": 1e-6,
            "len/mean": 420 - 80 * gain + rng.gauss(0, 12), "len/max": 1024,
            "stop/answer": 0.7 + 0.25 * gain, "stop/length": 0.2 - 0.15 * gain,
            "stop/turns": 0.1 - 0.1 * gain, "tool/calls": 2.2 + 0.6 * gain,
            "tool/fail_frac": 0.12 - 0.1 * gain, "format/valid": 0.75 + 0.24 * gain,
            "time/rollout": 4 + rng.random(), "time/tool_wait": 0.3, "time/update": 1.5,
            "time/publish": 0.02, "time/checkpoint": 0.0, "time/step": 6 + rng.random(),
        })  # fmt: skip
    return rows


def block(value: float, n: int) -> dict[str, Any]:
    """An evaluation's block of summary.json."""
    half = 1.96 * math.sqrt(value * (1 - value) / n)
    return {"pass_at_1": value, "ci95": [value - half, value + half], "n": n,
            "tokens_per_task": 512.4 - 200 * value, "tool_calls_per_task": 2.4,
            "format_valid": min(1.0, value + 0.2)}  # fmt: skip


def write_run(root: Path, tasks: int = 8) -> Path:
    """A run directory with every file: ``tasks`` traces each of four stages."""
    root.mkdir(parents=True, exist_ok=True)
    config = {"model": {"name": "SmolLM2-135M", "layers": 30}, "optim": {"lr": 1e-6, "clip": 1.0}}
    (root / "config.json").write_text(json.dumps(config))
    summary = {"base": block(0.08, 200), "sft": block(0.46, 200), "rl": block(0.71, 200),
               "teacher": block(0.93, 200),
               "timings_s": {"distill": 21.3, "sft": 88.0, "rl": 170.5, "eval": 35.2}}  # fmt: skip
    (root / "summary.json").write_text(json.dumps(summary))
    with open(root / "metrics.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in metric_rows())
    for stage, wrong in (("teacher", 0), ("base", 7), ("sft", 4), ("rl", 2)):
        append_trajectories(
            root / "traces.jsonl",
            [
                episode(
                    PLACES[k % len(PLACES)], stage, k >= wrong,
                    task_id=f"factbook/half-area/{k}", metadata={"stage": stage, "hops": 1 + k % 3},
                )
                for k in range(tasks)
            ],
        )  # fmt: skip
    return root
