"""The output head on chunks of positions, whose logits exist for one chunk at a time.

Shape letters: K chunks, R rows, C positions of a row in a chunk, D hidden, V vocabulary.  Only the
first ``live`` chunks are computed, in both passes.  A loop whose length is data has no gradient in
JAX, so both functions have their own: each chunk is differentiated by `jax.vjp`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from coa_jax.engine.constraint import allowed_tokens
from coa_jax.model.compute import Compute


@dataclasses.dataclass(frozen=True)
class Head:
    """The static choices of a head.

    Attributes:
        compute: how to compute.
        tied: whether the weight is the embedding table ``[V, D]`` and not a kernel ``[D, V]``.
        temperature: divides the logits.
        entropy: whether entropies are wanted; else they come out as 0.
    """

    compute: Compute
    tied: bool
    temperature: float = 1.0
    entropy: bool = False

    def chunk(
        self,
        hidden: jax.Array,
        weight: jax.Array,
        targets: jax.Array,
        rules: jax.Array | None = None,
        allowed: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities and entropies of one chunk, float32 ``[R, C]``; see `score`."""
        ops = self.compute.ops
        spec = "rcd,vd->rcv" if self.tied else "rcd,dv->rcv"
        z = ops.einsum(spec, hidden, weight, self.compute.dtype)
        z = ops.materialize(self.compute.constrain(z, "batch", None, "vocab"))
        may = None
        if rules is not None and allowed is not None:
            may = allowed_tokens(allowed, rules, z.shape[-1])
        # Relative to the largest, so that a low temperature makes no difference inexact.
        largest = jnp.max(z, axis=-1, keepdims=True, where=may, initial=-jnp.inf)
        z = (z - jax.lax.stop_gradient(largest)) / self.temperature
        powers = jnp.exp(z) if may is None else jnp.where(may, jnp.exp(z), 0.0)
        powers = ops.materialize(powers)
        total = ops.row_sum(powers)
        # A sum and not an index: the gradient is then a comparison that XLA fuses, not a scatter.
        own = jnp.sum(jnp.where(targets[..., None] == jnp.arange(z.shape[-1]), z, 0.0), axis=-1)
        if may is not None:
            own = jnp.where(jnp.take_along_axis(may, targets[..., None], -1)[..., 0], own, -jnp.inf)
        logp, entropy = own - jnp.log(total), jnp.zeros_like(total)
        if self.entropy:
            # Neither term is below 0, so nothing cancels where one token has all of the mass.
            weighted = powers * (z if may is None else jnp.where(may, z, 0.0))
            entropy = jnp.log(total) - ops.row_sum(ops.materialize(weighted)) / total
        return logp, entropy


def _at(x: Any, k: jax.Array) -> Any:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, k, keepdims=False), x)


def _put(x: jax.Array, value: jax.Array, k: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), k, 0)


# --- log-probabilities and entropies -------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def score(
    head: Head,
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    rules: jax.Array | None,
    allowed: jax.Array | None,
    live: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of targets, and entropies.

    Args:
        head: static.
        hidden: ``[K, R, C, D]``.
        weight: ``[V, D]`` or ``[D, V]``, see `Head`.
        targets: int32 ``[K, R, C]``.
        rules: int32 ``[K, R, C]``, states of a constraint; None without one.
        allowed: table of the constraint.
        live: number of chunks to compute; the others come out as 0.

    Returns:
        Two float32 ``[K, R, C]``.
    """
    weight = weight.astype(head.compute.dtype)

    def body(k: jax.Array, out: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        h, y, rule = _at((hidden, targets, rules), k)
        values = head.chunk(h, weight, y, rule, allowed)
        return tuple(_put(x, value, k) for x, value in zip(out, values, strict=True))

    zeros = jnp.zeros(targets.shape, jnp.float32)
    logp, entropy = jax.lax.fori_loop(0, live, body, (zeros, zeros))
    return logp, entropy


def _score_fwd(head: Head, *arguments: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    return score(head, *arguments), arguments


def _score_bwd(head: Head, saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    hidden, weight, targets, rules, allowed, live = saved
    cast = weight.astype(head.compute.dtype)

    def body(k: jax.Array, out: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h, y, rule, slopes = _at((hidden, targets, rules, cotangents), k)
        _, pull = jax.vjp(lambda h, w: head.chunk(h, w, y, rule, allowed), h, cast)
        dh, dw = pull(slopes)
        return _put(out[0], dh, k), out[1] + dw

    start = (jnp.zeros_like(hidden), jnp.zeros(weight.shape, jnp.float32))
    d_hidden, d_weight = jax.lax.fori_loop(0, live, body, start)
    return d_hidden, d_weight.astype(weight.dtype), None, None, None, None


score.defvjp(_score_fwd, _score_bwd)


# --- sums with constant weights ------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_sum(
    head: Head,
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    factors: jax.Array,
    live: jax.Array,
) -> jax.Array:
    """Sum of ``factors [K, R, C]``, constants, times log-probabilities; else as in `score`.

    The gradient is computed with the value, from the same logits.
    """
    logp, _ = score(head, hidden, weight, targets, None, None, live)
    return jnp.sum(logp * factors)


def _weighted_fwd(head: Head, *arguments: Any) -> tuple[jax.Array, Any]:
    hidden, weight, targets, factors, live = arguments
    cast = weight.astype(head.compute.dtype)

    def body(k: jax.Array, out: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        h, y, factor = _at((hidden, targets, factors), k)
        value, pull = jax.vjp(lambda h, w: jnp.sum(head.chunk(h, w, y)[0] * factor), h, cast)
        dh, dw = pull(jnp.ones_like(value))
        return out[0] + value, _put(out[1], dh, k), out[2] + dw

    zero = jnp.zeros((), jnp.float32)
    start = (zero, jnp.zeros_like(hidden), jnp.zeros(weight.shape, jnp.float32))
    total, d_hidden, d_weight = jax.lax.fori_loop(0, live, body, start)
    return total, (d_hidden, d_weight.astype(weight.dtype))


def _weighted_bwd(head: Head, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    d_hidden, d_weight = saved
    return g * d_hidden, (g * d_weight).astype(d_weight.dtype), None, None, None


weighted_sum.defvjp(_weighted_fwd, _weighted_bwd)
