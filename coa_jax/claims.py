r"""Compares claims of the Chain-of-Agents paper with results of our own runs, in a table.

    python -m coa_jax.claims runs/pretrained-0 runs/pretrained-1 --plain=runs/pretrained-hermes

The arguments are run folders of ``configs/pretrained/factbook.py``, one folder for each seed.
``--plain`` names run folders of the variant ``hermes`` of this config. The policy of this variant
calls tools without a chain of agents. The command prints the table; with ``--out`` it also writes
the table to a Markdown file. All figures come from the result files in the folders, and each row
names the command that creates these files.

Intervals are 95 % confidence intervals over tasks, pooled over seeds. The interval of a rate is
computed as in `evaluate.metrics`, the interval of a difference by a paired bootstrap. The intervals
do not include the variation between seeds, so the table also lists the figure of each seed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from coa_jax import files
from coa_jax.cli import run_main
from coa_jax.errors import UserError
from coa_jax.evaluate.compare import bootstrap_interval
from coa_jax.evaluate.metrics import mean, mean_interval, pass_at_k

Outcomes = Sequence[Mapping[str, Any]]
"""Contents of the result files of one stage, one for each seed."""

MAIN = "bash launch/pretrained.sh --seed N"
PLAIN = f"{MAIN} --config=configs/pretrained/factbook.py:hermes"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A measured value.

    Attributes:
        value: value that combines all seeds.
        interval: low and high end of the 95 % confidence interval; None if no interval is computed.
        n: number of tasks, calls or samples over which the value is computed, in all seeds; 0 if
            there are none, for example if the policy never called the tool in question.
        seeds: values of the single seeds; seeds in which ``n`` would be 0 are left out.
        signed: whether the value is a difference and is shown with its sign.
    """

    value: float
    interval: tuple[float, float] | None
    n: int
    seeds: tuple[float, ...]
    signed: bool = False


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
        """Reads the result files of a stage, one for each seed.

        Args:
            stage: name of the stage.
            plain: whether to read the folders of plain tool calling instead of those with chains of
                agents.

        Returns:
            The contents of the files, or [] if the file of any seed is missing.
        """
        folders = self.plain if plain else self.runs
        paths = [folder / "evaluate" / stage / "results.json" for folder in folders]
        return [files.read_json_object(path) for path in paths if all(p.is_file() for p in paths)]

    def summaries(self, block: str) -> list[Mapping[str, Any]]:
        """Reads one block of ``summary.json`` for each seed.

        Args:
            block: key of the block, such as ``economy``.

        Returns:
            The blocks, or [] if the block of any seed is missing.
        """
        found = [
            files.read_json_object(path).get(block)
            for path in (folder / "summary.json" for folder in self.runs)
            if path.is_file()
        ]
        return [entry for entry in found if entry] if all(found) else []


@dataclasses.dataclass(frozen=True)
class Claim:
    """A row of the table.

    Attributes:
        topic: subject of the claim, for the first column.
        paper: figure that the paper reports, and where in the paper.
        what: description of what is measured here.
        figure: function that computes the figure from the run folders. It returns None if files are
            missing.
        command: command that creates the result files.
    """

    topic: str
    paper: str
    what: str
    figure: Callable[[Folders], Figure | None]
    command: str = MAIN


# --- figures ---------------------------------------------------------------------------------


def solved_of(outcome: Mapping[str, Any], **where: Any) -> dict[str, list[bool]]:
    """Returns the grades of the tasks in a result file.

    Args:
        outcome: content of a result file.
        **where: values that fields of a task must have; tasks with other values are left out.

    Returns:
        Maps the id of each task to a list that says for each graded sample whether it is right.
    """
    return {
        task["id"]: [s["value"] == 1.0 for s in task["samples"] if s["value"] is not None]
        for task in outcome["tasks"]
        if all(task.get(key) == value for key, value in where.items())
    }


def rate(stage: str, plain: bool = False, **where: Any) -> Callable[[Folders], Figure | None]:
    """Returns a function that computes pass@1 of a stage from run folders.

    Args:
        stage: name of the stage.
        plain: whether to read the folders of plain tool calling.
        **where: values that fields of a task must have; tasks with other values are left out.
    """

    def figure(folders: Folders) -> Figure | None:
        seeds = [
            [group for group in solved_of(outcome, **where).values() if group]
            for outcome in folders.outcomes(stage, plain)
        ]
        return _of_groups(seeds)

    return figure


def _of_groups(seeds: Sequence[Sequence[Sequence[bool]]]) -> Figure | None:
    groups = list(itertools.chain(*seeds))
    if not seeds:
        return None
    values = tuple(_mean([_mean(group) for group in seed]) for seed in seeds if seed)
    value = _mean([_mean(group) for group in groups])
    return Figure(value, mean_interval(groups) if groups else None, len(groups), values)


def _mean(values: Sequence[float]) -> float:
    return float(mean(values) or 0)


def difference(
    stage: str, other: str, plain: bool = False, **where: Any
) -> Callable[[Folders], Figure | None]:
    """Returns a function that computes pass@1 of a stage minus pass@1 of the stage ``other``.

    The function compares only tasks with graded samples in both stages. If ``plain`` is True,
    ``other`` is read from the folders of plain tool calling. ``where`` selects tasks as in `rate`.
    """

    def figure(folders: Folders) -> Figure | None:
        pairs = list(zip(folders.outcomes(stage), folders.outcomes(other, plain), strict=False))
        by_seed = []
        for one, two in pairs:
            a, b = solved_of(one, **where), solved_of(two, **where)
            common = [name for name in a if a[name] and b.get(name)]
            by_seed.append([_mean(a[name]) - _mean(b[name]) for name in common])
        if not by_seed or not all(by_seed):
            return None
        every = np.array(list(itertools.chain(*by_seed)))
        values = tuple(map(_mean, by_seed))
        return Figure(_mean(every.tolist()), bootstrap_interval(every), len(every), values, True)

    return figure


def at_k(stage: str, k: int) -> Callable[[Folders], Figure | None]:
    """Returns a function for pass@k, the probability that at least one of k samples is right."""

    def figure(folders: Folders) -> Figure | None:
        seeds = []
        for outcome in folders.outcomes(stage):
            groups = [g for g in solved_of(outcome).values() if len(g) >= k]
            seeds.append([pass_at_k(len(g), sum(g), k) for g in groups])
        if not seeds or not all(seeds):
            return None
        every = np.array(list(itertools.chain(*seeds)))
        values = tuple(map(_mean, seeds))
        return Figure(_mean(every.tolist()), bootstrap_interval(every), len(every), values)

    return figure


def scaled(stage: str, prefix: str) -> Callable[[Folders], Figure | None]:
    """Returns a function for pass@1 of the samples chosen by ``prefix``, such as ``majority``."""

    def figure(folders: Folders) -> Figure | None:
        entries = [
            entry
            for outcome in folders.outcomes(stage)
            for name, entry in outcome["figures"]["scaling"].items()
            if name.startswith(prefix) and entry["pass_at_1"] is not None
        ]
        if not entries:
            return None
        values = tuple(float(entry["pass_at_1"]) for entry in entries)
        n = sum(entry["n"] for entry in entries)
        interval = tuple(entries[0]["ci95"]) if len(entries) == 1 else None
        return Figure(_mean(values), interval, n, values)

    return figure


def well_formed(stage: str, *tools: str) -> Callable[[Folders], Figure | None]:
    """Returns a function that computes the share of calls of ``tools`` whose outcome is ``ok``."""

    def figure(folders: Folders) -> Figure | None:
        seeds = [list(_calls(outcome, tools)) for outcome in folders.outcomes(stage)]
        return _of_groups([[[call] for call in seed] for seed in seeds])

    return figure


def _calls(outcome: Mapping[str, Any], tools: Sequence[str]) -> Iterator[bool]:
    """Yields for each call of the given tools whether its outcome is ``ok``."""
    for name, entry in outcome["figures"]["costs"]["tools"].items():
        if name in tools:
            for kind, count in entry["outcomes"].items():
                yield from [kind == "ok"] * count


def helped(stage: str, *tools: str) -> Callable[[Folders], Figure | None]:
    """Returns a function for the share of samples that are right and called one of ``tools``."""

    def figure(folders: Folders) -> Figure | None:
        seeds = [
            [
                [s["value"] == 1.0 and not set(tools).isdisjoint(s["calls"]) for s in graded]
                for task in outcome["tasks"]
                if (graded := [s for s in task["samples"] if s["value"] is not None])
            ]
            for outcome in folders.outcomes(stage)
        ]
        return _of_groups(seeds)

    return figure


def saved(key: str) -> Callable[[Folders], Figure | None]:
    """Returns a function that computes the share of the teacher's tokens that the policy saves.

    ``key`` names the tokens to compare, for example ``both_solved``, see `distill.economy`.
    """

    def figure(folders: Folders) -> Figure | None:
        blocks = [block for block in folders.summaries("economy") if "saved" in block]
        if not blocks:
            return None
        values = tuple(float(block["saved"][key]) for block in blocks)
        n = sum(block["both_solved"]["samples"] for block in blocks)
        return Figure(_mean(values), None, n, values)

    return figure


def calls_per_solved(stage: str) -> Callable[[Folders], Figure | None]:
    """Returns a function that computes the tool calls of all samples per solved sample."""

    def figure(folders: Folders) -> Figure | None:
        costs = [outcome["figures"]["costs"] for outcome in folders.outcomes(stage)]
        values = tuple(cost["calls_per_solved"] for cost in costs)
        if not values or None in values:
            return None
        n = sum(outcome["figures"]["n"] for outcome in folders.outcomes(stage))
        return Figure(_mean(values), None, n, values)

    return figure


def team_calls_per_solved(folders: Folders) -> Figure | None:
    """Computes the teacher's tool calls per solved task; None without statistics of the teacher."""
    blocks = [block for block in folders.summaries("teacher") if block["pass_at_1"]]
    if not blocks:
        return None
    values = tuple(block["tool_calls_per_task"] / block["pass_at_1"] for block in blocks)
    return Figure(_mean(values), None, sum(block["n"] for block in blocks), values)


# --- the claims ------------------------------------------------------------------------------

_TOPICS = ("single", "chain", "comparison", "counting", "arithmetic")
_NATURAL = ("single", "two-step", "comparison", "counting", "arithmetic")
_UNSEEN = ("units", "calendar")
_NO_FIGURE = "no figure"

CLAIMS: tuple[Claim, ...] = (
    Claim("base", _NO_FIGURE, "base model, prompted with the protocol: pass@1", rate("base")),
    Claim("SFT", "GAIA 50.5 (32B, Tab 8)", "SFT: pass@1", rate("sft")),
    Claim("RL", "GAIA 55.3 (32B, Tab 8)", "SFT + RL: pass@1", rate("rl")),
    Claim("RL", "GAIA +4.8; MHQA 7B-base +2.2", "RL minus SFT", difference("rl", "sft")),
    Claim("control", _NO_FIGURE, "SFT for the time of RL: pass@1", rate("sft_more")),
    Claim("control", _NO_FIGURE, "RL minus SFT for its time", difference("rl", "sft_more")),
    Claim("control", _NO_FIGURE, "RFT: pass@1", rate("rft")),
    Claim("control", _NO_FIGURE, "RL minus RFT", difference("rl", "rft")),
    *(
        Claim("by kind", _NO_FIGURE, f"RL, {topic}: pass@1", rate("rl", topic=topic))
        for topic in _TOPICS
    ),
    Claim("by kind", _NO_FIGURE, "RL, maths: pass@1", rate("rl", source="maths")),
    *(
        Claim("by hops", _NO_FIGURE, f"RL, {hops} searches: pass@1", rate("rl", hops=hops))
        for hops in (1, 2, 3)
    ),
    Claim("wordings", _NO_FIGURE, "RL, known wordings: pass@1", rate("rl", wording="known")),
    Claim("wordings", _NO_FIGURE, "RL, held-out wordings: pass@1", rate("rl", wording="new")),
    Claim(
        "wordings",
        _NO_FIGURE,
        "RL minus SFT, held-out wordings",
        difference("rl", "sft", wording="new"),
    ),
    Claim("natural", _NO_FIGURE, "SFT, natural questions: pass@1", rate("natural_sft")),
    Claim("natural", _NO_FIGURE, "RL, natural questions: pass@1", rate("natural_rl")),
    Claim("natural", _NO_FIGURE, "RL minus SFT, natural", difference("natural_rl", "natural_sft")),
    *(
        Claim("natural", _NO_FIGURE, f"RL, natural, {kind}", rate("natural_rl", kind=kind))
        for kind in _NATURAL
    ),
    Claim(
        "chain of agents",
        "ahead of tool calling (§4)",
        "SFT, plain tool calling: pass@1",
        rate("sft", plain=True),
        PLAIN,
    ),
    Claim(
        "chain of agents",
        "GAIA 55.3, WebThinker-RL 48.5 (Tab 8)",
        "RL minus RL of plain tool calling",
        difference("rl", "rl", plain=True),
        PLAIN,
    ),
    Claim("economy", "84.6 % (§5.1)", "tokens saved, both solved", saved("both_solved")),
    Claim("economy", "84.6 % (§5.1)", "the same, prompts resent", saved("both_solved_resent")),
    Claim("economy", "fewest (Fig 5)", "tool calls per solved task: RL", calls_per_solved("rl")),
    Claim("economy", "more (Fig 5)", "tool calls per solved task: team", team_calls_per_solved),
    Claim("scaling", "GAIA 55.3 (Tab 13)", "pass@1 of four samples", rate("scaling")),
    Claim("scaling", "GAIA 69.9 (Tab 13)", "pass@3", at_k("scaling", 3)),
    Claim("scaling", _NO_FIGURE, "majority of four", scaled("scaling", "majority")),
    Claim(
        "scaling",
        "GAIA 57.3 (Tab 13)",
        "best of 3, picked by a judge",
        scaled("scaling", "best_of"),
        f"{MAIN} --config.measures.scaling.evaluate.best_of.n=3 with best_of.chat.url of a judge",
    ),
    Claim(
        "unseen tools",
        "qualitative (§5.2)",
        "calls that the tools understood",
        well_formed("unseen", *_UNSEEN),
    ),
    Claim("unseen tools", "qualitative (§5.2)", "pass@1", rate("unseen")),
    Claim(
        "unseen tools", "qualitative (§5.2)", "solved with such a call", helped("unseen", *_UNSEEN)
    ),
)


# --- the table -------------------------------------------------------------------------------


def table(folders: Folders) -> str:
    """Formats the claims as a Markdown table."""
    lines = [
        "| about | the paper | here | figure (95 %) | n | by seed | command |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for claim in CLAIMS:
        figure = claim.figure(folders)
        shown = ("not measured yet", "", "") if figure is None else _shown(figure)
        cells = (claim.topic, claim.paper, claim.what, *shown, f"`{claim.command}`")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _shown(figure: Figure) -> tuple[str, str, str]:
    if not figure.n:
        return "nothing to count", "0", ""
    sign = "+" if figure.signed else ""
    text = f"{figure.value:{sign}.3f}"
    if figure.interval is not None:
        low, high = figure.interval
        text += f" ({low:{sign}.3f} to {high:{sign}.3f})"
    return text, str(figure.n), ", ".join(f"{value:{sign}.3f}" for value in figure.seeds)


def define_flags() -> None:
    """Defines the flags of the command."""
    flags.DEFINE_list("plain", [], "run folders of plain tool calling, in the order of the seeds")
    flags.DEFINE_string("out", "", "Markdown file for the table, which is printed as well")


def main(argv: list[str]) -> None:
    """Entry point."""
    runs, plain = [Path(name) for name in argv[1:]], [Path(name) for name in flags.FLAGS.plain]
    if not runs:
        raise UserError("give the folders of one or more runs of configs/pretrained/factbook.py")
    for folder in (*runs, *plain):
        if not (folder / "summary.json").is_file():
            raise UserError(f"{folder}: there is no summary.json; give the folder of a run")
    text = table(Folders(runs, plain))
    print(text)
    if flags.FLAGS.out:
        files.replace(Path(flags.FLAGS.out), text.encode())


if __name__ == "__main__":
    run_main(main, define_flags, positional=True)
