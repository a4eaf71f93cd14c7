"""Measures decoding without tools, and compares it with a lower bound on the time of a step.

    coa-jax bench-decode --model=DIR --batch=1,8,32 --prompt=128 --new=64
    coa-jax bench-decode --random=qwen2.5-7b --dtype=bfloat16 --batch=32
    coa-jax bench-decode --model=DIR --batch=8,32 --constrain=web_wiki

The command prefills random prompts; then each sequence samples ``--new`` tokens at temperature 1.
All programs are compiled before the measurement. The lower bound of a step's time (``floor_ms``) is
the longer of two times: the time to read the weights and the used part of the KV cache once, and
the time to compute all matmuls. Both times follow from the memory bandwidth and the FLOP rate,
which the command measures too.

The command prints one JSON object, in which ``batches`` lists the results for each batch size. A
result that is measured in every repeat is given as median, minimum and maximum. With
``--constrain``, each repeat is followed by a second one, whose sampling is constrained to a
protocol; ``constrained.slower`` is the relative increase of the step time in such a pair. With
``--profile``, one more repeat is profiled, and ``parts`` has the share of each part of the model in
the time of a step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from absl import flags

from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.constraint import Constraint
from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.model.costs import decode_bytes, forward_flops
from coa_jax.perf.bench.measure import (
    given,
    output_path,
    peak_flops,
    read_bandwidth,
    report,
    spread,
)
from coa_jax.perf.bench.models import Subject, define_model_flags, load_subject
from coa_jax.perf.bench.profile import profile_parts
from coa_jax.rollout.constrain import constraint_for
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run.command import run_main


@dataclasses.dataclass(frozen=True)
class Work:
    """The decoding that the benchmark measures.

    Attributes:
        prompt: number of tokens per prompt.
        new: number of tokens to sample per sequence.
        chunk: number of tokens that the device decodes per call, see `EngineConfig`.
        dtype: dtype of the matmul operands, see `EngineConfig`.
        repeats: number of measured repetitions.
        profile: whether one more repetition is profiled.
    """

    prompt: int
    new: int
    chunk: int
    dtype: str
    repeats: int = 3
    profile: bool = False


def decode_once(
    engine: Engine, prompts: np.ndarray, new: int, protocol: str | None = None
) -> tuple[float, float]:
    """Prefills a prompt into each slot, and samples ``new`` tokens in each slot.

    Args:
        engine: an engine with one slot per prompt.
        prompts: token ids, int ``[slots, prompt length]``.
        new: number of tokens to sample in each slot.
        protocol: protocol that constrains the sampling; a sequence can then end early with a tool
            call. None for no constraint.

    Returns:
        The seconds that the prefill took, and the seconds per decoding step.

    Raises:
        RuntimeError: the number of decoded tokens is wrong, although there is no protocol.
    """
    _begin(engine, prompts, new, protocol)
    _drain(engine)
    meter, expected = engine.meter, new * len(prompts)
    if protocol is None and meter.decoded_tokens != expected:
        raise RuntimeError(f"{meter.decoded_tokens} tokens were decoded, not {expected}")
    return meter.extend_s, meter.decode_s / meter.decode_steps


def _begin(engine: Engine, prompts: np.ndarray, new: int, protocol: str | None = None) -> None:
    engine.restart()
    length = prompts.shape[1]
    engine.extend([(slot, 0, prompt) for slot, prompt in enumerate(prompts.tolist())])
    for slot, prompt in enumerate(prompts.tolist()):
        engine.start(
            slot,
            length,
            last_token=prompt[-1],
            limit=length + new,
            key=(0, 0, slot),
            sampling=SamplingParams(),
            protocol=protocol,
        )
        engine.set_active(slot, True)


def _drain(engine: Engine) -> None:
    while engine.any_active:
        engine.decode()


def measure_batch(
    subject: Subject, batch: int, work: Work, constraint: Constraint | None = None
) -> dict[str, Any]:
    """Measures one batch size, after an unmeasured repetition that compiles the programs.

    Args:
        subject: the model.
        batch: number of sequences.
        work: lengths of prompts and samples, and the number of repetitions.
        constraint: constraint of one protocol, under which each repetition is measured a second
            time; None for no second measurement.

    Returns:
        The results for this batch size, by name.
    """
    prompt, new = work.prompt, work.new
    shapes = EngineConfig(
        batch, prompt + new, work.chunk, (32, 128, 512), dtype=work.dtype, decode_programs=1
    )
    began = time.perf_counter()
    engine = Engine(subject.params, subject.config, shapes)
    prompts = np.random.default_rng(batch).integers(0, subject.config.vocab_size, (batch, prompt))
    decode_once(engine, prompts, new)
    bound, protocol = None, None
    if constraint is not None:
        # The constraint of an engine cannot change, so there is a second engine.
        (protocol,) = constraint.start
        bound = Engine(engine.params, subject.config, shapes, (), constraint)
        decode_once(bound, prompts, new, protocol)
    first = time.perf_counter() - began
    runs, constrained_runs = [], []
    for _ in range(work.repeats):
        runs.append(decode_once(engine, prompts, new))
        if bound is not None:
            constrained_runs.append(decode_once(bound, prompts, new, protocol))
    result = {
        "batch": batch,
        "decode_tokens_per_s": spread(batch / step for _, step in runs),
        "ms_per_step": spread(1e3 * step for _, step in runs),
        "prefill_tokens_per_s": spread(batch * prompt / prefill for prefill, _ in runs),
        "end_to_end_tokens_per_s": spread(
            batch * new / (prefill + new * step) for prefill, step in runs
        ),
        "first_run_s": round(first, 2),
    }
    if work.profile:
        _begin(engine, prompts, new)
        program = engine.lower_decode().compile().as_text() or ""
        result["parts"] = profile_parts(lambda: _drain(engine), program)
    if bound is not None:
        pairs = zip(runs, constrained_runs, strict=True)
        result["constrained"] = {
            "ms_per_step": spread(1e3 * step for _, step in constrained_runs),
            "slower": spread(slow / fast - 1 for (_, fast), (_, slow) in pairs),
        }
    return result


def measure(
    subject: Subject, batches: Sequence[int], work: Work, protocol: str = ""
) -> dict[str, Any]:
    """Measures all batch sizes, and returns the result that the command prints.

    Args:
        subject: the model.
        batches: the batch sizes.
        work: lengths of prompts and samples, and the number of repetitions.
        protocol: protocol for a second measurement, in which sampling is constrained; "" for none.
    """
    constraint = None
    if protocol:
        if subject.tokenizer is None:
            raise UserError("--constrain needs the tokenizer of a --model, not random weights")
        constraint = constraint_for(
            RolloutConfig(constrain=True),
            subject.tokenizer,
            subject.config.vocab_size,
            [protocol],
        )
    context = work.prompt + work.new / 2
    results = [measure_batch(subject, batch, work, constraint) for batch in batches]
    # The limits are measured last, when the clock rate of the warm processor is the same as during
    # decoding.
    bandwidth, peak = read_bandwidth(), peak_flops(work.dtype)
    for result in results:
        batch = result["batch"]
        read = (
            decode_bytes(subject.config, batch, context, jnp.dtype(work.dtype).itemsize) / bandwidth
        )
        compute = batch * forward_flops(subject.config, context) / peak
        floor = 1e3 * max(read, compute)
        result["floor_ms"] = {"read": round(1e3 * read, 3), "compute": round(1e3 * compute, 3)}
        result["share_of_floor"] = round(floor / result["ms_per_step"]["median"], 3)
    return {
        "bench": "decode",
        "model": subject.name,
        **dataclasses.asdict(work),
        **({} if constraint is None else {"constraint": str(constraint)}),
        "bandwidth_gb_s": round(bandwidth / 1e9, 2),
        "peak_gflop_s": round(peak / 1e9, 1),
        "batches": results,
    }


def define_flags() -> None:
    """Defines the command-line flags of ``coa-jax bench-decode``."""
    define_model_flags()
    flags.DEFINE_string("constrain", "", "protocol to which decoding is constrained in extra runs")
    flags.DEFINE_bool("profile", False, "profile one more run, and print the time of each part")
    flags.DEFINE_list("batch", ["1", "8", "32"], "batch sizes, separated by commas")
    flags.DEFINE_integer("prompt", 128, "tokens per prompt", lower_bound=1)
    flags.DEFINE_integer("new", 64, "tokens to sample per sequence", lower_bound=1)
    flags.DEFINE_integer("chunk", 16, "tokens that the device decodes per call", lower_bound=1)
    flags.DEFINE_integer("repeats", 3, "number of measured runs", lower_bound=1)


def batch_sizes(values: Sequence[str]) -> tuple[int, ...]:
    """Parses the batch sizes of the command line.

    Raises:
        UserError: there is no batch size, or a value is not a positive integer.
    """
    if not values or not all(value.isdecimal() and int(value) >= 1 for value in values):
        raise UserError(f"--batch={','.join(values)}: give whole numbers from 1, such as 1,8,32")
    return tuple(int(value) for value in values)


def main(_: list[str]) -> None:
    """Runs ``coa-jax bench-decode``: measures decoding and prints JSON."""
    values = flags.FLAGS
    out, batches = output_path(values.out), batch_sizes(values.batch)
    subject = load_subject(values.model, values.random, values.dtype)
    work = Work(**given(field.name for field in dataclasses.fields(Work)))
    report(measure(subject, batches, work, values.constrain), out)


if __name__ == "__main__":
    run_main(main, define_flags)
