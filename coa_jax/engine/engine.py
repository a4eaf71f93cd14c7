"""The host side of decoding: starts and extends sequences, and decodes chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from coa_jax.engine import layout, programs
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.constraint import FREE, Constraint
from coa_jax.engine.memory import check_room
from coa_jax.engine.meter import Meter
from coa_jax.engine.pages import PageTable
from coa_jax.errors import UserError
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig, warn_of_positions
from coa_jax.model.params import Adapted, DecodeParams, Params
from coa_jax.parallel.launch_order import launch_alone


class Engine:
    """Decodes sequences in a fixed number of slots, on one device or on a group of devices.

    A slot is the space for one sequence. The KV cache stays on the device; the host keeps the
    length and the newest token of every sequence. The caller decides which sequence runs in which
    slot, so methods about a sequence take the number of its slot. To generate text: reserve a slot,
    `extend` or `fork` the prompt into the cache, `start`, and call `decode` until the slot is
    inactive. `meter` holds times and counts.

    A sequence holds cache pages for its present length. If the slots share a pool of pages, the
    caller must call `grow` before `extend` and `decode`, and must release other slots if `grow`
    returns False.
    """

    def __init__(
        self,
        params: Params | Adapted | DecodeParams,
        model_config: ModelConfig,
        config: EngineConfig,
        stop_tokens: Sequence[int] = (),
        constraint: Constraint | None = None,
        compute: Compute | None = None,
    ):
        """Places the parameters and allocates the cache.

        Args:
            params: parameters, see `publish`. The engine runs on their devices; several devices
                form one group, see `engine.layout`.
            model_config: the architecture.
            config: shapes of the engine.
            stop_tokens: ids of the tokens that end a sequence.
            constraint: limits the tokens that may be sampled, or only detects the ends of turns
                (`rollout.constrain.constraint_or_ends`); None for neither.
            compute: dtype, operations and sharding of the programs; None for the choice of
                `layout.engine_compute`.

        Raises:
            UserError: the engine needs more memory than is free, or its shapes contradict each
                other.
        """
        (platform,) = {d.platform for d in jax.tree.leaves(params)[0].devices()}
        config = config.on_platform(platform)
        check_shapes(config)
        warn_of_positions(model_config, config.max_length, "engine.max_length")
        self.model, self.config = model_config, config
        check_room(params, model_config, config, len(jax.tree.leaves(params)[0].devices()))
        if not isinstance(params, DecodeParams):
            (params,) = layout.publish(params, model_config, config)
        self.params = params
        self.compute = compute or layout.engine_compute(model_config, config, self.params)
        slots = config.slots
        # The state of all slots, as NumPy arrays: JAX arrays would be placed on the first device,
        # where an update may be running.
        state: dict[str, Any] = {
            "token": np.zeros(slots, np.int32),
            "length": np.zeros(slots, np.int32),
            "limit": np.zeros(slots, np.int32),
            "active": np.zeros(slots, bool),
            "key": np.zeros((slots, 3), np.int32),
            "temperature": np.ones(slots, np.float32),
            "top_p": np.ones(slots, np.float32),
            "top_k": np.zeros(slots, np.int32),
            "rule": np.full(slots, FREE, np.int32),
        }
        self._state: Any = programs.DecodeState(**state)
        self.length: np.ndarray = state["length"]
        self.constraint, self._tables = constraint, None
        if constraint is not None:
            self._tables = jax.device_put(
                constraint.tables, layout.replicated_sharding(self.params)
            )
        self.stop_tokens = tuple(stop_tokens)
        self.meter = Meter()
        self.pages = PageTable(slots, config.pages_per_slot, config.page_size, config.pages)
        self._pages: Any = layout.new_pages(self.params, model_config, config, self.compute)

    def publish(self, params: Params | Adapted | DecodeParams) -> None:
        """Replaces the parameters of the engine.

        Args:
            params: training parameters that lie on all devices of this engine, and on no others; or
                a copy that `layout.publish` made for the devices of this engine.
        """
        if not isinstance(params, DecodeParams):
            (params,) = layout.publish(params, self.model, self.config)
        self.params = params
        if self._pages is None:
            self._pages = layout.new_pages(params, self.model, self.config, self.compute)

    def free_memory(self, places: DecodeParams) -> None:
        """Frees the memory of the engine's parameters and cache until the next `publish`.

        All slots must be free.

        Args:
            places: shapes and shardings of the parameters, which replace the arrays until then.
        """
        self.params, self._pages = places, None

    def warm_up(self) -> None:
        """Compiles all programs of the engine, so that no later call waits for a compilation.

        All slots must be free.
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
        self.restart()

    def restart(self) -> None:
        """Sets the engine's times and counts in `meter` to zero; all slots must be free."""
        self.meter = Meter()

    def reserve(
        self,
        slot: int,
        positions: int,
        source: int | None = None,
        length: int = 0,
        spare: int = 0,
    ) -> bool:
        """Reserves pages for a sequence in a slot, and discards the slot's previous sequence.

        Args:
            slot: a free slot.
            positions: present length of the sequence, including the prompt, in tokens.
            source: a slot whose first ``length`` tokens are also those of the new sequence; this
                may be ``slot`` itself. In a pool, both sequences then use the pages that the first
                ``length - 1`` of these tokens fill; `fork` copies the tokens of the last, partly
                filled page. None if the new sequence has no tokens in common with another.
            length: number of tokens that the two sequences have in common, see ``source``.
            spare: number of pages that must stay free.

        Returns:
            Whether there are enough free pages; always True unless the slots share a pool of pages.
        """
        positions = min(positions, self.config.max_length)
        return self.pages.reserve(slot, positions, source, length, spare)

    def grow(self, slot: int, positions: int) -> bool:
        """Gives the sequence in a slot enough cache pages for ``positions`` tokens.

        Returns:
            Whether there are enough free pages; if not, the sequence keeps the pages that it has.
        """
        return self.pages.grow(slot, min(positions, self.config.max_length))

    def reach(self, slot: int) -> int:
        """Returns the maximum number of tokens of a slot's sequence after the next chunk."""
        return int(min(self.length[slot] + self.config.chunk, self._state.limit[slot]))

    def release(self, slot: int) -> None:
        """Frees the pages of a sequence that has ended; the keys and values in them are lost."""
        self.pages.release(slot)

    def give_way(self, slot: int) -> int:
        """Interrupts a sequence, and frees its pages for other sequences.

        Returns:
            The state of the constraint. To continue the sequence later, put all of its tokens into
            the cache again with `extend`, and pass this state to `start` as ``rule``.
        """
        self.set_active(slot, False)
        self.release(slot)
        return int(self._state.rule[slot])

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
        rule: int | None = None,
    ) -> None:
        """Starts a sequence in a slot, after `extend` or `fork` has put its prompt into the cache.

        Args:
            slot: index of the slot.
            prompt_length: number of tokens of the prompt, at least 1.
            last_token: last token of the prompt.
            limit: length at which decoding stops, in tokens, including the prompt; at most
                ``max_length``.
            key: (seed, prompt id, sample id), three signed 32-bit integers from which the random
                key is derived.
            sampling: temperature and truncation.
            protocol: name of the protocol that constrains the sequence; the engine's constraint
                must include this protocol. None for no constraint.
            rule: state of the constraint that `give_way` returned, to continue an interrupted
                sequence; None for the first state of the protocol.
        """
        state, limit = self._state, min(limit, self.config.max_length)
        if rule is None:
            starts = {} if self.constraint is None else self.constraint.start
            rule = FREE if protocol is None else starts[protocol]
        state.rule[slot] = rule
        state.length[slot], state.token[slot], state.limit[slot] = prompt_length, last_token, limit
        # NumPy integers would be truncated to 32 bits silently; Python integers raise an error.
        state.key[slot] = [np.int32(int(number)) for number in key]
        state.temperature[slot] = sampling.temperature
        state.top_p[slot], state.top_k[slot] = sampling.top_p, sampling.top_k

    def set_active(self, slot: int, active: bool) -> None:
        """Resumes (``active`` True) or pauses decoding in a slot, for example while a tool runs.

        A paused slot keeps its sequence and its cache.
        """
        self._state.active[slot] = active
        if not self.any_active:
            self.meter.rest()

    def set_limit(self, slot: int, limit: int) -> None:
        """Changes the length, including the prompt, at which decoding of a sequence stops."""
        self._state.limit[slot] = min(limit, self.config.max_length)

    def truncate(self, slot: int, length: int, last_token: int) -> None:
        """Discards the tokens of a sequence beyond ``length``.

        Call this method only for sequences without a constraint, because the state of a constraint
        cannot go back to an earlier token. A constrained sequence never needs it: decoding stops
        such a sequence exactly at the end of a turn.

        Args:
            slot: index of the slot that holds the sequence.
            length: new length of the sequence, including the prompt.
            last_token: the token at position ``length - 1``.

        Raises:
            ValueError: the sequence has a constraint, and ``length`` is not its present length.
        """
        if self._state.rule[slot] != FREE and length != self.length[slot]:
            raise ValueError(f"slot {slot} is constrained: its tokens cannot be forgotten")
        self.length[slot], self._state.token[slot] = length, last_token

    def observe(self, slot: int) -> None:
        """Tells the constraint of a slot that an observation (text of a tool) has been appended.

        The policy may then write again, from the constraint's state after an observation. Without a
        constraint, the method does nothing.
        """
        if self.constraint is not None:
            rule = self._state.rule
            rule[slot] = self.constraint.observed[rule[slot]]

    def extend(self, feeds: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Prefills tokens into the cache, and waits until the device has finished.

        The length of each slot's sequence grows to include the new tokens.

        Args:
            feeds: tuples (slot, start, tokens). ``start`` is the position of the first of these
                tokens, and is at most the current length of the sequence. For a sequence in
                progress, ``start`` must be the current length minus 1. The first token must then be
                the newest token of the sequence, which is not in the cache yet.

        Raises:
            RuntimeError: too few pages are free; see `grow`.
            ValueError: a sequence would have more than ``max_length`` tokens.
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
            self._state.token[slot] = tokens[-1]
        buckets = self.config.extend_buckets
        with self.meter.clock("extend_s"):
            while blocks:
                # Use the largest program that the remaining tokens can fill, so that only the last
                # program has padding.
                tokens_left = len(blocks) * size
                bucket = max((b for b in buckets if b <= tokens_left), default=buckets[0])
                self._extend_blocks(blocks[: bucket // size], bucket)
                del blocks[: bucket // size]
            jax.block_until_ready(self._pages)

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
        self._pages = launch_alone(
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
        self.meter.extended_tokens += bucket

    def fork(self, source: int, targets: Sequence[int], length: int) -> None:
        """Puts the first ``length`` tokens of a sequence into more slots, without a new prefill.

        With it, a prompt that several samples share is prefilled only once.

        Args:
            source: slot of the sequence.
            targets: slots of new sequences that begin with the same tokens.
            length: number of these tokens.
        """
        pairs: list[tuple[int, int]] = []
        for target in targets:
            self._cover(target, length, source, length)
            pairs.extend(self.pages.copies(source, target, length))
            self.length[target] = length
        size = self._copy_rows
        with self.meter.clock("extend_s"):
            for at in range(0, len(pairs), size):
                self._copy_pages(pairs[at : at + size])
            jax.block_until_ready(self._pages)

    @property
    def _copy_rows(self) -> int:
        """The number of pages that one call of the copy program copies."""
        return min(self.config.slots, 8)

    def _copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        padded = np.zeros((2, self._copy_rows), np.int32)
        padded[1] = self.pages.pages  # outside the pool, so not copied
        padded[:, : len(pairs)] = np.asarray(pairs, np.int32).reshape(-1, 2).T
        self._pages = launch_alone(
            self.compute.mesh,
            programs.copy_pages,
            self._pages,
            padded[0],
            padded[1],
            compute=self.compute,
        )

    def decode(self) -> programs.Chunk:
        """Decodes one chunk in the active slots, and waits until the result is on the host.

        Returns:
            The decoded chunk, as NumPy arrays over all slots. After the call, a slot whose sequence
            has ended is inactive.
        """
        active = np.flatnonzero(self._state.active).astype(np.int32)
        active = active[np.argsort(self.length[active], kind="stable")]  # as in `extend`
        for slot in active.tolist():
            self._cover(slot, self.reach(slot))
        rows = next(n for n in self.config.row_sizes if n >= active.size)
        with self.meter.clock("decode_s"):
            chunk = self._decode(active, rows)
        self.meter.count_chunk(rows, chunk.count)
        return chunk

    def lower_decode(self) -> jax.stages.Lowered:
        """Lowers the largest decoding program to XLA, for inspection; does not compile it."""
        arguments, static = self._decode_arguments(np.zeros(0, np.int32), self.config.row_sizes[-1])
        return programs.decode_chunk.lower(*arguments, **static)

    def _decode_arguments(
        self, slots: np.ndarray, rows: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        padded = np.zeros(rows, np.int32)
        padded[: slots.size] = slots
        state = jax.tree.map(lambda values: values[padded], self._state)
        state = state._replace(active=np.arange(rows) < slots.size)
        if self.constraint is None:
            state = state._replace(rule=None)
        arguments = (
            self.params,
            self._pages,
            self.pages.table[padded],
            state,
            np.asarray(self.stop_tokens or (-1,), np.int32),
            np.int32(self.config.chunk),
            self._tables,
        )
        capacity = max(self.config.chunk, 32)
        return arguments, {"config": self.model, "capacity": capacity, "compute": self.compute}

    def _decode(self, slots: np.ndarray, rows: int) -> programs.Chunk:
        """Decodes a chunk in the given slots, with the program that has ``rows`` rows."""
        arguments, static = self._decode_arguments(slots, rows)
        decoded = launch_alone(self.compute.mesh, programs.decode_chunk, *arguments, **static)
        self._pages, state, chunk = decoded
        chunk, length, token, rule = jax.device_get((chunk, state.length, state.token, state.rule))
        self.length[slots], self._state.token[slots] = length[: slots.size], token[: slots.size]
        if rule is not None:
            self._state.rule[slots] = rule[: slots.size]
        whole = jax.tree.map(
            lambda part: np.zeros((self.config.slots, *part.shape[1:]), part.dtype), chunk
        )
        for everything, part in zip(whole, chunk, strict=True):
            everything[slots] = part[: slots.size]
        self._state.active[:] = whole.active
        return whole

    def _cover(self, slot: int, positions: int, source: int | None = None, length: int = 0) -> None:
        """Gives a slot the pages that it lacks; a slot without pages may share those of another."""
        if source is not None and not self.pages.covers(slot, 1):
            done = self.pages.reserve(slot, positions, source, length)
        else:
            done = self.pages.grow(slot, positions)
        if not done:
            raise RuntimeError("too few pages are free: wait until Engine.grow returns True")

    @property
    def any_active(self) -> bool:
        """Whether a sequence is being decoded in any slot of the engine."""
        return bool(self._state.active.any())


def check_shapes(config: EngineConfig) -> None:
    """Checks that the shapes of an engine do not contradict each other.

    Raises:
        UserError: two settings contradict each other; the message names them.
    """
    if not config.slots:
        raise UserError("slots is 0, which only RL and evaluations can choose: give a number")
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
