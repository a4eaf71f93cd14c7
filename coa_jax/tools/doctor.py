"""Shows how programs are isolated on this machine, and proves it.

``python -m coa_jax.tools.doctor [--backend bubblewrap|landlock]`` runs one hostile program for
each thing that must not happen.  Exit code 0: all were contained; 1: one was not; 2: there is
no isolation.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time

from coa_jax.errors import UserError
from coa_jax.tools.sandbox import landlock, trial
from coa_jax.tools.sandbox.canaries import canaries
from coa_jax.tools.sandbox.isolation import BACKENDS, Isolation, find_isolation
from coa_jax.tools.sandbox.limits import Limits
from coa_jax.tools.sandbox.run import run

_TIMED_CALLS = 15


async def overhead_ms(isolation: Isolation) -> float:
    """Milliseconds of a call that does nothing: median of some, after one to warm up."""
    job = isolation.job(Limits())
    seconds = []
    for _ in range(_TIMED_CALLS + 1):
        start = time.monotonic()
        await run(job, "")
        seconds.append(time.monotonic() - start)
    return 1000 * statistics.median(seconds[1:])


async def prove(isolation: Isolation) -> bool:
    """Runs the hostile programs, prints a line for each; True if all were contained."""
    job = isolation.job(trial.TRIAL_LIMITS)
    contained = True
    with trial.scene() as around:
        for canary in canaries(around.targets):
            wrong, seconds = await trial.attempt(job, canary, around)
            print(f"  {'FAIL' if wrong else 'pass'}  {canary.name}  ({seconds:.2f} s)")
            for line in wrong:
                print(f"        {line}")
            contained = contained and not wrong
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


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="coa_jax.tools.doctor", description=__doc__)
    parser.add_argument("--backend", default="auto", choices=("auto", *BACKENDS))
    options = parser.parse_args(arguments)
    try:
        isolation = find_isolation(options.backend)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    _print_facts(isolation)
    print(f"overhead     {asyncio.run(overhead_ms(isolation)):.1f} ms a call", flush=True)
    print("hostile programs")
    contained = asyncio.run(prove(isolation))
    print("all contained" if contained else "NOT CONTAINED: do not run programs of a model here")
    return 0 if contained else 1


if __name__ == "__main__":
    sys.exit(main())
