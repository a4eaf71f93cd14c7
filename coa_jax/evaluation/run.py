"""Evaluates a policy on tasks with live tools; finished samples are never run again."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coa_jax.config.preflight import preflight, require, settings_probes
from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.evaluation.config import EvaluateConfig
from coa_jax.evaluation.exposure import exposure_of
from coa_jax.evaluation.journal import Journal
from coa_jax.evaluation.measure import missing_requests, run_and_grade
from coa_jax.evaluation.policy import load_sampler, weights_name
from coa_jax.evaluation.results import check_written, result_file_content, summary_blocks
from coa_jax.evaluation.sample import Key, Sample, TaskSamples, digest, group_by_task
from coa_jax.evaluation.scaling import choose, pick_name, scaling
from coa_jax.files import durable
from coa_jax.model.api import load_model
from coa_jax.protocol import Prompt
from coa_jax.rollout.agent_config import AgentConfig
from coa_jax.rollout.endpoint import PolicyEndpoint
from coa_jax.rollout.environments.base import tags_of
from coa_jax.rollout.environments.session import Environments
from coa_jax.rollout.request import Request
from coa_jax.rollout.sampler import Sampler
from coa_jax.run.progress import progress
from coa_jax.run.run_dir import RunDir
from coa_jax.storage import is_url, local, model_folder
from coa_jax.tasks import Graders, Task
from coa_jax.tasks.base import with_level
from coa_jax.tasks.checks import check_tools, warn_of_tools
from coa_jax.tasks.mixture import parts_of
from coa_jax.tasks.prompts import load_prompt, warn_of_prompts
from coa_jax.tools.base import Tool
from coa_jax.tools.make import ToolsConfig


def settings(
    config: EvaluateConfig, policy: str, tools: Mapping[str, Any], prompt: Prompt
) -> dict[str, Any]:
    """Returns the settings on which the samples of an evaluation depend.

    Args:
        config: settings of the evaluation.
        policy: a name that identifies the policy and its weights.
        tools: settings of the tools, as JSON values.
        prompt: instructions of the prompt.
    """
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
    group: PolicyEndpoint | EngineConfig = config.engine
    names = ["dtype", "cache_dtype"]
    if config.endpoint:
        group, names = config.endpoint, ["observation_chars"]
    values = {name: getattr(group, name) for name in names}
    return {name: value for name, value in values.items() if value != getattr(type(group), name)}


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
        other_protocols = ", ".join(sorted(set(others)))
        raise UserError(
            f"config.tasks={config.tasks or ', '.join(config.mixture)}: {len(others)} of"
            f" {len(tasks)} tasks are for the protocol {other_protocols}, and config.protocol is"
            f" {config.protocol}; give --config.protocol={sorted(set(others))[0]} to measure the"
            " policy in that one, or --config.protocol= to solve each task in its own"
        )
    return tasks


_OF_VERDICT = ("model", "temperature", "max_tokens", "request")
"""Settings of a chat model on which its verdicts depend."""


def _grading(config: EvaluateConfig) -> dict[str, Any]:
    """Returns the settings on which verdicts depend, without addresses and concurrency."""
    graders, pick = dataclasses.asdict(config.graders), dataclasses.asdict(config.best_of)
    for group in (graders["judge"], pick):
        for name in ("concurrency", "cache", "n"):
            group.pop(name, None)
        chat = group["chat"]
        group["chat"] = {name: chat[name] for name in _OF_VERDICT}
    return {**graders, "pick": pick, "last_suggestion": config.last_suggestion}


def evaluate(
    load: Callable[[], Sampler],
    tasks: Sequence[Task],
    config: EvaluateConfig,
    run: RunDir,
    stage: str,
    about: Mapping[str, Any],
    prompt: Prompt,
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
        load: function that loads the policy, see `load_sampler`. It is called only if samples are
            missing.
        tasks: the tasks of the evaluation, in the level and the format of ``config.rollout``.
        config: settings of the evaluation.
        run: the run directory.
        stage: name of the evaluation.
        about: settings on which the samples depend, from `settings`.
        prompt: instructions of the prompt.
        servers: settings of the tools, whose servers are checked, too; None if there are no tools.
        fresh: whether to delete the results that earlier processes stored for this stage.

    Returns:
        The content of the result file.

    Raises:
        UserError: an error that the user can correct; finished samples are kept.
    """
    warn_of_prompts(tasks, prompt, "tasks", "config.rollout.prompt_style")
    graders, exposure = Graders(config.graders), exposure_of(tasks, config.blocked)
    graders.check(tasks)
    journal = Journal(run, stage, about, _grading(config), config.last_suggestion)
    journal.load(tasks, exposure, fresh=fresh, retry_faults=config.retry_faults)
    environments = Environments(config.environment, prompt) if config.environment else None

    def missing(attempt: int) -> list[Request]:
        return missing_requests(
            journal.samples, dict(enumerate(tasks)), config, prompt,
            {**journal.about(), "attempt": attempt}, environments, config.attempts, attempt,
        )  # fmt: skip

    def ended(sample: Sample) -> None:
        bar.count(tokens=sample.tokens)
        bar.update()

    async def complete() -> tuple[list[TaskSamples], dict[str, str]]:
        await run_and_grade(
            sampler, missing, tasks, graders, journal,
            ungraded=ungraded, attempts=config.attempts, ended=ended,
        )  # fmt: skip
        groups = group_by_task(tasks, journal.samples, config.samples)
        return groups, await choose(
            config.best_of, graders, groups, config.samples, journal.verdicts,
            lambda sample: journal.trajectory(sample.key), journal.add_verdict,
        )  # fmt: skip

    requests = [request for attempt in range(config.attempts) for request in missing(attempt)]
    total = len(tasks) * config.samples
    unfinished = sum(len(request.samples) for request in requests)
    if unfinished < total:
        print(f"{stage}: {total - unfinished} of {total} samples are finished", flush=True)
    groups = group_by_task(tasks, journal.samples, config.samples)
    ungraded = [s.key for group in groups for s in group.samples if s.is_ungraded(config.attempts)]
    _check_ready(config, groups, journal, requests, ungraded, servers)
    sampler = load() if requests else None  # outside the event loop, because it may take long
    with progress(f"evaluate {stage}", total=total, initial=total - unfinished) as bar:
        groups, why = asyncio.run(complete())
    journal.finish([sample.key for group in groups for sample in group.samples])
    check_written(stage, groups)
    scaled = scaling(groups, config.samples, config.best_of.n, journal.verdicts, why)
    described = {**about, "grading": _grading(config)}
    unjudged = graders.judge.no_verdict if graders.judge else {}
    outcome = result_file_content(stage, described, groups, config.samples, scaled, unjudged)
    durable.write_json(journal.folder / "results.json", outcome)
    run.summary(summary_blocks(outcome))
    return outcome


def evaluate_model(
    model_path: str | Path,
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
    """Evaluates a model, or the policy behind an endpoint; returns the content of the result file.

    Args:
        model_path: Hugging Face directory of the model; ignored if ``config.endpoint`` names a
        server.
        tasks, config, run, stage, servers, fresh: see `evaluate`.
        tools: live tools.
        tool_settings: settings of the tools, on which the samples depend.
    """
    warn_of_tools(tools, tasks)
    tasks = with_level(tasks, config.rollout.level, config.rollout.format)
    if config.endpoint:
        name = f"{config.endpoint.model} (endpoint)"
        prompt = load_prompt(config.rollout.prompt_style)
    else:
        # The policy is named by a hash of its weights, which `model_folder` leaves in the bucket.
        model_path = (
            Path(local(str(model_path))) if is_url(str(model_path)) else model_folder(model_path)
        )
        name = f"{model_path.name} {weights_name(str(model_path))}"
        prompt = load_prompt(config.rollout.prompt_style, model_path)
    load = functools.partial(load_sampler, lambda: load_model(model_path), config, tools, tasks)
    about = settings(config, name, tool_settings, prompt)
    return evaluate(load, tasks, config, run, stage, about, prompt, servers=servers, fresh=fresh)


def _check_ready(
    config: EvaluateConfig,
    groups: Sequence[TaskSamples],
    journal: Journal,
    requests: Sequence[Request],
    ungraded: Sequence[Key],
    servers: ToolsConfig | None,
) -> None:
    """Raises UserError if a server that the remaining work needs does not answer.

    Also prints which answers will have no judge.
    """
    ids = {request.task.id for request in requests} | {task_id for task_id, _ in ungraded}
    graded = [group.task for group in groups if group.task.id in ids]
    parts: dict[str, Any] = {"graders": config.graders} if graded else {}
    if requests:
        parts |= {"environment": config.environment, "endpoint": config.endpoint, "tools": servers}
    best = config.best_of.n
    if best and any(pick_name(group, best) not in journal.verdicts for group in groups):
        parts["best_of"] = config.best_of
    probes = settings_probes(parts, tasks=graded)
    if requests and servers:
        tags = {*servers.tags, *tags_of(config.environment)}
        probes["tools.names"] = lambda seconds: check_tools(graded, servers.names, tags)
    require(preflight(probes, config.probe_s))
    unseen = sum(task.metadata.get("grader") == "judge" for task in graded)
    if unseen and not config.graders.judge:
        print(
            f"{journal.folder.name}: {unseen} tasks request a judge, but none is configured "
            f"(config.graders.judge.chat.url): {config.graders.answer} grades their "
            "answers instead, which is another measure",
            flush=True,
        )
