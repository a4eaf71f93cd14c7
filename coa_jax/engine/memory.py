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
        page: keys and values of one page of the cache.
        pages: how many there are.
        scratch: the largest of what its programs need besides while they run.
    """

    parameters: int
    page: int
    pages: int
    scratch: int

    @property
    def cache(self) -> int:
        """Bytes of all keys and values."""
        return self.page * self.pages

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.parameters + self.cache + self.scratch

    def __str__(self) -> str:
        """One line."""
        return (
            f"{_size(self.total)}: parameters {_size(self.parameters)}, cache {_size(self.cache)} "
            f"({self.pages} pages of {_size(self.page)}), scratch {_size(self.scratch)}"
        )


def engine_memory(model: ModelConfig, config: EngineConfig) -> Memory:
    """Computes what an engine will take.

    Parameters and cache are exact; of the scratch only the big arrays are counted: a page of every
    row, scores, logits and the wide activations of a layer.
    """
    item = jnp.dtype(config.dtype).itemsize
    table = model.vocab_size * model.hidden_size
    parameters = (num_params(model) + (table if model.tie_embeddings else 0)) * item
    vectors = 2 * model.num_layers * model.num_kv_heads * config.page_size
    kept = jnp.dtype(config.cache_dtype or config.dtype)
    page = vectors * (model.head_dim * kept.itemsize + (4 if kept == jnp.int8 else 0))

    def attention(rows: int, width: int) -> int:
        read = 2 * 4 * rows * model.num_kv_heads * model.head_dim * config.page_size
        return read + 2 * 4 * rows * model.num_heads * width * config.page_size

    tokens, rows = config.extend_buckets[-1], config.row_sizes[-1]
    wide = 4 * tokens * (2 * model.intermediate_size + 4 * model.hidden_size)
    extend = attention(tokens // config.extend_block, config.extend_block) + wide
    # Logits, scaled logits and weights in float32, and for top-p the sorted ones.
    decode = attention(rows, 1) + 4 * 4 * rows * model.vocab_size
    return Memory(parameters, page, config.num_pages, max(extend, decode))


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

    def total(count: int) -> int:
        if config.pages:
            return engine_memory(model, dataclasses.replace(config, pages=count)).total
        return engine_memory(model, dataclasses.replace(config, slots=count)).total

    name, most = ("pages", config.pages) if config.pages else ("slots", config.slots)
    least = config.pages_per_slot if config.pages else 1
    fits = bisect.bisect_right(range(most), free, key=total) - 1
    one_slot = memory.parameters + memory.page * config.pages_per_slot
    if fits >= least:
        advice = f"set {name} to {fits}"
    elif one_slot < free:
        advice = "lower the largest of extend_buckets"
        advice += ", or slots" if config.pages else ""
    elif memory.parameters < free:
        advice = "lower max_length"
    else:
        advice = "take a smaller model"
    if config.dtype != "bfloat16":
        advice += ", or set dtype to bfloat16"
    elif config.cache_dtype != "int8":
        advice += ", or set cache_dtype to int8"
    raise UserError(f"the engine needs {memory}; {_size(free)} are free: {advice}")


def _size(count: float) -> str:
    """Bytes for people, in powers of ten."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = min(int(math.log10(max(count, 1))) // 3, len(units) - 1)
    return f"{count / 1000**power:.3g} {units[power]}"
