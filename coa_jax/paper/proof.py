"""Computes the hours of launch/proof.sh, writes its corpus, and makes its table and page.

    coa-jax proof hours --tasks=gsm8k --model=Qwen/Qwen3-0.6B
    coa-jax proof corpus --tasks=hotpotqa --workdir=DIR
    coa-jax proof updates --workdir=DIR
    coa-jax proof table --workdir=DIR

``hours`` prints the longest time of each stage. ``corpus`` writes the passages of the questions to
``corpus.jsonl``. ``updates`` prints the number of updates of the control, a policy that continues
fine-tuning after SFT in place of RL. ``table`` prints pass@1 of each policy with 95 % intervals and
the paired differences, and writes ``results.json`` and ``report/index.html``.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from coa_jax.data.rows import open_rows
from coa_jax.errors import UserError
from coa_jax.evaluation.compare import compare, differing_settings, load
from coa_jax.files import durable, jsonl, markdown
from coa_jax.model.architectures import architecture_of
from coa_jax.model.config import ModelConfig
from coa_jax.model.costs import decode_bytes, forward_flops, train_flops
from coa_jax.parallel.chips import CHIPS
from coa_jax.report.page import escape, fixed, rate_cells, save_page, table, whole_page
from coa_jax.run.command import load_config, run_main

TASKS = ("gsm8k", "hotpotqa")
MACHINES = {"h100": ("h100", 1), "v5e-8": ("v5e", 8)}
"""Maps the name of a machine to its kind of chip and its number of chips."""

# Measured on one H100 with Qwen2.5-0.5B (docs/performance.md, On accelerators). The share of the
# peak is that of a fine-tuning step, and a decoding step of 32 sequences took 11 ms: 1.80 s for
# 5,219 tokens.
_COMPUTING, _READING, _LAYER_S = 0.34 * 0.70, 0.80, 1.80 * 32 / 5219 / 24
_START_S = 180.0
"""Time in which a command loads the model and compiles its programs; an assumption."""

ARMS = {
    "base": "base model",
    "sft": "SFT",
    "rl": "SFT, then RL",
    "more": "control: SFT, then SFT on its own samples for the time of RL",
}
"""Maps the name of an evaluation to the policy that it evaluates."""
PAIRS = (("sft", "base"), ("rl", "sft"), ("more", "sft"), ("rl", "more"))
"""Pairs of evaluations whose difference is in the table."""


class Work(NamedTuple):
    """The work of a stage of launch/proof.sh, as numbers of trajectories.

    Attributes:
        sampled: number of trajectories that are sampled.
        trained: number of trajectories in all updates together.
        scored: number of trajectories whose log-probabilities are computed before an update.
    """

    sampled: int = 0
    trained: int = 0
    scored: int = 0


def stages(tasks: str, machine: str, given: bool) -> dict[str, tuple[Any, Work]]:
    """Returns (settings, work) of each stage of launch/proof.sh by name, in order of execution.

    Stages that take only seconds are left out.

    Args:
        tasks: one of `TASKS`.
        machine: one of `MACHINES`.
        given: whether SFT trains on existing trajectories. If False, the base model samples them.
    """

    def read(stage: str) -> Any:
        return load_config(f"configs/proof/{tasks}.py:{stage},{machine}")

    evaluation, rl, again = read("evaluate"), read("rl"), read("again")
    measured = evaluation, Work(evaluation.num_tasks * evaluation.samples)
    first = {"evaluate base": measured}
    if not given:
        sample = read("sample")
        first["sample"] = sample, Work(sample.num_tasks * sample.samples)
    sft = read("sft" if given else "rft")
    groups = rl.groups * rl.group_size * rl.optimizer.total_steps
    return {
        **first,
        "sft": (sft, Work(trained=sft.batch_size * sft.optimizer.total_steps)),
        "evaluate sft": measured,
        "rl": (rl, Work(groups, groups, groups)),
        "evaluate rl": measured,
        "again": (again, Work(again.num_tasks * again.samples)),
        # The control takes as long as the updates of RL.
        "more": (rl, Work(0, groups, groups)),
        "evaluate more": measured,
    }


def seconds(work: Work, config: Any, model_config: ModelConfig, machine: str) -> float:
    """Estimates how many seconds a stage takes at most, from rates measured on an H100.

    The estimate assumes that every trajectory has the maximum length, and that the policy samples
    all of its tokens, with prompt and observations. The real time should therefore be shorter.

    Args:
        work: work of the stage.
        config: settings of the stage.
        model_config: architecture of the policy.
        machine: one of `MACHINES`. Its chips are assumed to reach the same fractions of their peak
            FLOP rate and memory bandwidth as the H100 does.
    """
    name, chips = MACHINES[machine]
    chip = CHIPS[name]
    total = _START_S
    if work.sampled:
        length, slots = config.rollout.max_tokens, config.engine.slots
        read = decode_bytes(model_config, slots, length / 2, 2) / (_READING * chip.hbm_bandwidth)
        step = _LAYER_S * model_config.num_layers + read
        total += work.sampled / (slots * chips) * length * step
    if work.trained:
        length, rate = config.row_length, _COMPUTING * chip.flops * chips
        trained = work.trained * train_flops(model_config, [length], length)
        scored = work.scored * length * forward_flops(model_config, length / 2)
        total += (trained + scored) / rate
    return total


def hours(tasks: str, model: str, machine: str, given: bool) -> str:
    """Returns a table of the longest time of each stage of launch/proof.sh, see `seconds`.

    Args:
        tasks, machine, given: see `stages`.
        model: directory or Hub name of the base model.
    """
    name, architecture = architecture_of(model)
    took = {
        stage: seconds(work, config, architecture, machine) / 3600
        for stage, (config, work) in stages(tasks, machine, given).items()
    }
    rows = [*took.items(), ("all stages", sum(took.values()))]
    lines = [f"{stage:14} {value:5.2f} h" for stage, value in rows]
    return "\n".join(
        [
            f"at most, for {name} on {machine}, if every trajectory fills its budget of tokens:",
            *lines,
            "computed from rates measured on one H100 with a model of 0.5B (docs/performance.md)",
        ]
    )


# --- corpus ------------------------------------------------------------------------------------


def passages(sources: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yields the passages that belong to the questions of data sets with HotpotQA's columns.

    A passage that belongs to several questions is yielded once.

    Args:
        sources: data sets, ``hf:NAME:CONFIG:SPLIT``.

    Raises:
        UserError: a data set cannot be read, or has other columns.
    """
    yielded = set()
    for source in sources:
        for row in open_rows(Path(source), columns=_context):
            try:
                context = row.value["context"]
                pairs = list(zip(context["title"], context["sentences"], strict=True))
            except (KeyError, TypeError, ValueError) as error:
                raise UserError(f"{source}: there are no passages as in HotpotQA") from error
            for title, sentences in pairs:
                text = "".join(sentences).strip()
                if text and (title, text) not in yielded:
                    yielded.add((title, text))
                    yield {"title": title, "text": text}


def _context(columns: list[str]) -> list[str]:
    return [column for column in columns if column == "context"]


def write_corpus(tasks: str, workdir: Path) -> None:
    """Writes the passages of the questions of all stages to ``corpus.jsonl`` in ``workdir``.

    Args:
        tasks: one of `TASKS`, whose data sets have passages.
        workdir: work directory.

    Raises:
        UserError: a data set cannot be read, or has no passages.
    """
    sources = [load_config(f"configs/proof/{tasks}.py:{stage}").tasks for stage in _TASKED]
    jsonl.write_lines(workdir / "corpus.jsonl", passages(sources))


_TASKED = ("sample", "rl", "evaluate")


# --- control -----------------------------------------------------------------------------------


def updates(workdir: Path) -> int:
    """Returns how many SFT updates take as long as all RL steps, not counting waits for rollouts.

    Both times are computed from the median step, because the first step also compiles.

    Raises:
        UserError: SFT or RL has not finished a step.
    """
    times = {}
    for stage in ("sft", "rl"):
        rows = jsonl.read_objects(workdir / stage / "metrics.jsonl")
        times[stage] = [
            row["time/step"] - row.get("time/rollout_wait", 0.0)
            for row in rows
            if "time/step" in row
        ]
        if not times[stage]:
            raise UserError(f"{workdir}: {stage} has no steps; run launch/proof.sh")
    of_rl = statistics.median(times["rl"]) * len(times["rl"])
    return max(1, round(of_rl / statistics.median(times["sft"])))


# --- table -------------------------------------------------------------------------------------


def results(workdir: Path) -> dict[str, Any]:
    """Returns the figures of each policy of launch/proof.sh, and the differences between policies.

    `ARMS` lists the policies. The differences are paired by task, for the pairs in `PAIRS`.

    Raises:
        UserError: an evaluation is missing or damaged.
    """
    folder = workdir / "evaluations" / "evaluate"
    outcomes = {arm: load(str(folder / arm / "results.json")) for arm in ARMS}
    return {
        "policies": {arm: _figures(outcome) for arm, outcome in outcomes.items()},
        "differences": {
            f"{one} - {other}": {
                **dataclasses.asdict(compare(outcomes[other], outcomes[one])),
                "differs": differing_settings(outcomes[other], outcomes[one]),
            }
            for one, other in PAIRS
        },
    }


def _figures(outcome: Mapping[str, Any]) -> dict[str, Any]:
    figures = outcome["figures"]
    return {
        **{name: figures[name] for name in ("pass_at_1", "ci95", "n", "format_valid")},
        "tokens_per_task": figures["costs"]["tokens_per_sample"],
        "tool_calls_per_task": figures["costs"]["calls_per_sample"],
    }


def text(figures: Mapping[str, Any]) -> str:
    """Formats the result of `results` as two Markdown tables."""
    policies = [
        (
            ARMS[arm],
            f"{row['pass_at_1']:.3f} ({row['ci95'][0]:.3f}-{row['ci95'][1]:.3f})",
            row["n"],
            fixed(row["tokens_per_task"], 0),
            fixed(row["tool_calls_per_task"], 2),
        )
        for arm, row in figures["policies"].items()
    ]
    differences = [
        (pair, f"{row['difference']:+.3f}", _interval(row), f"{row['p']:.2g}", row["tasks"])
        for pair, row in figures["differences"].items()
    ]
    head = ("policy", "pass@1 (95 %)", "tasks", "tokens per task", "tool calls per task")
    heads = ("difference", "of pass@1", "95 %, paired", "p", "tasks")
    return "\n".join([*markdown.table(head, policies), "", *markdown.table(heads, differences)])


def _interval(row: Mapping[str, Any]) -> str:
    return f"{row['ci95'][0]:+.3f} to {row['ci95'][1]:+.3f}" if row["ci95"] else "no interval"


def page(figures: Mapping[str, Any], name: str, pages: Mapping[str, str]) -> str:
    """Renders the result of `results` as an HTML page.

    Args:
        figures: the result of `results`.
        name: what the page calls the run.
        pages: maps the title of each linked page to the address of the page.
    """
    policies = [
        [
            escape(ARMS[arm]),
            *rate_cells(ARMS[arm], row["pass_at_1"], row["ci95"]),
            f"{row['n']:,}",
            fixed(row["tokens_per_task"], 0),
            fixed(row["tool_calls_per_task"], 2),
        ]
        for arm, row in figures["policies"].items()
    ]
    differences = [
        [
            escape(f"{ARMS[one]} minus {ARMS[other]}"),
            f"<strong>{row['difference']:+.3f}</strong>",
            _interval(row),
            f"{row['p']:.2g}",
            f"{row['tasks']:,}",
        ]
        for (one, other), row in zip(PAIRS, figures["differences"].values(), strict=True)
    ]
    links = "".join(f'<li><a href="{url}">{escape(title)}</a></li>' for title, url in pages.items())
    head = ("", "pass@1", "95% interval", "", "tasks", "tokens per task", "tool calls per task")
    heads = ("", "difference", "95% interval, paired", "p", "tasks")
    return whole_page(
        name,
        [
            f"<header><h1>{escape(name)}</h1></header><h2>Results</h2>",
            table("Policies", head, policies, ""),
            "<h2>Differences</h2>",
            table("Differences", heads, differences, ""),
            f"<h2>Pages of the stages</h2><ul>{links}</ul>",
        ],
        script=False,
    )


def write_table(workdir: Path) -> None:
    """Prints the tables of `results`, and writes ``results.json`` and ``report/index.html``."""
    figures = results(workdir)
    durable.write_json(workdir / "results.json", figures)
    stages_of = {"Evaluations": "evaluations", "SFT": "sft", "RL": "rl", "Control": "more"}
    pages = {
        title: f"../{folder}/report/index.html"
        for title, folder in stages_of.items()
        if (workdir / folder / "report" / "index.html").is_file()
    }
    path = save_page(
        workdir / "report" / "index.html", page(figures, workdir.resolve().name, pages)
    )
    print(text(figures))
    print(f"page -> {path}")


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax proof``."""
    flags.DEFINE_enum("tasks", "gsm8k", TASKS, "tasks of the run")
    flags.DEFINE_string("model", "Qwen/Qwen3-0.6B", "base model: directory or name of the Hub")
    flags.DEFINE_enum("machine", "h100", sorted(MACHINES), "machine of the run")
    flags.DEFINE_bool("given", False, "whether the trajectories of SFT are given")
    flags.DEFINE_string("workdir", "runs/proof", "directory of the run")


def main(argv: list[str]) -> None:
    """Runs ``coa-jax proof`` with one of its subcommands.

    ``hours`` and ``updates`` print the results of `hours` and `updates`. ``corpus`` calls
    `write_corpus`, and ``table`` calls `write_table`.
    """
    values, workdir = flags.FLAGS, Path(flags.FLAGS.workdir)
    match argv[1:]:
        case ["hours"]:
            print(hours(values.tasks, values.model, values.machine, values.given))
        case ["corpus"]:
            write_corpus(values.tasks, workdir)
        case ["updates"]:
            print(updates(workdir))
        case ["table"]:
            write_table(workdir)
        case _:
            raise UserError("say what: coa-jax proof hours, corpus, updates or table")


if __name__ == "__main__":
    run_main(main, define_flags, positional=True)
