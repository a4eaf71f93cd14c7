"""The command ``coa-jax``: one name for every entry point.

    coa-jax COMMAND [--flag=value ...]

``coa-jax sft ...`` runs the same code as ``python -m coa_jax.sft ...``. Only the module of the
requested command is imported.
"""

from __future__ import annotations

import difflib
import os
import runpy
import sys
from pathlib import Path

from coa_jax.installed import first_line

COMMANDS = {
    "quickstart": "quickstart",
    "distill": "distill",
    "scratch": "scratch",
    "sft": "sft",
    "rl": "rl",
    "rft": "rft",
    "dpo": "dpo",
    "evaluate": "evaluate",
    "compare": "compare",
    "ask": "ask",
    "serve": "serve",
    "report": "report",
    "watch": "report.watch",
    "sweep": "report.sweep",
    "export": "export",
    "synthesize": "synthesize",
    "inspect": "distill.inspect",
    "export-data": "distill.export",
    "ablation": "ablation",
    "economy": "economy",
    "claims": "claims",
    "release": "release",
    "replay": "rollout.replay",
    "aot": "aot",
    "needs": "needs",
    "doctor": "device.doctor",
    "tool-server": "tools.tool_server",
    "bench-decode": "bench.decode",
    "bench-input": "bench.input",
    "bench-sft": "bench.sft",
    "bench-rl": "bench.rl",
    "bench-rollout": "bench.rollout",
    "bench-pipeline": "bench.pipeline",
    "bench-pipeline-workload": "bench.pipeline_workload",
    "bench-stalls": "bench.stalls",
    "bench-workload": "bench.workload",
    "configs": "copy_configs",
    "new": "new",
    "debug-files": "debug_files",
    "fetch": "fetch",
}
"""Maps the name of each command to the module of this package that implements it."""


def main() -> int:
    """Runs the command that the first argument names; returns the exit code."""
    name, *arguments = sys.argv[1:] or ["--help"]
    try:
        if name in ("-h", "--help", "help"):
            print(_overview(), flush=True)
            return 0
        if name == "--version":
            from coa_jax import __version__

            print(__version__, flush=True)
            return 0
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "coa-jax --help lists the commands"
            print(f"error: there is no command {name!r}; {hint}", file=sys.stderr)
            return 2
        sys.argv[1:] = arguments
        # The module runs under the name __main__ and ends the process, as with `python -m`.
        runpy.run_module(f"coa_jax.{COMMANDS[name]}", run_name="__main__", alter_sys=True)
    except BrokenPipeError:  # `coa-jax --help | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:  # raised during the imports; `run_main` handles a later Ctrl-C
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _overview() -> str:
    folder = Path(__file__).parent
    lines = ["usage: coa-jax COMMAND [--flag=value ...]", ""]
    for name, module in COMMANDS.items():
        path = folder / module.replace(".", "/")
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        lines.append(f"  {name:15} {first_line(path)}")
    return "\n".join([*lines, "", "coa-jax COMMAND --help shows the flags of a command."])


if __name__ == "__main__":
    sys.exit(main())
