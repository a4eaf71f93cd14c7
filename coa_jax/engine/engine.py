"""The host side of decoding: starts and extends sequences, decodes chunks, discards overshoot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from coa_jax.engine import layout, programs
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.constraint import FREE, Constraint
from coa_jax.engine.memory import check_room
from coa_jax.engine.pages import PageTable
from coa_jax.errors import UserError
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig, warn_of_positions
from coa_jax.model.params import DecodeParams, Params
from coa_jax.parallel.turns import in_turn


class Engine:
    """Decoding over a fixed number of slots.

    The host mirrors lengths and newest tokens; the cache never leaves the device. Every method
    takes slot numbers: the caller decides which sequence runs in which slot.
    """

    def __init__(
        self,
        params: Params | DecodeParams,
        model: ModelConfig,
        config: EngineConfig,
        stop_tokens: Sequence[int] = (),
        constraint: Constraint | None = None,
        compute: Compute | None = None,
    ):
        """Allocates the cache.

        Args:
            params: see `publish`. The engine runs on their devices; several devices form one group,
                see `engine.layout`.
            model: the architecture.
            config: shapes of the engine.
            stop_tokens: tokens that end a sequence.
            constraint: which tokens may be sampled; None for all.
            compute: how the programs compute; None for the choice of `layout.engine_compute`.

        Raises:
            UserError: the engine needs more memory than is free, or its shapes contradict each
                other.
        """
        (platform,) = {d.platform for d in jax.tree.leaves(params)[0].devices()}
        config = config.on_platform(platform)
        check_shapes(config)
        warn_of_positions(model, config.max_length, "engine.max_length")
        self.model, self.config = model, config
        check_room(params, model, config, len(jax.tree.leaves(params)[0].devices()))
        if not isinstance(params, DecodeParams):
            (params,) = layout.publish(params, model, config)
        self.params = params
        self.compute = compute or layout.engine_compute(model, config, self.params)
        slots = config.slots
        self.length = np.zeros(slots, np.int32)
        self._token = np.zeros(slots, np.int32)
        self._limit = np.zeros(slots, np.int32)
        self._active = np.zeros(slots, bool)
        self._key = np.zeros((slots, 3), np.int32)
        self._temperature = np.ones(slots, np.float32)
        self._top_p = np.ones(slots, np.float32)
        self._top_k = np.zeros(slots, np.int32)
        self.constraint = constraint
        self._tables = None
        if constraint is not None:
            self._tables = jax.device_put(constraint.tables, layout.replicated(self.params))
        self._rule = np.full(slots, FREE, np.int32)
        self.stop_tokens = tuple(stop_tokens)
        self.extended_tokens = 0  # tokens that `extend` computed, padding included
        self.row_steps = 0  # sum over decode steps of their rows
        self.pages = PageTable(slots, config.pages_per_slot, config.page_size, config.pages)
        self._pages: Any = layout.new_pages(self.params, model, config, self.compute)

    def publish(self, params: Params | DecodeParams) -> None:
        """Replaces the parameters.

        Args:
            params: training parameters, whose devices form one group; or the copy that
                `layout.publish` made for the devices of this engine.
        """
        if not isinstance(params, DecodeParams):
            (params,) = layout.publish(params, self.model, self.config)
        self.params = params
        if self._pages is None:
            self._pages = layout.new_pages(params, self.model, self.config, self.compute)

    def give_back(self, places: DecodeParams) -> None:
        """Frees parameters and cache until the next `publish`; the slots must be free.

        Args:
            places: shapes and shardings of the parameters, which take their place.
        """
        self.params, self._pages = places, None

    def warm_up(self) -> None:
        """Compiles all programs, so that no later call waits for compilation.

        The slots must be free.
        """
        self.reserve(0, self.config.max_length)
        for size in self.config.extend_buckets:
            self._extend_blocks([(0, 0, [0])], size)
        self._copy_pages([])
        self.start(0, 1, last_token=0, limit=2, key=(0, 0, 0), sampling=SamplingParams())
        for rows in self.config.row_sizes:
            self.truncate(0, 1, 0)
            self._decode(np.zeros(1, np.int32), rows)
        self.release(0)
        self.extended_tokens = self.row_steps = 0

    def reserve(
        self, slot: int, positions: int, source: int | None = None, length: int = 0
    ) -> bool:
        """Reserves pages for a sequence in a slot; the slot's previous sequence is discarded.

        Args:
            slot: a free slot.
            positions: maximum length of the sequence.
            source: a slot whose sequence begins with the same ``length`` tokens. Whole pages of
                these tokens are shared; `fork` copies the rest. It may be the slot itself.
            length: see ``source``.

        Returns:
            Whether there are enough pages; always true unless slots share a pool of pages.
        """
        positions = min(positions, self.config.max_length)
        return self.pages.reserve(slot, positions, source, length)

    def release(self, slot: int) -> None:
        """Frees the pages of a sequence that has ended; its keys and values are lost."""
        self.pages.release(slot)

    def start(
        self,
        slot: int,
        prompt_length: int,
        *,
        last_token: int,
        limit: int,
        key: tuple[int, int, int],
        sampling: SamplingParams,
        protocol: str | None = None,
    ) -> None:
        """Starts a sequence in a slot; `extend` or `fork` has put its prompt into the cache.

        Args:
            slot: the slot.
            prompt_length: tokens of the prompt, at least 1.
            last_token: last token of the prompt.
            limit: length at which decoding stops, capped at ``max_length``.
            key: (seed, prompt id, sample id), signed 32-bit integers.
            sampling: temperature and truncation.
            protocol: protocol of the engine's constraint that the sequence must obey; None for
                none.
        """
        starts = {} if self.constraint is None else self.constraint.start
        self._rule[slot] = FREE if protocol is None else starts[protocol]
        self.length[slot] = prompt_length
        self._token[slot] = last_token
        self._limit[slot] = min(limit, self.config.max_length)
        if not self.pages.covers(slot, self._limit[slot]):
            raise RuntimeError(
                f"slot {slot} has no room for {self._limit[slot]} tokens: reserve it"
            )
        # NumPy integers would be truncated to 32 bits silently; Python integers raise an error.
        self._key[slot] = [np.int32(int(number)) for number in key]
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k

    def set_active(self, slot: int, active: bool) -> None:
        """Resumes decoding in a slot, or pauses it while its tool runs."""
        self._active[slot] = active

    def set_limit(self, slot: int, limit: int) -> None:
        """Changes the length at which a sequence stops.

        The reserved pages of the slot must cover the new length.
        """
        self._limit[slot] = min(limit, self.config.max_length)

    def truncate(self, slot: int, length: int, last_token: int) -> None:
        """Discards tokens beyond ``length``.

        Not for a constrained slot, which never samples beyond the end of a turn.

        Args:
            slot: the slot.
            length: new length of the sequence.
            last_token: the token at position ``length - 1``.
        """
        if self._rule[slot] != FREE and length != self.length[slot]:
            raise ValueError(f"slot {slot} is constrained: its tokens cannot be forgotten")
        self.length[slot] = length
        self._token[slot] = last_token

    def observe(self, slot: int) -> None:
        """Moves the constraint of a slot to the state after an observation, if the slot has one."""
        if self.constraint is not None:
            self._rule[slot] = self.constraint.observed[self._rule[slot]]

    def extend(self, feeds: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Prefills tokens into the cache; lengths grow to cover them.

        Args:
            feeds: (slot, start, tokens); the tokens take the positions from ``start`` on. ``start``
                is at most the slot's length. A sequence in progress is fed from ``length - 1``,
                because its newest token is not in the cache yet. A slot without pages gets pages
                for ``max_length``.
        """
        size = self.config.extend_block
        blocks: list[tuple[int, int, Sequence[int]]] = []
        for slot, start, tokens in feeds:
            end = start + len(tokens)
            if end > self.config.max_length:
                raise ValueError(f"slot {slot}: {end} tokens exceed {self.config.max_length}")
            self._cover(slot, end)
            blocks.extend(
                (slot, start + at, tokens[at : at + size]) for at in range(0, len(tokens), size)
            )
            self.length[slot] = end
            self._token[slot] = tokens[-1]
        buckets = self.config.extend_buckets
        while blocks:
            # Uses the largest program that can be filled, so that only the last one has padding.
            tokens_left = len(blocks) * size
            bucket = max((b for b in buckets if b <= tokens_left), default=buckets[0])
            self._extend_blocks(blocks[: bucket // size], bucket)
            del blocks[: bucket // size]

    def _extend_blocks(self, blocks: Sequence[tuple[int, int, Sequence[int]]], bucket: int) -> None:
        width, config = self.config.extend_block, self.config
        rows = bucket // width
        slots = np.zeros(rows, np.int32)
        tokens = np.zeros((rows, width), np.int32)
        positions = np.full((rows, width), config.pages_per_slot * config.page_size, np.int32)
        # Rows of similar lengths are adjacent, see `model.attention.paged.walk`.
        ordered = sorted(blocks, key=lambda block: block[1])
        for row, (slot, start, ids) in enumerate(ordered):
            slots[row] = slot
            tokens[row, : len(ids)] = ids
            positions[row, : len(ids)] = np.arange(start, start + len(ids))
        self._pages = in_turn(
            self.compute.mesh,
            programs.extend,
            self.params,
            self._pages,
            self.pages.table[slots],
            tokens,
            positions,
            config=self.model,
            compute=self.compute,
        )
        self.extended_tokens += bucket

    def fork(self, source: int, targets: Sequence[int], length: int) -> None:
        """Starts sequences with the first ``length`` tokens of another: one prefill for all.

        Args:
            source: slot of the other sequence.
            targets: slots of the new sequences; a slot without pages gets pages for ``max_length``.
            length: number of common tokens.
        """
        pairs: list[tuple[int, int]] = []
        for target in targets:
            if not self.pages.covers(target, length):
                self._reserved(self.reserve(target, self.config.max_length, source, length))
            pairs.extend(self.pages.copies(source, target, length))
            self.length[target] = length
        size = self._copy_rows
        for at in range(0, len(pairs), size):
            self._copy_pages(pairs[at : at + size])

    @property
    def _copy_rows(self) -> int:
        """Returns the number of pages that one copy program copies."""
        return min(self.config.slots, 8)

    def _copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        padded = np.zeros((2, self._copy_rows), np.int32)
        padded[1] = self.pages.pages  # outside the pool, so not copied
        padded[:, : len(pairs)] = np.asarray(pairs, np.int32).reshape(-1, 2).T
        self._pages = in_turn(
            self.compute.mesh,
            programs.copy_pages,
            self._pages,
            padded[0],
            padded[1],
            compute=self.compute,
        )

    def decode(self) -> programs.Chunk:
        """Decodes one chunk in the active slots; blocks until the result is on the host.

        Returns:
            The chunk as NumPy arrays over all slots. Slots whose sequence ended are inactive
            afterwards.
        """
        active = np.flatnonzero(self._active).astype(np.int32)
        active = active[np.argsort(self.length[active], kind="stable")]  # as in `extend`
        return self._decode(active, next(n for n in self.config.row_sizes if n >= active.size))

    def lower_decode(self) -> jax.stages.Lowered:
        """Lowers the largest decode program without compiling it, for inspection."""
        arguments, static = self._decode_arguments(np.zeros(0, np.int32), self.config.row_sizes[-1])
        return programs.decode_chunk.lower(*arguments, **static)

    def _decode_arguments(
        self, slots: np.ndarray, rows: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        padded = np.zeros(rows, np.int32)
        padded[: slots.size] = slots

        live: Any = np.arange(rows) < slots.size

        def of(values: np.ndarray) -> Any:
            # A JAX array would be placed on the first device, where an update may be running.
            return values[padded]

        state = programs.DecodeState(
            token=of(self._token),
            length=of(self.length),
            limit=of(self._limit),
            active=live,
            key=of(self._key),
            temperature=of(self._temperature),
            top_p=of(self._top_p),
            top_k=of(self._top_k),
            rule=None if self.constraint is None else of(self._rule),
        )
        arguments = (
            self.params,
            self._pages,
            self.pages.table[padded],
            state,
            np.asarray(self.stop_tokens or (-1,), np.int32),
            np.int32(self.config.chunk),
            self._tables,
        )
        return arguments, {
            "config": self.model,
            "capacity": max(self.config.chunk, 32),
            "compute": self.compute,
        }

    def _decode(self, slots: np.ndarray, rows: int) -> programs.Chunk:
        """Decodes a chunk of the given slots with the program of ``rows`` rows."""
        arguments, static = self._decode_arguments(slots, rows)
        decoded = in_turn(self.compute.mesh, programs.decode_chunk, *arguments, **static)
        self._pages, state, chunk = decoded
        chunk, length, token, rule = jax.device_get((chunk, state.length, state.token, state.rule))
        self.length[slots], self._token[slots] = length[: slots.size], token[: slots.size]
        if rule is not None:
            self._rule[slots] = rule[: slots.size]
        self.row_steps += rows * int(chunk.count.max(initial=0))
        whole = jax.tree.map(
            lambda part: np.zeros((self.config.slots, *part.shape[1:]), part.dtype), chunk
        )
        for everything, part in zip(whole, chunk, strict=True):
            everything[slots] = part[: slots.size]
        self._active = whole.active.copy()
        return whole

    def _cover(self, slot: int, positions: int) -> None:
        if not self.pages.covers(slot, positions):
            self._reserved(self.reserve(slot, self.config.max_length))

    def _reserved(self, there: bool) -> None:
        if not there:
            raise RuntimeError("no page is free; wait until Engine.reserve returns True")

    @property
    def any_active(self) -> bool:
        """Returns whether any slot is decoding."""
        return bool(self._active.any())


def check_shapes(config: EngineConfig) -> None:
    """Rejects shapes that contradict each other.

    Raises:
        UserError: shapes contradict each other; the message names them.
    """
    block, buckets = config.extend_block, config.extend_buckets
    ascending = list(buckets) == sorted(set(buckets))
    if not ascending or buckets[0] < block or any(b % block for b in buckets):
        raise UserError(
            f"extend_buckets are {', '.join(map(str, buckets))}; give ascending "
            f"multiples of extend_block, which is {block}"
        )
    if config.pages and config.pages < config.pages_per_slot:
        raise UserError(
            f"pages is {config.pages}, but a sequence of max_length {config.max_length} has "
            f"{config.pages_per_slot} pages of {config.page_size}; raise pages, or set it to 0"
        )
