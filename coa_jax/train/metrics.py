"""Computes the metrics of a step that its losses do not return; see docs/metrics.md."""

from __future__ import annotations

import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from coa_jax.data.trajectory import Author, StopReason, Trajectory, format_valid
from coa_jax.model.config import ModelConfig
from coa_jax.model.costs import train_flops
from coa_jax.parallel.chips import stated_flops
from coa_jax.train.advantages import has_signal, less_mean
from coa_jax.train.batch import Batch
from coa_jax.train.groups import Sampled, earned, graded_values, score_group
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.run_records import oldest_of, versions_of

CUT_OFF = ("length", "turn_length", "turns", "deadline", "tool_time")
"""Stop reasons of trajectories that were cut off by a budget."""

MASKED_BY = ("ungraded", "fault", "tool_fault", "deadline", "tool_time")
"""Reasons why trajectories are masked under the default settings; see `masked_by`."""


def rollout_metrics(sampled: Sampled) -> dict[str, float]:
    """Computes the metrics of a step's rollouts: rewards, lengths, tool calls, stop reasons.

    The metrics describe all groups that the step examined, including those that it does not train
    on. docs/metrics.md explains each metric.
    """
    groups, lost = sampled.everything, [t for group in sampled.dropped for t in group]
    flat = [t for group in groups for t in group]
    values = graded_values(groups) or [0.0]
    # Rewards before the length penalty, because the penalty may lower the reward of a correct
    # answer to 0 or below.
    graded = [[v for v in earned(group) if v is not None] for group in groups]
    lengths = [t.num_policy_tokens for t in flat]
    answered = [t.num_policy_tokens for t in flat if t.stop_reason == StopReason.ANSWER]
    calls = [call for t in flat for call in t.tool_calls]
    by_tool = Counter(call.tool for call in calls)
    stops = Counter(str(t.stop_reason) for t in flat)
    masked = Counter(cause for t in flat if (cause := masked_by(t)))
    return {
        **staleness(sampled.used, sampled.composition.step),
        "drop/groups": float(len(sampled.composition.dropped)),
        "drop/given_up": float(sampled.composition.given_up),
        "drop/len_mean": _mean(t.num_policy_tokens for t in lost),
        "rollout/tokens": float(sum(lengths)),
        **_parts(flat),
        "reward/mean": float(np.mean(values)),
        "reward/std": float(np.std(values)),
        "reward/min": float(min(values)),
        "reward/max": float(max(values)),
        "reward/masked_frac": 1.0 - len(graded_values(groups)) / len(flat),
        "reward/ungraded": float(sum(bool(t.reward and t.reward.reason) for t in flat)),
        **{f"masked/{why}": masked[why] / len(flat) for why in sorted({*MASKED_BY, *masked})},
        "group/sampled": float(len(groups)),
        "group/used": float(len(sampled.used)),
        "group/discarded": float(sampled.composition.discarded),
        **variety(groups),
        "group/frac_zero_std": _mean(not has_signal(rewards) for rewards in graded),
        "group/frac_all_pass": _mean(bool(g) and min(g) == max(g) > 0 for g in graded),
        "group/frac_all_fail": _mean(bool(g) and max(g) <= 0 for g in graded),
        "len/mean": float(np.mean(lengths)),
        "len/min": float(min(lengths)),
        "len/max": float(max(lengths)),
        "len/p90": float(np.percentile(lengths, 90)),
        "len/answered_mean": _mean(answered),
        "len/cut_off_frac": _mean(t.stop_reason in CUT_OFF for t in flat),
        "tool/calls": len(calls) / len(flat),
        "tool/fail_frac": _mean(not call.ok for call in calls),
        "tool/timeout_frac": _mean(call.outcome == "timeout" for call in calls),
        "tool/seconds": sum(call.end - call.start for call in calls) / len(flat),
        **{f"tool/{name}/calls": n / len(flat) for name, n in sorted(by_tool.items())},
        "format/valid": _mean(format_valid(t) for t in flat),
        **{f"stop/{reason}": count / len(flat) for reason, count in sorted(stops.items())},
        **turn_figures(flat),
        **agent_figures(flat),
    }


def _mean(values: Iterable[float]) -> float:
    """Returns the mean of some numbers; 0 if there are none."""
    return float(np.mean([*values] or [0.0]))


def variety(groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Computes how different the samples of a group are, and which of them have larger gradients.

    Returns:
        ``group/distinct`` and ``group/distinct_tokens`` are the shares of samples and of policy
        tokens that remain if equal samples of a group count once. ``group/gradient_ratio`` is the
        mean squared gradient of the samples below the mean reward of their group, divided by that
        of the samples above it. If it is above 1, bad samples move the policy more than good ones;
        without samples of both kinds, it is absent. The squared gradient of a sample is estimated
        by the sum of ``(1 - p)^2`` over its policy tokens, which have the probabilities p.
    """
    texts = [{t.tokens.tobytes(): t.num_policy_tokens for t in group} for group in groups]
    samples = [t for group in groups for t in group]
    tokens = sum(t.num_policy_tokens for t in samples)
    squares: dict[bool, list[float]] = {False: [], True: []}
    for group in groups:
        rewards = [(t, t.reward.value) for t in group if t.reward and t.reward.value is not None]
        differences = less_mean(np.array([value for _, value in rewards], np.float64))
        for (t, _), difference in zip(rewards, differences, strict=True):
            if difference:
                misses = -np.expm1(t.logp[t.author == Author.POLICY])
                squares[difference > 0].append(float(np.sum(misses * misses, dtype=np.float64)))
    below, above = _mean(squares[False]), _mean(squares[True])
    return {
        "group/distinct": sum(map(len, texts)) / max(len(samples), 1),
        "group/distinct_tokens": sum(sum(text.values()) for text in texts) / max(tokens, 1),
        **({"group/gradient_ratio": below / above} if above and squares[False] else {}),
    }


def _parts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the mean of each reward component over the graded trajectories that have it."""
    rewards = [t.reward for t in trajectories if t.reward is not None]
    there = [reward.parts for reward in rewards if reward.value is not None]
    means = {}
    for name in sorted({name for parts in there for name in parts} - {"earned"}):
        values = [parts[name] for parts in there if name in parts]
        # A reward has a penalty as a component only if the penalty lowered the reward; in the mean,
        # the penalty of the other rewards is 0.
        count = len(there) if name in ("overlong", "stop") else len(values)
        means[f"reward/{name}"] = float(sum(values) / count)
    return means


def masked_by(trajectory: Trajectory) -> str:
    """Returns the reason why a trajectory has no reward to train on; "" if it has a reward.

    The reason is ``ungraded`` if a grader gave no verdict, and ``tool_fault`` if a tool call failed
    through a fault of the tool and not of the policy. For every other trajectory without a reward,
    the reason is the trajectory's stop reason.
    """
    reward, stop = trajectory.reward, trajectory.stop_reason
    if reward is None or reward.reason:
        return "ungraded"
    if reward.value is not None:
        return ""
    broken = any(call.outcome == "fault" for call in trajectory.tool_calls)
    ours = stop in (StopReason.FAULT, StopReason.CANCELLED)
    return "tool_fault" if broken and not ours else str(stop)


def describe_sources(config: RLConfig, sampled: Sampled) -> dict[str, float]:
    """Computes metrics ``source/NAME/...`` of the groups of each task source of a mixture.

    The result is {} if the run has no mixture of sources.
    """
    groups: dict[str, list[list[Trajectory]]] = defaultdict(list)
    for group in sampled.everything if config.mixture else ():
        groups[group[0].metadata["source"]].append(group)
    figures: dict[str, float] = {}
    for name, members in sorted(groups.items()):
        scores = [score_group(group) for group in members]
        solved, graded = (sum(counts) for counts in zip(*scores, strict=True))
        figures |= {
            f"source/{name}/groups": float(len(members)),
            f"source/{name}/reward": _mean(graded_values(members)),
            f"source/{name}/solved": solved / max(graded, 1),
            f"source/{name}/tokens": float(sum(t.num_policy_tokens for g in members for t in g)),
        }
    return figures


def turn_figures(flat: Sequence[Trajectory]) -> dict[str, float]:
    """Computes the metrics ``env/...``, about the rewards that environments gave for single turns.

    Args:
        flat: trajectories of a step.

    Returns:
        Metrics by name; {} if no turn has a reward.
    """
    rewards = [[c.reward for c in t.tool_calls if c.reward is not None] for t in flat]
    turn_rewards = [reward for of_turns in rewards for reward in of_turns]
    if not turn_rewards:
        return {}
    return {
        "env/turn_reward": float(np.mean(turn_rewards)),
        "env/return": float(np.mean([sum(of_turns) for of_turns in rewards])),
        "env/turns": len(turn_rewards) / len(flat),
    }


def agent_figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Computes the metrics ``agent/...`` of trajectories that an external program produced.

    The metrics are the mean numbers of turns and of separate conversations per trajectory. The
    result is {} if there are no such trajectories.
    """
    turns = [t.metadata["agent_turns"] for t in trajectories if "agent_turns" in t.metadata]
    if not turns:
        return {}
    sequences = [len(trajectory.sequences) for trajectory in trajectories]
    return {"agent/turns": _mean(turns), "agent/sequences": _mean(sequences)}


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
        "stale/mean": _mean(ages),
        "stale/max": float(max(ages, default=0)),
        "stale/frac": _mean(age > 0 for age in ages),
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
            lengths = (t.num_policy_tokens for group in members for t in group)
            figures[f"stale/{age}/len_mean"] = _mean(lengths)
            figures[f"stale/{age}/reward_mean"] = _mean(graded_values(members))
    return figures


def sampling_metrics(sampled: Sampled, figures: Mapping[str, float]) -> dict[str, float]:
    """Computes the seconds per phase of sampling, and the throughput, since the previous step.

    Args:
        sampled: groups of samples of the step.
        figures: seconds and counts of this process, see `group_stream.LocalShare`.
    """
    seconds, slots = max(figures["seconds"], 1e-9), max(figures["slots"], 1)
    tokens = sum(t.num_policy_tokens for group in sampled.everything for t in group)
    # If nothing was decoded in these seconds, all samples are older: a resumed run read them from
    # disk, or they finished together with the samples of the previous step.
    speed = {"perf/rollout_tok_s": tokens / seconds} if figures["decoded_tokens"] else {}
    return {
        **speed,
        "time/rollout": figures["seconds"],
        "time/decode": figures["decode_s"],
        "time/extend": figures["extend_s"],
        "time/idle": figures["idle_s"],
        "time/reward": figures["reward_s"],
        "time/tool_wait": figures["waiting_s"] / slots,
        "drop/left_out": figures["left_out"],
        "perf/occupancy": figures["occupied_s"] / (slots * seconds),
        "perf/slot_util": figures["decoded_tokens"] / max(figures["row_steps"], 1),
    }


def sequence_lengths(batches: Sequence[Batch]) -> list[int]:
    """Returns the number of tokens of each packed sequence.

    If several sequences share a prompt, the prompt counts in the length of the first of them. Each
    further sequence has only the prompt's last token, from which its next token is predicted.
    """
    lengths: list[int] = []
    for batch in batches:
        for row in np.asarray(batch.segment_ids):
            lengths.extend(np.bincount(row)[1:].tolist())
    return [length for length in lengths if length]


def train_speed(
    model_config: ModelConfig, lengths: Sequence[int], loss_tokens: float, seconds: float
) -> dict[str, float]:
    """Computes the throughput of updates and, if the chip's peak FLOP rate is known, the MFU.

    MFU (model FLOP utilisation) is the share of the peak FLOP rate of all devices.

    Args:
        model_config: architecture of the model, including the adapters if only those are trained.
        lengths: number of tokens of each sequence.
        loss_tokens: number of tokens with a loss.
        seconds: time that the updates took.
    """
    if not lengths:
        return {}
    figures = {"perf/train_tok_s": sum(lengths) / max(seconds, 1e-9)}
    peak = stated_flops(jax.devices())
    if peak is not None and seconds > 0:
        flops = train_flops(model_config, lengths, loss_tokens, bool(model_config.lora.rank))
        figures["perf/mfu"] = flops / (seconds * peak)
    return figures


def peak_memory() -> dict[str, float]:
    """Returns the peak memory of this process and, if known, of its devices, in GB.

    ``mem/host_peak_gb`` is the peak of the process. ``mem/device_peak_gb`` is the peak of the
    device with the highest peak.
    """
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = {"mem/host_peak_gb": kilobytes * (1 if sys.platform == "darwin" else 1024) / 1e9}
    devices = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in devices if stats]
    return {**figures, "mem/device_peak_gb": max(peaks) / 1e9} if peaks else figures
