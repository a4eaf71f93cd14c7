"""Checks this machine: the isolation of programs, the tools, or the accelerator.

``coa-jax doctor [--backend bubblewrap|landlock]`` shows how model-written programs are isolated,
and runs a hostile program for each kind of attack that the isolation must prevent.

``coa-jax doctor --tools [--config FILE.py[:ARGUMENT]] [--config.KEY=VALUE]`` shows the
configuration of each tool, and whether its servers answer. Without a file, the command checks all
built-in tools with their default settings; tools that no config names by default are then optional.

``coa-jax doctor --device`` checks the first accelerator of this machine. It uses random weights,
and downloads nothing. The command compares

- the values and gradients of each attention kernel with NumPy,
- the log-probabilities of the sampler with those of the trainer,
- two SFT steps and two RL steps with the reference on the CPU,
- memory and speed with the limits of the device and with the predictions of ``coa-jax aot``.

The command prints one page, and writes all figures to the JSON file ``--out``, which users can
attach to a bug report. Without an accelerator the same checks run on the CPU, where kernels are
interpreted.

The exit code is 0 if all checks pass, 1 if a check fails, and 2 if the command cannot run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from coa_jax.config.installed import warn_untested
from coa_jax.errors import UserError
from coa_jax.sandbox.isolation import BACKENDS
from coa_jax.tools.doctor import check_isolation, check_tools


def check_device(out: str) -> int:
    """Runs all checks of the device, prints the report, and writes the JSON file.

    Args:
        out: path of the JSON file.

    Returns:
        0 if no check failed, otherwise 1.

    Raises:
        UserError: the file cannot be written, or JAX finds no device.
    """
    path = Path(out)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"--out={out}: give a file in a directory that exists")
    # The CPU computes the expected results, so JAX needs the CPU in addition to any other platform.
    if (platforms := os.environ.get("JAX_PLATFORMS", "")) and "cpu" not in platforms:
        os.environ["JAX_PLATFORMS"] = f"{platforms},cpu"
    import jax  # here, because the other checks need neither JAX nor a device

    try:
        facts = _facts(jax)
    except RuntimeError as error:
        raise UserError(f"JAX finds no device: {str(error).splitlines()[0]}") from error
    for name, value in facts.items():
        print(f"{name:13} {value}", flush=True)
    return _run_checks(out, facts)


def _run_checks(out: str, facts: dict[str, str]) -> int:
    """Runs all checks and writes the report; returns the exit code, see `check_device`."""
    from coa_jax.files.durable import write_json
    from coa_jax.perf.device import attention, policy, speed
    from coa_jax.perf.device.checks import Check, guarded

    path = Path(out)
    began, checks = time.monotonic(), list[Check]()

    def write(finished: bool = False) -> list[str]:
        """Writes the report with the checks so far; returns the names of the failed checks.

        It is called after every check, so that the file has them if the process is killed.

        Args:
            finished: whether all checks have been made, which the report states.
        """
        failed = [check.name for check in checks if check.verdict == "FAIL"]
        report = {
            **facts,
            "seconds": round(time.monotonic() - began, 1),
            "finished": finished,
            "ok": finished and not failed,
            "checks": [dataclasses.asdict(check) for check in checks],
        }
        try:
            write_json(path, report)
        except OSError as error:
            raise UserError(f"--out={out} cannot be written: {error.strerror or error}") from error
        return failed

    write()
    parts = (
        (attention.GROUP, attention.all_checks),
        (policy.SAMPLING, policy.all_checks),
        (speed.GROUP, speed.all_checks),
    )
    group = ""
    for first, run in parts:
        for check in guarded(first, "the checks", run):
            if check.group != group:
                print(group := check.group)
            checks.append(check)
            print(f"  {check.verdict}  {check.name}: {check.text}", flush=True)
            write()
    number = collections.Counter(check.verdict for check in checks)
    seconds, failed = time.monotonic() - began, write(finished=True)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in number.items())
    print(f"{verdicts} in {seconds:.0f} s; {path} has all figures", flush=True)
    if failed:
        print("FAILED: " + "; ".join(failed))
    return 1 if failed else 0


def _facts(jax: Any) -> dict[str, str]:
    from coa_jax.engine.memory import format_bytes

    versions = []
    for name in ("coa_jax", "jax", "jaxlib", "libtpu", "flax", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    device = jax.local_devices()[0]
    stats = (device.memory_stats() or {}) if device.platform != "cpu" else {}
    facts = {
        "device": f"{jax.local_device_count()} x {device.device_kind} ({device.platform})",
        "runtime": device.client.platform_version.splitlines()[0][:100],
        "versions": ", ".join(versions),
        "python": sys.version.split()[0],
    }
    if "bytes_limit" in stats:
        facts["memory"] = f"{format_bytes(stats['bytes_limit'])} for JAX"
    if device.platform == "cpu":
        facts["kernels"] = "interpreted: there is no accelerator"
    return facts


def main(arguments: list[str] | None = None) -> int:
    """Runs ``coa-jax doctor``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="coa-jax doctor", description=__doc__)
    parser.add_argument("--backend", default="auto", choices=("auto", *BACKENDS))
    parser.add_argument("--tools", action="store_true", help="what is configured and reachable")
    parser.add_argument("--config", default="", help="config file with a group 'tools'")
    parser.add_argument("--device", action="store_true", help="check the accelerator")
    parser.add_argument(
        "--out", default="coa-jax-device.json", help="JSON file that --device writes"
    )
    options, overrides = parser.parse_known_args(arguments)
    if options.device and overrides:
        parser.error(f"--device takes no {overrides[0]}")
    try:
        if options.device:
            return check_device(options.out)
        warn_untested()
        if options.tools or options.config or overrides:
            return check_tools(options.config, overrides)
        return check_isolation(options.backend)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
