"""Asks the parts of a run what they need, and whether they can start.

A part is a group of settings, such as the judge, or code that a setting names: a tool, a reward, an
environment or a source of tasks. Built-in code and your own code have the same two attributes:

* ``needs`` says which packages, keys and servers the part needs. It is a `Needs`, or a function
  that returns a `Needs` and touches nothing. ``coa-jax needs`` asks for it.
* ``probe(seconds)`` checks whether the part can start. It returns (whether it can, one line of
  text), or None if there is nothing to report, or raises `UserError`. It may be async. RL, SFT with
  evaluations, evaluations, distillation and synthesis ask the parts that they use before the first
  sample (`settings_probes`), and ``coa-jax doctor --tools`` asks the tools.

``--check`` asks both questions.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from coa_jax.config.extensions import BoundFunction, ExtensionKind, find, first_line, refuse_result
from coa_jax.config.fields import Between
from coa_jax.errors import UserError

SECONDS = 10.0
"""Default time limit for the answer of a server, in seconds."""

ProbeSeconds = Annotated[float, Between(0, 600)]
"""Type of the setting ``probe_s``: a time limit in seconds; with 0 nothing is asked."""

F = TypeVar("F", bound=Callable[..., Any])
Answer = tuple[bool, str] | None
Probe = Callable[[float], Answer | Awaitable[Answer]]
"""Checks within a number of seconds whether a part can start, see the docstring of this module."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a part of a run needs. The sum of two needs has the needs of both.

    Attributes:
        extras: names of extras in setup.py, without the extra of the accelerator.
        variables: names of environment variables that must hold API keys.
        servers: maps the name of a setting to the URL or the command line of the server that the
            setting names.
    """

    extras: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    servers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_server(cls, setting: str, url: str, key_env: str = "", *extras: str) -> Needs:
        """Returns the needs of a server that a setting names; nothing if ``url`` is "".

        Args:
            setting: name of the setting.
            url: URL of the server.
            key_env: environment variable with the key of the server; "" for no key.
            extras: extras with the client of the server.
        """
        return cls(extras, (key_env,) if key_env else (), {setting: url}) if url else cls()

    def __add__(self, other: Needs) -> Needs:
        return Needs(
            tuple(sorted({*self.extras, *other.extras})),
            tuple(sorted({*self.variables, *other.variables})),
            {**self.servers, **other.servers},
        )

    def under(self, group: str) -> Needs:
        """Returns the same needs, with ``group`` and a dot before each name of a setting."""
        servers = {f"{group}.{setting}": server for setting, server in self.servers.items()}
        return dataclasses.replace(self, servers=servers)

    def __str__(self) -> str:
        lines = [f"extras: {' '.join(self.extras)}", f"variables: {' '.join(self.variables)}"]
        lines += [f"server: {server} ({setting})" for setting, server in self.servers.items()]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of a check.

    Attributes:
        name: name of the part, such as the tag of a tool or the name of a setting.
        ok: whether the part can start.
        text: one line about the part, with the problem if there is one.
    """

    name: str
    ok: bool
    text: str

    @classmethod
    def failed(cls, name: str, error: Exception) -> Check:
        """Returns a failed check with the text of an error; logs errors that are no `UserError`."""
        if isinstance(error, UserError):
            return cls(name, False, str(error))
        logging.getLogger(__name__).error("the check of %s has failed", name, exc_info=error)
        return cls(name, False, first_line(error))


def declares(
    needs: Needs | Callable[..., Needs], probe: Callable[..., Any] | None = None
) -> Callable[[F], F]:
    """Returns a decorator that gives a function the attributes ``needs`` and ``probe``.

    Args:
        needs: what the function needs, such as packages and keys, or a function that returns this.
        probe: checks before a run, within a number of seconds, whether the decorated function can
            work. It returns (whether it can, one line of text), or None if there is nothing to
            report. None for no check.
    """

    def mark(function: F) -> F:
        function.__dict__.update({"needs": needs, **({"probe": probe} if probe else {})})
        return function

    return mark


def settings_needs(group: Any) -> Needs:
    """Returns the needs of a group of settings.

    A group without a method ``needs`` needs what the groups inside it need.
    """
    if hasattr(group, "needs"):
        needs: Needs = group.needs()
        return needs
    inside = dataclasses.fields(group) if dataclasses.is_dataclass(group) else ()
    parts = ((field.name, getattr(group, field.name)) for field in inside)
    return sum((settings_needs(part).under(name) for name, part in parts), Needs())


def used_settings(config: Any) -> dict[str, Any]:
    """Returns the settings of a run that have an effect, by name.

    For example, the settings of tools are left out if an agent program brings its own tools. In SFT
    without evaluations, those of tools, graders, held-out tasks and the engine are left out.
    """
    used = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    unused = ["tools"] if used.get("agent") else []
    if "data" in used and not used.get("evaluate_every"):
        unused = ["tools", "graders", "held_out", "engine"]
    return {name: value for name, value in used.items() if name not in unused}


def settings_probes(
    group: Any, where: str = "", *, tasks: Sequence[Any] = (), made: bool = True
) -> dict[str, Probe]:
    """Returns {part: probe} of a group of settings and of the groups inside it.

    A group with a method ``probes`` names its parts itself. A group that is false, such as a model
    without a URL, has no probe.

    Args:
        group: the group of settings, or several groups by name, such as `used_settings`.
        where: name of the group; "" for the settings of a whole run.
        tasks: tasks that are graded, for `GradersConfig.probes`; () if they are unknown.
        made: whether the tools exist already, see `ToolsConfig.probes`.
    """
    if not group:
        return {}
    if hasattr(group, "probes"):
        own: dict[str, Probe] = _call(group.probes, {"tasks": tasks, "made": made})
        return own
    if hasattr(group, "probe"):
        return {where: group.probe}
    if dataclasses.is_dataclass(group):
        group = {field.name: getattr(group, field.name) for field in dataclasses.fields(group)}
    elif where or not isinstance(group, Mapping):
        return {}
    probes: dict[str, Probe] = {}
    for name, part in group.items():
        probes |= settings_probes(part, f"{where}.{name}".lstrip("."), tasks=tasks, made=made)
    return probes


def code_needs(kind: ExtensionKind, name: str, options: Mapping[str, Any], **offered: Any) -> Needs:
    """Returns what the code of an extension requires before a run can start.

    These are the needs in the code's attribute ``needs`` (see `declares`), and the server that the
    options name.

    Args:
        kind: kind of the code.
        name: name of the code; "" for no code.
        options: options of the code. ``url`` names a server, and ``key_env`` the variable with its
            key.
        offered: arguments, in addition to the options, if ``needs`` is a function. The function
            receives those for which it has parameters.
    """
    url, key_env = (str(options.get(option) or "") for option in ("url", "key_env"))
    server = Needs.of_server("options.url", url, key_env)
    try:
        needs = getattr(find(kind, name, ""), "needs", Needs()) if name else Needs()
    except UserError:  # `--check` reports code that cannot be imported
        return server
    needs = _call(needs, {**options, **offered}) if callable(needs) else needs
    if not isinstance(needs, Needs):
        raise refuse_result(kind, name, needs, "a coa_jax.Needs from needs", kind.noun)
    return needs + server


def code_probes(
    kind: ExtensionKind, name: str, options: Mapping[str, Any], where: str, **offered: Any
) -> dict[str, Probe]:
    """Returns {setting: probe (see `declares`)} for the code that a setting names; {} for no probe.

    Args:
        kind, name, options, offered: as in `code_needs`, with ``probe`` in place of ``needs``.
        where: name of the setting.

    Raises:
        UserError: there is no code with this name.
    """
    probe = getattr(find(kind, name, where), "probe", None) if name else None
    if probe is None:
        return {}
    return {where: lambda seconds: _call(probe, {**options, **offered, "seconds": seconds})}


def _call(function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Calls a function with the arguments for which it has parameters."""
    return BoundFunction(function, frozenset(inspect.signature(function).parameters), {})(**offered)


def preflight(probes: Mapping[str, Probe], seconds: float) -> list[Check]:
    """Checks at the same time whether several parts of a run can start.

    Args:
        probes: name of a part -> the function that checks this part, see `declares`.
        seconds: time limit for the answer of each server; 0 to check nothing.

    Returns:
        The checks in the order of ``probes``, without the parts that have nothing to report.
    """

    async def ask(name: str, probe: Probe) -> Check:
        try:
            answer = await asyncio.to_thread(probe, seconds)  # it may block
            answer = await answer if inspect.isawaitable(answer) else answer
            ok, text = answer or (True, "")
            return Check(name, bool(ok), str(text))
        except Exception as error:  # a broken probe must not hide the other checks
            return Check.failed(name, error)

    async def ask_all() -> list[Check]:
        return await asyncio.gather(*map(ask, probes, probes.values()))

    checks = asyncio.run(ask_all()) if seconds and probes else []
    return [check for check in checks if check.text or not check.ok]


def require(checks: Iterable[Check]) -> None:
    """Raises an error if a check failed, so that the run does not start.

    Raises:
        UserError: at least one check failed. The message lists all failed checks in one line.
    """
    failures = [f"{check.name}: {check.text}" for check in checks if not check.ok]
    if failures:
        raise UserError(
            f"not ready: {'; '.join(failures)}; fix this, or start anyway with --config.probe_s=0"
        )
