"""Asks tools before a run whether they can be called, and whether their servers answer."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
from collections.abc import Awaitable
from types import ModuleType

from coa_jax.errors import UserError
from coa_jax.tools.make import TOOLS, ToolsConfig, make_tools, with_names
from coa_jax.tools.net.store import Store
from coa_jax.tools.recorded import StoreConfig

SECONDS = 10.0
"""Default time limit for the answer of a server, in seconds."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of checking a tool, a server or a setting.

    Attributes:
        name: tag of the tool, or name of the setting.
        ok: whether the check found no problem.
        text: how the tool or setting is configured, and the problem if there is one.
    """

    name: str
    ok: bool
    text: str


async def findings(
    config: ToolsConfig, seconds: float = 0.0, *, made: bool = False
) -> list[Finding]:
    """Checks each tool of a configuration, and the store of answers if there is one.

    A built-in tool is checked by the function ``probe`` of its module, every other tool by its
    method ``probe``, see `tools.base.Tool`. All tools are checked concurrently.

    Args:
        config: settings of the tools.
        seconds: time limit for the answer of a server; 0 for the default, `SECONDS`.
        made: whether the tools were created already. If True, only tools that call a server are
            checked. A tool whose answers are replayed from a recording calls no server.

    Returns:
        One finding per checked tool, in the order of the settings. If there is a store of answers
        and ``made`` is False, the finding for the store is the last.
    """
    names = [name for name in config.names if not made or _asks_server(name, config)]
    checks = [finding(name, _probe(name, config, seconds or SECONDS)) for name in names]
    if config.store.path and not made:
        checks.append(finding("store", _store(config)))
    return list(await asyncio.gather(*checks))


async def finding(name: str, check: Awaitable[tuple[bool, str]]) -> Finding:
    """Awaits a check of a tool or setting, and converts the result to a `Finding`.

    Args:
        name: name of the finding.
        check: awaitable whose result is (whether there is no problem, text). A `UserError` becomes
            a problem with the message as its text.
    """
    try:
        ok, text = await check
    except UserError as error:
        ok, text = False, str(error)
    return Finding(name, ok, text)


def _module_of(name: str, config: ToolsConfig) -> ModuleType | None:
    """Returns the module of a built-in tool; None for other tools."""
    path = TOOLS.built_in.get(name, "")
    if not path or name in config.own:
        return None
    return importlib.import_module(path.partition(":")[0])


def _asks_server(name: str, config: ToolsConfig) -> bool:
    """Returns whether the calls of a tool may be sent to a server."""
    if config.store.path and config.store.mode == "replay" and config.store.keeps(name):
        return False
    module = _module_of(name, config)
    return bool(module.asks_server(config)) if module else True


async def _probe(name: str, config: ToolsConfig, seconds: float) -> tuple[bool, str]:
    if module := _module_of(name, config):
        ok, text = await module.probe(config, seconds)
        return bool(ok), str(text)
    alone = dataclasses.replace(
        with_names(config, (name,)), protocol="", budgets={}, corpus="", store=StoreConfig()
    )
    (tool,) = await asyncio.to_thread(make_tools, alone)
    if not hasattr(tool, "probe"):
        return True, "a tool of your own"  # only a call could check the tool
    ok, text = await tool.probe(seconds)
    return bool(ok), str(text)


async def _store(config: ToolsConfig) -> tuple[bool, str]:
    entries = len(Store(config.store.path, writes=False))
    return True, f"{config.store.mode} of {entries} answers in {config.store.path}"
