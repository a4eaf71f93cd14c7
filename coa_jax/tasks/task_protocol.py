"""Gives the questions of a file a protocol that contains the tools of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coa_jax.config.extensions import Reference, read_options
from coa_jax.errors import UserError
from coa_jax.run.settings import build_config
from coa_jax.tasks import source_name
from coa_jax.tasks.task_files import split_path
from coa_jax.tools.make import TOOLS, ToolsConfig, names_function, protocol_of

_FILES = ("path", "hf", "tfds")  # sources whose rows may name no protocol


def with_task_protocol(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run, with a protocol of the run's tools for questions from files.

    The function sets the protocol of ``tools`` and of ``task_options``. Nothing changes if all
    tools are built-in ones, if a registered protocol has exactly the tools, or if an environment or
    an agent program takes the place of the tools. If a Python function is a tool, the policy calls
    tools in the format ``hermes``, unless the settings name another format or the questions get
    another protocol, such as that of distilled logs, which has tags.

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
        protocol, config = protocol_of(config)
        if not own or not config.protocol or source_name(source)[0] not in _FILES:
            return values
        functions = names_function(config)
        options = read_options(split_path(source)[1], "config.tasks")
    except UserError:  # what opens the tools and the tasks reports it
        return values
    values["tools"] = {**tools, "protocol": protocol}
    asked = values.get("protocol") or protocol  # evaluations may ask for another protocol
    values["task_options"] = {"protocol": asked, **(values.get("task_options") or {})}
    chosen = {**values["task_options"], **options}["protocol"]
    if functions and chosen == protocol and not rollout.get("format"):
        values["rollout"] = {"prompt_style": "model", **rollout, "format": "hermes"}
    return values
