"""Checks the isolation of programs, and the tools; ``coa-jax doctor`` calls these functions."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path

from coa_jax.errors import UserError
from coa_jax.sandbox import landlock, trial
from coa_jax.sandbox.attacks import TRIAL_LIMITS, list_attacks
from coa_jax.sandbox.isolation import BACKENDS, Isolation
from coa_jax.sandbox.limits import Job, Limits
from coa_jax.sandbox.run import run
from coa_jax.tools.code_libraries import isolation_here

_TIMED_CALLS = 15


async def overhead(job: Job) -> tuple[float, str]:
    """Measures the time that the sandbox adds to a program, by running an empty program.

    Args:
        job: isolation, interpreter and limits with which the program runs.

    Returns:
        (median time of several runs after a warm-up in milliseconds, name of the mechanism that
        enforced the limits on memory and files).
    """
    seconds = []
    for _ in range(_TIMED_CALLS + 1):
        start = time.monotonic()
        result = await run(job, "")
        seconds.append(time.monotonic() - start)
    return 1000 * statistics.median(seconds[1:]), result.totals


async def check_isolation_with_attacks(isolation: Isolation) -> bool:
    """Tests an isolation with hostile programs, and prints a line about each program.

    Args:
        isolation: isolation in which the programs run.

    Returns:
        Whether all programs were contained.
    """
    job = isolation.job(TRIAL_LIMITS)
    contained, over_mb, over_s = True, {"memory": 0.0, "disk": 0.0}, 0.0
    with trial.scene() as around:
        for attack in list_attacks(around.targets):
            tried = await trial.attempt(job, attack, around)
            text = f"{tried.seconds:.2f} s"
            if tried.over_mb:
                text += f"; {tried.over_mb:.0f} MiB over, ended {1000 * tried.over_s:.0f} ms later"
                over_mb[attack.exceeds] = max(over_mb[attack.exceeds], tried.over_mb)
                over_s = max(over_s, tried.over_s)
            print(f"  {'FAIL' if tried.wrong else 'pass'}  {attack.name}  ({text})", flush=True)
            for line in tried.wrong:
                print(f"        {line}")
            contained = contained and not tried.wrong
    print(
        f"overshoot    memory {over_mb['memory']:.0f} MiB over {TRIAL_LIMITS.memory_mb},"
        f" files {over_mb['disk']:.0f} MiB over {TRIAL_LIMITS.disk_mb},"
        f" ended at most {1000 * over_s:.0f} ms later"
    )
    return contained


def _print_facts(isolation: Isolation) -> None:
    limits = Limits()
    root = os.geteuid() == 0
    print(f"isolation    {isolation.backend}")
    for name, why in isolation.refused:
        print(f"not          {name}: {why}")
    for name in BACKENDS[BACKENDS.index(isolation.backend) + 1 :]:
        print(f"not          {name}: {isolation.backend} comes first")
    print(f"user         {'an unprivileged uid for each call' if root else 'the calling user'}")
    print(f"interpreter  {isolation.interpreter.path} ({isolation.interpreter.version})")
    print(f"kernel       {os.uname().release}, Landlock ABI {landlock.abi()}")
    print(
        f"limits       {limits.wall_s:g} s wall, {limits.cpu_s:g} s processor,"
        f" {limits.memory_mb} MiB memory, {limits.disk_mb} MiB scratch,"
        f" {limits.processes} processes, {limits.open_files} files"
    )


def check_tools(path: str, overrides: list[str]) -> int:
    """Prints how each tool is configured, and whether its server answers.

    Args:
        path: config file with a group ``tools``; "" for all built-in tools with their defaults.
            With "", all tools except the defaults of `ToolsConfig.names` are optional, unless
            ``overrides`` set ``names``.
        overrides: arguments ``--config.KEY=VALUE``.

    Returns:
        0 if all tools that are not optional can be called, otherwise 1.

    Raises:
        UserError: the settings cannot be read.
    """
    # These imports are local, because the test of the isolation needs only the standard library.
    from ml_collections import ConfigDict

    from coa_jax.config.extensions import importable
    from coa_jax.config.preflight import SECONDS, preflight
    from coa_jax.run.command import load_config, overridden
    from coa_jax.run.settings import build_config, complete_config
    from coa_jax.tools.make import TOOLS, ToolsConfig

    importable(Path())
    default = ConfigDict({"tools": complete_config(ToolsConfig, {"names": tuple(TOOLS.built_in)})})
    try:
        settings = overridden(load_config(path) if path else default, overrides)["tools"]
    except (KeyError, SyntaxError) as error:
        raise UserError(f"{path}: no tools can be read from it: {error!r}") from error
    config = build_config(ToolsConfig, settings, "config.tools")
    chosen = path or config.names != tuple(TOOLS.built_in)
    optional = () if chosen else set(TOOLS.built_in) - set(ToolsConfig().names)
    checks = preflight(config.probes(), SECONDS)
    for check in checks:
        missing = "optional" if check.name in optional else "NOT READY"
        print(f"{'ready' if check.ok else missing:10} {check.name:17} {check.text}")
    return 0 if all(check.ok for check in checks if check.name not in optional) else 1


def check_isolation(backend: str) -> int:
    """Runs hostile programs, each of which tries a forbidden action, and prints the outcomes.

    The function also measures the share of a processor that a training process keeps while
    programs in the sandbox use as much of the processor as they can.

    Args:
        backend: name of the isolation; ``auto`` for the best that works on this machine.

    Returns:
        0 if all programs were contained, otherwise 1.

    Raises:
        UserError: no isolation works on this machine.
    """
    isolation = isolation_here(backend)
    _print_facts(isolation)
    milliseconds, totals = asyncio.run(overhead(isolation.job(Limits())))
    print(f"totals       {totals}")
    print(f"overhead     {milliseconds:.1f} ms a call", flush=True)
    share = asyncio.run(trial.share_beside(isolation.job(Limits())))
    enough = share >= trial.LEAST_SHARE
    print(f"trainer      keeps {share:.0%} of a processor beside two programs of 45 processes")
    print("hostile programs")
    contained = asyncio.run(check_isolation_with_attacks(isolation))
    if not enough:
        print(f"SLOW: programs leave the trainer less than {trial.LEAST_SHARE:.0%} of a processor")
    print("all contained" if contained else "NOT CONTAINED: do not run programs of a model here")
    return 0 if contained else 1
