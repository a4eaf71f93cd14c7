"""The operations of the decoder in ordinary JAX, as textbooks write them.

Each backend is a module with these functions; `Compute.ops` is the module in use. The modules of
other backends define the operations that their compiler needs in another form, and import the
others from here. Matmuls take operands in the compute dtype and accumulate in float32. All other
operations compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.model.compute import Compute

# --- matmuls -------------------------------------------------------------------------------


def einsum(spec: str, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    """Computes ``einsum(spec, x, w)`` with operands in ``dtype`` and a float32 result.

    With ``dtype`` float32, operands are not rounded on any platform, although the default precision
    of TPUs (and of GPUs with TF32) would round them. The matmuls of the backward pass also take
    operands in ``dtype``. Without this rule, automatic differentiation would multiply float32
    cotangents by bfloat16 operands, at the speed of float32.

    Args:
        spec: subscripts of the einsum.
        x: first operand.
        w: second operand.
        dtype: dtype of the operands in the matmul.
    """
    return _einsum(spec, x.astype(dtype), w.astype(dtype))


def product(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Computes ``einsum(spec, x, w)`` in the operands' dtype, accumulated in float32.

    Args:
        spec: subscripts of the einsum.
        x: first operand.
        w: second operand, of the same dtype as the first.

    Returns:
        The result in float32.
    """
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, w, precision=exact, preferred_element_type=jnp.float32)


_einsum = jax.custom_vjp(product, nondiff_argnums=(0,))


def _einsum_bwd(
    spec: str, operands: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = operands
    inputs, out = spec.split("->")
    a, b = inputs.split(",")
    g = g.astype(x.dtype)
    dx = product(f"{out},{b}->{a}", g, w)
    dw = product(f"{a},{out}->{b}", x, g)
    return dx.astype(x.dtype), dw.astype(w.dtype)


# The forward pass calls `product` directly, because the policies of `model.remat` cannot see into a
# function with a custom VJP.
_einsum.defvjp(lambda spec, x, w: (product(spec, x, w), (x, w)), _einsum_bwd)


def linear(x: jax.Array, w: jax.Array, inputs: int, compute: Compute) -> jax.Array:
    """Multiplies activations by a weight matrix.

    Args:
        x: activations, ``[..., *in]``.
        w: weight matrix, ``[*in, *out]`` or in another order of the axes, see `KernelLayout`.
        inputs: number of axes of ``in``.
        compute: gives the dtype of the operands, and the order of the axes.

    Returns:
        The products, float32 ``[..., *out]``.
    """
    x = x.reshape(*x.shape[: x.ndim - inputs], -1)
    kept = "abcdef"[: x.ndim - 1]
    out = "uvwxyz"[: w.ndim - inputs]
    before = {"inputs_first": 0, "outputs_first": len(out), "matrices": len(out) - 1}
    at = before[compute.kernels]
    # Join the contracted axes to a single axis: with several axes, XLA may transpose the kernel
    # before each matmul.
    w = w.reshape(*w.shape[:at], -1, *w.shape[at + inputs :])
    return einsum(f"{kept}k,{out[:at]}k{out[at:]}->{kept}{out}", x, w, compute.dtype)


def attend(x: jax.Array, table: jax.Array, compute: Compute) -> jax.Array:
    """Computes logits with an output head that is tied to the embedding table.

    Args:
        x: hidden states, ``[..., hidden]``.
        table: embedding table, ``[vocab, hidden]``.
        compute: dtype of the operands.

    Returns:
        Logits, float32 ``[..., vocab]``.
    """
    return einsum("...d,vd->...v", x, table, compute.dtype)


# --- the rest of a layer -------------------------------------------------------------------


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Computes ``x / sqrt(mean(x^2) + eps) * scale`` over the last axis (arXiv 1910.07467 eq 4).

    Args:
        x: activations, ``[..., width]``.
        scale: learned factors, float32 ``[width]``.
        eps: number that is added to the mean square.

    Returns:
        The normalised activations, float32 ``[..., width]``.
    """
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def swiglu(gate_up: jax.Array) -> jax.Array:
    """Computes ``silu(gate) * up`` (arXiv 2002.05202 eq 6).

    The argument ``[..., 2, width]`` holds gate at index 0 and up at index 1; the result is float32
    ``[..., width]``.
    """
    gate, up = (gate_up[..., half, :].astype(jnp.float32) for half in (0, 1))
    return jax.nn.silu(gate) * up


def geglu(gate_up: jax.Array) -> jax.Array:
    """Computes ``gelu(gate) * up`` with the tanh approximation of GELU; otherwise like `swiglu`."""
    gate, up = (gate_up[..., half, :].astype(jnp.float32) for half in (0, 1))
    return jax.nn.gelu(gate, approximate=True) * up


# --- reductions over the vocabulary and over keys ------------------------------------------


def row_sum(x: jax.Array) -> jax.Array:
    """Sums ``x [..., n]`` over the last axis; returns float32 ``[...]``."""
    return jnp.sum(x, axis=-1, dtype=jnp.float32)


def materialize(x: jax.Array) -> jax.Array:
    """Returns x; the result is meant to be stored in memory and not recomputed.

    This implementation does nothing. A backend whose compiler fuses too many operations overrides
    it, so that the compiler stores x in a buffer of its own.
    """
    return x


def inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Samples one index per row from unnormalised weights, by inverting the distribution function.

    The result is the first index whose cumulative weight exceeds ``uniform`` times the total
    weight.

    Args:
        weights: weights of the tokens, float32 ``[batch, vocab]``, not negative.
        uniform: random numbers, float32 ``[batch]``, in [0, 1).

    Returns:
        Indices, int32 ``[batch]``. The weight at a returned index is never zero, unless all weights
        of the row are zero.
    """
    sums = jnp.cumsum(weights, axis=-1)
    return first_passed(sums, uniform * sums[:, -1], weights > 0)


def first_passed(sums: jax.Array, target: jax.Array, has_weight: jax.Array) -> jax.Array:
    """Returns, for each row, the first index with weight whose cumulative sum exceeds the target.

    If no sum exceeds the target, the result is the last index with weight. Indices without weight
    are skipped, because rounding may change a cumulative sum even where nothing is added.

    Args:
        sums: cumulative sums, float32 ``[batch, n]``.
        target: number that the sum must exceed, float32 ``[batch]``.
        has_weight: bool ``[batch, n]``, whether the weight of an index is above zero.

    Returns:
        Indices, int32 ``[batch]``.
    """
    passed = has_weight & (sums > target[:, None])
    last = sums.shape[1] - 1 - jnp.argmax(has_weight[:, ::-1], axis=-1)
    return jnp.where(passed.any(-1), jnp.argmax(passed, axis=-1), last)


def over_rows(function: Callable[..., jax.Array], *rows: jax.Array) -> jax.Array:
    """Computes ``function(*rows)``, where all arrays have one row per sequence (first axis).

    This implementation applies the function to all rows at once. A backend may apply it to a few
    rows at a time.
    """
    return function(*rows)
