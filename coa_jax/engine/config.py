"""Settings of the caller: the shapes of an engine, and how a sequence is sampled."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Annotated

from coa_jax.bounds import Between, Bounded, Count, Items, Natural, OneOf, Size, Temperature, TopP
from coa_jax.errors import UserError
from coa_jax.model.attention.choice import implementations
from coa_jax.model.config import DTYPES


@dataclasses.dataclass(frozen=True)
class SamplingParams(Bounded):
    """How the tokens of a sequence are sampled.

    Attributes:
        temperature: sampling temperature; 0 is greedy.
        top_p: probability of the nucleus, in (0, 1]; 1 keeps all tokens.
        top_k: number of most likely tokens that are kept; 0 keeps all.

    Raises:
        UserError: a value is out of bounds.
    """

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Natural = 0


@dataclasses.dataclass(frozen=True)
class EngineConfig(Bounded):
    """Static shapes of the engine's programs; each distinct value compiles once.

    Attributes:
        slots: number of sequences in progress at a time.
        max_length: S, positions of a slot; no sequence grows beyond this length.
        chunk: number of tokens that the device decodes before control returns to the host.
        extend_buckets: lengths in tokens, ascending, of the programs that prefill prompts and
            observations; empty for the platform's default, see `on_platform`.
        extend_block: consecutive tokens of a sequence that a prefill program processes together.
            The last block of a sequence is padded. 0 for the platform's default.
        dtype: dtype of matmul operands.
        cache_dtype: dtype of keys and values in the cache; empty for ``dtype``. ``int8`` stores one
            byte per number and one scale per head and position.
        page_size: positions of a cache page.
        pages: pages of a pool that all slots share; the samples of a prompt store its whole pages
            once. 0 gives every slot its own pages for ``max_length``.
        attention: attention implementation over the cache: ``auto`` or a name, see docs/kernels.md.
        decode_programs: maximum number of decode programs, for different numbers of rows. With 4,
            the first decodes a quarter of the slots, the next one half, and so on, in multiples of
            eight. Each chunk runs the smallest program with room for all slots that are not
            waiting.
        engines: number of engines that share one copy of the parameters and work at the same time,
            each with an equal part of the slots (and of the pages). While one engine computes on a
            single core, or waits, the others use the other cores. 0 chooses the number, see
            `num_engines`; `make_engines` creates them.

    Raises:
        UserError: a value is out of bounds.
    """

    slots: Size = 16
    max_length: Size = 1024
    chunk: Size = 8
    extend_buckets: Annotated[tuple[Count, ...], Items(0, 32)] = ()
    extend_block: Natural = 0
    dtype: Annotated[str, OneOf(*DTYPES)] = "float32"
    cache_dtype: Annotated[str, OneOf("", *DTYPES, "int8")] = ""
    page_size: Size = 128
    pages: Natural = 0
    decode_programs: Annotated[int, Between(1, 64)] = 4
    attention: Annotated[str, OneOf("auto", *implementations("paged"))] = "auto"
    engines: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.engines > self.slots:
            raise UserError(f"engines is {self.engines}; give at most slots, {self.slots}")

    def on_platform(self, platform: str) -> EngineConfig:
        """Fills in the platform's extend_buckets and extend_block where they are not set.

        CPUs have a single bucket: a larger program computes no more tokens per second there. The
        TPU kernel reads the pages of a sequence again for each of its blocks, so blocks are long on
        TPUs (docs/kernels.md).
        """
        widths = {"cpu": ((64,), 8), "tpu": ((128, 512), 128)}
        buckets, block = widths.get(platform, ((32, 128, 512), 16))
        buckets = self.extend_buckets or buckets
        if platform == "tpu":
            block = math.gcd(block, *buckets)
        return dataclasses.replace(
            self, extend_buckets=buckets, extend_block=self.extend_block or block
        )

    def num_engines(self, platform: str) -> int:
        """Returns the number of engines that share the slots of one device or one device group.

        If ``engines`` is 0, the number is one. On CPUs, unless the slots share a pool of pages, it
        is one per core as long as each engine has 16 slots, since matmuls there process 16 rows at
        a time.
        """
        if self.engines or self.pages or platform != "cpu":
            return self.engines or 1
        # Only some systems can restrict a process to fewer cores than the machine has.
        allowed = getattr(os, "sched_getaffinity", None)
        cores = len(allowed(0)) if allowed else os.cpu_count() or 1
        return max(1, min(cores, self.slots // 16))

    def share(self, engines: int) -> EngineConfig:
        """Returns the configuration of each of several engines."""
        slots = -(-self.slots // engines)
        # At least one page, since 0 would mean separate pages for each slot.
        pages = self.pages and max(1, self.pages // engines)
        return dataclasses.replace(self, slots=slots, pages=pages, engines=1)

    @property
    def pages_per_slot(self) -> int:
        """Number of pages of the longest sequence."""
        return -(-self.max_length // self.page_size)

    @property
    def num_pages(self) -> int:
        """Number of pages of the cache."""
        return self.pages or self.slots * self.pages_per_slot

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Numbers of rows of the decode programs, ascending; the last has room for all slots.

        A single slot has programs of one row, whose steps read the weights fastest. The bits of a
        sequence are the same for any number of rows from two on, but differ for one row. Sizes are
        multiples of eight: fewer rows decode no faster, and attention on CPUs processes eight
        sequences together.
        """
        if self.slots == 1:
            return (1,)
        count = self.decode_programs
        parts = {8 * -(-self.slots * part // (8 * count)) for part in range(1, count)}
        return (*sorted(rows for rows in parts if rows < self.slots), self.slots)
