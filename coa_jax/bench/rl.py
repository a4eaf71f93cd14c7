"""Measures a whole step of GRPO: publish, rollouts, rewards, update.

    python -m coa_jax.bench.workload --rollouts=32 --group_size=4 --prompt_tokens=48 --turns=0 \
        --final_tokens=64,64 --out=w.json
    python -m coa_jax.bench.rl --model=DIR --workload=w.json

`coa_jax/bench/workload.py` describes the file; with turns it has calls of tools.  The parts are
those of `coa_jax.rl`: the engine, the agent loop, the training step, on-policy, without a KL term.
Groups are the rollouts of one prompt; the reward is the share of sampled ids that are even, which
any model can learn.  A row of a batch is a group, in which the prompt stands once; what is saved is
lost again in attention where samples are far longer than their prompt (``--noshare_prompts``).  The
first step compiles and is given apart.  Prints one JSON object; what is measured in each step is
given as its median, smallest and largest value:

    step_s                   seconds of a step, which are, added up:
    publish_s                  the parameters, brought into the layout of decoding
    rollout_s                  of which decode_s and extend_s in the programs of the engine
    update_s                   packing, forward and backward pass, optimiser
    tokens_per_s             sampled tokens, by step_s
    logp_gap_max             largest difference between a token's log-probability when it was
                             sampled and in the update, before it changes anything
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from coa_jax.bench.measure import (
    compile_count,
    output_path,
    peak_memory_mb,
    report,
    reset_peak_memory,
    spread,
)
from coa_jax.bench.models import Subject, define_model_flags, load_subject
from coa_jax.bench.rollout import mean_of, run_workload
from coa_jax.bench.shapes import define_shape_flags, given_shapes
from coa_jax.bench.workload import Workload, read_workload
from coa_jax.cli import run_main
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.group import copies, make_engines, publish_all
from coa_jax.engine.meter import MeteredEngine
from coa_jax.errors import UserError
from coa_jax.learn.algorithms import Algorithm
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.step import OptimizerConfig, TrainState, init_state
from coa_jax.learn.update import update
from coa_jax.model.compute import training_compute
from coa_jax.model.remat import POLICIES
from coa_jax.rollout.request import RolloutConfig
from coa_jax.trajectory import Author, Reward, Trajectory


def row_lengths(workload: Workload, row_length: int, share_prompts: bool) -> tuple[int, int]:
    """``row_length`` and ``attention_length`` of `RLConfig` for a workload.

    Args:
        workload: its samples have to fit.
        row_length: tokens of a row; 0 for those of a group that shares its prompt, in whole
            blocks of 64, or else for the least multiple of 128 from 512 on that holds any sample.
        share_prompts: whether the samples of a group share their prompt.
    """
    if not share_prompts:
        return row_length or max(512, -(-workload.longest // 128) * 128), 0
    folded, whole = np.zeros((2, len(workload.prompts)), int)
    for script in workload.scripts:
        length, prompt = workload.length(script), len(workload.prompts[script.prompt])
        whole[script.prompt] += length
        # The first has the prompt, the others a copy of its last token.
        folded[script.prompt] += length - (prompt - 1 if folded[script.prompt] else 0)
    row_length = row_length or -(-int(folded.max()) // 64) * 64
    groups = max(1, row_length // int(folded.max()))
    return row_length, max(row_length, groups * -(-int(whole.max()) // 64) * 64)


def rl_config(
    workload: Workload,
    shapes: EngineConfig,
    *,
    rows: int,
    row_length: int,
    share_prompts: bool,
    remat: str,
    steps: int,
) -> RLConfig:
    """Settings of a run of ``steps`` updates over the workload's groups.

    Args:
        workload: its groups have one size.
        shapes: of the engine.
        rows: of a micro-batch; 0 for as many as trajectories fill.
        row_length, share_prompts: see `row_lengths`.
        remat, steps: see `RLConfig`.

    Raises:
        UserError: groups of different sizes, or of one.
    """
    members = np.bincount([script.prompt for script in workload.scripts])
    if len(set(members)) > 1 or members[0] < 2:
        raise UserError(
            f"workload {workload.name}: its groups have {sorted(set(members.tolist()))} rollouts; "
            "give groups of one size, at least 2"
        )
    row_length, attention_length = row_lengths(workload, row_length, share_prompts)
    per_row = max(1, max(row_length, attention_length) // workload.longest)
    return RLConfig(
        model="",
        tasks="arithmetic",  # none is asked: the trajectories are given
        num_tasks=len(members),
        seed=workload.seed,
        groups=len(members),
        group_size=int(members[0]),
        max_sampled=1.0,
        format_reward=False,
        temperature=1.0,
        rows=rows or -(-len(workload.scripts) // per_row),
        row_length=row_length,
        attention_length=attention_length,
        dtype=shapes.dtype,
        remat=remat,
        algorithm=Algorithm(name="grpo", kl_coef=0.0),
        optimizer=OptimizerConfig(learning_rate=1e-6, total_steps=steps),
        engine=shapes,
        rollout=RolloutConfig(max_tokens=workload.longest),
        checkpoint_every=steps,
        checkpoint_seconds=86_400.0,
    )


def graded(trajectories: Sequence[Trajectory], group_size: int) -> list[list[Trajectory]]:
    """Groups, with the share of even ids among what the policy wrote as the reward."""
    with_reward = [
        dataclasses.replace(
            t, reward=Reward(float(np.mean(t.tokens[t.author == Author.POLICY] % 2 == 0)))
        )
        for t in trajectories
    ]
    return [with_reward[i : i + group_size] for i in range(0, len(with_reward), group_size)]


def measure(
    subject: Subject,
    workload: Workload,
    shapes: EngineConfig,
    *,
    rows: int = 0,
    row_length: int = 0,
    share_prompts: bool = True,
    remat: str = "dots",
    steps: int = 3,
    attention: str = "auto",
) -> dict[str, Any]:
    """The result of the command.

    Args:
        subject: the model, with float32 parameters; they are used up.
        workload, shapes, rows, row_length, share_prompts, remat: see `rl_config`.
        steps: measured steps.
        attention: see `RLConfig`.
    """
    config = rl_config(
        workload,
        shapes,
        rows=rows,
        row_length=row_length,
        share_prompts=share_prompts,
        remat=remat,
        steps=steps + 1,
    )
    model = subject.config
    compute = training_compute(model, dtype=config.dtype, remat=remat, attention=attention)
    state = init_state(subject.params, config.optimizer)
    engines = make_engines(state.params, subject.config, shapes, kind=MeteredEngine)
    order = np.argsort([script.prompt for script in workload.scripts], kind="stable")

    def step(state: TrainState) -> tuple[TrainState, dict[str, float]]:
        times = [time.perf_counter()]
        publish_all(engines, state.params)
        jax.block_until_ready(copies(engines))
        times.append(time.perf_counter())
        for engine in engines:
            engine.restart()
        trajectories = run_workload(engines, workload)
        groups = graded([trajectories[i] for i in order], config.group_size)
        times.append(time.perf_counter())
        # The statistics are on the host when it returns, so the step is done.
        state, _, stats = update(config, state, model, groups, compute)
        times.append(time.perf_counter())
        publish_s, rollout_s, update_s = np.diff(times).tolist()
        step_s = times[-1] - times[0]
        return state, {
            "step_s": step_s,
            "publish_s": publish_s,
            "rollout_s": rollout_s,
            "decode_s": mean_of(engines, "decode_s"),
            "extend_s": mean_of(engines, "extend_s"),
            "update_s": update_s,
            "tokens_per_s": workload.generated_tokens / step_s,
            "logp_gap_max": stats["mismatch/abs_logp_max"],
        }

    state, first = step(state)
    compile_count()
    reset_peak_memory()
    compiled, measured = compile_count(), []
    for _ in range(steps):
        state, figures = step(state)
        measured.append(figures)
    return {
        "bench": "rl",
        "model": subject.name,
        "workload": workload.name,
        "rollouts": len(workload.scripts),
        "group_size": config.group_size,
        "generated_tokens": workload.generated_tokens,
        **dataclasses.asdict(shapes),
        "rows": config.rows,
        "row_length": config.row_length,
        "attention_length": config.attention_length,
        "remat": remat,
        "steps": steps,
        "first_step_s": round(first["step_s"], 2),
        **{name: spread(figures[name] for figures in measured) for name in measured[0]},
        "compiles_after_warmup": compile_count() - compiled,
        "peak_rss_mb": round(peak_memory_mb(), 1),
    }


def define_flags() -> None:
    """The flags of the command."""
    define_model_flags()
    define_shape_flags()
    flags.DEFINE_integer("rows", 0, "rows of a micro-batch; 0 for all", lower_bound=0)
    flags.DEFINE_integer("row_length", 0, "tokens of a row; 0 for a group's", lower_bound=0)
    flags.DEFINE_bool("share_prompts", True, "a row has the prompt of a group's samples once")
    flags.DEFINE_enum("remat", "dots", list(POLICIES), "what the backward pass computes again")
    flags.DEFINE_string("attention", "auto", "implementation of attention, see docs/kernels.md")


def main(_: list[str]) -> None:
    """Entry point."""
    values = flags.FLAGS
    out = output_path(values.out)
    # As in `coa_jax.rl`, parameters are float32 whatever the products are computed in.
    subject = load_subject(values.model, values.random, "float32")
    workload = read_workload(values.workload, subject.config.vocab_size)
    result = measure(
        subject,
        workload,
        given_shapes(values, workload),
        rows=values.rows,
        row_length=values.row_length,
        share_prompts=values.share_prompts,
        remat=values.remat,
        steps=values.repeats,
        attention=values.attention,
    )
    report(result, out)


if __name__ == "__main__":
    run_main(main, define_flags)
