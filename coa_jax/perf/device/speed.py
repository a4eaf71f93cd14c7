"""Compares speed and memory on this device with its limits, and with the predictions of `aot`.

A training step and decoding run with random weights. In the same process the limits of the device
are measured: the rate of a large matmul, and the bandwidth of reading a large matrix. `perf.aot`
predicts memory and time of the training step from the peak rates that the vendor states or, for an
unknown chip, from the measured limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from coa_jax.engine.memory import format_bytes
from coa_jax.model.architectures import ARCHITECTURES
from coa_jax.model.config import ModelConfig
from coa_jax.parallel.chips import CHIPS, KINDS, Chip
from coa_jax.parallel.slices import TPUS, Slice
from coa_jax.perf.aot.estimate import analyse
from coa_jax.perf.bench import decode, sft
from coa_jax.perf.bench.measure import read_bandwidth
from coa_jax.perf.bench.models import Subject, random_subject
from coa_jax.perf.device.checks import Check, Verdict
from coa_jax.train.arrays import set_up
from coa_jax.train.config import SFTConfig
from coa_jax.train.optimizer import OptimizerConfig

GROUP = "speed and memory"


@dataclasses.dataclass(frozen=True)
class Work:
    """The model and the sizes with which the speed of a device is measured.

    Attributes:
        name: name of the model.
        model: architecture of the model.
        step: sizes and settings of the training steps.
        batches: batch sizes (numbers of sequences) for which decoding is measured.
        decoding: lengths and settings of decoding.
    """

    name: str
    model: ModelConfig
    step: sft.Work
    batches: tuple[int, ...]
    decoding: decode.Work


ON_CPU = Work(
    "small",
    ModelConfig("llama", 4096, 256, 1024, 4, 4, 2, 64),
    sft.Work(4, 256, 2, "float32", "dots"),
    (1, 8),
    decode.Work(64, 16, 16, "float32"),
)
ON_ACCELERATOR = Work(
    "qwen2.5-0.5b",
    ARCHITECTURES["qwen2.5-0.5b"],
    sft.Work(16, 2048, 4, "bfloat16", "dots"),
    (32,),
    decode.Work(512, 128, 16, "bfloat16"),
)


def all_checks() -> Iterator[Check]:
    """Measures peak rates, a training step and decoding on the first device of this process."""
    device = jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    work, stated = ON_CPU if on_cpu else ON_ACCELERATOR, KINDS.get(device.device_kind)
    subject = random_subject(f"random {work.name}", work.model, "float32")
    bandwidth = read_bandwidth(128 if on_cpu else 2048)
    # A training step donates its parameters.
    copies = jax.tree.map(lambda x: x.copy(), subject.params)
    step = sft.measure(dataclasses.replace(subject, params=copies), work.step)
    stats = None if on_cpu else device.memory_stats()
    used = float(stats["peak_bytes_in_use"]) if stats else None
    flops = step["peak_gflop_s"] * 1e9
    yield from _limits(flops, bandwidth, stated)
    number = step["compiles_after_warmup"]
    text = f"{number} programs were compiled after the first step"
    verdict: Verdict = "FAIL" if number else "pass"
    yield Check(GROUP, "training compiles once", verdict, text, {"compiles": number})
    predicted = prediction(work.step, subject.config, device, stated, flops, bandwidth)
    yield from _compare(step, used, predicted)
    yield from _decoding(subject, work)


def _limits(flops: float, bandwidth: float, stated: str | None) -> Iterator[Check]:
    for name, value, field, unit in (
        ("matmul rate", flops, "flops", "FLOP/s"),
        ("read bandwidth", bandwidth, "hbm_bandwidth", "B/s"),
    ):
        text, verdict, figures = f"{value:.3g} {unit}", "pass", {"measured": value}
        if stated:
            peak = getattr(CHIPS[stated], field) / CHIPS[stated].devices
            figures["stated"] = peak
            text += f", {value / peak:.0%} of the vendor's {peak:.3g}"
            verdict = "pass" if value > 0.6 * peak else "look"
        yield Check(GROUP, name, verdict, text, figures)  # type: ignore[arg-type]


def prediction(
    work: sft.Work,
    model_config: ModelConfig,
    device: Any,
    stated: str | None,
    flops: float,
    bandwidth: float,
) -> dict[str, Any]:
    """Predicts memory and time of the measured training step with `perf.aot.estimate.analyse`.

    Args:
        work: sizes of the step.
        model_config: architecture of the model.
        device: device of the step. For a TPU, the prediction uses the TPU compiler; for all other
            devices, the CPU compiler.
        stated: name of the chip, a key of `CHIPS`; None for an unknown chip.
        flops: measured matmul rate in FLOP/s, which is used for an unknown chip.
        bandwidth: measured read bandwidth in bytes/s, which is used for an unknown chip.
    """
    peaks = None if stated else Chip(flops, 1 << 50, bandwidth, 1.0)
    axes = 1 if stated not in TPUS else 2 if stated in ("v5e", "v6e") else 3
    chips = Slice("this device", stated or "measured", (1,) * axes, peaks)
    devices = [device] if chips.tpu else jax.local_devices(backend="cpu")[:1]
    config = SFTConfig(
        model="random",
        data="none",
        validation="",
        prompt_style="brief",
        rename_share=0.0,
        seed=0,
        batch_size=work.batch,
        rows=work.rows,
        row_length=work.length,
        dtype=work.dtype,
        remat=work.remat,
        optimizer=OptimizerConfig(1e-5, 4),
        checkpoint_every=1,
    )
    return analyse(set_up(config, model_config, chips, devices), 0.1)


def _compare(
    step: dict[str, Any], used: float | None, predicted: dict[str, Any]
) -> Iterator[Check]:
    """Compares memory and time of the training step with their predictions.

    Args:
        step: result of `perf.bench.sft.measure`.
        used: peak memory of the device in bytes; None if the device does not report its memory.
        predicted: result of `prediction`.
    """
    (program,) = predicted["programs"]
    needed = program["bytes_per_chip"]["total"]
    name = "memory of a training step"
    if used is None:
        text = f"this device does not report its memory use; aot predicts {format_bytes(needed)}"
        yield Check(GROUP, name, "skip", text, {"predicted": needed})
    else:
        ratio = used / needed
        text = (
            f"{format_bytes(used)}, {ratio:.2f} times the {format_bytes(needed)} that aot predicts"
        )
        verdict: Verdict = "pass" if 0.5 < ratio < 1.1 else "look"
        yield Check(GROUP, name, verdict, text, {"measured": used, "predicted": needed})
    seconds = step["step_s"]["median"]
    least, most = (program["roofline"][name] for name in ("step_s", "serial_s"))
    played = program.get("schedule", {}).get("total")
    text = f"{seconds:.3g} s; aot predicts {least:.3g} s with full overlap, {most:.3g} s without"
    if played:
        text += f", {played:.3g} s by the compiler's schedule"
    text += f"; {step['share_of_peak']:.0%} of the measured matmul rate"
    figures = {"measured": seconds, "least": least, "most": most, "share": step["share_of_peak"]}
    # A time below the predicted minimum shows that the prediction is wrong.
    good = 0.9 * least < seconds < 2 * max(most, played or 0.0)
    yield Check(GROUP, "time of a training step", "pass" if good else "look", text, figures)


def _decoding(subject: Subject, work: Work) -> Iterator[Check]:
    params = jax.tree.map(lambda x: x.astype(work.decoding.dtype), subject.params)
    subject = dataclasses.replace(subject, params=params)
    measured = decode.measure(subject, work.batches, work.decoding)
    for result in measured["batches"]:
        floor = result["floor_ms"]
        least, share = max(floor.values()), result["share_of_floor"]
        step = result["ms_per_step"]["median"]
        text = (
            f"{step:.3g} ms per token, {share:.0%} of the limit ({least:.3g} ms: "
            f"{floor['read']:.3g} to read, {floor['compute']:.3g} to compute)"
        )
        prefill = result["prefill_tokens_per_s"]["median"]
        figures = {"ms": step, "limit ms": least, "prefill": prefill}
        name = f"decoding, batch {result['batch']}"
        yield Check(GROUP, name, "pass" if share > 0.4 else "look", text, figures)
