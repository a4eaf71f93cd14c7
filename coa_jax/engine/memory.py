"""How much memory an engine takes, computed before any of it is allocated."""

from __future__ import annotations

import bisect
import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp

from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.model.config import ModelConfig
from coa_jax.model.weights import num_params


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of an engine.

    Attributes:
        parameters: of the decoding layout, which has an output head of its own.
        slot: keys and values of one slot.
        slots: how many there are.
        scratch: the largest of what its programs need besides while they run.
    """

    parameters: int
    slot: int
    slots: int
    scratch: int

    @property
    def cache(self) -> int:
        """Bytes of the keys and values of all slots."""
        return self.slot * self.slots

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.parameters + self.cache + self.scratch

    def __str__(self) -> str:
        """One line."""
        return (
            f"{_size(self.total)}: parameters {_size(self.parameters)}, cache {_size(self.cache)} "
            f"({self.slots} slots of {_size(self.slot)}), scratch {_size(self.scratch)}"
        )


def engine_memory(model: ModelConfig, config: EngineConfig) -> Memory:
    """Computes what an engine will take.

    Parameters and cache are exact; of the scratch only the big arrays are counted: copies of rows,
    scores and logits, not the activations between them.
    """
    item = jnp.dtype(config.dtype).itemsize
    table = model.vocab_size * model.hidden_size
    parameters = (num_params(model) + (table if model.tie_embeddings else 0)) * item
    slot = 2 * model.num_layers * model.num_kv_heads * config.max_length * model.head_dim * item
    longest = min(config.extend_buckets[-1], config.max_length)
    # Scores and weights in float32, beside the rows as they were and as they become.
    scores = 2 * 4 * config.extend_rows * model.num_heads * longest * config.max_length
    extend = 2 * config.extend_rows * slot + scores
    # Logits, scaled logits and weights in float32, and for top-p the sorted ones.
    decode = 4 * 4 * config.slots * model.vocab_size
    return Memory(parameters, slot, config.slots, max(extend, decode))


def free_memory(device: jax.Device) -> int | None:
    """Bytes that can still be allocated on a device; None where nobody says."""
    stats = None if device.platform == "cpu" else device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
    if device.platform != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def check_memory(model: ModelConfig, config: EngineConfig, free: int | None) -> None:
    """Refuses an engine that does not fit.

    Args:
        model: the architecture.
        config: its shapes.
        free: bytes that are free on its device, None for unknown.

    Raises:
        UserError: it takes more; the line says which setting makes it fit.
    """
    memory = engine_memory(model, config)
    if free is None or memory.total <= free:
        return

    def total(slots: int) -> int:
        return engine_memory(model, dataclasses.replace(config, slots=slots)).total

    fits = bisect.bisect_right(range(config.slots), free, key=total) - 1
    if fits >= 1:
        advice = f"set slots to {fits}"
    elif memory.parameters + memory.slot < free:
        advice = "lower extend_rows or the largest of extend_buckets"
    elif memory.parameters < free:
        advice = "lower max_length"
    else:
        advice = "take a smaller model"
    if config.dtype != "bfloat16":
        advice += ", or set dtype to bfloat16"
    raise UserError(f"the engine needs {memory}; {_size(free)} are free: {advice}")


def _size(count: float) -> str:
    """Bytes for people, in powers of ten."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = min(int(math.log10(max(count, 1))) // 3, len(units) - 1)
    return f"{count / 1000**power:.3g} {units[power]}"
