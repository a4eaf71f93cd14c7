"""Evaluates a policy on tasks with live tools; finished samples are never run again."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from coa_jax.config.preflight import preflight, require
from coa_jax.data.trajectory import Trajectory
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.engine import Engine
from coa_jax.engine.group import make_engines
from coa_jax.engine.memory import chosen, engine_memory, fitted, free_memory
from coa_jax.errors import UserError
from coa_jax.evaluate.config import EvaluateConfig
from coa_jax.evaluate.endpoint import PolicyEndpoint
from coa_jax.evaluate.exposure import exposure_of
from coa_jax.evaluate.figures import blocks, check_written, result
from coa_jax.evaluate.journal import Journal
from coa_jax.evaluate.measure import Policy, Wanted, finish, wanted
from coa_jax.evaluate.policy import engine_policy, weights_name
from coa_jax.evaluate.sample import Key, Measured, digest, measured
from coa_jax.evaluate.scaling import choose, pick_name, scaling
from coa_jax.files import durable
from coa_jax.model.api import Model, load_model
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import Prompt
from coa_jax.rollout.agent_config import AgentConfig
from coa_jax.rollout.constrain import constraint_for
from coa_jax.rollout.environments.base import tags_of
from coa_jax.rollout.environments.session import Environments
from coa_jax.run.progress import Bar, progress
from coa_jax.run.run_dir import RunDir
from coa_jax.tasks import Graders, Task
from coa_jax.tasks.base import with_level
from coa_jax.tasks.checks import check_tools, warn_of_tools
from coa_jax.tasks.mixture import parts_of
from coa_jax.tasks.prompts import load_prompt, warn_of_prompts
from coa_jax.tools.base import Tool
from coa_jax.tools.make import ToolsConfig


def settings(
    config: EvaluateConfig, policy: str, tools: Mapping[str, Any], prompt: Prompt | None = None
) -> dict[str, Any]:
    """Returns the settings on which the samples of an evaluation depend.

    Args:
        config: settings of the evaluation.
        policy: a name that identifies the policy and its weights.
        tools: settings of the tools, as JSON values.
        prompt: instructions of the prompt; None for those that the config names.

    Raises:
        UserError: the file with the instructions cannot be read.
    """
    prompt = prompt or load_prompt(config.rollout.prompt_style)
    return {
        "policy": policy,
        "tasks": config.tasks,
        **({"task_options": dict(config.task_options)} if config.task_options else {}),
        **({"mixture": _weightless(config)} if config.mixture else {}),
        **({"environment": _environment(config)} if config.environment else {}),
        "split": config.split,
        "protocol": config.protocol,
        "seed": config.seed,
        "sampling": dataclasses.asdict(config.sampling),
        "attempts": config.attempts,
        "rollout": dataclasses.asdict(config.rollout),
        "prompt": digest(dataclasses.asdict(prompt)) if prompt.is_template else prompt.style,
        **({"agent": _of_agent(config.agent)} if config.agent else {}),
        "opening": config.endpoint.opening if config.endpoint else "",
        **_other_than_default(config),
        "tools": digest(dict(tools)),
    }


def _other_than_default(config: EvaluateConfig) -> dict[str, Any]:
    """Returns the settings of the engine or the endpoint on which samples depend.

    Settings with their default values are left out. Evaluations with the default values can
    therefore continue although their earlier samples were stored without these settings; others
    must start anew.
    """
    values: PolicyEndpoint | EngineConfig = config.engine
    names = ["dtype", "cache_dtype"]
    if config.endpoint:
        values, names = config.endpoint, ["observation_chars"]
    found = {name: getattr(values, name) for name in names}
    return {name: value for name, value in found.items() if value != getattr(type(values), name)}


def _weightless(config: EvaluateConfig) -> dict[str, Any]:
    """Returns the sources of a mixture with equal weights; samples do not depend on weights."""
    parts = parts_of(config)
    return {
        name: dataclasses.asdict(dataclasses.replace(p, weight=1.0)) for name, p in parts.items()
    }


def _environment(config: EvaluateConfig) -> dict[str, Any]:
    """Returns the settings of the environment on which samples depend."""
    return {"path": config.environment.path, "options": dict(config.environment.options)}


def _of_agent(agent: AgentConfig) -> dict[str, Any]:
    """Returns the settings of an external agent program on which samples depend."""
    values = dataclasses.asdict(agent)
    for name in ("concurrency", "host", "port"):
        values.pop(name)
    return {**values, "options": dict(agent.options)}


def load(config: EvaluateConfig) -> list[Task]:
    """Loads the tasks of an evaluation.

    Raises:
        UserError: the tasks cannot be loaded, or one has another protocol than ``config.protocol``.
    """
    tasks = config.load(config.environment, config.protocol)
    others = [task.protocol for task in tasks if config.protocol not in ("", task.protocol)]
    if others:
        named = ", ".join(sorted(set(others)))
        raise UserError(
            f"config.tasks={config.tasks or ', '.join(config.mixture)}: {len(others)} of"
            f" {len(tasks)} tasks are for the protocol {named}, and config.protocol is"
            f" {config.protocol}; give --config.protocol={sorted(set(others))[0]} to measure the"
            " policy in that one, or --config.protocol= to solve each task in its own"
        )
    return tasks


def _grading(config: EvaluateConfig) -> dict[str, Any]:
    """Returns the settings on which verdicts depend, without addresses and concurrency."""
    graders, pick = dataclasses.asdict(config.graders), dataclasses.asdict(config.best_of)
    for asked in (graders["judge"], pick):
        for name in ("attempts", "concurrency", "cache", "n"):
            asked.pop(name, None)
        chat = asked["chat"]
        asked["chat"] = {name: chat[name] for name in ("model", "temperature", "max_tokens")}
    graders.pop("programs")
    return {**graders, "pick": pick, "last_suggestion": config.last_suggestion}


def evaluate(
    policy: Policy,
    tasks: Sequence[Task],
    config: EvaluateConfig,
    run: RunDir,
    stage: str,
    about: Mapping[str, Any],
    prompt: Prompt | None = None,
    *,
    servers: ToolsConfig | None = None,
    fresh: bool = False,
) -> dict[str, Any]:
    """Runs and grades the samples that are not finished yet, and writes the result file.

    The function first checks that every required server answers. It writes the samples to
    ``traces.jsonl``, and the results to ``evaluate/STAGE/results.json``. The result file of an
    evaluation that was killed and restarted is, byte for byte, the same as without the
    interruption.

    Args:
        policy: the policy.
        tasks: the tasks.
        config: settings of the evaluation.
        run: the run directory.
        stage: name of the evaluation.
        about: settings on which the samples depend, from `settings`.
        prompt: instructions of the prompt; None for those that the config names.
        servers: settings of the tools, whose servers are checked, too; None if there are no tools.
        fresh: whether to delete the results that earlier processes stored for this stage.

    Returns:
        The content of the result file.

    Raises:
        UserError: an error that the user can correct; finished samples are kept.
    """
    tasks = with_level(tasks, config.rollout.level, config.rollout.format)
    prompt = prompt or load_prompt(config.rollout.prompt_style)
    warn_of_prompts(tasks, prompt, "tasks", "config.rollout.prompt_style")
    graders, exposure = Graders(config.graders), exposure_of(tasks, config.blocked)
    graders.check(tasks)
    journal = Journal(run, stage, about, _grading(config), config.last_suggestion)
    journal.load(tasks, exposure, fresh=fresh, retry_faults=config.retry_faults)

    pending = functools.partial(
        wanted, journal.samples, dict(enumerate(tasks)), config.samples, prompt, config.attempts
    )

    def begin(attempt: int) -> AsyncGenerator[Trajectory, None] | None:
        samples, about = pending(attempt), {**journal.about(), "attempt": attempt}
        return policy(samples, about, lambda n: bars[0].count(tokens=n)) if samples else None

    async def complete() -> dict[str, str]:
        await finish(
            filter(None, streams), tasks, graders, journal,
            ungraded=ungraded, attempts=config.attempts, ended=bars[0].update,
        )  # fmt: skip
        groups = measured(tasks, journal.samples, config.samples)
        return await choose(
            config.best_of, graders, groups, config.samples, journal.verdicts,
            lambda sample: journal.trajectory(sample.key), journal.say,
        )  # fmt: skip

    bars: list[Bar] = []  # the bar is created once the policy is loaded
    open_now = [one for attempt in range(config.attempts) for one in pending(attempt)]
    total, left = len(tasks) * config.samples, sum(len(one.numbers) for one in open_now)
    if left < total:
        print(f"{stage}: {total - left} of {total} samples are finished", flush=True)
    groups = measured(tasks, journal.samples, config.samples)
    ungraded = [s.key for group in groups for s in group.samples if s.is_ungraded(config.attempts)]
    _check_ready(config, groups, journal, open_now, ungraded, servers)
    # The first stream is created outside the event loop, because loading a policy may take long.
    streams = itertools.chain([begin(0)], map(begin, range(1, config.attempts)))
    with progress(f"evaluate {stage}", total=total, initial=total - left) as bar:
        bars.append(bar)
        why = asyncio.run(complete())
    groups = measured(tasks, journal.samples, config.samples)
    journal.finish([sample.key for group in groups for sample in group.samples])
    check_written(stage, groups)
    found = scaling(groups, config.samples, config.best_of.n, journal.verdicts, why)
    described = {**about, "grading": _grading(config)}
    unjudged = graders.judge.no_verdict if graders.judge else {}
    outcome = result(stage, described, groups, config.samples, found, unjudged)
    durable.write_json(journal.folder / "results.json", outcome)
    run.summary(blocks(outcome))
    return outcome


def evaluate_model(
    path: Path,
    tasks: Sequence[Task],
    config: EvaluateConfig,
    run: RunDir,
    stage: str,
    tools: Sequence[Tool],
    tool_settings: Mapping[str, Any],
    *,
    servers: ToolsConfig | None = None,
    fresh: bool = False,
) -> dict[str, Any]:
    """Evaluates a model that decodes on this machine; returns the content of the result file.

    Args:
        path: Hugging Face directory of the model.
        tasks, config, run, stage, servers, fresh: as in `evaluate`.
        tools: live tools.
        tool_settings: settings of the tools, on which the samples depend.
    """
    prompt = load_prompt(config.rollout.prompt_style, path)
    warn_of_tools(tools, tasks)
    environments = Environments(config.environment, prompt) if config.environment else None
    tasks = with_level(tasks, config.rollout.level, config.rollout.format)
    policy = local_policy(lambda: load_model(path), config, tools, tasks, environments)
    about = settings(config, f"{path.name} {weights_name(str(path))}", tool_settings, prompt)
    return evaluate(policy, tasks, config, run, stage, about, prompt, servers=servers, fresh=fresh)


def local_policy(
    load: Callable[[], Model],
    config: EvaluateConfig,
    tools: Sequence[Tool],
    tasks: Sequence[Task],
    environments: Environments | None = None,
) -> Policy:
    """Returns an `engine_policy` whose model is loaded when there are samples to run.

    Args:
        load: function that loads the model; called only if there are samples to run.
        config: settings of the evaluation. The shapes of its engine are upper bounds, which are
            reduced to what the samples need and the memory holds, see `engine.memory.fitted`.
        tools: live tools.
        tasks: all tasks of the evaluation. The shapes are derived from all of them, so that a
            resumed evaluation has the same shapes.
        environments: creates the environment of each sample; None for the default loop of tools.
    """
    shapes, rollout = config.engine, config.rollout

    @functools.cache
    def ready() -> Policy:
        model = load()
        device = jax.tree.leaves(jax.block_until_ready(model.params))[0].devices().pop()
        free, count = free_memory(device), len(tasks) * config.samples
        fit = fitted(shapes, model.config, device.platform, count, rollout.max_tokens, free)
        print(f"engine: {chosen(shapes, fit)}; {engine_memory(model.config, fit)}", flush=True)
        protocols = (task.protocol for task in tasks)
        constraint = constraint_for(rollout, model.tokenizer, model.config.vocab_size, protocols)
        if constraint is not None:
            print(f"constraint: {constraint}", flush=True)
        stop = eos_ids(model.tokenizer)
        engines: list[Engine] = make_engines(model.params, model.config, fit, stop, constraint)
        # Compiles now. Otherwise compilation would use up the time limits of the first
        # trajectories.
        for engine in engines if rollout.max_seconds else ():
            engine.warm_up()
        return engine_policy(model, engines, config, rollout, tools, environments, config.agent)

    return lambda wanted, about, written: ready()(wanted, about, written)


def _check_ready(
    config: EvaluateConfig,
    groups: Sequence[Measured],
    journal: Journal,
    open_now: Sequence[Wanted],
    ungraded: Sequence[Key],
    servers: ToolsConfig | None,
) -> None:
    """Raises UserError if a server that the remaining work needs does not answer.

    Also prints which answers will have no judge.
    """
    ids = {one.task.id for one in open_now} | {task_id for task_id, _ in ungraded}
    graded = [group.task for group in groups if group.task.id in ids]
    probes = config.graders.probes(graded) if graded else {}
    if open_now:
        probes |= config.environment.probes()
        probes |= {"endpoint": config.endpoint.chat.probe} if config.endpoint else {}
        probes |= servers.probes(made=True) if servers else {}
    if open_now and servers:
        tags = {*servers.tags, *tags_of(config.environment)}
        probes["tools.names"] = lambda seconds: check_tools(graded, servers.names, tags)
    best = config.best_of.n
    if best and any(pick_name(group, best) not in journal.verdicts for group in groups):
        probes["best_of.chat"] = config.best_of.chat.probe
    require(preflight(probes, config.probe_s))
    unseen = sum(task.metadata.get("grader") == "judge" for task in graded)
    if unseen and not config.graders.judge:
        print(
            f"{journal.folder.name}: {unseen} tasks request a judge, but none is configured "
            f"(config.graders.judge.chat.url): {config.graders.answer} grades their "
            "answers instead, which is another measure",
            flush=True,
        )
