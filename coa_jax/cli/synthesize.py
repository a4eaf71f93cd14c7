r"""Synthesises questions with verified answers from a corpus.

    coa-jax synthesize --config=configs/synthesize/factbook.py --workdir=runs/questions
    coa-jax distill --workdir=runs/asked \
        --config.tasks.tasks=runs/questions/questions.jsonl

A draft is a question that is not checked yet. To check a draft, solvers try to answer it with and
without tools. The command writes ``questions.jsonl``, which is a task source, ``dropped.jsonl``
with every dropped draft and the reason, and ``summary.json`` with the counts of every stage.
``runs.jsonl`` stores the runs with tools, ``closed_book.jsonl`` the answers without tools, and
``calls/`` every call of a model. After a kill, the same command reuses these files, so no call of a
model is paid twice.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np
from absl import flags

from coa_jax.config.fields import Bounded, Count, Times
from coa_jax.config.preflight import SECONDS, ProbeSeconds, preflight, require, settings_probes
from coa_jax.distillation.agent_functions import load_agents
from coa_jax.distillation.endpoint import Endpoint, EndpointConfig
from coa_jax.distillation.llm import language_model_agents
from coa_jax.distillation.pipeline import DistillConfig
from coa_jax.distillation.synthesis.build import Item, Synthesis, SynthesisConfig
from coa_jax.distillation.synthesis.closed_book import ClosedBookConfig, closed_book
from coa_jax.distillation.synthesis.drafts import Author, document_of, facts_author
from coa_jax.distillation.synthesis.language import LanguageAuthor
from coa_jax.distillation.synthesis.solvers import WithoutTools, WithTools
from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.run.command import config_flag, run_main, workdir_flag
from coa_jax.run.progress import progress
from coa_jax.run.run_dir import RunDir
from coa_jax.run.settings import build_config
from coa_jax.storage import cache_folder, run_folder, with_urls
from coa_jax.tasks.judge import Judge, JudgeConfig
from coa_jax.tools.base import Tool
from coa_jax.tools.bm25 import WikiIndex, load_index
from coa_jax.tools.corpus import read_corpus
from coa_jax.tools.make import ToolsConfig, check_protocol, make_tools


@dataclasses.dataclass(frozen=True)
class Team(Bounded):
    """The settings of the team of agents that tries to answer the new questions with tools.

    Attributes:
        attempts: maximum number of runs per question. The question counts as solvable if at least
            one run is right.
        concurrency: number of questions that are answered at the same time.
        max_messages: number of messages after which a run is abandoned.
    """

    attempts: Times = 1
    concurrency: Times = 16
    max_messages: Count = 80


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(Bounded):
    """The settings of the synthesis.

    Attributes:
        tools: tools of the team that tries to answer the new questions. The corpus of
            ``wiki_search`` is also the source of the questions.
        synthesis: number and kinds of the questions to create.
        with_tools, without_tools: settings of the two solvers. A question is kept only if the
            solver with tools answers it right, and the solver without tools rarely does.
        judge: model that decides whether an answer is right if it does not equal the accepted
            answer.
        endpoint: model that writes questions; None if rules write them, which works only for the
            corpus of the CIA World Factbook.
        solver: model of the solver without tools; None to use the model of ``endpoint``.
        probe_s: time limit, in seconds, of a check before the first question, in which each server
            that the solvers and the judge need must respond; 0 skips this check.
    """

    tools: ToolsConfig
    synthesis: SynthesisConfig
    with_tools: Team
    without_tools: ClosedBookConfig
    judge: JudgeConfig
    endpoint: EndpointConfig | None = None
    solver: EndpointConfig | None = None
    probe_s: ProbeSeconds = SECONDS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_protocol(self.synthesis.protocol, self.tools, "synthesis.protocol")


def synthesize(config: ml_collections.ConfigDict, workdir: Path) -> dict[str, Any]:
    """Creates questions from a corpus, checks them, and writes the files of the command.

    Args:
        config: settings of the synthesis, see `Command`.
        workdir: work directory.

    Returns:
        The content of ``summary.json``.
    """
    command = build_config(Command, config)
    corpus = command.tools.wiki_search.corpus
    tools = {tool.name: tool for tool in make_tools(command.tools)}
    # The endpoints are not asked: their budgets cover each call, also those of earlier processes.
    parts = {"tools": command.tools, "judge": command.judge}
    require(preflight(settings_probes(parts), command.probe_s))
    with RunDir(workdir) as run:
        passages = read_corpus(corpus) if corpus else None
        index = load_index(passages, cache_folder("wiki", corpus))
        source = Path(corpus).name if corpus else "factbook"
        summary = asyncio.run(_work(config, command, tools, index, source, workdir))
        run.write_config(config)
        run.summary(summary, anew=True)
    return summary


async def _work(
    config: ml_collections.ConfigDict,
    command: Command,
    tools: dict[str, Tool],
    index: WikiIndex,
    source: str,
    workdir: Path,
) -> dict[str, Any]:
    how, check = command.synthesis, command.without_tools
    endpoints = {
        name: Endpoint(settings, workdir / f"calls/{name}.jsonl", f"config.{name}")
        for name, settings in endpoints_of(command).items()
    }
    model = endpoints.get("endpoint")
    documents = [document_of(passage) for passage in index.passages]
    author: Author = LanguageAuthor(model, how.text) if model else facts_author(documents, how.seed)
    with_tools = _with_tools(config, command, tools, model, workdir)
    solver_endpoint = endpoints.get("solver", model)
    name, solver = closed_book(check, documents, solver_endpoint, command.with_tools.concurrency)
    if check.policy:  # the policy in this folder may have been retrained, so it answers again
        from coa_jax.evaluation.policy import weights_name  # here, because it loads JAX

        name += f"/{weights_name(check.policy)}"
    without_tools = WithoutTools(check, name, solver, workdir / "closed_book.jsonl")
    total = how.atomic + sum(how.depth) + how.width
    with progress("synthesize", total=total) as bar:

        def show(stage: str, kept: int, of: int) -> None:
            done = sum(funnel.kept for funnel in work.funnels.values())
            bar.reach(done, stage=stage)

        work = Synthesis(how, index, author, with_tools, without_tools, source, show)
        try:
            await work.run()
        finally:
            for endpoint in endpoints.values():
                await endpoint.close()
    jsonl.write_lines(workdir / "questions.jsonl", work.task_rows())
    jsonl.write_lines(workdir / "dropped.jsonl", work.dropped_rows())
    return {
        "stages": {stage: funnel.to_json() for stage, funnel in work.funnels.items()},
        "kept": figures_of(work.kept),
        "resumed_runs": with_tools.resumed,
        "spent": {name: endpoint.spent.to_json() for name, endpoint in endpoints.items()},
    }


def endpoints_of(command: Command) -> dict[str, EndpointConfig]:
    """Returns the settings of the language models by name; {} if the command uses none.

    ``endpoint`` is the model that writes questions, and ``solver`` the model that answers questions
    without tools. A model that the command does not use is left out. A solver without its own
    address or model name takes those of ``endpoint``.
    """
    endpoint, solver = command.endpoint, command.solver
    both = {"endpoint": endpoint, "solver": solver}
    if not endpoint or not solver:
        return {name: settings for name, settings in both.items() if settings}
    # The endpoint's settings fill in a missing model or address of the solver. The API key of the
    # endpoint is sent only to the address of the endpoint.
    reached = EndpointConfig(solver.url) if solver.url else endpoint
    solver = dataclasses.replace(
        solver,
        url=reached.url,
        key_env=solver.key_env or reached.key_env,
        model=solver.model or endpoint.model,
        prices=(*solver.prices, *endpoint.prices),
    )
    return {"endpoint": endpoint, "solver": solver}


def _with_tools(
    config: ml_collections.ConfigDict,
    command: Command,
    tools: dict[str, Tool],
    model: Endpoint | None,
    workdir: Path,
) -> WithTools:
    """Returns the team that solves with tools; without a model, scripted rules decide for it."""
    team, judge = command.with_tools, command.judge
    label = "scripted" if model is None else model.config.label
    most = team.max_messages
    return WithTools(
        tools,
        load_agents() if model is None else language_model_agents(model),
        DistillConfig(concurrency=team.concurrency, max_messages=most),
        team.attempts,
        workdir / "runs.jsonl",
        {"minds": label, "tools": config.tools.to_dict(), "max_messages": most},
        Judge(judge) if judge else None,
    )


def figures_of(items: Sequence[Item]) -> dict[str, Any]:
    """Returns statistics of the questions that were kept, as a JSON object."""
    rates = [item.figures["closed_book"] for item in items]
    bins, _ = np.histogram(rates, [0.0, 1e-9, 0.1, 0.2, 0.3, 1.0])
    names = ("0", "to 0.1", "to 0.2", "to 0.3", "above")
    splits = collections.Counter(item.draft.split for item in items)
    calls = [item.figures["tool_calls"] for item in items]
    return {
        "tasks": len(items),
        "by_split": dict(sorted(splits.items())),
        "closed_book_rates": dict(zip(names, bins.tolist(), strict=True)),
        "tool_calls_mean": float(np.mean(calls)) if calls else None,
    }


def describe(summary: dict[str, Any]) -> str:
    """Formats the counts of each stage as text for a terminal.

    Args:
        summary: result of `synthesize`.
    """
    lines = []
    for stage, funnel in summary["stages"].items():
        dropped = ", ".join(f"{why} {count}" for why, count in funnel["dropped"].items())
        lines.append(
            f"{stage}: {funnel['kept']} of {funnel['wanted']} wanted; asked {funnel['asked']}, "
            f"nothing usable {funnel['failed']}, nothing to ask {funnel['empty']}, drafts "
            f"{funnel['drafted']}" + (f" (dropped: {dropped})" if dropped else "")
        )
    return "\n".join(lines)


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax synthesize``."""
    config_flag("configs/synthesize/factbook.py", Command)
    workdir_flag("where the questions are written")


def main(argv: list[str]) -> None:
    """Runs ``coa-jax synthesize``: synthesises questions."""
    workdir = run_folder(flags.FLAGS.workdir)
    summary = synthesize(flags.FLAGS.config, workdir)
    print(describe(summary))
    if not summary["kept"]["tasks"]:
        funnel = summary["stages"]["atomic"]
        raise UserError(
            f"no question was kept; {workdir}/dropped.jsonl says why"
            if funnel["asked"]
            else "the author cannot read any document of these splits: without a model it knows "
            "sentences of the Factbook only; use configs/synthesize/endpoint.py"
        )
    print(f"{summary['kept']['tasks']} questions -> {with_urls(workdir)}/questions.jsonl")


if __name__ == "__main__":
    run_main(main, define_flags)
