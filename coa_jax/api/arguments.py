"""The arguments of the Python API: settings, and objects that become values of settings."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from coa_jax.config.extensions import Reference, parameters_of
from coa_jax.errors import UserError
from coa_jax.model.policy import Model
from coa_jax.run.settings import build_config
from coa_jax.tasks import Task
from coa_jax.tasks.question_rows import Columns, tasks_of_rows
from coa_jax.tasks.task_protocol import trained_protocol, with_task_protocol
from coa_jax.tools.base import Tool
from coa_jax.tools.function import FunctionTool
from coa_jax.tools.make import (
    OWN_TOOLS,
    Tools,
    ToolsConfig,
    listed,
    make_tools,
    named_tools,
    protocol_of,
)
from coa_jax.train.optimizer import reference_to

Config: TypeAlias = ConfigDict | Mapping[str, Any]
"""Settings by name, for example from `load_config`."""

Tasks: TypeAlias = (
    str | Path | Iterable[Task] | Iterable[Mapping[str, Any]] | Callable[..., Iterable[Any]]
)
"""The name or path of a source, tasks, rows, or a function that returns tasks.

A row has a question and an answer. A function without parameters may also return rows.
Rows are dicts or a ``datasets.Dataset``, see `question_rows.tasks_of_rows`.
"""

Tags: TypeAlias = Mapping[str, Callable[..., Any]]
"""Maps each tag of the policy to the typed function that it calls."""

RewardFunction: TypeAlias = Callable[..., Any]
Rewards: TypeAlias = (
    RewardFunction | Mapping[str, float | RewardFunction | tuple[RewardFunction, float]]
)
"""A reward function, or a mapping from names to reward functions (docs/extending.md).

In a mapping, a value is a function, a pair (function, weight), or a weight alone. A weight alone
selects the built-in reward of that name; the name ``grader`` selects the reward of the task itself.
"""


def values_of(config: Any) -> dict[str, Any]:
    """Returns settings by name; a model, its path or its Hub name is the setting ``model``."""
    if isinstance(config, Model):
        return {"model": config}
    if isinstance(config, str | Path):
        return {"model": str(config)}
    if isinstance(config, ConfigDict):
        return config.to_dict()
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    return _plain(config)


def _plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by name, with nested dataclasses converted to groups by name."""
    return {
        name: values_of(value) if dataclasses.is_dataclass(value) else value
        for name, value in changes.items()
    }


def changed_settings(config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by name, after changes; an optax object becomes a group of settings.

    A change with a dotted name, such as ``optimizer.total_steps``, keeps the rest of its group.
    """
    base, dotted = values_of(config), {name: changes[name] for name in changes if "." in name}
    values = {**base, **_plain({name: changes[name] for name in changes if "." not in name})}
    optimizer = values.get("optimizer", {})
    if not isinstance(optimizer, Mapping):
        group = base.get("optimizer", {})
        values["optimizer"] = {**group, "path": reference_to(optimizer), "options": {}}
    for name, value in dotted.items():
        *groups, last = name.split(".")
        inner = values
        for group in groups:
            if not isinstance(inner.get(group, {}), Mapping):
                raise UserError(f"{name}: {group} is {inner[group]!r}, which has no settings")
            inner[group] = inner = {**inner.get(group, {})}
        inner[last] = value
    return values


def settings_with(
    values: dict[str, Any],
    tasks: Tasks | None,
    rewards: Rewards | None,
    tools: Tools | None,
    environment: Callable[..., Any] | None,
) -> dict[str, Any]:
    """Returns settings by name; objects among the arguments become values of settings."""
    if rewards is not None:
        values["graders"] = {**values_of(values.get("graders", {})), "rewards": _rewards(rewards)}
    if tools is not None:
        values["tools"] = {**values_of(values.get("tools", {})), **named_tools(tools)}
        several: Any = () if isinstance(tools, ToolsConfig | Mapping) else tools
        tagged = any(isinstance(tool, FunctionTool) for tool in several)
        if tagged or any(not isinstance(tool, str | Tool) for tool in several):
            tags = build_config(ToolsConfig, values["tools"], "config.tools").tags
            in_tags = tagged or trained_protocol(values.get("model"), tags)
            form = {"prompt_style": "model", "format": "" if in_tags else "hermes"}
            values["rollout"] = {**form, **values_of(values.get("rollout", {}))}
            values["tools"]["protocol"] = values["tools"].get("protocol") or OWN_TOOLS
    if environment is not None:
        path = Reference(environment, "environment")
        values["environment"] = {**values_of(values.get("environment", {})), "path": path}
    if tasks is not None:
        named = isinstance(tasks, str | Path)
        values["tasks"] = str(tasks) if named else task_source(tasks, values)
    groups = ("tools", "rollout", "agent", "environment", "task_options")
    values |= {name: values_of(values[name]) for name in groups if name in values}
    return with_task_protocol(values)


def with_tags(tools: Tools | None, tags: Tags | None) -> Tools | None:
    """Returns the tools and the functions with tags of their own, as one list."""
    several = () if tools is None else listed(tools)
    if tags is None:
        return None if tools is None else several
    if not isinstance(tags, Mapping):
        raise UserError("tags must be a dict from tags to functions, such as {'search': search}")
    if isinstance(several, ToolsConfig | Mapping):
        raise UserError("tools is a group of settings; beside tags give a list of tools")
    return [*several, *(FunctionTool(function, tag) for tag, function in tags.items())]


def task_source(tasks: Any, values: dict[str, Any]) -> Reference:
    """Returns the setting ``tasks``; rows become tasks with a protocol for the tools."""
    if callable(tasks) and parameters_of(tasks, "the function", "tasks"):
        return Reference(tasks, "tasks")
    rows = tasks() if callable(tasks) else tasks
    rows = list(rows) if isinstance(rows, Iterable) else []
    if not rows:
        raise UserError("tasks is empty; give at least one task")
    if not all(isinstance(row, Task) for row in rows):
        config = build_config(ToolsConfig, values.get("tools", {}), "config.tools")
        protocol, config = protocol_of(config)
        if config.protocol:
            values["tools"] = {**values_of(values.get("tools", {})), "protocol": config.protocol}
            make_tools(config)  # registers the protocol
            if not values_of(values.get("rollout", {})).get("format"):
                protocol = trained_protocol(values.get("model"), config.tags) or protocol
        rewards = values.get("graders", {}).get("rewards", {})
        mapping = _columns(values.pop("task_options", {}), protocol)
        rows = tasks_of_rows(rows, mapping, graded=not rewards or "grader" in rewards)
    # The name depends on the tasks, so that a work directory refuses other tasks.
    content = "".join(repr(row) for row in rows)
    name = f"tasks_{hashlib.sha256(content.encode(errors='replace')).hexdigest()[:8]}"
    reference = Reference(tasks if callable(tasks) else lambda: rows, name)
    reference.target = lambda: rows  # a function of the caller is called only once
    return reference


def _columns(options: Any, protocol: str) -> Columns:
    """Returns which columns of rows from Python hold the parts of a task (``task_options``)."""
    options = values_of(options)
    defaults = {"columns": {}, "answer_after": "", "grader": "", "protocol": protocol}
    if wrong := [name for name in options if name not in defaults]:
        raise UserError(f"task_options.{wrong[0]}: rows from Python have {', '.join(defaults)}")
    return Columns(**{**defaults, **options}, where="tasks")


def _rewards(rewards: Rewards) -> dict[str, dict[str, Any]]:
    """Returns the setting ``graders.rewards``."""
    if callable(rewards):
        rewards = {getattr(rewards, "__name__", "reward").strip("<>"): rewards}
    if not isinstance(rewards, Mapping):
        raise UserError("rewards must be a function, or a dict such as {'brief': (brief, 0.2)}")
    settings = {}
    for name, reward in rewards.items():
        function, weight = reward if isinstance(reward, tuple) else (reward, 1.0)
        if callable(function):
            settings[name] = {"path": Reference(function, name), "weight": weight}
        else:
            settings[name] = {"weight": function}
    return settings
