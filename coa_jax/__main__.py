"""The command ``coa-jax``: one name for every entry point.

    coa-jax COMMAND [--flag=value ...]

``python -m coa_jax sft ...`` is the same. Only the module of the requested command is imported.
"""

from __future__ import annotations

import difflib
import os
import runpy
import sys
from pathlib import Path

from coa_jax.config.installed import VERSION, first_line

COMMANDS = {
    "quickstart": "paper.quickstart",
    "distill": "cli.distill",
    "scratch": "demo.untrained_command",
    "sft": "cli.sft",
    "rl": "cli.rl",
    "rft": "cli.rft",
    "dpo": "cli.dpo",
    "evaluate": "cli.evaluate",
    "compare": "cli.compare",
    "ask": "cli.ask",
    "serve": "cli.serve",
    "report": "cli.report",
    "watch": "report.watch",
    "sweep": "report.sweep",
    "export": "cli.export",
    "synthesize": "cli.synthesize",
    "inspect": "distillation.inspect",
    "export-data": "distillation.export",
    "ablation": "paper.ablation",
    "economy": "paper.token_savings",
    "claims": "paper.claims",
    "proof": "paper.proof",
    "release": "paper.release",
    "replay": "rollout.replay",
    "aot": "perf.aot",
    "needs": "cli.needs",
    "doctor": "perf.device.doctor",
    "tool-server": "serve.tool_server",
    "bench-attention": "perf.bench.attention",
    "bench-decode": "perf.bench.decode",
    "bench-input": "perf.bench.input",
    "bench-sft": "perf.bench.sft",
    "bench-rl": "perf.bench.rl",
    "bench-rollout": "perf.bench.rollout",
    "bench-pipeline": "perf.bench.pipeline",
    "bench-stalls": "perf.bench.stalls",
    "bench-workload": "perf.bench.workload",
    "configs": "cli.copy_configs",
    "new": "cli.new",
    "debug-files": "demo.debug_files",
    "fetch": "cli.fetch",
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
            print(VERSION, flush=True)
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
