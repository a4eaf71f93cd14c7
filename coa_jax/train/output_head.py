"""The output head, applied to one chunk of positions after the other.

Logits exist for one chunk at a time. Shape letters: K chunks, R rows, C positions of a row in a
chunk, D hidden size, V vocabulary. Only the first ``live`` chunks are computed, in the forward and
the backward pass. JAX cannot differentiate a loop with a traced trip count in reverse mode, so
`score_chunks` and `weighted_sum` have custom VJPs, which differentiate each chunk with `jax.vjp`.
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
    """Settings of the output head, which are static (hashable) arguments of compiled functions.

    Attributes:
        compute: dtype, operations and sharding of the computation.
        tied: whether the head's weight is the embedding table ``[vocabulary, hidden size]``;
            otherwise the weight is a kernel ``[hidden size, vocabulary]`` of its own.
        temperature: number by which the logits are divided.
        entropy: whether entropies are computed; if not, 0 is returned in their place.
    """

    compute: Compute
    tied: bool
    temperature: float = 1.0
    entropy: bool = False

    def logits(self, hidden: jax.Array, weight: jax.Array) -> jax.Array:
        """Computes the output head's logits for a chunk of positions.

        Args:
            hidden: hidden states, ``[rows, positions, hidden size]``.
            weight: weight of the head in the compute dtype.

        Returns:
            Logits, float32 ``[rows, positions, vocabulary]``.
        """
        spec = "rcd,vd->rcv" if self.tied else "rcd,dv->rcv"
        z = self.compute.ops.einsum(spec, hidden, weight, self.compute.dtype)
        return self.compute.constrain(z, "batch", None, "vocab")

    def backward(
        self, dz: jax.Array, hidden: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the gradients of a chunk's hidden states and of the head's weight.

        Args:
            dz: gradient of the chunk's logits, float32 ``[rows, positions, vocabulary]``.
            hidden: hidden states of the chunk, ``[rows, positions, hidden size]``.
            weight: weight of the head in the compute dtype.

        Returns:
            The gradient of the hidden states, float32 of their shape, and the gradient of the
            weight, float32 ``[hidden size, vocabulary]``. If the weight is tied, and so has the
            transposed shape, `gradient` transposes the sum over all chunks once. This is cheaper
            than to transpose ``dz`` in each chunk.
        """
        ops, dtype = self.compute.ops, self.compute.dtype
        dz = ops.materialize(dz)
        dh = ops.einsum("rcv,vd->rcd" if self.tied else "rcv,dv->rcd", dz, weight, dtype)
        return dh, ops.einsum("rcd,rcv->dv", hidden, dz, dtype)

    def scores(
        self,
        z: jax.Array,
        targets: jax.Array,
        rules: jax.Array | None = None,
        allowed: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the log-probabilities of a chunk's target tokens, and the entropies.

        Args:
            z: logits, float32 ``[rows, positions, vocabulary]``.
            targets: ids of the tokens that the logits predict, int32 ``[rows, positions]``.
            rules: state of the constraint before each target, an index into ``allowed``, int32
                ``[rows, positions]``; None without a constraint.
            allowed: tokens that the constraint allows in each state, `ConstraintTables.allowed`;
                None without a constraint.

        Returns:
            Log-probabilities and entropies, each float32 ``[rows, positions]``.
        """
        ops, may = self.compute.ops, None
        if rules is not None and allowed is not None:
            may = allowed_tokens(allowed, rules, z.shape[-1])
        # Subtract the maximum before the division, so that differences stay exact at a low
        # temperature.
        largest = jnp.max(z, axis=-1, keepdims=True, where=may, initial=-jnp.inf)
        largest = jax.lax.stop_gradient(largest)
        # Pick from the logits themselves: with a second use of the difference, XLA for CPUs fuses
        # the maximum and the subtraction with the matmul of the logits, which takes longer.
        own = (_pick(z, targets) - largest[..., 0]) / self.temperature
        z = (z - largest) / self.temperature
        if may is not None:
            # Mask before the exponential: the exponential of a forbidden, larger logit may
            # overflow, and its gradient would be NaN.
            z = jnp.where(may, z, -jnp.inf)
            own = jnp.where(_pick(may, targets), own, -jnp.inf)
        powers = ops.materialize(jnp.exp(z))
        total = ops.row_sum(powers)
        logp, entropy = own - jnp.log(total), jnp.zeros_like(total)
        if self.entropy:
            # Neither term is negative, so no digits cancel where one token has all of the
            # probability.
            weighted = powers * (z if may is None else jnp.where(may, z, 0.0))
            entropy = jnp.log(total) - ops.row_sum(ops.materialize(weighted)) / total
        return logp, entropy

    def no_gradient(self, weight: jax.Array) -> jax.Array:
        """Returns float32 zeros, to which the head's weight gradients of all chunks are added."""
        return jnp.zeros(weight.shape[::-1] if self.tied else weight.shape, jnp.float32)

    def gradient(self, dw: jax.Array, weight: jax.Array) -> jax.Array:
        """Converts the summed gradient of the head's weight to the weight's shape and dtype."""
        return (dw.T if self.tied else dw).astype(weight.dtype)


@jax.custom_vjp
def _pick(z: jax.Array, targets: jax.Array) -> jax.Array:
    """Takes the element of ``z [..., V]`` at each of the targets ``[...]``.

    The gradient is a comparison, which XLA fuses with its consumer, instead of a scatter.
    """
    return jnp.take_along_axis(z, targets[..., None], axis=-1)[..., 0]


def _pick_fwd(z: jax.Array, targets: jax.Array) -> tuple[jax.Array, tuple[int, jax.Array]]:
    return _pick(z, targets), (z.shape[-1], targets)


def _pick_bwd(saved: tuple[int, jax.Array], g: jax.Array) -> tuple[jax.Array, None]:
    size, targets = saved
    return jnp.where(targets[..., None] == jnp.arange(size), g[..., None], 0.0), None


_pick.defvjp(_pick_fwd, _pick_bwd)


def _at(x: Any, k: jax.Array) -> Any:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, k, keepdims=False), x)


def _put(x: jax.Array, value: jax.Array, k: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), k, 0)


# --- log-probabilities and entropies -------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def score_chunks(
    head: Head,
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    rules: jax.Array | None,
    allowed: jax.Array | None,
    live: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes the log-probabilities of K chunks of target tokens, and the entropies.

    Each chunk has C positions of R rows. D is the hidden size, and V the size of the vocabulary.

    Args:
        head: static settings.
        hidden: final hidden states, ``[K, R, C, D]``.
        weight: weight of the head, ``[V, D]`` or ``[D, V]``, see `Head`.
        targets: token ids, int32 ``[K, R, C]``.
        rules: state of the constraint before each target, an index into ``allowed``, int32
            ``[K, R, C]``; None without a constraint.
        allowed: tokens that the constraint allows in each state, `ConstraintTables.allowed`; None
            without a constraint.
        live: int32, number of chunks to compute; the results of the chunks after these are 0.

    Returns:
        Log-probabilities and entropies, each float32 ``[K, R, C]``.
    """
    cast = weight.astype(head.compute.dtype)

    def body(k: jax.Array, out: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        h, y, rule = _at((hidden, targets, rules), k)
        values = head.scores(head.logits(h, cast), y, rule, allowed)
        return tuple(_put(x, value, k) for x, value in zip(out, values, strict=True))

    zeros = jnp.zeros(targets.shape, jnp.float32)
    logp, entropy = jax.lax.fori_loop(0, live, body, (zeros, zeros))
    return logp, entropy


def _score_fwd(head: Head, *arguments: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    return score_chunks(head, *arguments), arguments


def _score_bwd(head: Head, saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    hidden, weight, targets, rules, allowed, live = saved
    cast = weight.astype(head.compute.dtype)

    def body(k: jax.Array, out: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h, y, rule, slopes = _at((hidden, targets, rules, cotangents), k)
        _, pull = jax.vjp(lambda z: head.scores(z, y, rule, allowed), head.logits(h, cast))
        (dz,) = pull(slopes)
        dh, dw = head.backward(dz, h, cast)
        return _put(out[0], dh, k), out[1] + dw

    start = (jnp.zeros_like(hidden), head.no_gradient(weight))
    d_hidden, d_weight = jax.lax.fori_loop(0, live, body, start)
    return d_hidden, head.gradient(d_weight, weight), None, None, None, None


score_chunks.defvjp(_score_fwd, _score_bwd)


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
    """Computes the sum of the targets' log-probabilities, each multiplied by a constant factor.

    The forward pass computes the gradient too, so that the backward pass need not compute the
    logits again. For the shape letters see `score_chunks`.

    Args:
        head: static settings.
        hidden: final hidden states, ``[K, R, C, D]``.
        weight: weight of the head, ``[V, D]`` or ``[D, V]``, see `Head`.
        targets: token ids, int32 ``[K, R, C]``.
        factors: factor of each log-probability, float32 ``[K, R, C]``. No gradient flows into the
            factors.
        live: int32, number of chunks (the axis K) to compute; later chunks add nothing.

    Returns:
        The sum, float32 ``[]``.
    """
    logp, _ = score_chunks(head, hidden, weight, targets, None, None, live)
    return jnp.sum(logp * factors)


def _weighted_fwd(head: Head, *arguments: Any) -> tuple[jax.Array, Any]:
    hidden, weight, targets, factors, live = arguments
    cast = weight.astype(head.compute.dtype)

    def body(k: jax.Array, out: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        h, y, factor = _at((hidden, targets, factors), k)
        z = head.logits(h, cast)
        value, pull = jax.vjp(lambda z: jnp.sum(head.scores(z, y)[0] * factor), z)
        (dz,) = pull(jnp.ones_like(value))
        dh, dw = head.backward(dz, h, cast)
        return out[0] + value, _put(out[1], dh, k), out[2] + dw

    zero = jnp.zeros((), jnp.float32)
    start = (zero, jnp.zeros_like(hidden), head.no_gradient(weight))
    total, d_hidden, d_weight = jax.lax.fori_loop(0, live, body, start)
    return total, (d_hidden, head.gradient(d_weight, weight))


def _weighted_bwd(head: Head, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    d_hidden, d_weight = saved
    return g * d_hidden, (g * d_weight).astype(d_weight.dtype), None, None, None


weighted_sum.defvjp(_weighted_fwd, _weighted_bwd)
