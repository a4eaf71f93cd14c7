"""Trains a policy by reinforcement learning with live tools.

    coa-jax rl --config=configs/rl/factbook.py --workdir=runs/rl
    coa-jax rl --config.model=MODEL --config.tasks=questions.jsonl --workdir=runs/rl

A config file contains the settings that differ from the defaults. Without a file, flags such as
``--config.model`` give these settings. The command writes metrics, every trajectory and
checkpoints to the work directory, and the model to ``WORKDIR/model``.

    coa-jax rl --replay=runs/rl

With ``--replay`` the command repeats the recorded steps of a run without tools or judges. It
compares every trajectory, and the parameters after each step, with the recording. The exit code is
0 if all bits are equal, and 1 if some differ or no trajectory was compared.
"""

from __future__ import annotations

import functools

from absl import flags

from coa_jax.cli.needs import check_settings
from coa_jax.config.renamed import with_present_keys
from coa_jax.files import durable
from coa_jax.protocol import find_protocols
from coa_jax.run.command import need, run_main
from coa_jax.run.settings import build_config
from coa_jax.storage import visited, with_urls
from coa_jax.storage.mirror import NAMES_ONLY
from coa_jax.train.command import define_flags
from coa_jax.train.defaults import with_defaults
from coa_jax.train.rl_config import RLRun

FIRST = (
    *("model", "tasks", "num_tasks", "tools.names", "tools.wiki_search.corpus", "graders.answer"),
    *("graders.rewards", "format_reward", "algorithm.name", "algorithm.kl_coef", "groups"),
    *("group_size", "temperature", "optimizer.learning_rate", "optimizer.total_steps"),
    *("optimizer.warmup_steps", "lora.rank", "rollout.format", "rollout.max_tokens"),
    *("rollout.max_tool_calls", "max_staleness", "evaluate_every", "held_out.tasks"),
    *("checkpoint_every", "keep_best", "seed", "dtype", "remat", "rows", "row_length"),
    *("mesh.fsdp", "mesh.tensor", "engine.slots", "engine.max_length"),
)
"""Settings that ``--help`` lists."""


def main(argv: list[str]) -> int:
    """Runs ``coa-jax rl``: trains by RL, or replays a run; returns the exit code."""
    if flags.FLAGS.check == "false" and not flags.FLAGS.replay:
        check_settings("rl")
    # Imported here, so that mistakes in settings are told before JAX is loaded.
    from coa_jax.api import train_rl
    from coa_jax.cli.check import check
    from coa_jax.train.rl import replay_steps

    values = flags.FLAGS
    if values.check != "false":
        return check("rl")
    if values.replay:
        with visited(values.replay, (*NAMES_ONLY, "traces.jsonl", "spool")) as run_path:
            find_protocols(run_path)
            config = with_present_keys(durable.read_json_object(run_path / "config.json"))
            outcome = replay_steps(build_config(RLRun, config), run_path)
        print(outcome)
        return 0 if outcome.identical else 1
    run = train_rl(values.config, values.workdir, wandb_project=values.wandb_project)
    print(f"model -> {with_urls(run.model)}")
    return 0


def define() -> None:
    """Defines the command-line flags of ``coa-jax rl``."""
    defaults = functools.partial(with_defaults, "rl")
    define_flags(RLRun, first=FIRST, with_defaults=defaults, workdir_required=False)
    flags.DEFINE_string("replay", "", "directory of a run whose steps are repeated and compared")
    need("--config.model", "--replay", example="Qwen/Qwen3-0.6B")
    need("--config.tasks", "--config.mixture", "--replay", example="questions.jsonl")
    need("--workdir", "--replay", example="runs/mine")


if __name__ == "__main__":
    run_main(main, define)
