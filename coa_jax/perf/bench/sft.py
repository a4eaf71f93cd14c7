"""Measures the training step of supervised fine-tuning, and compares it with peak FLOP/s.

    coa-jax bench-sft --model=DIR --batch=8 --length=256 --steps=3
    coa-jax bench-sft --random=qwen2.5-0.5b --dtype=bfloat16 --remat=full --rows=2

The training step is that of `coa-jax sft`: forward and backward pass over all tokens, in
micro-batches of ``--rows`` sequences, and an AdamW update of float32 parameters. The first step
compiles the program, and is reported separately. The FLOPs are those of the model
(`coa_jax.model.costs`), without the recomputation that ``--remat`` causes. ``share_of_peak`` is
relative to the FLOP rate of a large matmul on this machine; ``mfu`` is relative to the peak FLOP
rate that the vendor states, and null for an unknown chip. The command prints one JSON object. Each
measurement of the steps is given as median, minimum and maximum.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np
from absl import flags

from coa_jax.model.compute import training_compute
from coa_jax.model.costs import train_flops
from coa_jax.model.remat import POLICIES
from coa_jax.parallel.chips import stated_flops
from coa_jax.perf.bench.measure import after_warm_up, given, output_path, peak_flops, report, spread
from coa_jax.perf.bench.models import Subject, define_model_flags, load_subject
from coa_jax.run.command import run_main
from coa_jax.train.batch import Example, pack, split_rows
from coa_jax.train.losses import SFTLoss
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.step import init_state, train_step


@dataclasses.dataclass(frozen=True)
class Work:
    """The training steps that the benchmark measures.

    Attributes:
        batch: number of sequences per step.
        length: number of tokens per sequence.
        rows: number of sequences per micro-batch.
        dtype: dtype of the matmul operands, see `SFTConfig`.
        remat: name of the rematerialisation policy, see `SFTConfig`.
        steps: number of measured steps.
        attention: implementation of attention, see `SFTConfig`.
    """

    batch: int
    length: int
    rows: int
    dtype: str
    remat: str
    steps: int = 3
    attention: str = "auto"


def random_examples(vocab_size: int, batch: int, length: int) -> list[Example]:
    """Creates sequences of random token ids, in which every token has a loss.

    Args:
        vocab_size: size of the vocabulary, below which all token ids lie.
        batch: number of sequences.
        length: number of tokens per sequence.
    """
    tokens = np.random.default_rng(0).integers(0, vocab_size, (batch, length), np.int32)
    zeros = np.zeros(length, np.float32)
    return [Example(row, np.ones(length, np.float32), zeros, zeros) for row in tokens]


def measure(subject: Subject, work: Work) -> dict[str, Any]:
    """Measures training steps, and returns the result that the command prints.

    Args:
        subject: the model, whose parameters must be float32, and are donated.
        work: the steps.
    """
    batch, length, steps = work.batch, work.length, work.steps
    examples = random_examples(subject.config.vocab_size, batch, length)
    batches = split_rows(pack(examples, length), work.rows)
    optimizer = OptimizerConfig(learning_rate=1e-5, total_steps=steps + 1)
    model = subject.config
    compute = training_compute(model, dtype=work.dtype, remat=work.remat, attention=work.attention)
    state = init_state(subject.params, optimizer)
    seconds, counted = [], after_warm_up()
    for step in range(steps + 1):
        if step == 1:  # the first step compiles the program
            counted = after_warm_up()
        began = time.perf_counter()
        # `train_step` returns statistics on the host, so the computation has ended here.
        state, stats = train_step(
            state, batches, loss=SFTLoss(), model_config=model, compute=compute, optimizer=optimizer
        )
        seconds.append(time.perf_counter() - began)
    counts = counted()  # before the peak FLOP rate is measured
    lengths, losses = [length] * batch, batch * (length - 1)
    flops = train_flops(model, lengths, losses)
    peak, stated = peak_flops(work.dtype), stated_flops(jax.devices()[:1])
    measured = seconds[1:]
    speed = spread(flops / s / 1e9 for s in measured)
    return {
        "bench": "sft",
        "model": subject.name,
        **dataclasses.asdict(work),
        "attention": compute.attention,
        "first_step_s": round(seconds[0], 2),
        "step_s": spread(measured),
        "tokens_per_s": spread(batch * length / s for s in measured),
        "model_gflop_s": speed,
        "peak_gflop_s": round(peak / 1e9, 1),
        "share_of_peak": round(speed["median"] * 1e9 / peak, 3),
        "mfu": round(speed["median"] * 1e9 / stated, 4) if stated else None,
        **counts,
        "loss": stats["loss"],
    }


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax bench-sft``."""
    define_model_flags()
    flags.DEFINE_integer("batch", 8, "sequences per step", lower_bound=1)
    flags.DEFINE_integer("length", 256, "tokens per sequence", lower_bound=2)
    flags.DEFINE_integer("rows", 0, "sequences per micro-batch; 0 for the batch", lower_bound=0)
    flags.DEFINE_enum("remat", "dots", list(POLICIES), "what the backward pass recomputes")
    flags.DEFINE_string("attention", "auto", "attention kernel, see docs/kernels.md")
    flags.DEFINE_integer("steps", 3, "number of measured steps", lower_bound=1)


def main(_: list[str]) -> None:
    """Runs ``coa-jax bench-sft``: measures training steps and prints JSON."""
    values = flags.FLAGS
    out = output_path(values.out)
    # As in `coa-jax sft`, parameters are float32 for any dtype of the matmul operands.
    subject = load_subject(values.model, values.random, "float32")
    flag_values = given(field.name for field in dataclasses.fields(Work))
    work = Work(**{**flag_values, "rows": values.rows or values.batch})
    report(measure(subject, work), out)


if __name__ == "__main__":
    run_main(main, define_flags)
