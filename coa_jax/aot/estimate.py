"""Compiles programs and says what a chip needs: memory, time at best, and whether it fits."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from coa_jax.aot.arrays import Setup, export_bytes, micro_batches, resume_bytes
from coa_jax.aot.costs import Costs, count
from coa_jax.aot.hlo import parse
from coa_jax.aot.programs import Program, all_programs
from coa_jax.aot.schedule import Machine, play
from coa_jax.aot.slices import Slice, owners_of
from coa_jax.aot.split import ASSUMES, BY_DECODING, BY_RATIO, Split, best, splits
from coa_jax.errors import UserError
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.sft import SFTConfig
from coa_jax.model.costs import train_flops
from coa_jax.model.params import num_params
from coa_jax.parallel.chips import Chip
from coa_jax.parallel.mesh import make_mesh
from coa_jax.parallel.placement import split_devices


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one chip while a program runs.

    Attributes:
        arguments, output, temporaries: of the program, with those of kernels that are not in it.
        aliased: part of the output that takes the place of arguments.
        code: the program itself.
        lying: other arrays of the run.
    """

    arguments: int
    output: int
    temporaries: int
    aliased: int
    code: int
    lying: int

    @property
    def total(self) -> int:
        """Everything together."""
        kept = self.arguments + self.output - self.aliased
        return kept + self.temporaries + self.code + self.lying


KERNEL_EFFICIENCY = 0.5
"""Assumed share of the peak at which attention kernels run; nothing of it is measured."""
SENSITIVITY = (1.0, 0.7, 0.5, 0.35)
"""Shares for which the time of a step is given beside that of the assumption."""


def analyse(
    setup: Setup, reserve: float, kernels: float = KERNEL_EFFICIENCY, fraction: float = 1.0
) -> dict[str, Any]:
    """Compiles every program of a configuration.

    Args:
        setup: see `programs.set_up`.
        reserve: share of the memory that has to stay free, of what a run gets of a chip's.
        kernels: share of the peak at which attention kernels are assumed to run.
        fraction: share of a chip's memory that a run gets.

    Returns:
        The result of the command; ``fits`` says whether all programs do.
    """
    chip, config = setup.where.chip, setup.config
    rows: list[dict[str, Any]] = []
    total: dict[str, float] = {}
    for program in all_programs(setup):
        row = _compiled(program, setup.where, kernels)
        rows.append(row)
        if program.runs and row["roofline"]:
            total[program.name] = program.runs * row["roofline"]["step_s"]
    if setup.rollouts_go_on:
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
        "estimate": not setup.where.tpu,
        "assumes": {"kernel_efficiency": kernels, "memory_fraction": fraction},
        "usable_bytes_per_chip": int(usable),
        "chip": dataclasses.asdict(chip),
        "params": num_params(setup.model),
        "mesh": dict(setup.mesh.shape),
        "engine_chips": setup.engine_chips,
        "programs": rows,
        "other_moments_bytes_per_chip": moments,
        "step": _step(setup, rows, total),
        "peak_bytes_per_chip": peak,
        "free_share": round(1 - peak / usable, 4),
        "compile_s": round(sum(row["compile_s"] for row in rows), 1),
        "fits": fits,
    }
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
    """Counts what programs of both kinds set aside, where either may be started beside the other.

    Args:
        rows: of all programs; the ``beside`` and ``total`` of their bytes are changed.
    """

    def scratch(row: dict[str, Any]) -> int:
        used = row["bytes_per_chip"]
        return sum(used.get(k, 0) for k in ("temporaries", "output", "code")) - used.get(
            "aliased", 0
        )

    most = {
        kind: max((scratch(row) for row in rows if (row["name"] in ENGINE) == kind), default=0)
        for kind in (True, False)
    }
    for row in rows:
        used = row["bytes_per_chip"]
        used["beside"] = most[row["name"] not in ENGINE]
        used["total"] += used["beside"]


def _compiled(program: Program, where: Slice, kernels: float = 1.0) -> dict[str, Any]:
    chip = where.chip
    began = time.monotonic()
    lowered = program.lower()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = exceeded(str(error))
        if needed is None:
            raise
        memory = {"total": needed + program.lying, "lying": program.lying}
        row: dict[str, Any] = {"bytes_per_chip": memory, "roofline": None, "refused": True}
    else:
        analysis, text = compiled.memory_analysis(), compiled.as_text()
        assert analysis is not None
        assert text is not None
        scratch = analysis.temp_size_in_bytes if program.scratch is None else program.scratch
        used = Memory(
            analysis.argument_size_in_bytes,
            analysis.output_size_in_bytes,
            scratch + program.kernel_bytes,
            analysis.alias_size_in_bytes,
            analysis.generated_code_size_in_bytes,
            program.lying,
        )
        module = parse(text)
        costs = count(module, len(program.devices), program.data_trips)
        costs.flops += program.kernel_flops
        costs.kernel_flops += program.kernel_flops
        row = {
            "bytes_per_chip": {**dataclasses.asdict(used), "total": used.total},
            "flops": costs.flops,
            "kernel_flops": costs.kernel_flops,
            "hbm_bytes": costs.hbm_bytes,
            "collective_bytes": costs.sent_by_kind(),
            "loops_ended_by_data": costs.unknown_loops,
            "roofline": roofline(costs, chip, kernels),
        }
        shares = dict.fromkeys((kernels, *SENSITIVITY))
        row["serial_s_by_kernel_efficiency"] = {
            f"{share:g}": roofline(costs, chip, share)["serial_s"] for share in shares
        }
        # Only the text of a TPU program is a schedule.
        if where.tpu:
            places = np.array([device.coords[: len(where.shape)] for device in program.devices])
            # As neighbours where other chips, which send nothing, lie between them.
            sizes = [len(np.unique(axis)) for axis in places.T]
            places = np.array([np.unique(axis, return_inverse=True)[1] for axis in places.T]).T
            # What is left of an axis is no ring.
            rings = tuple(
                size if ring and size == whole else 0
                for ring, size, whole in zip(where.rings, sizes, where.shape, strict=True)
            )
            played = {
                share: play(module, Machine(chip, places, rings, share), program.data_trips)
                for share in shares
            }
            row["schedule"] = dataclasses.asdict(played[kernels])
            row["schedule_s_by_kernel_efficiency"] = {
                f"{share:g}": each.total for share, each in played.items()
            }
    return {
        "name": program.name,
        "chips": len(program.devices),
        "runs_per_step": program.runs,
        **row,
        "compile_s": round(time.monotonic() - began, 1),
    }


_REFUSALS = (
    r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm",
    # Said where the temporaries alone are too much; the arguments come on top.
    r"required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM",
)


def exceeded(message: str) -> int | None:
    """Bytes that a program needs at least that the compiler refused for want of memory.

    None if the message is of something else.
    """
    found = next(filter(None, (re.search(refusal, message) for refusal in _REFUSALS)), None)
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")) if found else None


def roofline(costs: Costs, chip: Chip, kernels: float = 1.0) -> dict[str, float]:
    """Seconds at the peaks of a chip; products of kernels at a share of the peak.

    ``step_s`` is the longest of the three, as if they overlapped perfectly; ``serial_s`` is their
    sum, as if they did not at all.
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
"""Programs of an engine, which run where it is."""

_PARTS = {
    "score_s": ("score", "score_adapters", "score_teacher", "values"),
    "critic_s": ("critic",),
    "publish_s": ("merge", "publish"),
}
"""Programs of a step of RL beside its training."""


def _step(setup: Setup, rows: Sequence[dict[str, Any]], total: dict[str, float]) -> dict[str, Any]:
    """Time and model FLOPs utilisation of the training part of a step, and speed of decoding."""
    config, chip = setup.config, setup.where.chip
    tokens = micro_batches(config) * config.rows * config.row_length
    lengths = [config.row_length] * (micro_batches(config) * config.rows)
    useful = train_flops(setup.model, lengths, tokens, bool(config.lora.rank))
    train = next(row for row in rows if row["name"] == "train")
    known = train["roofline"] is not None
    seconds = total.get("train", 0.0)
    serial = train["runs_per_step"] * train["roofline"]["serial_s"] if known else 0.0
    played = train["runs_per_step"] * train.get("schedule", {}).get("total", 0.0)
    peak = setup.mesh.size * chip.flops
    step: dict[str, Any] = {
        "assumes": "every row is full, one sequence a row; MFU counts 6 FLOPs a parameter and "
        "token (4 where adapters are trained) and causal attention, not what is computed again",
        "micro_batches": micro_batches(config),
        "tokens": tokens,
        "model_flops": useful,
        "train_s": seconds if known else None,
        "mfu": round(useful / seconds / peak, 4) if known else None,
        "mfu_scheduled": round(useful / played / peak, 4) if played else None,
        "mfu_serial": round(useful / serial / peak, 4) if known else None,
    }
    by = "schedule" if played else "serial"
    if known:
        step[f"mfu_{by}_by_kernel_efficiency"] = {
            share: round(useful / (train["runs_per_step"] * seconds) / peak, 4)
            for share, seconds in train.get(f"{by}_s_by_kernel_efficiency", {}).items()
        }
    if isinstance(config, RLConfig):
        for name, parts in _PARTS.items():
            step[name] = sum(total.get(part, 0.0) for part in parts)
        decode = next(row for row in rows if row["name"] == "decode")
        if decode["roofline"]:
            seconds = decode["roofline"]["step_s"] / config.engine.chunk
            step["decode_token_s"] = seconds
            engines = (len(setup.aside) or setup.mesh.size) // setup.engine_chips
            step["decode_tokens_per_s"] = engines * config.engine.row_sizes[-1] / seconds
    return step


def balance(
    setup: Setup, result: dict[str, Any], devices: Sequence[Any], ratio: float = 0.0
) -> tuple[list[Split], dict[str, Any]]:
    """How long a step of RL takes if the slice is split in other ways.

    Args:
        setup: of the split that was compiled.
        result: of `analyse`.
        devices: of the slice.
        ratio: seconds of rollouts over those of an update where both have all chips; 0 for what
            the programs of the engine say.

    Returns:
        The splits that a mesh can be laid over, and the same for the result of the command.

    Raises:
        UserError: a program does not fit at all, so that its time is not known.
    """
    config, rows = setup.config, result["programs"]
    assert isinstance(config, RLConfig)
    if any(row["roofline"] is None for row in rows):
        raise UserError("the compiler refused a program: no split can be estimated")
    owners = owners_of(setup.where, devices)
    hosts, host = len(set(owners)), owners.count(owners[0])
    update = setup.mesh.size * sum(
        row["runs_per_step"] * row.get("schedule", {}).get("total", row["roofline"]["serial_s"])
        for row in rows
        if row["name"] not in (*ENGINE, "merge", "publish")
    )
    step = result["step"]
    decoders = len(setup.aside) or setup.mesh.size
    rollout = ratio * update or decoders * step["tokens"] / step["decode_tokens_per_s"]
    counts = [count for count in range(host) if _can_train(setup, devices, owners, count)]
    found = splits(hosts, host, counts, update, rollout)
    return found, {
        "assumes": f"{ASSUMES}; {BY_RATIO if ratio else BY_DECODING}",
        "rows": [{**dataclasses.asdict(row), "step_s": row.step_s} for row in found],
        "best_rollout_devices": best(found).rollout_devices,
    }


def _can_train(setup: Setup, devices: Sequence[Any], owners: Sequence[int], count: int) -> bool:
    """Whether the chips that are left for training are a block of the slice."""
    training, _ = split_devices(devices, count, owners)
    try:
        make_mesh(fsdp=-1, devices=training)
    except UserError:
        return False
    return True


def advice(
    config: SFTConfig | RLConfig,
    rows: Sequence[dict[str, Any]],
    moments: dict[str, int],
    usable: float,
    reserve: float,
) -> str:
    """One line: how much is too much, and which settings take less.

    Args:
        config: of the run.
        rows: of its programs.
        moments: bytes of a chip at other moments of the run.
        usable: bytes of a chip that the run gets.
        reserve: share of them that has to stay free.
    """
    others = ({"name": name, "bytes_per_chip": {"total": n}} for name, n in moments.items())
    worst: Any = max((*rows, *others), key=lambda row: row["bytes_per_chip"]["total"])
    memory = worst["bytes_per_chip"]
    most = usable * (1 - reserve)
    least = "at least " if worst.get("refused") else ""
    head = (
        f"{worst['name']} needs {least}{memory['total'] / 1e9:.1f} GB a chip, "
        f"{most / 1e9:.1f} GB are there "
        f"({usable / 1e9:.1f} GB that the run gets, of which {reserve:.0%} stay free): "
    )
    if worst["name"] in (*ENGINE, "merge", "publish"):
        return head + "lower engine.slots or engine.max_length, or set engine.pages"
    knobs = []
    # What keeps less for a backward pass; scores have none.
    if worst["name"] in ("train", "critic") and (kept := config.remat) != "full":
        knobs.append(f"set remat to full (it is {kept})")
    if memory.get("temporaries", memory["total"]) > memory["total"] / 2:
        if config.rows > 1:
            knobs.append(f"lower rows ({config.rows}) to the product of mesh.data and mesh.fsdp")
        knobs += ["raise mesh.tensor, which shares the tokens of a row", "lower row_length"]
    else:
        knobs.append("raise mesh.fsdp or mesh.tensor, or take more chips")
        if isinstance(config, RLConfig):
            knobs.append("lower engine.slots")
    return head + "; ".join(knobs)
