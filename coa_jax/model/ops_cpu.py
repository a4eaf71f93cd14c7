"""The operations of `model.ops` in the form that XLA's CPU backend needs.

This module is used only on CPUs. There are two reasons for it:

- Reproducibility: XLA distributes a reduction or a matmul over the cores in a way that depends on
  the number of rows. The last bits of a sequence would then depend on how many sequences are
  decoded with it.
- Speed: the docstring of each function says which operation the compiler handles badly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.model import ops, ops_tpu
from coa_jax.model.compute import Compute
from coa_jax.model.ops import einsum as einsum
from coa_jax.model.ops import first_passed as first_passed
from coa_jax.model.ops import geglu as geglu
from coa_jax.model.ops import product as product

# --- matmuls -------------------------------------------------------------------------------

_TOKEN_ROWS, _BLOCK_ROWS = 16, 64
"""Number of rows of one matmul with an outputs-first kernel.

The first number holds if each row is the only new token of its sequence, the second number if
sequences have several new tokens.
"""


def linear(x: jax.Array, w: jax.Array, inputs: int, compute: Compute) -> jax.Array:
    """Multiplies activations by a weight matrix; for arguments and result see `ops.linear`."""
    if compute.kernels == "outputs_first":
        batch = x.shape[: x.ndim - inputs]
        x = x.reshape(*batch, -1)
        outputs = w.shape[: w.ndim - inputs]
        y = _outputs_first(x, w.reshape(math.prod(outputs), -1), compute.dtype)
        return y.reshape(*batch, *outputs)
    return ops.linear(x, w, inputs, compute)


def _outputs_first(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """Multiplies ``x [..., in]`` by ``w [out, in]``.

    Matmuls of ``[out, in]`` with few columns are 1.5 times as fast as matmuls of few rows with
    ``[in, out]``, because XLA rearranges the second operand, which is the small one here. The bits
    of a matmul depend on its shape, so all matmuls here have the same shape for any number of rows.
    """
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) == 1:  # the only slot of an engine, which needs no padding
        return einsum("bk,nk->bn", rows, w, dtype).reshape(*x.shape[:-1], -1)
    size = _BLOCK_ROWS if x.ndim > 2 and x.shape[-2] > 1 else _TOKEN_ROWS
    # Without the barriers XLA would swap the operands instead of transposing them.
    barrier = jax.lax.optimization_barrier
    padded = jnp.pad(rows, ((0, -len(rows) % size), (0, 0)))
    parts = [
        barrier(einsum("nk,kb->nb", w, barrier(padded[at : at + size].T), dtype)).T
        for at in range(0, len(padded), size)
    ]
    return jnp.concatenate(parts)[: len(rows)].reshape(*x.shape[:-1], -1)


def attend(x: jax.Array, table: jax.Array, compute: Compute) -> jax.Array:
    """Computes logits with tied weights; for arguments and result see `ops.attend`.

    If ``compute.kernels`` is ``outputs_first``, the table ``[vocab, hidden]``, whose output axis is
    the first one, is multiplied like the weight matrices of this layout, see `linear`.
    """
    if compute.kernels == "outputs_first":
        return _outputs_first(x, table, compute.dtype)
    return ops.attend(x, table, compute)


# --- sums ----------------------------------------------------------------------------------

_BLOCK = 128
"""Number of terms, or of weights in `inverse_cdf`, of one block of a row; a power of two."""


@jax.custom_vjp
def row_sum(x: jax.Array) -> jax.Array:
    """Sums ``x [..., n]`` over the last axis in float32, in the same order for any number of rows.

    The function adds the second half of each block of terms to the first half until one term is
    left, and then does the same with the sums of the blocks. These additions of whole arrays have
    the same order on every processor. The order of a reduction, or of a matmul with ones, is the
    compiler's choice: it depends on the number of rows and on the width of the vector registers.
    """
    x = x.astype(jnp.float32)
    while (size := x.shape[-1]) > 1:
        # The largest power of two that divides the size, up to 128. If it is below 8, a block has
        # 128 terms, or all terms of a shorter row, and zeros fill the last block.
        block = size & -size
        if block < 8:
            block = 1 << (size - 1).bit_length()
        block = min(block, _BLOCK)
        padding = [(0, 0)] * (x.ndim - 1) + [(0, -size % block)]
        x = jnp.pad(x, padding).reshape(*x.shape[:-1], -1, block)
        while (half := x.shape[-1] // 2) > 0:
            x = x[..., :half] + x[..., half:]
        # The barrier keeps the compiler from recomputing the sums of blocks in later operations.
        x = jax.lax.optimization_barrier(x[..., 0])
    return x[..., 0]


row_sum.defvjp(lambda x: (row_sum(x), x), ops_tpu.row_sum_bwd)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Computes the root-mean-square normalisation with `row_sum`; see `ops.rms_norm`."""
    return ops_tpu.rms_norm_with(row_sum, eps, x.astype(jnp.float32), scale)


@jax.custom_vjp
def materialize(x: jax.Array) -> jax.Array:
    """Stores x in a buffer of its own; the gradient of x gets no such buffer.

    Without the buffer, XLA would recompute elementwise operations in every fusion that uses their
    result, and would be slow where such a fusion contains a reduction.
    """
    return jax.lax.optimization_barrier(x)


materialize.defvjp(lambda x: (materialize(x), None), lambda _, g: (g,))


# --- SwiGLU --------------------------------------------------------------------------------


@jax.custom_vjp
def swiglu(gate_up: jax.Array) -> jax.Array:
    """Computes `ops.swiglu` with a gradient that stacks the gradients of gate and up.

    The automatic gradient pads the gradients of gate and up, and adds them. XLA for CPUs adds
    slowly in bfloat16: a fine-tuning step of SmolLM2-135M in bfloat16 takes 5.4 s with the
    automatic gradient, and 4.8 s with this one.
    """
    return ops.swiglu(gate_up)


def _swiglu_bwd(gate_up: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    gate, up = (gate_up[..., half, :].astype(jnp.float32) for half in (0, 1))
    share = jax.nn.sigmoid(gate)
    slope = 1 + gate * (1 - share)
    halves = (g * share * slope * up, g * share * gate)
    return (jnp.stack(halves, axis=-2).astype(gate_up.dtype),)


swiglu.defvjp(lambda gate_up: (swiglu(gate_up), gate_up), _swiglu_bwd)


# --- decoding ------------------------------------------------------------------------------

_GROUP = 8
"""Number of sequences per group in attention.

The pages of a group stay in the CPU cache from the copy to the matmuls, and no sequence is
processed beyond the longest sequence of its group.
"""


def inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Samples one index per row; see `ops.inverse_cdf` for arguments and result.

    Sums over blocks of the vocabulary find the block of the result; sums within this block then
    find the index. A cumulative sum over the whole vocabulary would be slow, and its bits would
    depend on the number of rows.
    """
    rows, vocab = weights.shape
    padded = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(rows, -1, _BLOCK)
    blocks = row_sum(padded)
    sums = jnp.cumsum(blocks, axis=-1)
    target = uniform * sums[:, -1]
    block = first_passed(sums, target, blocks > 0)
    lane = jnp.arange(rows)
    rest = target - jnp.where(block > 0, sums[lane, block - 1], 0.0)
    chosen = padded[lane, block]
    offset = first_passed(jnp.cumsum(chosen, axis=-1), rest, chosen > 0)
    return jnp.minimum(block * _BLOCK + offset, vocab - 1)


def over_rows(function: Callable[..., jax.Array], *rows: jax.Array) -> jax.Array:
    """Applies a function to eight sequences at a time, and joins the results.

    In attention this is faster, because the KV pages of eight sequences stay in the CPU's cache. If
    the number of sequences is not a multiple of eight, the function is applied to all of them at
    once. See `ops.over_rows` for the arguments.
    """
    count = len(rows[0])
    if count <= _GROUP or count % _GROUP:
        return function(*rows)
    groups = [x.reshape(-1, _GROUP, *x.shape[1:]) for x in rows]
    result: jax.Array = jax.lax.map(lambda group: function(*group), groups)
    return result.reshape(count, *result.shape[2:])
