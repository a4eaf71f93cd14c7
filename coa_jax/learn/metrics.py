"""Computes the metrics of a step that its losses do not return; see docs/metrics.md."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from coa_jax.learn.batch import Batch
from coa_jax.learn.groups import Sampled, earned, graded_values
from coa_jax.learn.record import oldest_of, versions_of
from coa_jax.model.config import ModelConfig
from coa_jax.model.costs import train_flops
from coa_jax.parallel.chips import stated_flops
from coa_jax.trajectory import Author, StopReason, Trajectory

# Stop reasons of trajectories that were cut off by a budget.
CUT_OFF = frozenset(
    {
        StopReason.LENGTH,
        StopReason.TURN_LENGTH,
        StopReason.TURNS,
        StopReason.DEADLINE,
        StopReason.TOOL_TIME,
    }
)


def rollout_metrics(sampled: Sampled) -> dict[str, float]:
    """Computes metrics of a step's rollouts, in addition to those of `groups.describe`."""
    flat = [t for group in sampled.everything for t in group]
    lost = [t for group in sampled.dropped for t in group]
    figures = {
        **staleness(sampled.used, sampled.composition.step),
        "drop/groups": float(len(sampled.dropped)),
        "drop/given_up": float(sampled.composition.given_up),
        "drop/len_mean": float(np.mean([t.num_policy_tokens for t in lost] or [0])),
        "rollout/tokens": float(sum(t.num_policy_tokens for t in flat)),
    }
    values = graded_values(sampled.everything) or [0.0]
    # Rewards before the length penalty, because the penalty may lower the reward of a correct
    # answer to 0 or below.
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
        **turn_figures(flat),
        **agent_figures(flat),
    }


def turn_figures(flat: Sequence[Trajectory]) -> dict[str, float]:
    """Computes metrics of the rewards that environments gave for turns; {} without such rewards."""
    rewards = [[c.reward for c in t.tool_calls if c.reward is not None] for t in flat]
    given = [reward for of_turns in rewards for reward in of_turns]
    if not given:
        return {}
    return {
        "env/turn_reward": float(np.mean(given)),
        "env/return": float(np.mean([sum(of_turns) for of_turns in rewards])),
        "env/turns": len(given) / len(flat),
    }


def agent_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Computes metrics of trajectories that an agent program sampled; {} if there are none."""
    turns = [t.metadata["agent_turns"] for t in trajectories if "agent_turns" in t.metadata]
    if not turns:
        return {}
    sequences = [len(trajectory.sequences) for trajectory in trajectories]
    return {
        "agent/turns": float(np.mean(turns)),
        "agent/sequences": float(np.mean(sequences)),
    }


def staleness(groups: Sequence[Sequence[Trajectory]], step: int) -> dict[str, float]:
    """Computes metrics of the ages, in steps, of a step's groups.

    The age of a token is the number of steps between the policy version that sampled the token and
    the version that the step updates. The age of a group is the age of its oldest token. If any
    group has an age above 0, metrics ``stale/N/...`` describe each age N: the number of groups of
    this age, the mean length and mean reward of these groups, and the share of the step's policy
    tokens that have this age.

    Args:
        groups: groups that the step trains on.
        step: number of the step, which updates policy version ``step - 1``.
    """
    ages = [step - 1 - oldest_of(group) for group in groups]
    figures = {
        "stale/mean": float(np.mean(ages)) if ages else 0.0,
        "stale/max": float(max(ages, default=0)),
        "stale/frac": _share([age > 0 for age in ages]),
    }
    if not any(ages):
        return figures
    tokens: Counter[int] = Counter()
    for trajectory in (one for group in groups for t in group for one in t.sequences):
        starts = versions_of(trajectory)
        ends = [position for position, _ in starts[1:]] + [len(trajectory.tokens)]
        for (start, version), end in zip(starts, ends, strict=True):
            written = trajectory.author[start:end] == Author.POLICY
            tokens[step - 1 - version] += int(np.count_nonzero(written))
    for age in sorted({*ages, *tokens}):
        members = [group for group, its in zip(groups, ages, strict=True) if its == age]
        figures[f"stale/{age}/groups"] = float(len(members))
        figures[f"stale/{age}/tokens"] = tokens[age] / max(tokens.total(), 1)
        if members:
            lengths = [t.num_policy_tokens for group in members for t in group]
            figures[f"stale/{age}/len_mean"] = float(np.mean(lengths))
            figures[f"stale/{age}/reward_mean"] = float(np.mean(graded_values(members) or [0.0]))
    return figures


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / max(len(flags), 1)


def sampling_metrics(sampled: Sampled, figures: Mapping[str, float]) -> dict[str, float]:
    """Computes the seconds per phase of sampling, and the throughput, since the previous step.

    Args:
        sampled: groups of samples of the step.
        figures: seconds and counts of this process, see `stream.Share`.
    """
    seconds, slots = max(figures["seconds"], 1e-9), max(figures["slots"], 1)
    tokens = sum(t.num_policy_tokens for group in sampled.everything for t in group)
    return {
        "time/rollout": figures["seconds"],
        "time/decode": figures["decode_s"],
        "time/extend": figures["extend_s"],
        "time/idle": figures["idle_s"],
        "time/reward": figures["reward_s"],
        "time/tool_wait": figures["waiting_s"] / slots,
        "drop/left_out": figures["left_out"],
        "perf/rollout_tok_s": tokens / seconds,
        "perf/occupancy": figures["occupied_s"] / (slots * seconds),
        "perf/slot_util": figures["decoded_tokens"] / max(figures["row_steps"], 1),
    }


def sequence_lengths(batches: Sequence[Batch]) -> list[int]:
    """Returns the number of tokens of each packed sequence.

    A prompt that several sequences share counts only in the length of the first of them. (The other
    sequences keep its last token.)
    """
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
    """Computes the throughput of updates and, if the chip's peak FLOP rate is known, the MFU.

    MFU is the model FLOP utilisation over all devices, see `mfu`.

    Args:
        model: architecture of the model.
        lengths: number of tokens of each sequence.
        loss_tokens: number of tokens with a loss.
        seconds: time that the updates took.
        adapters: whether only LoRA adapters are trained.
    """
    if not lengths:
        return {}
    flops = train_flops(model, lengths, loss_tokens, adapters)
    return {"perf/train_tok_s": sum(lengths) / max(seconds, 1e-9), **mfu(flops, seconds)}


def mfu(flops: float, seconds: float) -> dict[str, float]:
    """Computes the model FLOP utilisation over all devices, ``perf/mfu``.

    Returns {} if the chip's peak FLOP rate is unknown.
    """
    peak = stated_flops(jax.devices())
    if peak is None or seconds <= 0:
        return {}
    return {"perf/mfu": flops / (seconds * peak)}


def memory() -> dict[str, float]:
    """Returns the peak memory of the process and, if known, of the device with the highest peak."""
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = {"mem/host_peak_gb": kilobytes * (1 if sys.platform == "darwin" else 1024) / 1e9}
    devices = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in devices if stats]
    return {**figures, "mem/device_peak_gb": max(peaks) / 1e9} if peaks else figures
