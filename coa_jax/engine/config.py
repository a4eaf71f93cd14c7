"""What a caller chooses: the shapes of an engine, and how a sequence is sampled."""

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
    """How the tokens of a sequence are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus in (0, 1]; 1 keeps all.
        top_k: 0 keeps all.

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
        slots: sequences that are in progress at a time.
        max_length: S, positions of a slot; no sequence grows beyond it.
        chunk: tokens decoded between two visits of the host.
        extend_buckets: tokens of the programs that write prompts and observations, ascending; empty
            for those of the platform, see `on_platform`.
        extend_block: these programs take that many tokens of a sequence together; what a sequence
            has beyond a multiple is filled up with padding; 0 for that of the platform.
        dtype: of the operands of products.
        cache_dtype: of keys and values; empty for that of the products, ``int8`` for a byte and a
            factor for each head and position.
        page_size: positions of a page of the cache.
        pages: of a pool that all slots share, in which the samples of a prompt hold its whole pages
            once; 0 gives every slot pages of its own for ``max_length``.
        attention: implementation over the cache: ``auto`` or a name, see docs/kernels.md.
        decode_programs: at most how many programs decode, for all slots and for equal parts of
            them: of 4, one takes a quarter, the next one half, ..., in whole eights; the smallest
            that takes all slots that are not waiting is run.
        engines: that share one copy of the parameters, and work at the same time, each with an
            equal part of the slots (and of the pages): what one of them computes on a single core,
            or waits for, leaves the other cores to the rest; 0 for as many as pay, see
            `num_engines`.  It is `make_engines` that makes several.

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
        """With the extend_buckets and the extend_block of a platform where none are given.

        On CPUs there is a single bucket: larger programs read no faster (docs/findings.md).  The
        kernel of TPUs reads the pages of a sequence again for each of its blocks, so blocks are
        long there (docs/kernels.md).
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
        """How many engines take the slots of one device or of devices that make one group.

        Where none are asked for it is one; on CPUs, unless the slots share a pool of pages, one for
        each core, so long as it has 16 slots: products there take 16 rows at a time.
        """
        if self.engines or self.pages or platform != "cpu":
            return self.engines or 1
        # Not on every system can a process have fewer cores than there are.
        allowed = getattr(os, "sched_getaffinity", None)
        cores = len(allowed(0)) if allowed else os.cpu_count() or 1
        return max(1, min(cores, self.slots // 16))

    def share(self, engines: int) -> EngineConfig:
        """Of each of several engines."""
        slots = -(-self.slots // engines)
        # A pool stays a pool: 0 would be pages for each slot.
        pages = self.pages and max(1, self.pages // engines)
        return dataclasses.replace(self, slots=slots, pages=pages, engines=1)

    @property
    def pages_per_slot(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_length // self.page_size)

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        return self.pages or self.slots * self.pages_per_slot

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Rows of the decoding programs, ascending; the last takes all slots.

        A single slot has programs of one row, of which a step reads the weights fastest; two rows
        or more give a sequence the same bits, which one does not.  Parts are whole eights: fewer
        rows decode no faster, and attention on CPUs goes over eight sequences together.
        """
        if self.slots == 1:
            return (1,)
        count = self.decode_programs
        parts = {8 * -(-self.slots * part // (8 * count)) for part in range(1, count)}
        return (*sorted(rows for rows in parts if rows < self.slots), self.slots)
