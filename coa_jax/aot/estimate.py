"""Compiles programs and says what a chip needs: memory, time at best, and whether it fits."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from coa_jax.aot.arrays import Setup, micro_batches
from coa_jax.aot.costs import Costs, count
from coa_jax.aot.hlo import parse
from coa_jax.aot.programs import Program, all_programs
from coa_jax.aot.schedule import Machine, play
from coa_jax.aot.slices import Slice
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.sft import SFTConfig
from coa_jax.model.costs import train_flops
from coa_jax.model.params import num_params
from coa_jax.parallel.chips import Chip


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


def analyse(setup: Setup, reserve: float) -> dict[str, Any]:
    """Compiles every program of a configuration.

    Args:
        setup: see `programs.set_up`.
        reserve: share of a chip's memory that has to stay free.

    Returns:
        The result of the command; ``fits`` says whether all programs do.
    """
    chip, config = setup.where.chip, setup.config
    rows: list[dict[str, Any]] = []
    total: dict[str, float] = {}
    for program in all_programs(setup):
        row = _compiled(program, setup.where, reserve)
        rows.append(row)
        if program.runs and row["roofline"]:
            total[program.name] = program.runs * row["roofline"]["step_s"]
    fits = all(row["fits"] for row in rows)
    result = {
        "topology": setup.where.name,
        "chips": setup.mesh.size,
        "estimate": not setup.where.tpu,
        "chip": dataclasses.asdict(chip),
        "params": num_params(setup.model),
        "mesh": dict(setup.mesh.shape),
        "engine_chips": setup.engine_chips,
        "programs": rows,
        "step": _step(setup, rows, total),
        "peak_bytes_per_chip": max(row["bytes_per_chip"]["total"] for row in rows),
        "free_share": min(row["free_share"] for row in rows),
        "compile_s": round(sum(row["compile_s"] for row in rows), 1),
        "fits": fits,
    }
    if setup.unknown:
        result["unknown"] = setup.unknown
    if not fits:
        result["advice"] = advice(config, rows, chip, reserve)
    return result


def _compiled(program: Program, where: Slice, reserve: float) -> dict[str, Any]:
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
        used = Memory(
            analysis.argument_size_in_bytes,
            analysis.output_size_in_bytes,
            analysis.temp_size_in_bytes + program.kernel_bytes,
            analysis.alias_size_in_bytes,
            analysis.generated_code_size_in_bytes,
            program.lying,
        )
        module = parse(text)
        costs = count(module, len(program.devices), program.data_trips)
        costs.flops += program.kernel_flops
        row = {
            "bytes_per_chip": {**dataclasses.asdict(used), "total": used.total},
            "flops": costs.flops,
            "hbm_bytes": costs.hbm_bytes,
            "collective_bytes": costs.sent_by_kind(),
            "loops_ended_by_data": costs.unknown_loops,
            "roofline": roofline(costs, chip),
        }
        # Only the text of a TPU program is a schedule.
        if where.tpu:
            places = np.array([device.coords[: len(where.shape)] for device in program.devices])
            played = play(module, Machine(chip, places), program.data_trips)
            row["schedule"] = dataclasses.asdict(played)
    free = 1 - row["bytes_per_chip"]["total"] / chip.hbm_bytes
    return {
        "name": program.name,
        "chips": len(program.devices),
        "runs_per_step": program.runs,
        **row,
        "free_share": round(free, 4),
        "fits": free >= reserve,
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


def roofline(costs: Costs, chip: Chip) -> dict[str, float]:
    """Seconds at the peaks of a chip.

    ``step_s`` is the longest of the three, as if they overlapped perfectly; ``serial_s`` is their
    sum, as if they did not at all.
    """
    compute, memory = costs.flops / chip.flops, costs.hbm_bytes / chip.hbm_bandwidth
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


_PARTS = {
    "score_s": ("score", "score_adapters", "values"),
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
    if isinstance(config, RLConfig):
        for name, parts in _PARTS.items():
            step[name] = sum(total.get(part, 0.0) for part in parts)
        decode = next(row for row in rows if row["name"] == "decode")
        if decode["roofline"]:
            seconds = decode["roofline"]["step_s"] / config.engine.chunk
            step["decode_token_s"] = seconds
            engines = setup.mesh.size // setup.engine_chips
            step["decode_tokens_per_s"] = engines * config.engine.row_sizes[-1] / seconds
    return step


def advice(
    config: SFTConfig | RLConfig, rows: Sequence[dict[str, Any]], chip: Chip, reserve: float
) -> str:
    """One line: how much is too much, and which settings take less."""
    worst = max(rows, key=lambda row: row["bytes_per_chip"]["total"])
    memory = worst["bytes_per_chip"]
    most = chip.hbm_bytes * (1 - reserve)
    least = "at least " if worst.get("refused") else ""
    head = (
        f"{worst['name']} needs {least}{memory['total'] / 1e9:.1f} GB a chip, "
        f"{most / 1e9:.1f} GB are there "
        f"({chip.hbm_bytes / 1e9:.1f} GB, of which {reserve:.0%} stay free): "
    )
    if worst["name"] in ("extend", "decode", "fork", "merge", "publish"):
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
