"""Compares the values and gradients of every attention kernel with NumPy in float64.

Kernels for this platform run compiled, in bfloat16. On a CPU all kernels run in interpret mode, in
float32. ``cudnn``, ``tokamax`` and ``ragged_paged`` cannot be interpreted, so reference functions
of their libraries replace them. A wrong result is compared with the results that well-known faults
would produce, and the report names the fault that matches.

Shape letters: B batch, T tokens, S keys, N key/value heads, G query heads per key/value head, K
head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.model.attention.causal import causal_attention
from coa_jax.model.attention.choice import Case, Kind, implementations, missing, platform_of, unmet
from coa_jax.model.cache import attend_to, init_layers, write
from coa_jax.model.compute import Compute, backend_for
from coa_jax.model.config import ModelConfig
from coa_jax.perf.device.checks import RUNNING, Check, at_once, within

GROUP = "kernels"
LIMITS = {"float32": 1e-4, "bfloat16": 0.03}
"""Maximum error of values, by dtype. Gradients have half the limit, relative to their norm."""

HEADS, GROUPS, PAGE = 2, 2, 16


def numpy_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray,
    cotangent: np.ndarray | None = None,
    factor: float = 1.0,
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Computes attention in float64 and, if a cotangent is given, its gradients.

    Shape letters: B batch, T queries, S keys, N key/value heads, G query heads per key/value head,
    K head width.

    Args:
        q: queries, ``[B, T, N, G, K]``.
        k: keys, ``[B, S, N, K]``.
        v: values, ``[B, S, N, K]``.
        mask: bool ``[B, T, S]``, True for the keys that a query sees. The result of a query that
            sees no key is NaN.
        cotangent: gradient with respect to the output, ``[B, T, N, G, K]``; None to compute no
            gradients.
        factor: number by which the attention scores are multiplied in addition to the usual scale.
            Values other than 1 show the results of kernels with a wrong scale, to recognise this
            fault.

    Returns:
        The output, float64 ``[B, T, N, G, K]``, and a tuple of the gradients with respect to q, k
        and v; without a cotangent, the tuple is empty.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scale = factor * q.shape[-1] ** -0.5
    scores = np.where(
        mask[:, None, None], np.einsum("btngk,bsnk->bngts", q, k, optimize=True) * scale, -np.inf
    )
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bngts,bsnk->btngk", weights, v, optimize=True)
    if cotangent is None:
        return out, ()
    by_weight = np.einsum("btngk,bsnk->bngts", cotangent, v, optimize=True)
    by_score = weights * (by_weight - (weights * by_weight).sum(-1, keepdims=True)) * scale
    return out, (
        np.einsum("bngts,bsnk->btngk", by_score, k, optimize=True),
        np.einsum("bngts,btngk->bsnk", by_score, q, optimize=True),
        np.einsum("bngts,btngk->bsnk", weights, cotangent, optimize=True),
    )


def runs_here(kind: Kind, name: str, head_dim: int) -> tuple[list[Compute], str]:
    """Determines how an implementation of attention can run on this device.

    Args:
        kind: ``causal`` or ``paged``.
        name: name of the implementation.
        head_dim: head width.

    Returns:
        A list with a `Compute` for each dtype to check, and a text. If the implementation can run
        on this device, the text is ""; otherwise the list is empty, and the text is the reason.
    """
    platform, capability = platform_of(jax.local_devices()[0])
    backend = backend_for(platform)
    if name == "xla":
        return [Compute(dtype, backend=backend) for dtype in LIMITS], ""
    case = Case(platform, "bfloat16", HEADS, GROUPS, head_dim, PAGE, capability)
    if not (why := unmet(kind, name, case)):
        return [Compute("bfloat16", attention=name, backend=backend)], ""
    if platform == "cpu" and not (why := missing(kind, name)):
        return [Compute(attention=name, backend=backend, interpret=True)], ""
    return [], why


def _cases(kind: Kind, names: Sequence[str], head_dim: int) -> Iterator[tuple[str, Compute | str]]:
    """Yields (label, `Compute` to check), or (name, reason why the implementation cannot run)."""
    for name in names or implementations(kind):
        computes, why = runs_here(kind, name, head_dim)
        if not computes:
            yield name, why
        for compute in computes:
            yield f"{name} {compute.dtype}{' interpreted' if compute.interpret else ''}", compute


# --- whole sequences -----------------------------------------------------------------------


def causal_checks(length: int, names: Sequence[str] = ()) -> Iterator[Check]:
    """Checks implementations of causal attention on packed rows, and on rows of one sequence.

    Args:
        length: number of tokens of a row.
        names: names of the implementations to check; () checks all implementations.
    """
    for name, compute in _cases("causal", names, 64):
        if isinstance(compute, str):
            yield Check(GROUP, f"causal {name}", "skip", compute)
            continue
        for packed in (True, False):
            label = f"causal {name}, {length} tokens{', packed' if packed else ''}"
            yield _causal(label, compute, length, packed)


def _causal(name: str, compute: Compute, length: int, packed: bool) -> Check:
    rng = np.random.default_rng(0)
    shape = (2, length, HEADS, GROUPS, 64)
    q, cotangent = rng.normal(size=(2, *shape)).astype(np.float32)
    k, v = rng.normal(size=(2, *shape[:3], 64)).astype(np.float32)
    segments = np.ones(shape[:2], np.int32)
    if packed:  # the last sequence is padding, as in a packed batch
        segments = np.sort(rng.integers(1, 5, shape[:2]), axis=1).astype(np.int32) % 4
    same = segments[:, :, None] == segments[:, None, :]

    # All arrays are arguments, because XLA takes long to fold constants.
    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array, ids: Any) -> Any:
        attend = causal_attention(compute, shape[:2], ids)
        out, pullback = jax.vjp(lambda *x: attend(*x)[0], q, k, v)
        return out, pullback(cotangent)

    arrays = (q, k, v, cotangent, segments if packed else None)
    compiled = run.lower(*arrays).compile()
    with RUNNING:
        out, gradients = jax.device_get(compiled(*arrays))
    mask = np.tril(np.ones((length, length), bool)) & same
    expected, reference_gradients = numpy_attention(q, k, v, mask, cotangent)
    limit = LIMITS[compute.dtype]
    measured, limits = {"values": _largest_error(out, expected)}, {"values": limit}
    why = ""
    if not measured["values"] <= limit:
        ones = np.ones((length, length), bool)
        masks = {
            "a token sees the token after it (mask off by one)": np.tril(ones, 1) & same,
            "a token does not see itself (mask off by one)": np.tril(ones, -1) & same,
            "packed sequences see each other": np.broadcast_to(np.tril(ones), same.shape),
            "no causal mask": same,
        }
        why = _fitting(out, q, k, v, masks, mask, limit)
    for letter, gradient, right in zip("qkv", gradients, reference_gradients, strict=True):
        gradient = np.asarray(gradient, np.float64)
        measured[f"d{letter}"] = float(np.linalg.norm(gradient - right) / np.linalg.norm(right))
        limits[f"d{letter}"] = limit / 2
        factor = float(np.vdot(gradient, right) / np.vdot(right, right))
        rest = np.linalg.norm(gradient - factor * right) / np.linalg.norm(right)
        if not why and not measured[f"d{letter}"] <= limit / 2 and rest <= limit:
            sign = " (wrong sign)" if factor < 0 else ""
            why = f"the gradient of {letter} is {factor:.3g} times the right one{sign}"
    return within(GROUP, name, measured, limits, why)


# --- a cache in pages ----------------------------------------------------------------------


def paged_checks(names: Sequence[str] = ()) -> Iterator[Check]:
    """Checks implementations of attention over a paged cache, for one and for several new tokens.

    Args:
        names: names of the implementations to check; () checks all implementations.
    """
    for name, compute in _cases("paged", names, 128):
        if isinstance(compute, str):
            yield Check(GROUP, f"paged {name}", "skip", compute)
            continue
        # The queries of 70 tokens are more than one block of a kernel.
        for new, label in ((1, "decode"), (70, "extend")):
            yield _paged(f"paged {name}, {label}", compute, new)


def _paged(name: str, compute: Compute, new: int) -> Check:
    rng = np.random.default_rng(1)
    rows, pages_each, width = 4, 9, 128
    length = pages_each * PAGE
    k, v = rng.normal(size=(2, rows, length, HEADS, width)).astype(np.float32)
    # The pages of each sequence are in random order; unused pages have other contents.
    count = rows * pages_each + 3
    table = rng.permutation(count)[: rows * pages_each].reshape(rows, -1).astype(np.int32)
    model = ModelConfig("llama", 8, 8, 8, 1, HEADS * GROUPS, HEADS, width)
    (pages,) = jax.tree.map(
        lambda x: x + 7, init_layers(model, count, PAGE, compute.dtype, compute)
    )
    # A new sequence, a sequence of five pages, a sequence that fills all its pages, an idle row.
    start = np.array([0, 5 * PAGE - new, length - new, length])
    positions = (start[:, None] + np.arange(new)).astype(np.int32)
    q = rng.normal(size=(rows, new, HEADS, GROUPS, width)).astype(np.float32)
    everywhere = jnp.broadcast_to(jnp.arange(length), (rows, length))
    attend: Callable[..., jax.Array] = functools.partial(attend_to, compute=compute)
    # JAX's reference of ragged_paged cannot be traced, because it is a Python loop over the
    # lengths.
    pages = write(pages, jnp.asarray(table), jnp.asarray(k), jnp.asarray(v), everywhere, compute)
    arrays = (pages, *map(jnp.asarray, (q, table, positions)))
    if not (compute.attention == "ragged_paged" and compute.interpret):
        attend = jax.jit(attend).lower(*arrays).compile()
    with RUNNING:
        out = np.asarray(attend(*arrays))
    steps = np.arange(length)
    mask = steps <= positions[..., None]
    expected, _ = numpy_attention(q[:3], k[:3], v[:3], mask[:3])
    limit = LIMITS[compute.dtype]
    measured = {"values": _largest_error(out[:3], expected)}
    if not np.isfinite(out[3]).all():
        measured["values"] = float("nan")
    why, at = "", positions[:3, :, None]
    if not measured["values"] <= limit:
        masks = {
            "a token sees the position after it (length off by one)": steps - 1 <= at,
            "a token does not see itself (length off by one)": steps < at,
        }
        for page in range(pages_each):
            fault = f"page {page + 1} of {pages_each} of a sequence is dropped"
            masks[fault] = mask[:3] & (steps // PAGE != page)
        why = _fitting(out[:3], q[:3], k[:3], v[:3], masks, mask[:3], limit)
    return within(GROUP, name, measured, {"values": limit}, why)


# --- known faults --------------------------------------------------------------------------


def _largest_error(actual: np.ndarray, right: np.ndarray) -> float:
    """Returns the largest difference over queries that see a key; NaN if a value is not finite."""
    seen = np.isfinite(right)
    if not seen.any():
        return float("inf")
    return float(np.abs(np.asarray(actual, np.float64)[seen] - right[seen]).max())


def _fitting(
    out: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    masks: Mapping[str, np.ndarray],
    right: np.ndarray,
    limit: float,
) -> str:
    """Finds the fault that explains wrong values: a wrong mask, or a wrong scale of the scores.

    Args:
        out: output of the kernel.
        q: queries.
        k: keys.
        v: values.
        masks: maps a fault to the mask that a kernel with this fault applies.
        right: correct mask.
        limit: maximum difference between ``out`` and the output that a matching fault would
            produce.

    Returns:
        Description of the fault; "" if no known fault matches.
    """
    for fault, mask in masks.items():
        if _largest_error(out, numpy_attention(q, k, v, mask)[0]) <= limit:
            return fault

    def error(power: float) -> float:
        return float(np.nanmean(np.abs(out - numpy_attention(q, k, v, right, factor=2**power)[0])))

    part = slice(None), slice(0, 48)
    if q.shape[1] > 48:  # a part is enough for the search
        out, q, k, v, right = out[part], q[part], k[part], v[part], right[:, :48, :48]
    power, width = 0.0, 8.0
    while width > 1e-5:
        powers = power + np.linspace(-width, width, 33)
        power = float(powers[int(np.argmin([error(power) for power in powers]))])
        width /= 16
    factor = 2**power
    if _largest_error(out, numpy_attention(q, k, v, right, factor=factor)[0]) <= limit:
        return f"the scores are {factor:.3g} times the right ones (wrong scale)"
    return ""


def all_checks() -> Iterator[Check]:
    """Checks every implementation of causal and of paged attention.

    On a CPU, causal attention is checked for one row length. On accelerators, it is also checked
    for rows that are longer than a block of the kernels.
    """
    lengths = (201,) if jax.default_backend() == "cpu" else (201, 1100)
    checks: dict[str, Callable[[], Iterator[Check]]] = {}
    for length in lengths:
        for name in implementations("causal"):
            run = functools.partial(causal_checks, length, [name])
            checks[f"causal {name}, {length} tokens"] = run
    for name in implementations("paged"):
        checks[f"paged {name}"] = functools.partial(paged_checks, [name])
    return at_once(GROUP, checks)
