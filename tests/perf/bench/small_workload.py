"""Small workloads, as files and as objects, and a model that runs them quickly."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from coa_jax.perf.bench.models import Subject, load_subject
from coa_jax.perf.bench.workload import Workload, read_workload


@functools.cache
def subject() -> Subject:
    return load_subject(None, "tiny", "float32")


def rollout(prompt=0, lengths=(5, 3), seconds=0.01, observation=6) -> dict:
    """A rollout with a call after each of its lengths but the last."""
    *turns, final = lengths
    return {
        "prompt": prompt,
        "turns": [
            {
                "gen_tokens": length,
                "tool_latency_s": seconds,
                "observation": [100 + i for i in range(observation)],
            }
            for length in turns
        ],
        "final_gen_tokens": final,
    }


def content(*rollouts: dict, prompt_length=12) -> dict:
    prompts = 1 + max((r["prompt"] for r in rollouts), default=0)
    return {
        "name": "small",
        "seed": 3,
        "prompts": [[(7 * i + 31 * p) % 500 for i in range(prompt_length)] for p in range(prompts)],
        "rollouts": list(rollouts),
    }


def write(folder: Path, value: object) -> Path:
    path = folder / "workload.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def workload(folder: Path, *rollouts: dict, **options: int) -> Workload:
    return read_workload(write(folder, content(*rollouts, **options)), 512)
