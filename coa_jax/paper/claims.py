r"""Compares claims of the Chain-of-Agents paper with results of our own runs, in a table.

    coa-jax claims runs/pretrained-0 runs/pretrained-1 --plain=runs/plain-0,runs/plain-1

The arguments are run folders of a pipeline such as ``configs/pretrained/factbook.py``, one folder
for each seed. ``--plain`` names as many folders of the variant ``hermes`` of this config, whose
policy calls tools without a chain of agents. The command prints the table, and with ``--out`` also
writes it to a Markdown file. Below the table, it lists what the folders did not measure, with the
command that measures it.

Intervals are 95 % confidence intervals over the tasks of all seeds. A task that several seeds share
counts once, with the samples of these seeds. The interval of a rate is computed as in
`evaluation.metrics`, the interval of a difference by a paired bootstrap. The p-value of a
difference comes from the paired permutation test of `evaluation.compare`. Neither includes the
variation between seeds, so the table also lists the figure of each seed. Figures without an
interval, such as token savings, are means over seeds, and their n is the sum over seeds.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from coa_jax.errors import UserError
from coa_jax.evaluation.compare import bootstrap_interval, permutation_test, result_files
from coa_jax.evaluation.metrics import mean, mean_interval, pass_at_k
from coa_jax.files import durable, markdown
from coa_jax.run.command import run_main

Outcomes = Sequence[Mapping[str, Any]]
"""Contents of the result files of one stage, one for each seed."""

MAIN = "bash launch/pretrained.sh --seed N"
PLAIN = f"{MAIN} --config=configs/pretrained/factbook.py:hermes"
RECALL = "bash launch/quickstart.sh --seed N --config=configs/quickstart/mhqa.py:recall"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A value that is measured over all seeds.

    A figure with an interval is a mean over tasks (or calls). A task of several seeds then counts
    once, with the mean of its values in these seeds. A figure without an interval is a mean over
    seeds, and its ``n`` is the sum over seeds.

    Attributes:
        value: the value.
        interval: low and high end of the 95 % confidence interval; None if no interval is computed.
        n: number of tasks, calls or samples behind the value; 0 if there are none, for example if
            the policy never called the measured tool.
        seeds: values of the single seeds; seeds in which ``n`` would be 0 are left out.
        signed: whether the value is a difference and is shown with its sign.
        p: two-sided p-value of the hypothesis that a difference is 0; None if it is not computed.
    """

    value: float
    interval: tuple[float, float] | None
    n: int
    seeds: tuple[float, ...]
    signed: bool = False
    p: float | None = None


@dataclasses.dataclass(frozen=True)
class Folders:
    """The run folders from which a table is computed, one folder for each seed.

    Attributes:
        runs: folders of runs whose policy writes chains of agents.
        plain: folders of runs whose policy calls tools without a chain of agents.
    """

    runs: Sequence[Path]
    plain: Sequence[Path] = ()

    def outcomes(self, stage: str, plain: bool = False) -> Outcomes:
        """Reads the result files of a stage, one for each seed; [] if any file is missing.

        Args:
            stage: name of the stage.
            plain: whether to read the folders of plain tool calling.
        """
        paths = [result_files(run).get(stage) for run in (self.plain if plain else self.runs)]
        return [durable.read_json_object(path) for path in paths if path] if all(paths) else []

    def summaries(self, block: str) -> list[Mapping[str, Any]]:
        """Reads one block of ``summary.json`` for each seed; [] if any block is missing.

        Args:
            block: key of the block, such as ``economy``.
        """
        entries = [
            durable.read_json_object(path).get(block)
            for path in (folder / "summary.json" for folder in self.runs)
            if path.is_file()
        ]
        return [entry for entry in entries if entry] if all(entries) else []


Measure = Callable[[Folders], Figure | None]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A row of the table that compares the paper's claims with our results.

    Attributes:
        topic: subject of the claim, for the first column.
        what: description of what is measured here.
        figure: function that computes the figure from the run folders. It returns None if files are
            missing.
        paper: figure that the paper reports, and where in the paper.
        command: command that creates the result files.
    """

    topic: str
    what: str
    figure: Measure
    paper: str = "no figure"
    command: str = MAIN


# --- figures ---------------------------------------------------------------------------------


def solved_of(
    outcome: Mapping[str, Any], calling: Sequence[str] = (), **where: Any
) -> dict[str, list[bool]]:
    """Returns the grades of the tasks in a result file.

    Args:
        outcome: content of a result file.
        calling: tags of tools; if given, only a sample that called one of them counts as right.
        **where: values that fields of a task must have; tasks with other values are left out.

    Returns:
        Maps the id of each task to a list that says for each graded sample whether it is right.
        Tasks without graded samples are left out.
    """
    return {
        task["id"]: [
            sample["value"] == 1.0
            and (not calling or not sample["calls"].keys().isdisjoint(calling))
            for sample in graded
        ]
        for task in outcome["tasks"]
        if all(task.get(key) == value for key, value in where.items())
        if (graded := [sample for sample in task["samples"] if sample["value"] is not None])
    }


def measure(compute: Callable[..., Figure | None]) -> Callable[..., Measure]:
    """Decorates a function whose first argument is a list of run folders.

    The decorated function takes all other arguments, and returns a function of the folders alone,
    as `Claim.figure` needs.
    """

    @functools.wraps(compute)
    def given(*arguments: Any, **named: Any) -> Measure:
        return lambda folders: compute(folders, *arguments, **named)

    return given


def _merged(seeds: Sequence[Mapping[str, Sequence[Any]]]) -> list[list[Any]]:
    """Returns the values of each task, which are given for each seed, in one list for each task."""
    values_of: dict[str, list[Any]] = {}
    for seed in seeds:
        for name, values in seed.items():
            values_of.setdefault(name, []).extend(values)
    return list(values_of.values())


def _of_tasks(
    seeds: Sequence[Mapping[str, Sequence[Any]]],
    interval: Callable[[list[list[Any]]], tuple[float, float] | None] = mean_interval,
) -> Figure | None:
    """Computes the mean over tasks; None if there are no seeds.

    Args:
        seeds: for each seed, the values of each task, by task id.
        interval: computes the interval from the values of each task.
    """
    groups = _merged(seeds)
    values = tuple(_mean([_mean(group) for group in seed.values()]) for seed in seeds if seed)
    bounds = interval(groups) if groups else None
    return Figure(_mean([*map(_mean, groups)]), bounds, len(groups), values) if seeds else None


def _by_bootstrap(seeds: Sequence[Mapping[str, Sequence[Any]]]) -> Figure | None:
    """Computes a mean over tasks with a bootstrap interval; None if a seed has no tasks."""
    if not all(seeds):
        return None
    return _of_tasks(seeds, lambda groups: bootstrap_interval(np.array([*map(_mean, groups)])))


def _of_seeds(values: Sequence[float | None], n: int) -> Figure | None:
    """Returns the mean of one value for each seed; None if a value is missing."""
    numbers = tuple(float(value) for value in values if value is not None)
    complete = numbers and len(numbers) == len(values)
    return Figure(_mean(numbers), None, n, numbers) if complete else None


def _mean(values: Sequence[Any]) -> float:
    return float(mean(values) or 0)


@measure
def rate(folders: Folders, stage: str, plain: bool = False, **where: Any) -> Figure | None:
    """Computes pass@1 of a stage.

    Args:
        folders: the run folders.
        stage: name of the stage.
        plain: whether to read the folders of plain tool calling.
        **where: values that fields of a task must have; tasks with other values are left out.
    """
    return _of_tasks([solved_of(one, **where) for one in folders.outcomes(stage, plain)])


@measure
def difference(
    folders: Folders, stage: str, other: str, plain: bool = False, **where: Any
) -> Figure | None:
    """Computes pass@1 of a stage minus pass@1 of another, over the tasks that both have graded.

    Args:
        folders: the run folders.
        stage: name of the stage, which is read from the folders with chains of agents.
        other: name of the other stage.
        plain: whether ``other`` is read from the folders of plain tool calling.
        **where: values that fields of a task must have; tasks with other values are left out.
    """
    by_seed = []
    for pair in zip(folders.outcomes(stage), folders.outcomes(other, plain), strict=False):
        a, b = (
            {name: Fraction(sum(right), len(right)) for name, right in solved.items()}
            for solved in (solved_of(outcome, **where) for outcome in pair)
        )
        by_seed.append({name: [a[name] - b[name]] for name in a if name in b})
    if (figure := _by_bootstrap(by_seed)) is None:
        return None
    p, _ = permutation_test([sum(values) / len(values) for values in _merged(by_seed)])
    return dataclasses.replace(figure, signed=True, p=p)


@measure
def at_k(folders: Folders, stage: str, k: int) -> Figure | None:
    """Computes pass@k of a stage: the probability that at least one of k samples is right.

    Args:
        folders: the run folders.
        stage: name of the stage.
        k: number of samples.
    """
    seeds = [solved_of(outcome).items() for outcome in folders.outcomes(stage)]
    return _by_bootstrap(
        [{t: [pass_at_k(len(g), sum(g), k)] for t, g in tasks if len(g) >= k} for tasks in seeds]
    )


@measure
def scaled(folders: Folders, stage: str, prefix: str) -> Figure | None:
    """Computes pass@1 of a method of test-time scaling, which chooses one of several samples.

    Args:
        folders: the run folders.
        stage: stage of the pipeline whose evaluation is read, such as ``rl``.
        prefix: beginning of the method's name in the result file, such as ``majority``.
    """
    blocks = [outcome["figures"]["scaling"] for outcome in folders.outcomes(stage)]
    methods = [e for block in blocks for name, e in block.items() if name.startswith(prefix)]
    entries = [entry for entry in methods if entry["pass_at_1"] is not None]
    n = sum(entry["n"] for entry in entries)
    figure = _of_seeds([entry["pass_at_1"] for entry in entries], n)
    if figure is not None and len(entries) == 1:
        figure = dataclasses.replace(figure, interval=tuple(entries[0]["ci95"]))
    return figure


@measure
def well_formed(folders: Folders, stage: str, *tools: str) -> Figure | None:
    """Computes the share of tool calls that succeeded, that is, have the outcome ``ok``.

    Args:
        folders: the run folders.
        stage: name of the stage whose calls are counted.
        *tools: tags of the tools whose calls are counted.
    """
    seeds = []
    for seed, outcome in enumerate(folders.outcomes(stage)):
        entries = outcome["figures"]["costs"]["tools"].items()
        counts = [entry["outcomes"] for name, entry in entries if name in tools]
        kinds = [kind for count in counts for kind, n in count.items() for _ in range(n)]
        # Each call counts as a task of its own.
        seeds.append({f"{seed}/{i}": [kind == "ok"] for i, kind in enumerate(kinds)})
    return _of_tasks(seeds)


@measure
def helped(folders: Folders, stage: str, *tools: str) -> Figure | None:
    """Computes the share of graded samples that are right and called one of the given tools.

    Args:
        folders: the run folders.
        stage: name of the stage that drew the samples.
        *tools: tags of the tools, of which a sample must have called at least one.
    """
    return _of_tasks([solved_of(one, calling=tools) for one in folders.outcomes(stage)])


@measure
def saved(folders: Folders, key: str) -> Figure | None:
    """Computes the mean share of the multi-agent teacher's tokens that the policy saves.

    Args:
        folders: the run folders.
        key: name of the share in ``summary.json``. For example, ``both_solved`` compares the
            tokens of the samples in which both solve the task, see `distillation.token_counts`.
    """
    blocks = [block for block in folders.summaries("economy") if "saved" in block]
    n = sum(block["both_solved"]["samples"] for block in blocks)
    return _of_seeds([block["saved"][key] for block in blocks], n)


@measure
def calls_per_solved(folders: Folders, stage: str) -> Figure | None:
    """Computes the number of tool calls in all samples of a stage, per solved sample."""
    figures_of_seeds = [outcome["figures"] for outcome in folders.outcomes(stage)]
    n = sum(figures["n"] for figures in figures_of_seeds)
    return _of_seeds([figures["costs"]["calls_per_solved"] for figures in figures_of_seeds], n)


def team_calls_per_solved(folders: Folders) -> Figure | None:
    """Computes the number of the teacher's tool calls per solved task; None if it is unknown."""
    blocks = [block for block in folders.summaries("teacher") if block["pass_at_1"]]
    values = [block["tool_calls_per_task"] / block["pass_at_1"] for block in blocks]
    return _of_seeds(values, sum(block["n"] for block in blocks))


# --- the claims ------------------------------------------------------------------------------

_TOPICS = ("single", "chain", "comparison", "counting", "arithmetic")
_NATURAL = ("single", "two-step", "comparison", "counting", "arithmetic")
_UNSEEN = ("units", "calendar")
CLAIMS: tuple[Claim, ...] = (
    Claim("base", "base model, prompted with the protocol: pass@1", rate("base")),
    Claim("SFT", "SFT: pass@1", rate("sft"), "GAIA 50.5 (32B, Tab 8)"),
    Claim("RL", "SFT + RL: pass@1", rate("rl"), "GAIA 55.3 (32B, Tab 8)"),
    Claim("RL", "RL minus SFT", difference("rl", "sft"), "GAIA +4.8; MHQA 7B-base +2.2"),
    Claim("control", "SFT for the time of RL: pass@1", rate("sft_more")),
    Claim("control", "RL minus SFT for its time", difference("rl", "sft_more")),
    *(
        Claim("greedy", f"{name}: pass@1", rate(f"{stage}_greedy"), command=RECALL)
        for stage, name in (("sft", "SFT"), ("rl", "SFT + RL"), ("sft_more", "SFT longer"))
    ),
    *(
        Claim(
            "greedy", f"RL minus {name}", difference("rl_greedy", f"{stage}_greedy"),
            command=RECALL,
        )
        for stage, name in (("sft", "SFT"), ("sft_more", "SFT longer"))
    ),
    Claim("control", "RFT: pass@1", rate("rft")),
    Claim("control", "RL minus RFT", difference("rl", "rft")),
    *(Claim("by kind", f"RL, {topic}: pass@1", rate("rl", topic=topic)) for topic in _TOPICS),
    Claim("by kind", "RL, maths: pass@1", rate("rl", source="maths")),
    *(Claim("by hops", f"RL, {n} searches: pass@1", rate("rl", hops=n)) for n in (1, 2, 3)),
    Claim("wordings", "RL, known wordings: pass@1", rate("rl", wording="known")),
    Claim("wordings", "RL, held-out wordings: pass@1", rate("rl", wording="new")),
    Claim("wordings", "RL minus SFT, held-out wordings", difference("rl", "sft", wording="new")),
    Claim("natural", "SFT, natural questions: pass@1", rate("natural_sft")),
    Claim("natural", "RL, natural questions: pass@1", rate("natural_rl")),
    Claim("natural", "RL minus SFT, natural", difference("natural_rl", "natural_sft")),
    *(Claim("natural", f"RL, natural, {kind}", rate("natural_rl", kind=kind)) for kind in _NATURAL),
    Claim(
        "chain of agents", "SFT, plain tool calling: pass@1", rate("sft", plain=True),
        "ahead of tool calling (§4)", PLAIN,
    ),
    Claim(
        "chain of agents", "RL minus RL of plain tool calling", difference("rl", "rl", plain=True),
        "GAIA 55.3, WebThinker-RL 48.5 (Tab 8)", PLAIN,
    ),
    Claim("economy", "tokens saved, both solved", saved("both_solved"), "84.6 % (§5.1)"),
    Claim("economy", "the same, prompts resent", saved("both_solved_resent"), "84.6 % (§5.1)"),
    Claim("economy", "tool calls per solved task: RL", calls_per_solved("rl"), "fewest (Fig 5)"),
    Claim("economy", "tool calls per solved task: team", team_calls_per_solved, "more (Fig 5)"),
    Claim("scaling", "pass@1 of four samples", rate("scaling"), "GAIA 55.3 (Tab 13)"),
    Claim("scaling", "pass@3", at_k("scaling", 3), "GAIA 69.9 (Tab 13)"),
    Claim("scaling", "majority of four", scaled("scaling", "majority")),
    Claim(
        "scaling", "best of 3, picked by a judge", scaled("scaling", "best-of-3"),
        "GAIA 57.3 (Tab 13)",
        f"{MAIN} with best_of in config.measures.scaling.evaluate (docs/reproduction.md)",
    ),
    Claim(
        "unseen tools", "calls that the tools understood", well_formed("unseen", *_UNSEEN),
        "examples (§5.2)",
    ),
    Claim("unseen tools", "pass@1", rate("unseen"), "examples (§5.2)"),
    Claim("unseen tools", "solved with such a call", helped("unseen", *_UNSEEN), "examples (§5.2)"),
)  # fmt: skip


# --- the table -------------------------------------------------------------------------------


def table(folders: Folders) -> str:
    """Computes the figure of each claim from run folders, and formats the table in Markdown.

    Claims whose result files are missing follow below the table, with the command that makes them.
    """
    head = ("about", "the paper", "here", "figure (95 %)", "n", "by seed")
    rows, missing = [], dict[str, dict[str, None]]()
    for claim in CLAIMS:
        if (figure := claim.figure(folders)) is None:
            missing.setdefault(claim.command, {})[claim.topic] = None
        else:
            rows.append((claim.topic, claim.paper, claim.what, *_shown(figure)))
    lines = list(markdown.table(head, rows)) if rows else []
    for command, topics in missing.items():
        lines += ["", f"Not measured in all folders, results of `{command}`: {', '.join(topics)}."]
    return "\n".join([*lines, ""])


def _shown(figure: Figure) -> tuple[str, str, str]:
    if not figure.n:
        return "nothing to count", "0", ""
    sign = "+" if figure.signed else ""
    text = f"{figure.value:{sign}.3f}"
    if figure.interval is not None:
        low, high = figure.interval
        text += f" ({low:{sign}.3f} to {high:{sign}.3f})"
    if figure.p is not None:
        text += f", p = {figure.p:.2g}"
    return text, str(figure.n), ", ".join(f"{value:{sign}.3f}" for value in figure.seeds)


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax claims``."""
    flags.DEFINE_list("plain", [], "run folders of plain tool calling, in the order of the seeds")
    flags.DEFINE_string("out", "", "Markdown file for the table, which is printed as well")


def main(argv: list[str]) -> None:
    """Runs ``coa-jax claims``: prints the table of claims."""
    runs, plain = [Path(name) for name in argv[1:]], [Path(name) for name in flags.FLAGS.plain]
    if not runs:
        raise UserError("give the folders of one or more runs, such as released/recall/1")
    if plain and len(plain) != len(runs):
        raise UserError(f"--plain has {len(plain)} folders for {len(runs)} runs; give one for each")
    if (out := flags.FLAGS.out) and not Path(out).parent.is_dir():
        raise UserError(f"--out={out}: give a file in a directory that exists")
    for folder in (*runs, *plain):
        if not (folder / "summary.json").is_file():
            raise UserError(f"{folder}: there is no summary.json; give the folder of a run")
    text = table(Folders(runs, plain))
    print(text)
    if out:
        durable.replace(Path(out), text.encode())


if __name__ == "__main__":
    run_main(main, define_flags, positional=True)
