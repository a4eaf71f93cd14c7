"""Gives the questions of a file a protocol that contains the tools of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coa_jax.config.extensions import Reference, read_options
from coa_jax.errors import UserError
from coa_jax.protocol import get_protocol, protocol_names
from coa_jax.run.settings import build_config
from coa_jax.tasks import source_name
from coa_jax.tasks.prompts import protocol_of_model
from coa_jax.tasks.task_files import split_path
from coa_jax.tools.make import OWN_TOOLS, TOOLS, ToolsConfig, names_function, protocol_of

_FILES = ("path", "hf", "tfds")  # sources whose rows may name no protocol


def with_task_protocol(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run, with a protocol of the run's tools for questions from files.

    The function sets the protocol of ``tools`` and of ``task_options``. Nothing changes if all
    tools are built-in ones, if a registered protocol has exactly the tools, or if an environment or
    an agent program takes the place of the tools. Questions get the protocol that the settings
    name, or else that of the model's training (`trained_protocol`), or else a new one. With the
    new one, the policy calls Python functions in the format ``hermes``, unless the settings name
    another format.

    Args:
        values: settings by name; their groups are mappings.
    """
    values, source = dict(values), values.get("tasks")
    tools, rollout = values.get("tools") or {}, values.get("rollout") or {}
    agent, environment = values.get("agent") or {}, values.get("environment") or {}
    if not isinstance(source, str) or isinstance(source, Reference) or not source:
        return values
    if environment.get("path") or agent.get("command") or agent.get("function"):
        return values
    try:
        config = build_config(ToolsConfig, tools, "config.tools")
        own = {*config.names} - {*TOOLS.built_in} | {*config.own}
        trained = trained_protocol(values.get("model"), config.tags)
        protocol = protocol_of(config)[1].protocol or (trained and OWN_TOOLS)
        if not own or not protocol or source_name(source)[0] not in _FILES:
            return values
        functions = names_function(config)
        options = read_options(split_path(source)[1], "config.tasks")
    except UserError:  # what opens the tools and the tasks reports it
        return values
    values["tools"] = {**tools, "protocol": protocol}
    # Evaluations may ask for a protocol. A format is for protocols without tags.
    default = values.get("protocol") or ("" if rollout.get("format") else trained) or protocol
    values["task_options"] = {"protocol": default, **(values.get("task_options") or {})}
    chosen = {**values["task_options"], **options}["protocol"]
    if functions and chosen == protocol and not rollout.get("format"):
        values["rollout"] = {"prompt_style": "model", **rollout, "format": "hermes"}
    return values


def trained_protocol(model: Any, tools: Iterable[str]) -> str:
    """Returns the protocol in which a model was trained, if it has tags for exactly these tools.

    The result is "" for other protocols, and if the model is no local one.

    Args:
        model: a `Model`, or the path of a model.
        tools: names of the tools.

    Raises:
        UserError: the model's ``agent.json`` or ``protocols.json`` cannot be read.
    """
    if isinstance(model, str | Path):
        source: Any = model if Path(model).expanduser().is_dir() else {}
    else:
        source = getattr(model, "card", {})
    name = protocol_of_model(source)
    has_tags = name in protocol_names()
    return name if has_tags and set(get_protocol(name).tools) == set(tools) else ""
