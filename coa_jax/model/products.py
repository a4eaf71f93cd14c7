"""Products whose operands, and only they, are in the compute dtype."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def project(spec: str, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """``einsum(spec, x, w)`` with operands in ``dtype`` and a float32 result.

    In float32 the products are exact float32 on every platform; the default of TPUs and of
    GPUs with TF32 would round the operands.
    """
    return _einsum(spec, x.astype(dtype), w.astype(dtype))


def product(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """``einsum(spec, x, w)`` in the operands' dtype, accumulated and returned in float32."""
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, w, precision=exact, preferred_element_type=jnp.float32)


_einsum = jax.custom_vjp(product, nondiff_argnums=(0,))


def _einsum_fwd(
    spec: str, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Not by `_einsum`, into which policies of `model.remat` do not look.
    return product(spec, x, w), (x, w)


def _einsum_bwd(
    spec: str, operands: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    # Without this the backward products would mix a float32 cotangent with bfloat16 operands and
    # run at float32 speed; and on CPUs that of a weight would begin with a transposed copy of the
    # cotangent, which is mostly larger than x.
    x, w = operands
    inputs, out = spec.split("->")
    a, b = inputs.split(",")
    g = g.astype(x.dtype)
    dx = product(f"{out},{b}->{a}", g, w)
    dw = product(f"{a},{out}->{b}", x, g)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_einsum.defvjp(_einsum_fwd, _einsum_bwd)


_PARTS = 4
"""Into how many parts of its contracted axis the product of a single row falls on CPUs."""


class OutputMajor(NamedTuple):
    """A weight ``[..., K]``, whose outputs come first, for products of several rows on CPUs.

    XLA's CPU products of ``w [N, K]`` and few columns are half as long again as fast as those of
    few rows and ``[K, N]`` (docs/findings.md): the rows are what they rearrange first, and not
    the weight.
    """

    array: jax.Array


Weight = jax.Array | OutputMajor


def multiply(x: jax.Array, w: Weight, dtype: Any, contracted: int = 1) -> jax.Array:
    """``x [..., K]`` times a weight ``w [K, ...]``, float32 ``[..., ...]``, as `project` does it.

    Args:
        x: activations.
        w: weight.
        dtype: of the operands.
        contracted: axes of the weight that are K together.
    """
    if isinstance(w, OutputMajor):
        return _times_output_major(x, w.array, dtype, contracted)
    # As one contracted axis: einsum would sort several by their letters, and copy the weights into
    # that order in every call.
    w = w.reshape(-1, *w.shape[contracted:])
    kept, outputs = "abcdef"[: x.ndim - 1], "uvwxyz"[: w.ndim - 1]

    def whole(x: jax.Array, w: jax.Array) -> jax.Array:
        return project(f"{kept}k,k{outputs}->{kept}{outputs}", x, w, dtype)

    def in_parts(x: jax.Array, w: jax.Array) -> jax.Array:
        rows, blocks = x.reshape(_PARTS, 1, -1), w.reshape(_PARTS, w.shape[0] // _PARTS, -1)
        # As sums of two they are fused with what follows; a reduction is a pass of its own.
        summed = functools.reduce(jnp.add, tuple(project("pak,pku->pau", rows, blocks, dtype)))
        return summed.reshape(*x.shape[:-1], *w.shape[1:])

    # The product of a single row takes as long as reading the weight.  XLA shares a batch of
    # products out over the cores of a CPU, but not a lone one of a vector with few columns: there
    # the weight is read as a batch of blocks of its rows, and what they give is added.
    if x.size > x.shape[-1] or x.shape[-1] % _PARTS:
        return whole(x, w)
    result: jax.Array = jax.lax.platform_dependent(x, w, cpu=in_parts, default=whole)
    return result


_COLUMNS = 16, 64
"""Rows that `_times_output_major` takes together: where each is the one token of a sequence, and
where a sequence has several."""


def _times_output_major(x: jax.Array, w: jax.Array, dtype: Any, contracted: int) -> jax.Array:
    rows, outputs = x.reshape(-1, x.shape[-1]), w.shape[:-contracted]
    w = w.reshape(math.prod(outputs), -1)
    # The bits of a product depend on its shape.  Those of a sequence must not depend on how many
    # others are decoded or read beside it: all products have one shape, however many they are.
    size = _COLUMNS[x.ndim > 2 and x.shape[-2] > 1]

    def in_columns(rows: jax.Array, w: jax.Array) -> jax.Array:
        # Without the barriers XLA would swap the operands in place of transposing them.
        barrier = jax.lax.optimization_barrier
        padded = jnp.pad(rows, ((0, -len(rows) % size), (0, 0)))
        parts = [
            barrier(project("nk,kb->nb", w, barrier(padded[at : at + size].T), dtype)).T
            for at in range(0, len(padded), size)
        ]
        return jnp.concatenate(parts)[: len(rows)]

    def whole(rows: jax.Array, w: jax.Array) -> jax.Array:
        return project("bk,nk->bn", rows, w, dtype)

    if len(rows) == 1:  # as the only slot of an engine has it
        result = whole(rows, w)
    else:
        result = jax.lax.platform_dependent(rows, w, cpu=in_columns, default=whole)
    return result.reshape(*x.shape[:-1], *outputs)


def computed_once(x: jax.Array) -> jax.Array:
    """x, float32 ``[..., K]``, with a buffer of its own.

    XLA computes what is no product once more in each loop that reads it on CPUs, and drops its
    barriers before it forms loops.  A product with one is exact.
    """

    def product(x: jax.Array) -> jax.Array:
        return project("...k,kj->...j", x, jnp.eye(x.shape[-1], dtype=jnp.float32), jnp.float32)

    result: jax.Array = jax.lax.platform_dependent(x, cpu=product, default=lambda x: x)
    return result


@jax.custom_vjp
def row_sum(x: jax.Array) -> jax.Array:
    """Sums over the last axis, float32, in an order that does not depend on the other axes.

    That is what XLA's CPU products with a few columns of ones do, and its reductions do not: how
    they share a row's sum out depends on how many rows there are.  A sequence would depend, in its
    last bits, on how many others are decoded beside it.
    """
    # Four equal columns: one would be a matrix-vector product, and of eight XLA of jaxlib 0.12 sums
    # from 96 rows on in another order.
    ones = jnp.ones((x.shape[-1], 4), jnp.float32)
    return project("...d,dk->...k", x, ones, jnp.float32)[..., 0]


def _row_sum_fwd(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return row_sum(x), x


def _row_sum_bwd(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (jnp.broadcast_to(g[..., None], x.shape).astype(x.dtype),)


row_sum.defvjp(_row_sum_fwd, _row_sum_bwd)


def column_sum(x: jax.Array) -> jax.Array:
    """Sums ``[..., D]`` over all axes but the last, float32 ``[D]``.

    A product with ones on CPUs, where a sum fused with what it adds up takes twenty times as long.
    """
    flat = x.reshape(-1, x.shape[-1])

    def product(flat: jax.Array) -> jax.Array:
        ones = jnp.ones((8, flat.shape[0]), jnp.float32)
        return project("kt,td->kd", ones, flat, jnp.float32)[0]

    result: jax.Array = jax.lax.platform_dependent(
        flat, cpu=product, default=functools.partial(jnp.sum, axis=0)
    )
    return result
