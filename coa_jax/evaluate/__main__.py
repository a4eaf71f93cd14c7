"""Measures a policy on held-out tasks or benchmarks with live tools.

    python -m coa_jax.evaluate --config=configs/evaluate/factbook.py --workdir=runs/evaluate

Writes ``evaluate/STAGE/results.json`` and the same as a page, ``summary.json`` and every trajectory
to the work directory, and prints the figures.  Killed and started again it goes on where it was,
and its result file is that of an evaluation that nobody killed.  Two result files are compared by
``python -m coa_jax.evaluate.compare``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from absl import flags

from coa_jax.bounds import Name, Place
from coa_jax.cli import config_flag, run_main, workdir_flag
from coa_jax.evaluate.endpoint import endpoint_policy
from coa_jax.evaluate.figures import table
from coa_jax.evaluate.run import EvaluateConfig, evaluate, evaluate_model, load, settings
from coa_jax.report.benchmark import write_page
from coa_jax.run_dir import RunDir
from coa_jax.settings import build
from coa_jax.tools.make import ToolsConfig, make_tools


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command(EvaluateConfig):
    """The settings of the command.

    Attributes:
        model: Hugging Face directory of the policy; not used with an endpoint.
        stage: name of the results in the work directory.
        tools: tools of the policy.
    """

    model: Place
    stage: Name
    tools: ToolsConfig


def define_flags() -> None:
    """The flags of the command."""
    config_flag("configs/evaluate/factbook.py")
    workdir_flag("where the results are written")
    flags.DEFINE_bool("fresh", False, "drop the samples of the stage that are there")


def main(argv: list[str]) -> None:
    """Entry point."""
    config = build(Command, flags.FLAGS.config)
    tools, path, stage = config.tools, config.model, config.stage
    with RunDir(Path(flags.FLAGS.workdir)) as run:
        run.write_config(flags.FLAGS.config)
        # First: tools may bring the protocol that tasks name.  A program has tools of its own.
        live = [] if config.agent else make_tools(tools)
        servers = None if config.agent else tools
        tasks = load(config)
        described, fresh = _on_answers(tools), flags.FLAGS.fresh
        if config.endpoint:
            policy = endpoint_policy(
                config.endpoint, config.sampling, config.seed, config.rollout, live
            )
            about = settings(config, f"{config.endpoint.model} (endpoint)", described)
            outcome = evaluate(policy, tasks, config, run, stage, about, servers=tools, fresh=fresh)
        else:
            outcome = evaluate_model(
                Path(path), tasks, config, run, stage, live, described, servers=servers, fresh=fresh
            )
        page = write_page(outcome, run.path / "evaluate" / stage / "index.html")
    print(table(outcome))
    print(f"page -> {page}")


def _on_answers(tools: ToolsConfig) -> dict[str, Any]:
    """Settings of the tools on which their answers depend: not where they are kept."""
    values = dataclasses.asdict(tools)
    values.pop("store")
    return values


if __name__ == "__main__":
    run_main(main, define_flags)
