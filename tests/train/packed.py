"""Sequences with every array that a loss may read, packed in several ways."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from coa_jax.train.batch import Example, pack, split_rows
from coa_jax.train.objectives import policy_objective, weigh

EXTRA = ("old_logp", "ref_logp", "value", "returns")


@dataclasses.dataclass(frozen=True, eq=False)
class Member:
    """A sequence; ``arrays`` holds float64 ``[T]`` of what a batch has beside an example."""

    tokens: np.ndarray
    mask: np.ndarray
    logp: np.ndarray
    advantage: np.ndarray
    arrays: dict[str, np.ndarray]


def members(sizes=(12, 7, 19, 3, 16), seed=0, vocab=97):
    """Sequences with turns of the policy and of the environment; the last token is the latter's.

    ``arrays["logp_now"]`` and ``arrays["entropy"]`` are what a model would say.  Differences of
    log-probabilities lie on both sides of every bound.
    """
    rng = np.random.default_rng(seed)
    made = []
    for i, size in enumerate(sizes):
        mask = (rng.random(size) < 0.6).astype(np.float64)
        mask[[0, -1]], mask[1] = 0, 1
        now = -rng.uniform(0.5, 7, size)
        shifts = [-1.6, -0.3, -0.15, -1e-4, 0.0, 1e-4, 0.15, 0.3, 1.7]
        arrays = {
            "logp_now": now,
            "entropy": rng.uniform(0, 3, size),
            "old_logp": now + rng.choice(shifts, size),
            "ref_logp": now + rng.normal(0, 0.5, size),
            "value": rng.normal(0, 1, size),
            "returns": rng.normal(0, 1, size),
        }
        sampled = arrays["old_logp"] + rng.choice([-0.9, -0.01, 0.02, 0.8], size)
        advantage = (1.9, -1.3, -0.4, 0.7)[i % 4]
        tokens = rng.integers(0, vocab, size)
        made.append(Member(tokens, mask, sampled, np.full(size, advantage), arrays))
    return made


def batches(members, length=32, rows=None, normalise="token", constant=1, extra=EXTRA):
    """Micro-batches of ``rows`` rows, and the arrays of ``arrays`` laid out in the same way."""
    # Each token carries its own number, so that whatever belongs to it can be found.
    numbers, at = [], 1
    for m in members:
        numbers.append(np.arange(at, at + len(m.tokens)))
        at += len(m.tokens)
    values = {
        name: np.concatenate([[0.0], *(m.arrays[name] for m in members)])
        for name in members[0].arrays
    }
    packed = pack(
        [
            Example(
                n.astype(np.int32),
                m.mask.astype(np.float32),
                m.logp.astype(np.float32),
                m.advantage.astype(np.float32),
            )
            for n, m in zip(numbers, members, strict=True)
        ],
        length,
    )
    parts = weigh(split_rows(packed, rows or packed.tokens.shape[0]), normalise, constant)
    tokens = np.concatenate([[0], *(m.tokens for m in members)]).astype(np.int32)
    layouts = [part.tokens for part in parts]
    filled = [
        part._replace(
            tokens=tokens[n], **{name: values[name][n].astype(np.float32) for name in extra}
        )
        for part, n in zip(parts, layouts, strict=True)
    ]
    arrays = [{k: v[n].astype(np.float32) for k, v in values.items()} for n in layouts]
    return filled, arrays, layouts


def by_member(members, layouts, arrays):
    """Arrays ``[R, T]`` of micro-batches as one float64 ``[T]`` a member."""
    flat = np.zeros(1 + sum(len(m.tokens) for m in members))
    for layout, array in zip(layouts, arrays, strict=True):
        flat[layout] = np.asarray(array, np.float64)
    found, at = [], 1
    for m in members:
        found.append(flat[at : at + len(m.tokens)])
        at += len(m.tokens)
    return found


def gradients(algorithm, sequences, **layout):
    """Loss of an update and its gradients by log-probability and entropy, as a step makes them."""
    extra = tuple(
        name
        for name, wanted in (
            ("old_logp", algorithm.old_logp == "trainer"),
            ("ref_logp", algorithm.needs_reference),
        )
        if wanted
    )
    parts, arrays, places = batches(
        sequences,
        normalise=algorithm.normalise,
        constant=algorithm.loss_length,
        extra=extra,
        **layout,
    )
    function = jax.value_and_grad(
        lambda logp, entropy, batch: policy_objective(logp, entropy, batch, algorithm)[0], (0, 1)
    )
    results = [
        function(a["logp_now"], a["entropy"], part) for a, part in zip(arrays, parts, strict=True)
    ]
    count = sum(part.mask.sum() for part in parts)
    loss = sum(float(value) for value, _ in results) / count
    slopes = [by_member(sequences, places, [g[i] / count for _, g in results]) for i in (0, 1)]
    return loss, slopes
