"""Measures whole steps of GRPO: publishing weights, rollouts, rewards and updates.

    coa-jax bench-workload --rollouts=32 --group_size=4 --prompt_tokens=48 --turns=0 \
        --final_tokens=64,64 --out=w.json
    coa-jax bench-rl --model=DIR --workload=w.json

`coa_jax/perf/bench/workload.py` describes the workload file, which has tool calls if ``--turns`` is
above 0. The command uses the engine, the agent loop and the training step of `coa-jax rl`,
on-policy and without a KL penalty. A group consists of the rollouts of one prompt. The reward is
the share of even token ids, which any model can learn to raise. A row of a batch holds a group,
whose prompt is stored only once. If samples are much longer than their prompt, the shared prompt
saves less time than it costs in attention; use ``--noshare_prompts`` for such workloads. The first
step compiles the programs, and is reported separately.

The command prints one JSON object. Each measurement of the steps is given as median, minimum and
maximum:

    step_s                   seconds of a step, which is the sum of
    publish_s                  conversion of the parameters to the layout of the decoding engine
    rollout_s                  rollouts, including decode_s and extend_s in programs of the engine
    update_s                   packing, forward and backward pass, optimiser
    tokens_per_s             sampled tokens / step_s
    logp_gap_max             largest difference between the log-probability of a token in sampling
                             and in training, before the update changes the parameters
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from coa_jax.data.trajectory import Author, Reward, Trajectory
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.group import make_engines, parameter_copies, publish_all
from coa_jax.errors import UserError
from coa_jax.model.compute import training_compute
from coa_jax.model.remat import POLICIES
from coa_jax.perf.bench import shapes
from coa_jax.perf.bench.measure import after_warm_up, given, spread
from coa_jax.perf.bench.models import Subject, rl_settings
from coa_jax.perf.bench.rollout import mean_of, run_workload
from coa_jax.perf.bench.workload import Workload
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run.command import run_main
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.step import init_state
from coa_jax.train.update import update


def row_lengths(workload: Workload, row_length: int, share_prompts: bool) -> tuple[int, int]:
    """Returns ``row_length`` and ``attention_length`` of `RLConfig` for a workload.

    Args:
        workload: the workload, all of whose samples must fit.
        row_length: number of tokens per row; 0 chooses the number as follows. With shared prompts,
            it is the number of tokens of the largest group, rounded up to a multiple of 64. Without
            shared prompts, it is the length of the longest sample, rounded up to a multiple of 128,
            and at least 512.
        share_prompts: whether the samples of a group share one copy of their prompt in a row.
    """
    if not share_prompts:
        return row_length or max(512, -(-workload.longest // 128) * 128), 0
    folded, unshared = np.zeros((2, len(workload.prompts)), int)
    for script in workload.scripts:
        length, prompt = workload.length(script), len(workload.prompts[script.prompt])
        unshared[script.prompt] += length
        # The first sample has the whole prompt, the others a copy of the prompt's last token.
        folded[script.prompt] += length - (prompt - 1 if folded[script.prompt] else 0)
    row_length = row_length or -(-int(folded.max()) // 64) * 64
    groups = max(1, row_length // int(folded.max()))
    return row_length, max(row_length, groups * -(-int(unshared.max()) // 64) * 64)


def rl_config(
    workload: Workload,
    engine: EngineConfig,
    *,
    rows: int = 0,
    row_length: int = 0,
    share_prompts: bool = True,
    remat: str = "dots",
    attention: str = "auto",
    steps: int = 3,
) -> RLConfig:
    """Creates the settings of a run on the workload's groups.

    Args:
        workload: a workload whose groups have the same size.
        engine: shapes of the engine.
        rows: number of rows per micro-batch; 0 puts all rows that the trajectories need into one
            micro-batch.
        row_length: number of tokens per row, see `row_lengths`.
        share_prompts: whether the samples of a group share one copy of their prompt in a row.
        remat: name of the rematerialisation policy, see `RLConfig`.
        attention: implementation of attention, see `RLConfig`.
        steps: number of measured steps; one more step precedes them.

    Raises:
        UserError: the groups have different sizes, or have only one rollout.
    """
    members = np.bincount([script.prompt for script in workload.scripts])
    if len(set(members)) > 1 or members[0] < 2:
        raise UserError(
            f"workload {workload.name}: its groups have {sorted(set(members.tolist()))} rollouts; "
            "give groups of one size, at least 2"
        )
    row_length, attention_length = row_lengths(workload, row_length, share_prompts)
    per_row = max(1, max(row_length, attention_length) // workload.longest)
    return rl_settings(
        engine,
        OptimizerConfig(learning_rate=1e-6, total_steps=steps + 1),
        seed=workload.seed,
        groups=len(members),
        group_size=int(members[0]),
        max_sampled=1.0,
        rows=rows or -(-len(workload.scripts) // per_row),
        row_length=row_length,
        attention_length=attention_length,
        remat=remat,
        attention=attention,
        algorithm=Algorithm(name="grpo", kl_coef=0.0),
        rollout=RolloutConfig(max_tokens=workload.longest),
    )


def graded(trajectories: Sequence[Trajectory], group_size: int) -> list[list[Trajectory]]:
    """Splits trajectories into groups, and gives each trajectory an artificial reward.

    The reward is the share of even token ids among the tokens that the policy wrote.
    """
    with_reward = [
        dataclasses.replace(
            t, reward=Reward(float(np.mean(t.tokens[t.author == Author.POLICY] % 2 == 0)))
        )
        for t in trajectories
    ]
    return [with_reward[i : i + group_size] for i in range(0, len(with_reward), group_size)]


def measure(subject: Subject, workload: Workload, config: RLConfig) -> dict[str, Any]:
    """Measures steps of RL, and returns the result that the command prints.

    Args:
        subject: the model, whose parameters must be float32, and are donated.
        workload: a workload whose groups have the same size.
        config: settings of the run, see `rl_config`.
    """
    model, steps = subject.config, config.optimizer.total_steps - 1
    compute = training_compute(
        model, dtype=config.dtype, remat=config.remat, attention=config.attention
    )
    state = init_state(subject.params, config.optimizer)
    engines = make_engines(state.params, model, config.engine)
    order = np.argsort([script.prompt for script in workload.scripts], kind="stable")

    seconds, measured, counted = [], [], after_warm_up()
    for number in range(steps + 1):
        if number == 1:  # the first step compiles the programs
            counted = after_warm_up()
        times = [time.perf_counter()]
        publish_all(engines, state.params)
        jax.block_until_ready(parameter_copies(engines))
        times.append(time.perf_counter())
        for engine in engines:
            engine.restart()
        trajectories = run_workload(engines, workload)
        groups = graded([trajectories[i] for i in order], config.group_size)
        times.append(time.perf_counter())
        # `update` returns statistics on the host, so the computation has ended here.
        state, _, stats = update(config, state, model, groups, compute)
        times.append(time.perf_counter())
        publish_s, rollout_s, update_s = np.diff(times).tolist()
        seconds.append(times[-1] - times[0])
        measured.append(
            {
                "step_s": seconds[-1],
                "publish_s": publish_s,
                "rollout_s": rollout_s,
                "decode_s": mean_of(engines, "decode_s"),
                "extend_s": mean_of(engines, "extend_s"),
                "update_s": update_s,
                "tokens_per_s": workload.generated_tokens / seconds[-1],
                "logp_gap_max": stats["mismatch/abs_logp_max"],
            }
        )
    return {
        "bench": "rl",
        "model": subject.name,
        "workload": workload.name,
        "rollouts": len(workload.scripts),
        "group_size": config.group_size,
        "generated_tokens": workload.generated_tokens,
        **dataclasses.asdict(config.engine),
        "rows": config.rows,
        "row_length": config.row_length,
        "attention_length": config.attention_length,
        "remat": config.remat,
        "steps": steps,
        "first_step_s": round(seconds[0], 2),
        **{name: spread(figures[name] for figures in measured[1:]) for name in measured[0]},
        **counted(),
    }


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax bench-rl``."""
    shapes.define_flags()
    flags.DEFINE_integer("rows", 0, "rows per micro-batch; 0 for the whole batch", lower_bound=0)
    flags.DEFINE_integer("row_length", 0, "tokens per row; 0 fits a group", lower_bound=0)
    flags.DEFINE_bool("share_prompts", True, "store the prompt of a group's samples once per row")
    flags.DEFINE_enum("remat", "dots", list(POLICIES), "what the backward pass recomputes")
    flags.DEFINE_string("attention", "auto", "attention kernel, see docs/kernels.md")


def main(_: list[str]) -> None:
    """Runs ``coa-jax bench-rl``: measures steps of RL and prints JSON."""
    values = flags.FLAGS
    options = given(("rows", "row_length", "share_prompts", "remat", "attention"))

    def measured(subject: Subject, workload: Workload, engine: EngineConfig) -> dict[str, Any]:
        return measure(
            subject, workload, rl_config(workload, engine, steps=values.repeats, **options)
        )

    # As in `coa-jax rl`, parameters are float32 for any dtype of the matmul operands.
    shapes.run_command(measured, "float32")


if __name__ == "__main__":
    run_main(main, define_flags)
