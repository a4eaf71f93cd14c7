"""Measures a policy on held-out tasks with live tools.

    python -m coa_jax.evaluate --config=configs/evaluate/factbook.py --workdir=runs/evaluate

Writes ``summary.json`` and every trajectory to the work directory, and prints the figures.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from coa_jax.cli import config_flag, run_main
from coa_jax.evaluate.run import EvaluateConfig, blocks, evaluate, table
from coa_jax.model.api import load_model
from coa_jax.run_dir import RunDir
from coa_jax.settings import build, take
from coa_jax.tasks import load_tasks
from coa_jax.tools.make import ToolsConfig, make_tools


def define_flags() -> None:
    """The flags of the command."""
    config_flag("configs/evaluate/factbook.py")
    flags.DEFINE_string("workdir", None, "where the results are written", required=True)


def main(argv: list[str]) -> None:
    """Entry point."""
    values = flags.FLAGS.config.to_dict()
    tools = build(ToolsConfig, take(values, "tools"), "config.tools")
    path, stage = take(values, "model"), take(values, "stage")
    config = build(EvaluateConfig, values)
    with RunDir(Path(flags.FLAGS.workdir)) as run:
        run.write_config(flags.FLAGS.config)
        live = make_tools(tools)  # first: they may bring the protocol that tasks name
        tasks = load_tasks(config.tasks, config.split, config.num_tasks, config.seed)
        model = load_model(path)
        run.rewind(f"evaluate-{stage}", 0)
        groups = evaluate(model, tasks, config, live, stage)
        run.traces(1, f"evaluate-{stage}", [t.to_json() for group in groups for t in group])
        result = blocks(groups, stage)
        run.summary(result)
    print(table(result, stage))


if __name__ == "__main__":
    run_main(main, define_flags)
