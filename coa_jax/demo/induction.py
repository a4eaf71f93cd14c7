"""Initialises the first two layers with an induction circuit, so that the model can copy.

The main skill of a policy with tools is copying: a name from the question into a query, or a value
from an observation into the answer. Transformers copy by induction. One head writes to each
position the token of the position before. A head in a later layer attends to the position after the
last occurrence of the current token (Olsson et al. 2022, arXiv 2209.11895). From random initial
values this circuit takes millions of tokens to form, more than a run of minutes on a CPU can
afford. Therefore small policies that are trained from scratch start with the circuit. All values
remain trainable.

In layer 0, in the group of every key/value head, query head 0 attends one position back, and query
head 1 attends two positions back. Both heads read a dimension of the residual stream that is
constant for all tokens, because rotary positions turn a constant query and key into a function of
their distance.

Layer 1 finds the positions after earlier occurrences of the current token. At each position, the
key is the pair of preceding tokens, which the heads of layer 0 have written. The query is the pair
of the current token and the token before it. The value is the token at the position that is found;
the head writes this token to the residual stream, so that the model predicts it. Queries and keys
use the slow rotary dimensions, which hardly rotate with distance.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from coa_jax.errors import UserError
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Params
from coa_jax.model.rope import frequencies

_FAST = 12
"""Number of rotary pairs by which heads distinguish positions."""
_TURN = 2e-3
"""Maximum angle per position, in radians, of a rotary pair that can match distant content."""


def add_induction(params: Params, config: ModelConfig, seed: int) -> Params:
    """Returns parameters in which the first two layers have attention weights that copy text.

    These weights form an induction circuit: at a token that occurred before, the layers predict the
    token that followed the earlier occurrence.

    Args:
        params: parameters of a model, in which one array has the weights of all layers (stacked
            along the first axis). Each key/value head needs at least two query heads.
        config: architecture of the model. The circuit matches tokens by the rotary dimensions that
            hardly rotate with distance; a larger ``rope_theta`` gives more of these.
        seed: seed of the random projections.

    Raises:
        UserError: the architecture is too small for the circuit.
    """
    if config.num_groups < 2 or config.num_layers < 2 or config.head_dim < 4 * _FAST:
        raise UserError(
            "an induction circuit needs two layers, two query heads for each key/value head and "
            f"heads of {4 * _FAST} dimensions or more: change the policy's sizes or set "
            "induction to False"
        )
    rng = np.random.default_rng(seed)
    d, n, half = config.hidden_size, config.num_kv_heads, config.head_dim // 2
    slow = np.flatnonzero(np.asarray(frequencies(config)[0]) < _TURN)
    slow = np.concatenate([slow, slow + half])
    # The first half of the residual stream holds the token. The second half holds the two previous
    # tokens and, in its last dimension, the constant.
    tokens, size = d // 2, min((d - d // 2 - 1) // 2, config.head_dim)
    if len(slow) < 8 or size < len(slow):
        raise UserError(
            f"an induction circuit has {len(slow)} slow rotary dimensions and room for {size}: "
            "change rope_theta or hidden_size, or set induction to False"
        )
    embed = np.array(params["embed"]["embedding"])
    embed[:, tokens:] = 0.0
    # All tokens have the same norm, so that the constant is equal after normalisation. Otherwise
    # attention by distance would prefer some tokens.
    lengths = np.linalg.norm(embed, axis=1, keepdims=True)
    norm = float(np.sqrt(2.0) * lengths.mean())
    embed *= norm / lengths
    embed[:, -1] = norm / 2
    places = (slice(tokens, tokens + size), slice(tokens + size, tokens + 2 * size))
    attn = params["layers"]["attn"]
    qkv, out = np.array(attn["qkv"]["kernel"]), np.array(attn["out"]["kernel"])
    code = _orthonormal(rng, tokens, size)  # code by which a later position holds a token
    _previous_token_heads(config, qkv[0], out[0], code, places, norm / n)
    for head in range(n):
        _match_heads(qkv[1, :, head], out[1, head], code, places, slow, rng, norm / n)
    replaced = {
        ("embed", "embedding"): embed,
        ("layers", "attn", "qkv", "kernel"): qkv,
        ("layers", "attn", "out", "kernel"): out,
    }
    flat = flatten_dict(params)
    return unflatten_dict({path: jnp.asarray(replaced.get(path, x)) for path, x in flat.items()})


def _previous_token_heads(
    config: ModelConfig,
    qkv: np.ndarray,
    out: np.ndarray,
    code: np.ndarray,
    places: tuple[slice, slice],
    norm: float,
) -> None:
    """Sets layer 0, whose heads attend by distance and write the code of the token they find."""
    half, (tokens, size), key = config.head_dim // 2, code.shape, config.num_groups
    # The normalised constant is sqrt(D / 5), so every rotary pair of a query and a key has norm 7.
    sharpness = 7.0 * np.sqrt(5 / config.hidden_size)
    angles = np.asarray(frequencies(config)[0])[:_FAST]
    qkv[:], out[:] = 0.0, 0.0
    qkv[-1, :, key, :_FAST] = sharpness
    qkv[:tokens, :, key + 1, :size] = code[:, None]
    # A normalised token has norm sqrt(D), and its code has norm sqrt(D size / tokens).
    gain = norm / np.sqrt(config.hidden_size * size / tokens)
    for group, offset in enumerate((1, 2)):
        qkv[-1, :, group, :_FAST] = sharpness * np.cos(offset * angles)
        qkv[-1, :, group, half : half + _FAST] = -sharpness * np.sin(offset * angles)
        out[:, group, :size, places[group]] = gain * np.eye(size)


def _match_heads(
    qkv: np.ndarray,
    out: np.ndarray,
    code: np.ndarray,
    places: tuple[slice, slice],
    slow: np.ndarray,
    rng: np.random.Generator,
    norm: float,
) -> None:
    """Sets the heads of layer 1 that share a key/value head.

    These heads attend to the positions after earlier occurrences of a token, and write the tokens
    that they find there.
    """
    tokens, size = code.shape
    groups = qkv.shape[1] - 2
    key, value, width = groups, groups + 1, qkv.shape[-1]
    qkv[:], out[:] = 0.0, 0.0
    # Two thirds of the dimensions match the current token, the other third the token before it.
    split = 2 * len(slow) // 3
    first, second = _orthonormal(rng, size, split), _orthonormal(rng, size, len(slow) - split)
    strength = 1.6
    here, before = places
    qkv[here, key, slow[:split]] = strength * first
    qkv[before, key, slow[split:]] = strength * second
    qkv[:tokens, :groups, slow[:split]] = strength * (code @ first)[:, None]
    qkv[here, :groups, slow[split:]] = strength * second[:, None]
    basis = _orthonormal(rng, tokens, min(width, tokens))
    qkv[:tokens, value, : basis.shape[1]] = basis
    out[:, : basis.shape[1], :tokens] = basis.T * norm / 2


def _orthonormal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Returns a random matrix ``[rows, columns]`` with orthonormal columns."""
    return np.linalg.qr(rng.normal(size=(rows, max(columns, 1))))[0][:, :columns]
