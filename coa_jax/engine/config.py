"""Settings of decoding: the shapes of an engine, and how a sequence is sampled."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Annotated

from coa_jax.config.fields import (
    Between,
    Bounded,
    Count,
    Items,
    Natural,
    OneOf,
    Size,
    Temperature,
    TopP,
)
from coa_jax.errors import UserError
from coa_jax.model.attention.choice import implementations
from coa_jax.model.config import DTYPES


@dataclasses.dataclass(frozen=True)
class SamplingParams(Bounded):
    """Settings for sampling the tokens of a sequence.

    Attributes:
        temperature: sampling temperature; 0 samples greedily.
        top_p: probability mass of the nucleus, in (0, 1]; 1 keeps all tokens.
        top_k: number of most likely tokens that are kept; 0 keeps all tokens.

    Raises:
        UserError: a value is out of bounds.
    """

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Natural = 0


@dataclasses.dataclass(frozen=True)
class EngineConfig(Bounded):
    """Settings of an engine, which decodes sequences in a fixed number of slots.

    A slot is the space for one sequence in the KV cache. Each distinct configuration compiles its
    own programs.

    Attributes:
        slots: number of sequences in progress; 0 for as many as memory holds, at most the
            samples of an RL step or of an evaluation (`memory.fit_engine_config`).
        max_length: maximum number of tokens of a sequence (the positions of a slot).
        chunk: number of tokens that the device decodes for each sequence before control returns to
            the host.
        extend_buckets: sizes of the programs that prefill prompts and observations, in tokens per
            call, ascending. () uses the default of the platform, see `on_platform`.
        extend_block: number of consecutive tokens of a sequence in a row of a prefill program. With
            32, a program of size 512 has 16 rows, of one or several sequences. The last row of a
            sequence is padded. 0 uses the default of the platform.
        dtype: dtype of matmul operands; ``auto`` takes that of the platform, see `on_platform`.
        cache_dtype: dtype of keys and values in the cache; "" takes ``dtype``. ``int8`` stores one
            byte per number, and one scale per head and position.
        page_size: number of positions of a cache page.
        pages: number of pages of a pool that all slots share. A sequence holds pages for its
            present length, and the samples of a prompt store the prompt's full pages only once. 0
            gives every slot its own pages for ``max_length`` positions.
        attention: implementation of attention over the cache: ``auto``, or a name, see
            docs/kernels.md.
        decode_programs: maximum number of decoding programs, which differ in their number of rows.
            With 4, the programs have rows for a quarter, a half, three quarters, and all of the
            slots, rounded up to multiples of eight. Each chunk runs the smallest program with a row
            for each sequence that does not wait for a tool.
        engines: number of engines that share one copy of the parameters and work at the same time.
            The slots and the pages are divided equally among the engines. While one engine computes
            on a single core, or waits, the other engines use the other cores. 0 chooses the number
            automatically, see `num_engines`.

    Raises:
        UserError: a value is out of bounds.
    """

    slots: Annotated[int, Between(0, 2**24)] = 16
    max_length: Size = 1024
    chunk: Size = 8
    extend_buckets: Annotated[tuple[Count, ...], Items(0, 32)] = ()
    extend_block: Natural = 0
    dtype: Annotated[str, OneOf("auto", *DTYPES)] = "float32"
    cache_dtype: Annotated[str, OneOf("", *DTYPES, "int8")] = ""
    page_size: Size = 128
    pages: Natural = 0
    decode_programs: Annotated[int, Between(1, 64)] = 4
    attention: Annotated[str, OneOf("auto", *implementations("paged"))] = "auto"
    engines: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots and self.engines > self.slots:
            raise UserError(f"engines is {self.engines}; give at most slots, {self.slots}")

    def on_platform(self, platform: str) -> EngineConfig:
        """Returns the settings, with the platform's defaults for unset buckets, blocks and dtype.

        The dtype is float32 on CPUs and bfloat16 on accelerators.

        On CPUs, one bucket of 64 tokens is enough, because larger programs compute no more tokens
        per second. On accelerators, blocks are long, because the kernels read all pages of a
        sequence again for each block of the sequence (docs/kernels.md). A block is the largest
        power of two, up to the default of the platform, that divides all buckets.
        """
        widths = {"cpu": ((64,), 8), "tpu": ((128, 512), 128)}
        buckets, block = widths.get(platform, ((32, 128, 512), 32))
        buckets = self.extend_buckets or buckets
        block = self.extend_block or math.gcd(block, *buckets)
        dtype = self.dtype
        if dtype == "auto":
            dtype = "float32" if platform == "cpu" else "bfloat16"
        return dataclasses.replace(self, extend_buckets=buckets, extend_block=block, dtype=dtype)

    def num_engines(self, platform: str) -> int:
        """Returns the number of engines that share the slots of one device (or group of devices).

        If the setting ``engines`` is not 0, the number is this setting. If ``engines`` is 0:

        - on a CPU without a pool of pages (``pages`` is 0), the number is that of the cores. It is
          lower if an engine would otherwise have fewer than 16 slots, because matmuls on CPUs
          process 16 rows at a time;
        - in all other cases, the number is 1.
        """
        if self.engines or self.pages or platform != "cpu":
            return self.engines or 1
        # Only some systems can restrict a process to fewer cores than the machine has.
        allowed = getattr(os, "sched_getaffinity", None)
        cores = len(allowed(0)) if allowed else os.cpu_count() or 1
        return max(1, min(cores, self.slots // 16))

    def share(self, engines: int) -> EngineConfig:
        """Returns the settings of each engine if several engines divide slots and pages equally.

        The number of slots is rounded up. The number of pages is rounded down, but is at least 1 if
        there is a pool.

        Args:
            engines: number of engines.
        """
        slots = -(-self.slots // engines)
        # At least one page, because 0 would mean that every slot has its own pages.
        pages = self.pages and max(1, self.pages // engines)
        return dataclasses.replace(self, slots=slots, pages=pages, engines=1)

    def whole(self) -> EngineConfig:
        """Returns the settings without a shared pool of pages: fewer slots, each with own pages.

        The cache keeps about the same size. Every slot has pages for ``max_length`` positions, so
        no sequence ever has to free its pages for another one (`Engine.give_way`). There are at
        least two slots, because the results of an engine with one slot differ in the last bits from
        those of all others, see `row_sizes`.
        """
        if not self.pages:
            return self
        slots = min(self.slots, max(2, self.pages // self.pages_per_slot))
        return dataclasses.replace(self, slots=slots, pages=0)

    @property
    def pages_per_slot(self) -> int:
        """Number of cache pages that a sequence of ``max_length`` tokens needs."""
        return -(-self.max_length // self.page_size)

    @property
    def num_pages(self) -> int:
        """Number of pages in the KV cache: ``pages``, or, if 0, the pages of all slots."""
        return self.pages or self.slots * self.pages_per_slot

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Number of rows of each decoding program, ascending; the last program has a row per slot.

        The numbers are multiples of eight, because two to seven rows decode no faster than eight,
        and attention on CPUs processes eight sequences together. An engine with a single slot has
        a program with one row, which is faster. The results are bit-identical for any number of
        rows from two on, but differ for one row.
        """
        if self.slots == 1:
            return (1,)
        count = self.decode_programs
        parts = {8 * -(-self.slots * part // (8 * count)) for part in range(1, count)}
        return (*sorted(rows for rows in parts if rows < self.slots), self.slots)
