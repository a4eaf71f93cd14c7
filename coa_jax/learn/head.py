"""The output head on chunks of positions, with gradients that never hold more than one chunk.

Shape letters: K chunks, R rows, C positions of a row in a chunk, D hidden, V vocabulary.  Only the
first ``live`` chunks are computed, in both passes.  Let z be the logits over the temperature,
p = softmax(z), and H = -sum p log p the entropy.  Then for a target y

    d log p_y / dz = onehot(y) - p    and    dH / dz = -p (log p + H).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from coa_jax.engine.constraint import allowed_tokens
from coa_jax.model.compute import Compute


@dataclasses.dataclass(frozen=True)
class Head:
    """What is static of a head.

    Attributes:
        compute: how to compute.
        tied: whether its weight is the embedding ``[V, D]`` and not ``[D, V]``.
        temperature: divides the logits.
        entropy: whether to compute it.
    """

    compute: Compute
    tied: bool
    temperature: float = 1.0
    entropy: bool = False

    @property
    def dtype(self) -> str:
        """Dtype of the matmul operands."""
        return self.compute.dtype

    def logits(
        self, hidden: jax.Array, weight: jax.Array, may: jax.Array | None = None
    ) -> jax.Array:
        """``[R, C, D]`` -> ``[R, C, V]``, divided by the temperature.

        Where that is not 1 they are relative to the largest of those that ``may`` be sampled, which
        a low temperature would otherwise make too large for their differences to be exact.
        """
        spec = "rcd,vd->rcv" if self.tied else "rcd,dv->rcv"
        z = self.compute.ops.einsum(spec, hidden, weight, self.dtype)
        z = self.compute.constrain(z, "batch", None, "vocab")
        if self.temperature == 1.0:
            return z
        largest = jnp.max(z, axis=-1, keepdims=True, where=may, initial=-jnp.inf)
        return (z - largest) / self.temperature

    def may(
        self, allowed: jax.Array | None, rule: jax.Array | None, weight: jax.Array
    ) -> jax.Array | None:
        """Which tokens a constraint lets follow, bool ``[R, C, V]``; None without one."""
        if allowed is None or rule is None:
            return None
        return allowed_tokens(allowed, rule, weight.shape[0 if self.tied else 1])

    def backward(
        self, dz: jax.Array, hidden: jax.Array, weight: jax.Array, dw: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """The gradients of a chunk of hidden states, and of the weight, added to ``dw [D, V]``."""
        ops = self.compute.ops
        # XLA of jaxlib 0.10.2 returns wrong values on CPUs where it fuses a maximum, exp and a
        # single matmul of the result, as a frozen head has here.
        dz = ops.materialize(dz if self.temperature == 1.0 else dz / self.temperature)
        dh = ops.einsum("rcv,vd->rcd" if self.tied else "rcv,dv->rcd", dz, weight, self.dtype)
        if dw is not None:
            # The other way round, XLA would begin with a transposed copy of all logits' gradients.
            dw = dw + ops.einsum("rcd,rcv->dv", hidden, dz, self.dtype)
        return dh, dw

    def no_gradient(self, weight: jax.Array) -> jax.Array:
        """What `backward` begins to add to, ``[D, V]``."""
        return jnp.zeros(weight.shape[::-1] if self.tied else weight.shape, jnp.float32)

    def gradient(self, dw: jax.Array, weight: jax.Array) -> jax.Array:
        """The sum of `backward` in the form of the weight."""
        return (dw.T if self.tied else dw).astype(weight.dtype)


def _at(x: Any, k: jax.Array) -> Any:
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, k, keepdims=False), x)


def _put(x: jax.Array, value: jax.Array, k: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), k, 0)


def _is(targets: jax.Array, size: int) -> jax.Array:
    return targets[..., None] == jnp.arange(size)


def _pick(z: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.take_along_axis(z, targets[..., None], axis=-1)[..., 0]


def _softmax_parts(
    ops: Any, z: jax.Array, may: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The largest of logits ``[..., V]``, ``[..., 1]``; exp of the distances to it; their sum.

    Tokens that ``may`` not be sampled count 0.
    """
    largest = jnp.max(z, axis=-1, keepdims=True, where=may, initial=-jnp.inf)
    powers = jnp.exp(z - largest)
    if may is not None:
        powers = jnp.where(may, powers, 0.0)
    powers = ops.materialize(powers)
    return largest, powers, ops.row_sum(powers)


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
        rules: int32 ``[K, R, C]``, states of a constraint; None for none.
        allowed: its table.
        live: chunks to compute; the others come out as 0.

    Returns:
        Two float32 ``[K, R, C]``; entropies are 0 if they are not wanted.
    """
    return _score(head, hidden, weight, targets, rules, allowed, live)[:2]


def _score(
    head: Head,
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    rules: jax.Array | None,
    allowed: jax.Array | None,
    live: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `score`, with the logarithms of the softmax's denominators."""
    ops, weight = head.compute.ops, weight.astype(head.dtype)

    def body(k: jax.Array, out: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        h, y, rule = _at((hidden, targets, rules), k)
        may = head.may(allowed, rule, weight)
        z = head.logits(h, weight, may)
        largest, powers, total = _softmax_parts(ops, z, may)
        log_total = jnp.log(total)
        denominator = log_total + largest[..., 0]
        logp = _pick(z if may is None else jnp.where(may, z, -jnp.inf), y) - denominator
        entropy = jnp.zeros_like(logp)
        if head.entropy:
            # Neither term is below 0, so nothing cancels where one token has all of the mass.
            entropy = log_total - ops.row_sum(ops.materialize(powers * (z - largest))) / total
        values = (logp, entropy, denominator)
        return tuple(_put(x, value, k) for x, value in zip(out, values, strict=True))

    zeros = jnp.zeros(targets.shape, jnp.float32)
    logp, entropy, denominator = jax.lax.fori_loop(0, live, body, (zeros,) * 3)
    return logp, entropy, denominator


def _score_fwd(head: Head, *primals: Any) -> tuple[tuple[jax.Array, jax.Array], Any]:
    hidden, weight, targets, rules, allowed, live = (
        jax.tree.map(lambda p: p.value, p, is_leaf=_is_primal) for p in primals
    )
    logp, entropy, denominator = _score(head, hidden, weight, targets, rules, allowed, live)
    # Of a frozen head no gradient is wanted; a tuple says so, which is static, unlike a bool.
    trained = () if primals[1].perturbed else None
    saved = (hidden, weight, targets, rules, allowed, live, entropy, denominator, trained)
    return (logp, entropy), saved


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _score_bwd(head: Head, saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    hidden, weight, targets, rules, allowed, live, entropies, denominators, trained = saved
    of_logp, of_entropy = cotangents
    if isinstance(of_logp, SymbolicZero):
        of_logp = jnp.zeros(targets.shape, jnp.float32)
    with_entropy = head.entropy and not isinstance(of_entropy, SymbolicZero)
    cast = weight.astype(head.dtype)

    def body(k: jax.Array, out: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        h, y, rule, g, log_sum = _at((hidden, targets, rules, of_logp, denominators), k)
        may = head.may(allowed, rule, cast)
        z = head.logits(h, cast, may)
        each = z - log_sum[..., None]
        p = jnp.exp(each)
        dz = g[..., None] * (_is(y, z.shape[-1]) - p)
        if with_entropy:
            slope, entropy = _at((of_entropy, entropies), k)
            dz -= slope[..., None] * p * (each + entropy[..., None])
        if may is not None:
            dz = jnp.where(may, dz, 0.0)
        dh, dw = head.backward(dz, h, cast, out[1])
        return _put(out[0], dh, k), dw

    start = None if trained is None else head.no_gradient(weight)
    d_hidden, d_weight = jax.lax.fori_loop(0, live, body, (jnp.zeros_like(hidden), start))
    d_weight = None if d_weight is None else head.gradient(d_weight, weight)
    return d_hidden, d_weight, None, None, None, None


score.defvjp(_score_fwd, _score_bwd, symbolic_zeros=True)


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

    Where its gradient is wanted it is computed with the value, from the same logits.
    """
    logp, _ = score(head, hidden, weight, targets, None, None, live)
    return jnp.sum(logp * factors)


def _weighted_fwd(head: Head, *primals: Any) -> tuple[jax.Array, Any]:
    hidden, weight, targets, factors, live = (p.value for p in primals)
    cast = weight.astype(head.dtype)

    def body(k: jax.Array, out: tuple[jax.Array, jax.Array, Any]) -> tuple[Any, ...]:
        h, y, factor = _at((hidden, targets, factors), k)
        z = head.logits(h, cast)
        # One exponential for the loss and the gradient.
        largest, powers, total_power = _softmax_parts(head.compute.ops, z)
        log_sum = jnp.log(total_power) + largest[..., 0]
        total = out[0] + jnp.sum((_pick(z, y) - log_sum) * factor)
        dz = factor[..., None] * (_is(y, z.shape[-1]) - powers / total_power[..., None])
        dh, dw = head.backward(dz, h, cast, out[2])
        return total, _put(out[1], dh, k), dw

    start = head.no_gradient(weight) if primals[1].perturbed else None
    first = (jnp.zeros((), jnp.float32), jnp.zeros_like(hidden), start)
    total, d_hidden, d_weight = jax.lax.fori_loop(0, live, body, first)
    d_weight = None if d_weight is None else head.gradient(d_weight, weight)
    return total, (d_hidden, d_weight)


def _weighted_bwd(head: Head, saved: Any, g: Any) -> tuple[Any, ...]:
    d_hidden, d_weight = saved
    if isinstance(g, SymbolicZero):
        return None, None, None, None, None
    d_weight = None if d_weight is None else (g * d_weight).astype(d_weight.dtype)
    return g * d_hidden, d_weight, None, None, None


weighted_sum.defvjp(_weighted_fwd, _weighted_bwd, symbolic_zeros=True)
