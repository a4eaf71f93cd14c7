"""Computes log-probabilities of given tokens and of their alternatives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import DecodeParams

TOP = 20
_CHUNK = 64


@dataclasses.dataclass(frozen=True)
class Scored:
    """The log-probability of a token given the tokens before it.

    Attributes:
        id: id of the token.
        logp: natural log-probability of the token; None for the first token of a text.
        rank: rank of the token by probability, 1 for the most likely token; 0 if unknown.
        top: pairs (id, log-probability) of the most likely tokens, the most likely first; () if
            unknown.
    """

    id: int
    logp: float | None
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


def score(
    params: DecodeParams, config: ModelConfig, compute: Compute, ids: Sequence[int]
) -> list[Scored]:
    """Scores all tokens of a text in one forward pass, at temperature 1.

    The text is padded to a power of two, so that JAX compiles the pass for few lengths.

    Args:
        params: parameters in the layout for decoding.
        config: architecture of the model.
        compute: dtypes and implementations of the computation.
        ids: token ids of the text.
    """
    length = max(_CHUNK, 1 << (len(ids) - 1).bit_length())
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(ids)] = ids
    parts = jax.device_get(_score(params, tokens, config=config, compute=compute))
    logps, ranks, top, top_logps = (part[: len(ids) - 1] for part in parts)
    scored = [Scored(int(ids[0]), None)]
    for token, logp, rank, best, values in zip(ids[1:], logps, ranks, top, top_logps, strict=True):
        pairs = tuple(zip(best.tolist(), values.tolist(), strict=True))
        scored.append(Scored(int(token), float(logp), int(rank), pairs))
    return scored


@functools.partial(jax.jit, static_argnames=("config", "compute"))
def _score(
    params: DecodeParams, tokens: jax.Array, *, config: ModelConfig, compute: Compute
) -> Any:
    positions = jnp.arange(tokens.shape[1])[None]
    # The engine's attention implementation needs a KV cache, which this program does not have.
    compute = dataclasses.replace(compute, attention="xla")
    decoder, layers = params.bind(config)
    hidden, _ = decoder(tokens, positions, compute, layers=layers)
    chunks = hidden[0].reshape(-1, _CHUNK, hidden.shape[-1])
    targets = jnp.roll(tokens[0], -1).reshape(-1, _CHUNK)

    def chunk(pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        logps = jax.nn.log_softmax(decoder.logits(pair[0], compute), axis=-1)
        chosen = jnp.take_along_axis(logps, pair[1][:, None], axis=-1)
        ranks = 1 + jnp.sum(logps > chosen, axis=-1)
        values, ids = jax.lax.top_k(logps, min(TOP, config.vocab_size))
        return chosen[:, 0], ranks, ids, values

    parts = jax.lax.map(chunk, (chunks, targets))
    return jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), parts)
