"""Compiles the programs of a run, and estimates how much memory and time a chip needs."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from coa_jax.errors import UserError
from coa_jax.model.costs import train_flops
from coa_jax.model.params import num_params
from coa_jax.parallel.chips import Chip
from coa_jax.parallel.mesh import make_mesh
from coa_jax.parallel.placement import split_devices
from coa_jax.parallel.slices import Slice, owners_of
from coa_jax.perf.aot.chip_split import ASSUMES, BY_DECODING, BY_RATIO, ChipSplit, best, splits
from coa_jax.perf.aot.costs import Costs, count
from coa_jax.perf.aot.hlo import parse
from coa_jax.perf.aot.programs import Program, all_programs
from coa_jax.perf.aot.schedule import Machine, play
from coa_jax.train.arrays import (
    Setup,
    export_bytes,
    micro_batches,
    resume_bytes,
    rollout_waves,
)
from coa_jax.train.config import FitConfig
from coa_jax.train.rl_config import RLConfig

KERNEL_EFFICIENCY = 0.5
"""Share of the peak FLOP rate that attention kernels are assumed (not measured) to reach."""
SENSITIVITY = (1.0, 0.7, 0.5, 0.35)
"""Other shares of the peak FLOP rate, for which the result contains the time of a step too."""

NO_AUTOTUNING: dict[str, Any] = {"xla_gpu_autotune_level": 0}
"""Options of the compiler for GPUs, which would otherwise measure kernels on a GPU."""


def analyse(
    setup: Setup, reserve: float, kernels: float = KERNEL_EFFICIENCY, fraction: float = 1.0
) -> dict[str, Any]:
    """Compiles every program of a configuration, and estimates memory and times.

    Args:
        setup: configuration on a slice, see `arrays.set_up`.
        reserve: share of the usable memory that must stay free.
        kernels: share of the peak FLOP rate that attention kernels are assumed to reach.
        fraction: share of a chip's memory that a run may use.

    Returns:
        The result that ``coa-jax aot`` prints; ``fits`` says whether the whole run fits in memory.
    """
    chip, config = setup.where.chip, setup.config
    programs, attention = all_programs(setup), config.attention
    rows = [_compiled(program, setup.where, kernels, attention) for program in programs]
    if setup.rollouts_continue:
        _add_plans(rows)
    usable = chip.hbm_bytes * fraction
    moments = {"resume": resume_bytes(setup), "export": export_bytes(setup)}
    for row in rows:
        free = 1 - row["bytes_per_chip"]["total"] / usable
        row |= {"free_share": round(free, 4), "fits": free >= reserve}
    peak = max(*(row["bytes_per_chip"]["total"] for row in rows), *moments.values())
    fits = peak <= usable * (1 - reserve)
    devices = setup.where.whole.devices
    result = {
        "topology": setup.where.name,
        "chips": (setup.mesh.size + len(setup.aside)) // devices,
        "devices_per_chip": devices,
        "rollout_chips": len(setup.aside) // devices,
        "estimate": setup.simulated,
        "assumes": {"kernel_efficiency": kernels, "memory_fraction": fraction},
        "usable_bytes_per_chip": int(usable),
        "chip": dataclasses.asdict(chip),
        "params": num_params(setup.model),
        "mesh": dict(setup.mesh.shape),
        "engine_chips": setup.engine_chips,
        "programs": rows,
        "other_moments_bytes_per_chip": moments,
        "step": _step(setup, rows),
        "peak_bytes_per_chip": peak,
        "free_share": round(1 - peak / usable, 4),
        "compile_s": round(sum(row["compile_s"] for row in rows), 1),
        "fits": fits,
    }
    if isinstance(config, RLConfig):
        result["rollouts"] = rollout_waves(setup, int(usable * (1 - reserve) - peak))
    if setup.aside:
        for place, apart in (("training", False), ("rollout", True)):
            peaks = [r["bytes_per_chip"]["total"] for r in rows if (r["name"] in ENGINE) == apart]
            result[f"peak_bytes_per_{place}_chip"] = max(peaks)
    if setup.unknown:
        result["unknown"] = setup.unknown
    if not fits:
        result["advice"] = advice(config, rows, moments, usable, reserve)
    return result


def _add_plans(rows: Sequence[dict[str, Any]]) -> None:
    """Adds to each program the memory of the program that may run at the same time.

    Programs of an engine run beside programs of training.

    Args:
        rows: results of all programs, in whose bytes ``beside`` and ``total`` are changed.
    """

    def scratch(row: dict[str, Any]) -> int:
        used = row["bytes_per_chip"]
        kept = sum(used.get(name, 0) for name in ("temporaries", "output", "code"))
        return kept - used.get("aliased", 0)

    most = {
        kind: max((scratch(row) for row in rows if (row["name"] in ENGINE) == kind), default=0)
        for kind in (True, False)
    }
    for row in rows:
        used = row["bytes_per_chip"]
        used["beside"] = most[row["name"] not in ENGINE]
        used["total"] += used["beside"]


def lower_on(
    device: jax.Device, attention: str, lower: Callable[[], jax.stages.Lowered]
) -> jax.stages.Lowered:
    """Lowers a program for a device that may not be part of this machine.

    Args:
        device: a device that will run the program.
        attention: name of the attention implementation.
        lower: function that lowers the program.
    """
    if attention != "tokamax" or device.platform != "gpu":
        return lower()
    import tokamax

    # tokamax chooses its kernel by the default device, not by the devices of the program.
    with tokamax.config.cross_compile(True), jax.default_device(device):
        return lower()


def _compiled(
    program: Program, where: Slice, kernels: float = 1.0, attention: str = "auto"
) -> dict[str, Any]:
    began = time.monotonic()
    row: dict[str, Any] = {"name": program.name, "chips": len(program.devices)}
    row["runs_per_step"] = program.runs
    try:
        lowered = lower_on(program.devices[0], attention, program.lower)
    except RuntimeError as error:
        if "cuDNN not found" not in str(error):
            raise
        raise UserError(
            "attention is cudnn, and its compiler is part of cuDNN, which is not installed: take "
            "auto or pallas_gpu, or install the package nvidia-cudnn-cu13 too"
        ) from error
    options = NO_AUTOTUNING if program.devices[0].platform == "gpu" else None
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        needed = exceeded(str(error))
        if needed is None:
            raise
        memory = {"total": needed + program.lying, "lying": program.lying}
        row |= {"bytes_per_chip": memory, "roofline": None, "refused": True}
    else:
        row |= _figures(program, compiled, where, kernels)
    return {**row, "compile_s": round(time.monotonic() - began, 1)}


def _figures(
    program: Program, compiled: jax.stages.Compiled, where: Slice, kernels: float
) -> dict[str, Any]:
    """Returns the memory, the costs and the times of a compiled program on one chip."""
    analysis, text = compiled.memory_analysis(), compiled.as_text()
    assert analysis is not None
    assert text is not None
    scratch = program.scratch
    if scratch is None:
        scratch = _temporaries(analysis) if where.tpu else analysis.temp_size_in_bytes
    memory = {
        "arguments": analysis.argument_size_in_bytes,
        "output": analysis.output_size_in_bytes,
        "temporaries": scratch + program.kernel_bytes,
        "aliased": analysis.alias_size_in_bytes,  # results in the memory of arguments
        "code": analysis.generated_code_size_in_bytes,
        "lying": program.lying,
    }
    memory["total"] = sum(memory.values()) - 2 * memory["aliased"]
    module = parse(text)
    costs = count(module, len(program.devices), program.data_trips)
    costs.flops += program.kernel_flops
    costs.kernel_flops += program.kernel_flops
    shares = dict.fromkeys((kernels, *SENSITIVITY))
    serial = {f"{share:g}": roofline(costs, where.chip, share)["serial_s"] for share in shares}
    row = {
        "bytes_per_chip": memory,
        "flops": costs.flops,
        "kernel_flops": costs.kernel_flops,
        "hbm_bytes": costs.hbm_bytes,
        "collective_bytes": costs.sent_by_kind(),
        "loops_ended_by_data": costs.unknown_loops,
        "roofline": roofline(costs, where.chip, kernels),
        "serial_s_by_kernel_efficiency": serial,
    }
    if program.devices[0].platform == "gpu":
        row["kernels"] = costs.kernels
    # Only in the text of TPU programs are the instructions in the order of execution.
    if where.tpu:
        places, rings = _torus(program, where)
        played = {
            share: play(module, Machine(where.chip, places, rings, share), program.data_trips)
            for share in shares
        }
        row["schedule"] = dataclasses.asdict(played[kernels])
        row["schedule_s_by_kernel_efficiency"] = {
            f"{share:g}": each.total for share, each in played.items()
        }
    return row


def _torus(program: Program, where: Slice) -> tuple[np.ndarray, tuple[int, ...]]:
    """Returns the places of a program's chips and the sizes of their rings, see `Machine`."""
    places = np.array([device.coords[: len(where.shape)] for device in program.devices])
    # Chips are regarded as neighbours if only idle chips lie between them.
    sizes = [len(np.unique(axis)) for axis in places.T]
    places = np.array([np.unique(axis, return_inverse=True)[1] for axis in places.T]).T
    # Chips along only a part of an axis do not form a ring.
    rings = tuple(
        size if ring and size == whole else 0
        for ring, size, whole in zip(where.rings, sizes, where.shape, strict=True)
    )
    return places, rings


def _temporaries(analysis: Any) -> int:
    """Returns the bytes of a TPU program's temporary arrays, from the compiler's memory analysis.

    The compiler refuses a program if `peak_memory_in_bytes`, which includes arguments and results,
    exceeds the memory of the chip. `temp_size_in_bytes` would lead to a sum that exceeds
    `peak_memory_in_bytes`, by up to 15 GB in the training program of a 32B model.
    """
    inputs = analysis.argument_size_in_bytes - analysis.alias_size_in_bytes
    return int(max(0, analysis.peak_memory_in_bytes - inputs - analysis.output_size_in_bytes))


_REFUSALS = (
    r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm",
    # This message appears if the temporary arrays exceed the memory even without the arguments.
    r"required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM",
)


def exceeded(message: str) -> int | None:
    """Parses the error message of the compiler for a program that needs too much memory.

    Returns:
        The minimum number of bytes that the program needs; None if the message reports another
        error.
    """
    match = next(filter(None, (re.search(refusal, message) for refusal in _REFUSALS)), None)
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2] or " ")) if match else None


def roofline(costs: Costs, chip: Chip, kernels: float = 1.0) -> dict[str, float]:
    """Computes the time that a program takes at the peak rates of a chip, in seconds.

    Args:
        costs: costs of the program on one chip.
        chip: peak rates of the chip.
        kernels: share of the peak FLOP rate that attention kernels reach.

    Returns:
        Five times by name: ``compute_s`` for matmuls, ``hbm_s`` for reading and writing the main
        memory, ``ici_s`` for sending to other chips, ``step_s`` for the whole program if the three
        overlap perfectly (their maximum), and ``serial_s`` if they do not overlap (their sum).
    """
    products = costs.flops + costs.kernel_flops * (1 / kernels - 1)
    compute, memory = products / chip.flops, costs.hbm_bytes / chip.hbm_bandwidth
    links = 0.0
    for (_, size), sent in costs.sent.items():
        far = chip.group and size > chip.group
        links += sent / (chip.network_bandwidth if far else chip.link_bandwidth)
    return {
        "compute_s": compute,
        "hbm_s": memory,
        "ici_s": links,
        "step_s": max(compute, memory, links),
        "serial_s": compute + memory + links,
    }


ENGINE = ("extend", "decode", "fork")
"""Names of the programs that run on the chips of an engine."""

_PARTS = {
    "score_s": ("score", "score_adapters", "score_teacher", "values"),
    "critic_s": ("critic",),
    "publish_s": ("publish",),
}
"""Maps times in the result to the programs of an RL step beside training and rollouts."""


def _step(setup: Setup, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Computes the time and MFU of a step's training part, and the speed of decoding.

    MFU is the model FLOP utilisation.
    """
    config = setup.config
    number = micro_batches(config)
    tokens, lengths = number * config.rows * config.row_length, [config.row_length] * config.rows
    useful = train_flops(setup.model, lengths * number, tokens, bool(setup.model.lora.rank))
    peak = setup.mesh.size * setup.where.chip.flops
    programs = {row["name"]: row for row in rows}

    def mfu(seconds: float | None) -> float | None:
        return round(useful / seconds / peak, 4) if seconds else None

    def least(*names: str) -> float:
        """Returns the time of programs per step, if their costs overlap perfectly."""
        known = [programs[name] for name in names if name in programs]
        runs = (
            row["runs_per_step"] * row["roofline"]["step_s"] for row in known if row["roofline"]
        )
        return sum(runs, 0.0)

    train = programs["train"]
    runs, times = train["runs_per_step"], train["roofline"]
    played = train.get("schedule")
    step: dict[str, Any] = {
        "assumes": "every row is full and has one sequence; MFU counts 6 FLOPs per parameter and "
        "token (4 if adapters are trained) and causal attention, without recomputation",
        "micro_batches": number,
        "tokens": tokens,
        "model_flops": useful,
        "train_s": least("train") if times else None,
        "mfu": mfu(least("train")),
        "mfu_scheduled": mfu(runs * played["total"]) if played else None,
        "mfu_serial": mfu(runs * times["serial_s"]) if times else None,
    }
    by = "schedule" if played else "serial"
    if times:
        step[f"mfu_{by}_by_kernel_efficiency"] = {
            share: mfu(runs * seconds)
            for share, seconds in train.get(f"{by}_s_by_kernel_efficiency", {}).items()
        }
    if isinstance(config, RLConfig):
        step |= {name: least(*parts) for name, parts in _PARTS.items()}
        if decoding := programs["decode"]["roofline"]:
            seconds = decoding["step_s"] / config.engine.chunk
            step["decode_token_s"] = seconds
            engines = (len(setup.aside) or setup.mesh.size) // setup.engine_chips
            step["decode_tokens_per_s"] = engines * config.engine.row_sizes[-1] / seconds
    return step


def balance(
    setup: Setup, result: dict[str, Any], devices: Sequence[Any], ratio: float = 0.0
) -> tuple[list[ChipSplit], dict[str, Any]]:
    """Estimates the time of an RL step for each split of a slice into training and rollout chips.

    Args:
        setup: configuration on a slice, which was compiled for one of these splits.
        result: the result of `analyse`, in which the compiler refused no program.
        devices: devices of the slice.
        ratio: time of a step's rollouts relative to the time of its update, if each had all chips;
            0 estimates this ratio from the compiled programs of the engine.

    Returns:
        The splits for which a training mesh exists, and their description in the result of
        ``coa-jax aot``.
    """
    rows = result["programs"]
    owners = owners_of(setup.where, devices)
    hosts, host = len(set(owners)), owners.count(owners[0])
    update = setup.mesh.size * sum(
        row["runs_per_step"] * row.get("schedule", {}).get("total", row["roofline"]["serial_s"])
        for row in rows
        if row["name"] not in (*ENGINE, "publish")
    )
    step = result["step"]
    decoders = len(setup.aside) or setup.mesh.size
    rollout = ratio * update or decoders * step["tokens"] / step["decode_tokens_per_s"]
    counts = []
    for number in range(host):
        training, _ = split_devices(devices, number, owners)
        with contextlib.suppress(UserError):  # the remaining chips form no block of the slice
            make_mesh(fsdp=-1, devices=training)
            counts.append(number)
    chip_splits = splits(hosts, host, counts, update, rollout)
    return chip_splits, {
        "assumes": f"{ASSUMES}; {BY_RATIO if ratio else BY_DECODING}",
        "rows": [{**dataclasses.asdict(row), "step_s": row.step_s} for row in chip_splits],
        "best_rollout_devices": best(chip_splits).rollout_devices,
    }


def advice(
    config: FitConfig | RLConfig,
    rows: Sequence[dict[str, Any]],
    moments: dict[str, int],
    usable: float,
    reserve: float,
) -> str:
    """Describes in one line how much memory is missing, and which settings need less.

    Args:
        config: settings of the run.
        rows: results of the run's programs.
        moments: number of bytes per chip that the run takes outside its programs, by name:
            ``resume`` (while it reads a checkpoint) and ``export`` (while it writes the model).
        usable: number of bytes of a chip that the run may use.
        reserve: share of ``usable`` that must stay free.
    """
    others = ({"name": name, "bytes_per_chip": {"total": n}} for name, n in moments.items())
    worst: Any = max((*rows, *others), key=lambda row: row["bytes_per_chip"]["total"])
    memory = worst["bytes_per_chip"]
    most = usable * (1 - reserve)
    least = "at least " if worst.get("refused") else ""
    head = (
        f"{worst['name']} needs {least}{memory['total'] / 1e9:.1f} GB per chip, and "
        f"{most / 1e9:.1f} GB are available "
        f"({usable / 1e9:.1f} GB for the run, of which {reserve:.0%} must stay free): "
    )
    if worst["name"] in (*ENGINE, "publish"):
        return head + "lower engine.slots or engine.max_length, or set engine.pages"
    knobs = []
    # `remat` matters only for programs with a backward pass.
    if worst["name"] in ("train", "critic") and config.remat != "full":
        knobs.append(f"set remat to full (it is {config.remat})")
    if memory.get("temporaries", memory["total"]) > memory["total"] / 2:
        if config.rows > 1:
            knobs.append(f"lower rows ({config.rows}) to the product of mesh.data and mesh.fsdp")
        knobs += ["raise mesh.tensor, which splits the tokens of a row", "lower row_length"]
    else:
        knobs.append("raise mesh.fsdp or mesh.tensor, or take more chips")
        knobs += ["lower engine.slots"] if isinstance(config, RLConfig) else []
    return head + "; ".join(knobs)
