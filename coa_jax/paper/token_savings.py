r"""Counts the tokens that a policy saves compared with its multi-agent teacher (paper §5.1).

    coa-jax economy --config=configs/economy/factbook.py --workdir=runs/economy

The command reads the trajectories of an evaluation by ``coa-jax evaluate`` and lets the
teacher, also called the team, solve the same tasks. It counts the tokens of the policy and of the
team with the policy's tokenizer, and writes the results to ``summary.json``. The team's runs are
stored in ``team.jsonl`` and ``calls/``. If the command is started again, also for another policy,
it reuses these runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags

from coa_jax.config.fields import Bounded, Count, Name, Natural, Place, Seed, Split
from coa_jax.data.trajectory import Author, Trajectory, iterate_trajectories
from coa_jax.distillation.endpoint import Endpoint, EndpointConfig
from coa_jax.distillation.journal import open_journal
from coa_jax.distillation.llm import language_model_agents
from coa_jax.distillation.pipeline import DistillConfig, graded_runs, run_teacher
from coa_jax.distillation.token_counts import compare_policy_tokens
from coa_jax.errors import UserError
from coa_jax.model.tokenizer import decode_ids, encode_plain, load_tokenizer
from coa_jax.run.command import config_flag, run_main, workdir_flag
from coa_jax.run.progress import progress
from coa_jax.run.run_dir import RunDir
from coa_jax.run.settings import build_config
from coa_jax.storage import run_folder
from coa_jax.tasks import Task, load_tasks
from coa_jax.tools.make import ToolsConfig, make_tools


def read_phase(path: str, phase: str) -> list[Trajectory]:
    """Reads the trajectories of one phase of a run, for example of ``evaluate-rl``.

    Raises:
        UserError: the file cannot be read or has no trajectory of this phase.
    """
    phases_read: set[str] = set()

    def decode(row: Any) -> Trajectory | None:
        phase_of_row = str(row["metadata"].get("phase", ""))
        phases_read.add(phase_of_row)
        return Trajectory.from_json(row) if phase_of_row == phase else None

    traces = [trace for trace in iterate_trajectories(path, decode) if trace is not None]
    if not traces:
        phases = ", ".join(sorted(phases_read)) or "nothing"
        raise UserError(f"{path}: no trajectory of the phase {phase!r}; it has {phases}")
    return traces


def token_counter(tokenizer: Any) -> Callable[[str], int]:
    """Returns a function that counts the tokens of a text with a policy's tokenizer."""
    return lambda text: len(encode_plain(tokenizer, text))


def check_tokens(tokenizer: Any, traces: Sequence[Trajectory], model: str) -> None:
    """Checks that the trajectories were sampled by a policy with the given tokenizer.

    The check passes if, for most trajectories, the decoded tokens equal the stored text.

    Args:
        tokenizer: tokenizer of the policy.
        traces: the trajectories.
        model: name of the model, used in the error message.

    Raises:
        UserError: the trajectories have no tokens, or most stored texts differ from the decoded
            tokens.
    """
    served = [trace for trace in traces if not trace.tokens.size]
    if served:
        raise UserError(
            f"{len(served)} of {len(traces)} trajectories have no tokens to count: they are of a "
            "policy behind an endpoint; evaluate it on this machine, without config.endpoint.url"
        )
    # Tokens that end within a character may be decoded differently, so some mismatches are allowed.
    if 2 * sum(_written_with(tokenizer, trace) for trace in traces) <= len(traces):
        raise UserError(f"{model}: not the tokenizer that the trajectories were written with")


def _written_with(tokenizer: Any, trace: Trajectory) -> bool:
    ids = trace.tokens[trace.author != Author.PROMPT].tolist()
    try:
        return decode_ids(tokenizer, ids).startswith(trace.text)
    except (IndexError, KeyError, OverflowError, TypeError):
        return False


@dataclasses.dataclass(frozen=True)
class Tasks(Bounded):
    """Settings that load an evaluation's tasks again; they must equal the evaluation's settings.

    The evaluation is the one whose trajectories are compared, see `Command.traces`.

    Attributes:
        source: source of the tasks, see `tasks.load_tasks`.
        split: split of the source.
        num_tasks: number of tasks; 0 for all tasks of the split.
        seed: seed of the random choice of tasks.
    """

    source: Place
    split: Split
    num_tasks: Natural
    seed: Seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(Bounded):
    """Settings of the comparison of a policy's tokens with those of its multi-agent teacher (team).

    Attributes:
        traces: path of the ``traces.jsonl`` of an evaluation.
        phase: phase whose trajectories are compared, for example ``evaluate-rl``.
        model: directory of the policy, whose tokenizer counts the tokens.
        number: number of tasks that the team solves; these are the first tasks of the evaluation.
        tasks: settings with which the evaluation loaded its tasks.
        teacher: settings of the team.
        tools: tools of the team.
        endpoint: language model that decides for the team; None for a scripted team.
    """

    traces: Place
    phase: Name
    model: Place
    number: Count
    tasks: Tasks
    teacher: DistillConfig
    tools: ToolsConfig
    endpoint: EndpointConfig | None = None


def tasks_of(config: Tasks, traces: list[Trajectory]) -> list[Task]:
    """Returns the tasks of the trajectories of an evaluation, in the order of the trajectories.

    Raises:
        UserError: a trajectory belongs to a task that is not loaded with these settings.
    """
    loaded = load_tasks(config.source, config.split, config.num_tasks or None, config.seed)
    by_id = {task.id: task for task in loaded}
    task_ids = list(dict.fromkeys(trace.task_id for trace in traces))
    missing = next((name for name in task_ids if name not in by_id), None)
    if missing is not None:
        raise UserError(
            f"the trajectories contain the task {missing!r}, config.tasks does not: give the "
            "source, split, num_tasks and seed of the evaluation"
        )
    return [by_id[name] for name in task_ids]


def measure(config: ml_collections.ConfigDict, workdir: Path) -> dict[str, Any]:
    """Lets the multi-agent team solve the tasks, and compares its tokens with the policy's tokens.

    Args:
        config: settings of the comparison, see `Command`.
        workdir: work directory.

    Returns:
        The content of ``summary.json``.
    """
    command = build_config(Command, config)
    teacher, limits = command.teacher, command.endpoint
    traces = read_phase(command.traces, command.phase)
    tokenizer = load_tokenizer(command.model)
    check_tokens(tokenizer, traces, command.model)
    settings = config.tools.to_dict()
    # The tools are created before the tasks: tasks may name a protocol that the tools define.
    tools = {tool.name: tool for tool in make_tools(command.tools)}
    tasks = tasks_of(command.tasks, traces)[: command.number]
    with RunDir(workdir) as run:
        agents, endpoint = teacher.agents(), None
        model = label = "scripted"
        if limits:
            endpoint = Endpoint(limits, workdir / "calls" / "team.jsonl")
            agents, model, label = language_model_agents(endpoint), limits.model, limits.label
        mistakes = {n: getattr(teacher, n) for n in ("mistake_rate", "unrecovered_rate", "seed")}
        made_by = {"minds": label, **mistakes, "tools": settings}
        journal = open_journal(workdir / "team.jsonl", made_by)
        before = sum(task.id in journal.done for task in tasks)
        with progress("team", total=len(tasks), initial=before) as bar:
            work = run_teacher(tasks, tools, teacher, agents, journal, bar.reach)
            logs = asyncio.run(work if endpoint is None else endpoint.closing(work))
        runs = {run.task.id: run for run in graded_runs(tasks, logs, teacher.judges)}
        solved = [trace for trace in traces if trace.task_id in runs]
        comparison = compare_policy_tokens(runs, solved, list(tools), token_counter(tokenizer))
        comparison |= {"tasks": len(tasks), "team_model": model, "phase": config.phase}
        if endpoint is not None:
            comparison["spent"] = endpoint.spent.to_json()
        run.write_config(config)
        run.summary({"economy": comparison}, anew=True)
    return comparison


def describe(told: dict[str, Any]) -> str:
    """Formats the content of ``summary.json`` as text for a terminal.

    Args:
        told: result of `measure`.
    """
    team, policy, both = told["team"], told["policy"], told["both_solved"]
    rates = ["unknown" if s["success"] is None else f"{s['success']:.3f}" for s in (team, policy)]
    lines = [
        f"{told['tasks']} tasks, {told['samples']} trajectories ({told['left_out']} left out); "
        f"success: team {rates[0]}, policy {rates[1]}"
    ]
    if "saved" in told:
        saved = told["saved"]
        lines += [
            f"solved by both ({both['samples']}): team {both['team']:.0f} tokens, policy "
            f"{both['policy']:.0f}: {100 * saved['both_solved']:.1f} % fewer; with each turn's "
            f"prompt sent again {both['policy_resent']:.0f}: "
            f"{100 * saved['both_solved_resent']:.1f} % fewer",
            f"all attempts, for each solved one: team {team['tokens_per_solved']:.0f}, policy "
            f"{policy['tokens_per_solved']:.0f}: {100 * saved['per_solved']:.1f} % fewer; sent "
            f"again {policy['resent_per_solved']:.0f}: {100 * saved['per_solved_resent']:.1f} % "
            "fewer",
        ]
    return "\n".join(lines)


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax economy``."""
    config_flag("configs/economy/factbook.py", Command)
    workdir_flag("where the results are written")


def main(argv: list[str]) -> None:
    """Runs ``coa-jax economy``: compares the tokens of policy and multi-agent teacher."""
    print(describe(measure(flags.FLAGS.config, run_folder(flags.FLAGS.workdir))))


if __name__ == "__main__":
    run_main(main, define_flags)
