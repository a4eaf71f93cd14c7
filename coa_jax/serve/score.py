"""Log-probabilities of given tokens, for clients that ask for those of prompts or alternatives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.model.config import ModelConfig
from coa_jax.model.forward import forward, unembed
from coa_jax.model.weights import Params

TOP = 20
_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Scored:
    """A token in its context, at temperature 1.

    Attributes:
        id: the token.
        logp: its log-probability, natural; None for the first token of a text.
        rank: 1 for the most likely token; 0 where there is no probability.
        top: the likeliest ids with their log-probabilities, best first.
    """

    id: int
    logp: float | None
    rank: int
    top: tuple[tuple[int, float], ...]


def score(params: Params, config: ModelConfig, dtype: str, ids: Sequence[int]) -> list[Scored]:
    """Scores a text in one pass.  Texts are padded to a power of two, each compiled once."""
    length = max(_CHUNK, 1 << (len(ids) - 1).bit_length())
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(ids)] = ids
    found = jax.device_get(_score(params, tokens, config=config, dtype=dtype))
    logps, ranks, top, top_logps = (part[: len(ids) - 1] for part in found)
    scored = [Scored(int(ids[0]), None, 0, ())]
    for token, logp, rank, best, values in zip(ids[1:], logps, ranks, top, top_logps, strict=True):
        pairs = tuple(zip(best.tolist(), values.tolist(), strict=True))
        scored.append(Scored(int(token), float(logp), int(rank), pairs))
    return scored


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def _score(params: Params, tokens: jax.Array, *, config: ModelConfig, dtype: str) -> Any:
    positions = jnp.arange(tokens.shape[1])[None]
    hidden, _ = forward(params, config, tokens, positions, dtype=dtype)
    chunks = hidden[0].reshape(-1, _CHUNK, hidden.shape[-1])
    targets = jnp.roll(tokens[0], -1).reshape(-1, _CHUNK)

    def chunk(pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        logps = jax.nn.log_softmax(unembed(params, config, pair[0], dtype), axis=-1)
        own = jnp.take_along_axis(logps, pair[1][:, None], axis=-1)
        ranks = 1 + jnp.sum(logps > own, axis=-1)
        values, ids = jax.lax.top_k(logps, min(TOP, config.vocab_size))
        return own[:, 0], ranks, ids, values

    parts = jax.lax.map(chunk, (chunks, targets))
    return jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), parts)
