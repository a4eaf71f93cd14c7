"""Figures of a step beside those of its losses; docs/metrics.md has what each means."""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np

from coa_jax.engine.meter import MeteredEngine
from coa_jax.learn.batch import Batch
from coa_jax.learn.groups import Sampled, earned, graded_values
from coa_jax.model.config import ModelConfig
from coa_jax.model.costs import train_flops
from coa_jax.parallel.chips import stated_flops
from coa_jax.trajectory import StopReason, Trajectory

# What ends a trajectory that had not ended itself.
CUT_OFF = frozenset(
    {
        StopReason.LENGTH,
        StopReason.TURN_LENGTH,
        StopReason.TURNS,
        StopReason.DEADLINE,
        StopReason.TOOL_TIME,
    }
)


def stamp(sampled: Sampled, policy_step: int) -> Sampled:
    """Notes in each trajectory after how many steps its policy was; an earlier note stays."""

    def noted(groups: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
        return [
            [
                dataclasses.replace(t, metadata={"policy_step": policy_step, **t.metadata})
                for t in group
            ]
            for group in groups
        ]

    return dataclasses.replace(
        sampled,
        used=noted(sampled.used),
        everything=noted(sampled.everything),
        surplus=noted(sampled.surplus),
    )


def rollout_metrics(sampled: Sampled, step: int) -> dict[str, float]:
    """What `groups.describe` does not say of a step's rollouts.

    Args:
        sampled: graded and stamped.
        step: steps before this one.
    """
    flat = [t for group in sampled.everything for t in group]
    used = [t for group in sampled.used for t in group]
    ages = [step - t.metadata["policy_step"] for t in used]
    figures = {
        "stale/mean": float(np.mean(ages)) if ages else 0.0,
        "stale/max": float(max(ages, default=0)),
        "rollout/tokens": float(sum(t.num_policy_tokens for t in flat)),
    }
    if not flat:
        return figures
    values = graded_values(sampled.everything) or [0.0]
    # Not the rewards: of answers that are all right a penalty may leave some at or below 0.
    graded = [[v for v in earned(group) if v is not None] for group in sampled.everything]
    lengths = [t.num_policy_tokens for t in flat]
    answered = [t.num_policy_tokens for t in flat if t.stop_reason == StopReason.ANSWER]
    calls = [call for t in flat for call in t.tool_calls]
    by_tool = Counter(call.tool for call in calls)
    timeouts = sum(call.outcome == "timeout" for call in calls)
    best = max(values)
    return {
        **figures,
        "reward/min": float(min(values)),
        "reward/max": float(best),
        "group/frac_all_pass": _share([bool(g) and min(g) == max(g) > 0 for g in graded]),
        "group/frac_all_fail": _share([bool(g) and max(g) <= 0 for g in graded]),
        "len/min": float(min(lengths)),
        "len/p90": float(np.percentile(lengths, 90)),
        "len/answered_mean": float(np.mean(answered)) if answered else 0.0,
        "len/cut_off_frac": _share([t.stop_reason in CUT_OFF for t in flat]),
        "tool/timeout_frac": timeouts / max(len(calls), 1),
        **{f"tool/{name}/calls": n / len(flat) for name, n in sorted(by_tool.items())},
    }


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / max(len(flags), 1)


def sampling_metrics(
    sampled: Sampled, engines: Sequence[MeteredEngine], seconds: float, reward_seconds: float
) -> dict[str, float]:
    """Where the time of sampling a batch went, and how fast that was.

    Args:
        sampled: the batch.
        engines: restarted before it; their seconds are means.
        seconds: that it took.
        reward_seconds: those of them that grading took.
    """
    decode = float(np.mean([engine.meter.decode_s for engine in engines]))
    extend = float(np.mean([engine.meter.extend_s for engine in engines]))
    idle = float(np.mean([engine.meter.idle_s for engine in engines]))
    decoded = sum(engine.meter.decoded_tokens for engine in engines)
    row_steps = sum(engine.row_steps for engine in engines)
    tokens = sum(t.num_policy_tokens for group in sampled.everything for t in group)
    return {
        "time/rollout": seconds,
        "time/decode": decode,
        "time/extend": extend,
        "time/reward": reward_seconds,
        "time/idle": idle,
        "time/tool_wait": max(seconds - decode - extend - reward_seconds, 0.0),
        "perf/rollout_tok_s": tokens / max(seconds, 1e-9),
        "perf/slot_util": decoded / max(row_steps, 1),
    }


def sequence_lengths(batches: Sequence[Batch]) -> list[int]:
    """Tokens of each sequence that is packed into batches; a shared prompt counts for the first."""
    lengths: list[int] = []
    for batch in batches:
        for row in np.asarray(batch.segment_ids):
            lengths.extend(np.bincount(row)[1:].tolist())
    return [length for length in lengths if length]


def train_speed(
    model: ModelConfig,
    lengths: Sequence[int],
    loss_tokens: float,
    seconds: float,
    adapters: bool = False,
) -> dict[str, float]:
    """Speed of updates on sequences of these lengths, and their MFU where the peak is known."""
    if not lengths:
        return {}
    flops = train_flops(model, lengths, loss_tokens, adapters)
    return {"perf/train_tok_s": sum(lengths) / max(seconds, 1e-9), **mfu(flops, seconds)}


def mfu(flops: float, seconds: float) -> dict[str, float]:
    """``perf/mfu`` of all devices; nothing where the peak of their chip is not known."""
    peak = stated_flops(jax.devices())
    if peak is None or seconds <= 0:
        return {}
    return {"perf/mfu": flops / (seconds * peak)}


def memory() -> dict[str, float]:
    """Peak memory so far: of the process, and of its fullest device where that is known."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = {"mem/host_peak_gb": kilobytes * (1 if sys.platform == "darwin" else 1024) / 1e9}
    devices = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in devices if stats]
    return {**figures, "mem/device_peak_gb": max(peaks) / 1e9} if peaks else figures
