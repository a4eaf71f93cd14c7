"""Computes the results of an evaluation, for the result file and for a terminal.

The content of a result file depends only on samples and verdicts, not on times or on the order in
which samples finished. A result file contains no question and no answer, so it can be shared
without leaking the benchmark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coa_jax.errors import UserError
from coa_jax.evaluation import metrics
from coa_jax.evaluation.sample import Sample, TaskSamples

FORMAT = 2
FIELDS = (
    *("level", "topic", "hops", "kind", "lang", "answer_type", "platform", "data_source"),
    *("source", "wording"),
)
"""Metadata fields of tasks; the results also list pass@1 for each value of each field."""

_MOST_GROUPS = 6
"""Maximum number of values of a field that are shown on a terminal."""


def check_written(stage: str, groups: Sequence[TaskSamples]) -> None:
    """Raises UserError if the policy wrote nothing in every graded sample of an evaluation.

    There is no error if no sample is graded, or if the policy itself ended a sample at once (stop
    reason ``eos``).
    """
    graded = [one for group in groups for one in group.samples if one.value is not None]
    if graded and not any(one.tokens or one.answer or one.stop == "eos" for one in graded):
        stops = Counter(sample.stop for sample in graded)
        reasons = ", ".join(f"{count} samples {stop}" for stop, count in sorted(stops.items()))
        raise UserError(
            f"{stage}: there is no result, because the policy wrote no token (stop reasons: "
            f"{reasons}); if the prompts do not fit into the context, give a shorter "
            "rollout.prompt_style or a higher rollout.max_tokens and engine.max_length"
        )


def compute_results(groups: Sequence[TaskSamples], numbers: int) -> dict[str, Any]:
    """Returns the results of an evaluation by name, such as pass@1, costs and stop reasons.

    Args:
        groups: the tasks with their finished samples.
        numbers: number of samples per task that the evaluation wants.
    """
    solved = [group.solved for group in groups]
    pairs = [(group.task.metadata, group.solved) for group in groups]
    flat = [sample for group in groups for sample in group.samples]
    graded = [sample for sample in flat if sample.value is not None]
    broken = sum(sample.broken for sample in flat)
    return {
        **metrics.rate(solved),
        "mean_value": metrics.mean([float(np.mean(g.values)) for g in groups if g.values]),
        "tasks": len(groups),
        "samples": {
            "wanted": len(groups) * numbers,
            "finished": len(flat),
            "graded": len(graded),
            "ungraded": {
                "no_verdict": len(flat) - len(graded) - broken,
                "infrastructure_fault": broken,
            },
            "unanswered": sum(sample.answer is None for sample in graded),
        },
        # A round consists of the graded samples of one sample number.
        "rounds": [
            metrics.mean([sample.solved for sample in graded if sample.number == number])
            for number in range(numbers)
        ],
        "at_k": metrics.at_k(solved),
        "by": {
            key: rates_by_value
            for key in FIELDS
            if (rates_by_value := metrics.rates_by(pairs, key))
        },
        "format_valid": metrics.mean([sample.format_valid for sample in graded]),
        "stops": dict(sorted(Counter(sample.stop for sample in flat).items())),
        "costs": costs(graded),
        "exposure": _exposure(groups),
    }


def training_metrics(groups: Sequence[TaskSamples], numbers: int) -> dict[str, float]:
    """Returns the metrics ``eval/...`` of an evaluation during training, see docs/metrics.md.

    If the tasks come from several sources, the rates of each source are included.

    Args:
        groups: the tasks with their finished samples.
        numbers: number of samples per task that the evaluation wants.
    """
    sources = dict.fromkeys(group.task.source for group in groups)
    parts = {"eval": groups}
    if len(sources) > 1:
        for name in sources:
            parts[f"eval/{name}"] = [group for group in groups if group.task.source == name]
    rates = {
        f"{name}/{key}": float(value)
        for name, part in parts.items()
        for key, value in _training_rates(part, numbers).items()
        if value is not None
    }
    flat = [sample for group in groups for sample in group.samples]
    return {
        **rates,
        "eval/ungraded": float(sum(sample.value is None for sample in flat)),
        "eval/faults": float(sum(sample.broken for sample in flat)),
        "eval/len_mean": float(np.mean([sample.tokens for sample in flat])),
        "eval/tool_calls": float(np.mean([len(sample.calls) for sample in flat])),
        "eval/format_valid": float(np.mean([sample.format_valid for sample in flat])),
    }


def _training_rates(groups: Sequence[TaskSamples], numbers: int) -> dict[str, float | None]:
    """Returns the rates of graded samples; a rate is None if the samples do not determine it."""
    rates = compute_results(groups, numbers)
    if not rates["n"]:
        return {"tasks": 0}
    solved = [group.solved for group in groups if group.values]
    return {
        "tasks": rates["n"],
        "pass_at_1": rates["pass_at_1"],
        "pass_at_1_se": rates["se"],
        "pass_at_1_low": rates["ci95"][0],
        "pass_at_1_high": rates["ci95"][1],
        "reward": rates["mean_value"],
        "any_right": metrics.mean(list(map(any, solved))) if max(map(len, solved)) > 1 else None,
        **{f"pass_at_{k}": entry["value"] for k, entry in rates["at_k"].items() if k != "1"},
    }


def costs(samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the numbers of tokens and tool calls, per sample and per solved sample.

    ``tokens_per_solved`` is the number of tokens of all samples, including unsolved samples,
    divided by the number of solved samples; ``calls_per_solved`` is computed in the same way.
    Values per sample are None if there are no samples. Values per solved sample are None if no
    sample is solved.
    """
    solved = sum(sample.solved for sample in samples)
    tokens = sum(sample.tokens for sample in samples)
    calls = [call for sample in samples for call in sample.calls]
    return {
        "tokens_per_sample": metrics.mean([sample.tokens for sample in samples]),
        "length_per_sample": metrics.mean([sample.length for sample in samples]),
        "calls_per_sample": metrics.mean([len(sample.calls) for sample in samples]),
        "tokens_per_solved": tokens / solved if solved else None,
        "calls_per_solved": len(calls) / solved if solved else None,
        "tools": {
            name: {
                "calls": sum(tool == name for tool, _ in calls),
                "outcomes": dict(sorted(Counter(o for tool, o in calls if tool == name).items())),
            }
            for name in sorted({tool for tool, _ in calls})
        },
    }


def _exposure(groups: Sequence[TaskSamples]) -> dict[str, Any]:
    """Counts the samples that saw a copy of the benchmark; adds pass@1 of the other samples."""
    flat = [sample for group in groups for sample in group.samples]
    clean = [
        [s.solved for s in group.samples if s.value is not None and not (s.blocked or s.shown)]
        for group in groups
    ]
    return {
        "named_blocked_address": sum(sample.blocked > 0 for sample in flat),
        "shown_question": sum(sample.shown > 0 for sample in flat),
        "unexposed": metrics.rate(clean),
    }


def result_file_content(
    stage: str,
    settings: Mapping[str, Any],
    groups: Sequence[TaskSamples],
    numbers: int,
    scaling: Mapping[str, Any],
    unjudged: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Returns the content of the result file of an evaluation.

    Args:
        stage: name of the evaluation.
        settings: settings of the evaluation, as JSON values.
        groups: the tasks with their finished samples.
        numbers: number of samples per task that the evaluation wants.
        scaling: results of majority vote and best-of-n, see `scaling.scaling`.
        unjudged: number of answers without a verdict of the judge, by reason; None if there is no
            judge.
    """
    measured = {**compute_results(groups, numbers), "scaling": dict(scaling)}
    return {
        "format": FORMAT,
        "stage": stage,
        "settings": dict(settings),
        "not_plain": not_plain(settings),
        "figures": {**measured, "unjudged": dict(sorted((unjudged or {}).items()))},
        "tasks": [
            {
                "id": group.task.id,
                **{key: group.task.metadata[key] for key in FIELDS if key in group.task.metadata},
                "samples": [sample.to_json() for sample in group.samples],
            }
            for group in groups
        ],
    }


def not_plain(settings: Mapping[str, Any]) -> list[str]:
    """Returns the names of the enabled settings that make the measured rate differ from pass@1.

    An example is ``attempts`` above 1, which runs a sample again until it has an answer. Such
    settings reproduce the evaluation code of the Chain-of-Agents paper.
    """
    names = {
        "last_suggestion": (settings.get("grading") or {}).get("last_suggestion"),
        f"attempts={settings.get('attempts')}": (settings.get("attempts") or 1) > 1,
        "rollout.cut_context": (settings.get("rollout") or {}).get("cut_context"),
    }
    return [name for name, on in names.items() if on]


def summary_blocks(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a result file contributes to ``summary.json`` and to the report of the run.

    The result maps the stage to its main figures, and ``STAGE_details`` to further figures.
    """
    stage, values = outcome["stage"], outcome["figures"]
    by, cost = values["by"], values["costs"]
    return {
        stage: {
            "pass_at_1": values["pass_at_1"],
            "ci95": values["ci95"],
            "n": values["n"],
            "tokens_per_task": cost["tokens_per_sample"],
            "tool_calls_per_task": cost["calls_per_sample"],
            "format_valid": values["format_valid"],
        },
        f"{stage}_details": {
            "samples_per_task": len(values["rounds"]),
            "ungraded": sum(values["samples"]["ungraded"].values()),
            "pass_at_k": {k: entry["value"] for k, entry in values["at_k"].items()},
            "by_hops": by.get("hops", {}),
            "by_kind": by.get("kind", {}),
            "tools": cost["tools"],
            "stops": values["stops"],
            "tokens_per_solved": cost["tokens_per_solved"],
        },
    }


def table(outcome: Mapping[str, Any]) -> str:
    """Formats the content of a result file as text for a terminal."""
    values = outcome["figures"]
    lines = [_headline(outcome["stage"], values)]
    if outcome["not_plain"]:
        lines.append(f"  not a plain pass@1: measured with {', '.join(outcome['not_plain'])}")
    rounds = [value for value in values["rounds"] if value is not None]
    if len(rounds) > 1:
        shown = ", ".join(f"{value:.3f}" for value in rounds)
        lines.append(f"  avg@{len(rounds)} over the rounds {shown}")
    lines += [
        f"  pass@{k} {entry['value']:.3f} (n {entry['n']})"
        for k, entry in values["at_k"].items()
        if k != "1"
    ]
    lines += [f"  {line}" for line in _scaling_lines(values["scaling"])]
    lines += [f"  by {key}: {_by_line(groups)}" for key, groups in values["by"].items()]
    cost = values["costs"]
    if values["format_valid"] is not None:
        lines.append(
            f"  {cost['tokens_per_sample']:.0f} tokens and {cost['calls_per_sample']:.2f} tool "
            f"calls a sample, {100 * values['format_valid']:.1f} % obey the protocol"
        )
    lines.append(
        f"  ends: {', '.join(f'{name} {count}' for name, count in values['stops'].items())}"
    )
    cut_off = values["stops"].get("length", 0) / max(1, sum(values["stops"].values()))
    if cut_off > 0.2:
        lines.append(
            f"  {cut_off:.0%} were cut off by rollout.max_tokens, which counts the prompt too: "
            "raise it, or read the texts, if they do not end"
        )
    for name, entry in cost["tools"].items():
        outcomes = ", ".join(f"{k} {v}" for k, v in entry["outcomes"].items())
        lines.append(f"  {name}: {entry['calls']} calls ({outcomes})")
    if cost["tokens_per_solved"] is not None:
        lines.append(
            f"  {cost['tokens_per_solved']:.0f} tokens and {cost['calls_per_solved']:.2f} calls per"
            " solved sample"
        )
    met = values["exposure"]
    named, shown = met["named_blocked_address"], met["shown_question"]
    if named or shown:
        lines.append(
            f"  contamination: {named} samples named a blocked address, {shown} were shown a "
            f"question; pass@1 of the others {shown_rate(met['unexposed']['pass_at_1'])}"
        )
    for why, count in values["samples"]["ungraded"].items():
        if count:
            lines.append(f"  ungraded, and in no figure: {count} samples ({why.replace('_', ' ')})")
    lines += [f"  no verdict of the judge: {_reasons(values['unjudged'])}"] * bool(
        values["unjudged"]
    )
    return "\n".join(lines)


def _headline(stage: str, values: Mapping[str, Any]) -> str:
    if values["pass_at_1"] is None:
        return f"{stage}: not graded ({values['samples']['finished']} samples are finished)"
    low, high = values["ci95"]
    error = f" ± {values['se']:.3f}" if values["se"] is not None else ""
    rate = f"pass@1 {values['pass_at_1']:.3f}{error}"
    return f"{stage}: {rate} (95 % {low:.3f}-{high:.3f}, n {values['n']})"


def shown_rate(value: float | None) -> str:
    """Formats a rate as text; None, which means that no sample is graded, as "not graded"."""
    return "not graded" if value is None else f"{value:.3f}"


def _by_line(groups: Mapping[str, Any]) -> str:
    """Formats the rates by the values of a field; shows only the values with the most tasks."""
    largest = sorted(groups, key=lambda name: groups[name]["n"], reverse=True)[:_MOST_GROUPS]
    shown = [
        f"{name} {shown_rate(group['pass_at_1'])} (n {group['n']})"
        for name, group in groups.items()
        if name in largest
    ]
    hidden = len(groups) - len(shown)
    return ", ".join(shown) + (f", and {hidden} more in results.json" if hidden else "")


def _scaling_lines(scaling: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, entry in scaling.items():
        missing = f", {entry['ungraded']} tasks ungraded" if entry["ungraded"] else ""
        missing += f": {_reasons(entry['why'])}" if entry.get("why") else ""
        lines.append(f"{name} {shown_rate(entry['pass_at_1'])} (n {entry['n']}{missing})")
    return lines


def _reasons(reasons: Mapping[str, int]) -> str:
    return "; ".join(f"{reason} ({count})" for reason, count in reasons.items())
