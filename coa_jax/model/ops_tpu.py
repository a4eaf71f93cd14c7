"""The operations of `model.ops`, some of them in a form that XLA for TPUs schedules better.

The figures in this module come from the compiler's schedule of a whole step (`perf.aot`), not
from a measurement on a chip. An operation is rewritten here only if the new form makes a step
shorter by 2 % or more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from coa_jax.model.ops import attend as attend
from coa_jax.model.ops import einsum as einsum
from coa_jax.model.ops import first_passed as first_passed
from coa_jax.model.ops import geglu as geglu
from coa_jax.model.ops import inverse_cdf as inverse_cdf
from coa_jax.model.ops import linear as linear
from coa_jax.model.ops import materialize as materialize
from coa_jax.model.ops import over_rows as over_rows
from coa_jax.model.ops import product as product
from coa_jax.model.ops import row_sum as row_sum
from coa_jax.model.ops import swiglu as swiglu

RowSum = Callable[[jax.Array], jax.Array]


@jax.custom_vjp
def matmul_sum(x: jax.Array) -> jax.Array:
    """Sums ``x [..., n]`` over the last axis in float32, by a matmul with ones."""
    # Use four equal columns: one column would be a matrix-vector product.
    ones = jnp.ones((x.shape[-1], 4), jnp.float32)
    return einsum("...d,dk->...k", x, ones, jnp.float32)[..., 0]


def row_sum_bwd(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    """Returns the gradient of x, given the gradient g of the sum of x over its last axis.

    The gradient of each term is that of its sum, so g is broadcast to the shape of x.
    """
    return (jnp.broadcast_to(g[..., None], x.shape).astype(x.dtype),)


matmul_sum.defvjp(lambda x: (matmul_sum(x), x), row_sum_bwd)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Computes the root-mean-square normalisation with matmuls in place of sums over a row.

    The gradient uses matmuls too; for the arguments see `ops.rms_norm`. A fine-tuning step of a 7B
    model on v5p:4x4x4 takes 34.5 s with matmuls and 35.5 s with reductions. A step of a 32B model
    on v5p:4x4x8 takes the same time either way.
    """
    return rms_norm_with(matmul_sum, eps, x.astype(jnp.float32), scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def rms_norm_with(row_sum: RowSum, eps: float, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Computes `rms_norm` of a float32 array, and its gradient, with a function that sums rows."""
    return x * _inverse_rms(row_sum, eps, x) * scale


def _inverse_rms(row_sum: RowSum, eps: float, x: jax.Array) -> jax.Array:
    return jax.lax.rsqrt(row_sum(x * x)[..., None] / x.shape[-1] + eps)


def _rms_norm_bwd(
    row_sum: RowSum, eps: float, saved: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, scale = saved
    inverse = _inverse_rms(row_sum, eps, x)
    x, scaled = x * inverse, g * scale
    dx = inverse * (scaled - x * (row_sum(scaled * x)[..., None] / x.shape[-1]))
    # The sum over rows is a matmul too: on CPUs a reduction that XLA fuses with the computation of
    # its terms takes twenty times as long.
    rows = (g * x).reshape(-1, x.shape[-1])
    d_scale = einsum("kt,td->kd", jnp.ones((8, len(rows)), jnp.float32), rows, jnp.float32)
    # All rows are equal. An index in place of the maximum makes the compiler of libtpu 0.0.42 fail
    # on meshes with the axes fsdp and tensor: the compiler merges the index with a reduce-scatter.
    return dx, jnp.max(d_scale, axis=0).astype(scale.dtype)


rms_norm_with.defvjp(lambda *args: (rms_norm_with(*args), args[2:]), _rms_norm_bwd)
