"""Slots on the host: admits sequences, extends them, decodes chunks, forgets overshoot."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.engine import programs
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.memory import check_memory, free_memory
from coa_jax.engine.sampling import sample_key
from coa_jax.model.config import ModelConfig
from coa_jax.model.forward import Cache, init_cache
from coa_jax.model.weights import Params, unstack_layers


class Engine:
    """Decoding over a fixed number of slots.

    The host mirrors lengths and newest tokens; the cache never leaves the device.  Every method
    works on slot numbers that the caller chooses: who runs where is the caller's business.
    """

    def __init__(
        self,
        params: Params,
        model: ModelConfig,
        config: EngineConfig,
        stop_tokens: Sequence[int] = (),
    ):
        """Allocates the cache.

        Args:
            params: stacked parameters, see `publish`.
            model: the architecture.
            config: shapes.
            stop_tokens: tokens that end a sequence.

        Raises:
            UserError: it needs more memory than is free.
        """
        self.model, self.config = model, config
        devices = jax.tree.leaves(params)[0].devices()
        if len(devices) == 1:
            check_memory(model, config, free_memory(*devices))
        self.publish(params)
        slots = config.slots
        self.length = np.zeros(slots, np.int32)
        self._token = np.zeros(slots, np.int32)
        self._limit = np.zeros(slots, np.int32)
        self._active = np.zeros(slots, bool)
        self._key = np.zeros((slots, 2), np.uint32)
        self._temperature = np.ones(slots, np.float32)
        self._top_p = np.ones(slots, np.float32)
        self._top_k = np.zeros(slots, np.int32)
        self.stop_tokens = tuple(stop_tokens)
        stop = np.asarray(self.stop_tokens or (-1,), np.int32)
        self._stop = np.broadcast_to(stop, (slots, stop.size))
        self.extended_tokens = 0  # computed by `extend` so far, padding included
        self._cache = _new_cache(self.params, model, config)

    def publish(self, params: Params) -> None:
        """Takes new training parameters over, in the decoding layout and dtype."""
        self.params = _publish(params, config=self.model, dtype=self.config.dtype)

    def warm_up(self) -> None:
        """Compiles all programs, so that no later call waits for that; the slots must be free."""
        for size in self.config.extend_buckets:
            self.extend([(0, 0, [0] * min(size, self.config.max_length))])
        self.fork(0, [0])
        self.start(0, 1, last_token=0, limit=2, key=(0, 0, 0), sampling=SamplingParams())
        self.set_active(0, True)
        self.decode()
        self.set_active(0, False)

    def start(
        self,
        slot: int,
        prompt_length: int,
        *,
        last_token: int,
        limit: int,
        key: tuple[int, int, int],
        sampling: SamplingParams,
    ) -> None:
        """Puts a sequence whose prompt is in the cache (by `extend` or `fork`) into a slot.

        Args:
            slot: the slot.
            prompt_length: tokens of the prompt, at least 1.
            last_token: the prompt's last token.
            limit: length at which decoding stops, capped at ``max_length``.
            key: (seed, prompt id, sample id).
            sampling: temperature and truncation.
        """
        self.length[slot] = prompt_length
        self._token[slot] = last_token
        self._limit[slot] = min(limit, self.config.max_length)
        self._key[slot] = np.asarray(sample_key(*key))
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k

    def set_active(self, slot: int, active: bool) -> None:
        """Lets a slot decode, or rest while its tool runs."""
        self._active[slot] = active

    def truncate(self, slot: int, length: int, last_token: int) -> None:
        """Forgets tokens beyond ``length``; ``last_token`` is the newest that stays."""
        self.length[slot] = length
        self._token[slot] = last_token

    def extend(self, feeds: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Writes tokens into caches; lengths grow to cover them.

        Args:
            feeds: (slot, start, tokens); the tokens take positions ``start ..``.  ``start`` is
                at most the slot's length: for a sequence in progress feed from ``length - 1``,
                because its newest token is not in the cache yet.
        """
        biggest = self.config.extend_buckets[-1]
        pieces = []
        for slot, start, tokens in feeds:
            if start + len(tokens) > self.config.max_length:
                raise ValueError(
                    f"slot {slot}: {start + len(tokens)} tokens exceed {self.config.max_length}"
                )
            pieces.append(
                [
                    (slot, start + at, tokens[at : at + biggest])
                    for at in range(0, len(tokens), biggest)
                ]
            )
            self.length[slot] = start + len(tokens)
            self._token[slot] = tokens[-1]
        # A long feed runs piece after piece: later positions attend to the earlier ones.
        while pieces:
            wave = [queue.pop(0) for queue in pieces]
            pieces = [queue for queue in pieces if queue]
            wave.sort(key=lambda piece: len(piece[2]))
            rows = self.config.extend_rows
            for at in range(0, len(wave), rows):
                self._extend_rows(wave[at : at + rows])

    def _extend_rows(self, feeds: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        longest = max(len(tokens) for _, _, tokens in feeds)
        bucket = next(size for size in self.config.extend_buckets if size >= longest)
        rows, size = self.config.extend_rows, self.config.max_length
        slots = np.full(rows, self.config.slots, np.int32)
        tokens = np.zeros((rows, bucket), np.int32)
        positions = np.full((rows, bucket), size, np.int32)
        for row, (slot, start, ids) in enumerate(feeds):
            slots[row] = slot
            tokens[row, : len(ids)] = ids
            positions[row, : len(ids)] = np.arange(start, start + len(ids))
        state = programs.extend(
            self.params,
            self._state(),
            slots,
            tokens,
            positions,
            config=self.model,
            dtype=self.config.dtype,
        )
        self._cache = state.cache
        self.extended_tokens += rows * bucket

    def fork(self, source: int, targets: Sequence[int]) -> None:
        """Copies a slot's cache into others: a group's samples share one prefill."""
        rows = self.config.extend_rows
        for at in range(0, len(targets), rows):
            padded = np.full(rows, self.config.slots, np.int32)
            part = targets[at : at + rows]
            padded[: len(part)] = part
            self._cache = programs.fork(self._state(), np.int32(source), padded).cache

    def decode(self) -> programs.Chunk:
        """Decodes one chunk in the active slots; blocks until it is there.

        Returns:
            The chunk as NumPy arrays.  Slots that ended are no longer active.
        """
        capacity = 32 if self.config.chunk <= 32 else self.config.chunk
        state, chunk = programs.decode_chunk(
            self.params,
            self._state(),
            np.int32(self.config.chunk),
            config=self.model,
            capacity=capacity,
            dtype=self.config.dtype,
        )
        self._cache = state.cache
        chunk, length, token = jax.device_get((chunk, state.length, state.token))
        self.length, self._token = length.copy(), token.copy()
        self._active = chunk.active.copy()
        return chunk

    @property
    def any_active(self) -> bool:
        """Whether a slot decodes."""
        return bool(self._active.any())

    def _state(self) -> programs.DecodeState:
        return programs.DecodeState(
            cache=self._cache,
            token=jnp.array(self._token),
            length=jnp.array(self.length),
            limit=jnp.array(self._limit),
            active=jnp.array(self._active),
            key=jnp.array(self._key),
            temperature=jnp.array(self._temperature),
            top_p=jnp.array(self._top_p),
            top_k=jnp.array(self._top_k),
            stop=jnp.array(self._stop),
        )


# Unless the parameters stay arguments, JAX does not tie the cache to their devices, and compiles a
# program anew that meets first a new cache and then one that a program has returned.
@functools.partial(jax.jit, static_argnames=("model", "config"), keep_unused=True)
def _new_cache(params: Params, model: ModelConfig, config: EngineConfig) -> Cache:
    """An empty cache on the devices of the parameters."""
    return init_cache(model, config.slots, config.max_length, config.dtype)


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def _publish(params: Params, config: ModelConfig, dtype: str) -> Params:
    """One compiled program from the training layout to the decoding layout."""
    return jax.tree.map(lambda x: x.astype(dtype), unstack_layers(params, config))
