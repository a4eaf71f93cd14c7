"""Computes how much memory an engine needs on a device, before anything is allocated."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Adapted, DecodeParams, Params, num_params


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory that an engine takes, in bytes on each of its devices.

    Attributes:
        parameters: bytes of the parameters in the decoding layout, including a separate output
            head.
        page: bytes of one cache page, counting only the keys and values that lie on one device.
        pages: number of pages.
        scratch: bytes of temporary memory of the compiled program that needs the most.
    """

    parameters: int
    page: int
    pages: int
    scratch: int

    @property
    def cache(self) -> int:
        """Number of bytes of all keys and values on one device."""
        return self.page * self.pages

    @property
    def total(self) -> int:
        """Number of bytes of parameters, cache and scratch memory together, on one device."""
        return self.parameters + self.cache + self.scratch

    def __str__(self) -> str:
        """Describes the memory in one line."""
        return (
            f"{format_bytes(self.total)}: parameters {format_bytes(self.parameters)}, "
            f"cache {format_bytes(self.cache)} ({self.pages} pages of {format_bytes(self.page)}), "
            f"scratch {format_bytes(self.scratch)}"
        )


def engine_memory(model_config: ModelConfig, config: EngineConfig, tensor: int = 1) -> Memory:
    """Computes the memory that an engine will need.

    The sizes of parameters and cache are exact. The size of the scratch memory is an estimate that
    includes only large arrays: a page of every row, scores, logits, and the wide activations of a
    layer. With several devices, each device has all logits. Everything else except the cache is
    assumed to be sharded evenly, which neglects small replicated arrays such as norms.

    Args:
        model_config: the architecture.
        config: settings of the engine.
        tensor: number of devices of the engine's group.
    """
    config = config.on_platform(jax.default_backend())
    item = jnp.dtype(config.dtype).itemsize
    parameters = num_params(model_config) * item
    # Heads that cannot be sharded are replicated on all devices.
    heads = model_config.num_kv_heads // (1 if model_config.num_kv_heads % tensor else tensor)
    vectors = 2 * model_config.num_layers * heads * config.page_size
    kept = jnp.dtype(config.cache_dtype or config.dtype)
    page = vectors * (model_config.head_dim * kept.itemsize + (4 if kept == jnp.int8 else 0))

    def attention(rows: int, width: int) -> int:
        read = 2 * 4 * rows * model_config.num_kv_heads * model_config.head_dim * config.page_size
        return read + 2 * 4 * rows * model_config.num_heads * width * config.page_size

    tokens, rows = config.extend_buckets[-1], config.row_sizes[-1]
    wide = 4 * tokens * (2 * model_config.intermediate_size + 4 * model_config.hidden_size)
    extend = attention(tokens // config.extend_block, config.extend_block) + wide
    # Logits, scaled logits and weights in float32, and the sorted logits for top-p.
    logits = 4 * 4 * rows * model_config.vocab_size
    scratch = max(-(-extend // tensor), -(-attention(rows, 1) // tensor) + logits)
    return Memory(-(-parameters // tensor), page, config.num_pages, scratch)


def fit_engine_config(
    config: EngineConfig,
    model_config: ModelConfig,
    platform: str,
    samples: int,
    longest: int,
    free: int | None,
    tensor: int = 1,
) -> EngineConfig:
    """Returns the settings of an engine, fitted to given samples and to this machine.

    No shape is larger than in ``config``. The cache fits in memory, no slot stays empty for the
    whole run, and no slot is longer than the longest sample. If memory cannot hold the longest
    sample in every slot, the slots share as many pages as fit, because most samples are shorter. On
    CPUs, ``extend_buckets`` (the sizes of prefill) and ``chunk`` (the decoding steps of a call) are
    at most the defaults of the platform, because larger programs are no faster there. The choice
    changes no trajectory: a single slot, whose results differ in the last bits, is never chosen.

    Args:
        config: settings of the engine, with the largest allowed shapes; if ``slots`` is 0, at most
            64 slots are allowed on CPUs and 256 on accelerators.
        model_config: the architecture.
        platform: JAX platform, such as ``cpu``.
        samples: number of samples to decode.
        longest: maximum number of tokens of a sample.
        free: number of free bytes on each device of the engine; None if unknown.
        tensor: number of devices of the engine's group.
    """
    # An engine with a single slot has other programs, whose sums differ in their last bits.
    most = config.slots or (64 if platform == "cpu" else 256)
    slots = min(most, max(samples, 2))
    fit = dataclasses.replace(config, slots=slots, max_length=min(config.max_length, longest))
    if config.pages:
        pages = min(config.pages, slots * fit.pages_per_slot)
        fit = dataclasses.replace(fit, pages=pages)
    if platform == "cpu":
        theirs = dataclasses.replace(config, extend_buckets=(), extend_block=0).on_platform("cpu")
        small = max(fit.extend_buckets, default=0) <= max(theirs.extend_buckets)
        fit = dataclasses.replace(
            fit,
            extend_buckets=fit.extend_buckets if small else (),
            extend_block=fit.extend_block if small else 0,
            chunk=min(fit.chunk, 8),
        )
    if free is not None and not config.pages and _total(model_config, fit, tensor) > free:
        least, most = fit.pages_per_slot, slots * fit.pages_per_slot
        counts = range(1, slots + 1)  # scratch memory grows with the slots
        taken = bisect.bisect_right(
            counts, free, key=lambda n: _total(model_config, fit, tensor, slots=n, pages=least)
        )
        fit = dataclasses.replace(fit, slots=max(min(slots, 2), taken))
        fitting = bisect.bisect_right(
            range(least, most), free, key=lambda n: _total(model_config, fit, tensor, pages=n)
        )
        fit = dataclasses.replace(fit, pages=least + max(fitting - 1, 0))
    return dataclasses.replace(fit, engines=min(fit.engines, fit.slots))


def describe_fit(asked: EngineConfig, fit: EngineConfig) -> str:
    """Describes, for a log line, the slots, positions and chunk that `fit_engine_config` chose.

    Args:
        asked: the settings before `fit_engine_config`.
        fit: the settings that `fit_engine_config` returned.
    """
    names = {"slots": "slots", "max_length": "positions", "chunk": "tokens a chunk"}
    parts = []
    for name, what in names.items():
        most, count = getattr(asked, name), getattr(fit, name)
        parts.append(f"{count:,} {what}" if most in (0, count) else f"{count:,} of {most:,} {what}")
    if fit.pages != asked.pages:
        parts.append(f"{fit.pages:,} pages of {fit.page_size} positions that the slots share")
    if fit.extend_buckets != asked.extend_buckets:
        parts.append("extend buckets of the CPU")
    fewer = " (as many as this run and machine can use)" if fit != asked else ""
    return ", ".join(parts) + fewer


def describe_waves(samples: int, places: int, engines: int) -> str:
    """Describes in how many waves the samples of a step are decoded, for a log line.

    Args:
        samples: number of samples of a step.
        places: number of slots on all devices together.
        engines: number of device groups, each of which has the same number of slots.
    """
    count, slots = -(-samples // places), -(-samples // engines)
    text = f"{samples:,} samples a step, {places:,} at a time: {count:,} wave{'s' * (count > 1)}"
    return text + (f"; engine.slots={slots} makes one" if count > 1 else "")


def _total(model_config: ModelConfig, config: EngineConfig, tensor: int, **other: Any) -> int:
    """Returns the bytes of an engine with changed settings, such as another number of slots."""
    return engine_memory(model_config, dataclasses.replace(config, **other), tensor).total


def free_memory(device: jax.Device) -> int | None:
    """Returns the number of bytes that can still be allocated on a device.

    The result is None if the platform does not report the number.
    """
    if device.platform != "cpu":
        stats = device.memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else int(limit) - int(stats["bytes_in_use"])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
    return min([free, *free_in_groups(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def free_in_groups(listing: Path, mounted: Path) -> Iterator[int]:
    """Yields the number of free bytes under each memory limit of this process's cgroups.

    Container runtimes set such limits.

    Args:
        listing: path of the file that lists the cgroups of this process.
        mounted: directory where the cgroup file systems (versions 1 and 2) are mounted.
    """
    for line in listing.read_text().splitlines() if listing.exists() else ():
        _, controllers, path = line.split(":", 2)
        top, maximum, usage, cache = mounted, "memory.max", "memory.current", "inactive_file"
        if "memory" in controllers.split(","):
            top, maximum = mounted / "memory", "memory.limit_in_bytes"
            usage, cache = "memory.usage_in_bytes", "total_inactive_file"
        elif controllers:
            continue
        group = top / path.lstrip("/")
        # Inside a container, the listing may show the path on the host, while the mount is that of
        # the container.
        for directory in (group, *group.parents):
            if not directory.is_relative_to(top):
                break
            with contextlib.suppress(OSError, ValueError):  # "max", or not in this namespace
                limit = int((directory / maximum).read_text())
                used = int((directory / usage).read_text())
                kept = dict(map(str.split, (directory / "memory.stat").read_text().splitlines()))
                yield max(0, limit - used + int(kept.get(cache, 0)))


def check_room(
    params: Params | Adapted | DecodeParams,
    model_config: ModelConfig,
    config: EngineConfig,
    tensor: int,
    places: Sequence[Sharding | DecodeParams] = (),
) -> None:
    """Checks that an engine fits in the memory of the devices that will run it.

    Args:
        params: training parameters that will be copied; or parameters that are already allocated:
            the copy, or training parameters with a shared base.
        model, config: the architecture, and the settings of the engine.
        tensor: number of devices of the engine's group.
        places: shardings of the engines' parameters on devices that are reserved for rollouts; each
            of these devices must hold two copies, see `engine.group.new_copies`. () if the engine
            runs on the devices of ``params``.

    Raises:
        UserError: the engine does not fit, see `check_memory`.
    """
    jax.block_until_ready(params)  # otherwise they may not be allocated yet
    devices = jax.tree.leaves(params)[0].sharding.addressable_devices
    if places:
        devices = {d for sharding in jax.tree.leaves(places) for d in sharding.addressable_devices}
    free = [count for count in map(free_memory, devices) if count is not None]
    # All CPU devices have the same memory.
    shared = len(devices) if any(device.platform == "cpu" for device in devices) else 1
    published = isinstance(params, DecodeParams | Adapted)
    least = min(free) // shared if free else None
    check_memory(model_config, config, least, tensor, published=published, twice=bool(places))


def check_memory(
    model_config: ModelConfig,
    config: EngineConfig,
    free: int | None,
    tensor: int = 1,
    *,
    published: bool = False,
    twice: bool = False,
) -> None:
    """Checks that an engine fits in the free memory of its devices.

    Args:
        model_config: the architecture.
        config: settings of the engine.
        free: number of free bytes on each of the engine's devices; None if unknown, which skips the
            check.
        tensor: number of devices of the engine's group.
        published: whether the parameters are already allocated.
        twice: whether new parameters must fit in memory in addition to the old parameters.

    Raises:
        UserError: the engine does not fit; the message names a setting with which it fits.
    """
    memory = engine_memory(model_config, config, tensor)
    if free is None:
        return
    free += memory.parameters * (published - twice)
    if memory.total <= free:
        return
    name, most = ("pages", config.pages) if config.pages else ("slots", config.slots)
    least = config.pages_per_slot if config.pages else 1
    fits = bisect.bisect_right(
        range(1, most),
        free,
        key=lambda count: _total(model_config, config, tensor, **{name: count}),
    )
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
    elif config.cache_dtype != "int8" and jax.default_backend() == "cpu":
        # On accelerators no kernel reads such a cache (docs/kernels.md).
        advice += ", or set cache_dtype to int8"
    each = f" on each of {tensor} devices" if tensor > 1 else ""
    taken = " or hold its parameters already" if published else ""
    taken += " beside new parameters while it is given them" if twice else ""
    there = format_bytes(max(free, 0))
    raise UserError(f"the engine needs {memory}{each}; {there} are free{taken}: {advice}")


def format_bytes(count: float) -> str:
    """Formats a number of bytes as text with a decimal unit, such as ``1.5 GB``."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = min(int(math.log10(max(count, 1))) // 3, len(units) - 1)
    return f"{count / 1000**power:.3g} {units[power]}"
