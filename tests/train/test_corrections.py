"""Corrections for the policy that sampled, against float64 references in NumPy.

The reference uses neither packing nor automatic differentiation: it iterates over the sequences of
a small categorical policy, and computes gradients by finite differences.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.objectives import AGES, policy_objective
from coa_jax.train.update import quotients
from tests.train.packed import Member, batches, gradients, members

LENGTH, VOCAB = 40, 4
LOSSES = {
    "clip": {"loss": "clip", "dual_clip": 3.0},
    "sequence_clip": {"loss": "sequence_clip", "normalise": "sequence"},
    "cispo": {"loss": "cispo", "clip_low": 0.6, "clip_high": 0.9},
}
CORRECTIONS = {
    "truncated by token": {"tis_cap": 1.5},
    "truncated by sequence": {"tis_cap": 1.5, "tis_level": "sequence"},
    "truncated by the geometric mean": {"tis_cap": 1.1, "tis_level": "geometric"},
    "IcePop": {"tis_cap": 1.8, "mask_low": 0.6, "mask_high": 1.8},
    "MIS by sequence": {
        "tis_cap": 1e6, "tis_level": "sequence", "mask_high": 2.0, "mask_level": "sequence",
    },
    "sequences masked by the geometric mean": {
        "tis_cap": 2.0, "mask_low": 0.9, "mask_high": 1.2, "mask_level": "geometric",
    },
    "decoupled PPO": {"tis_cap": 1e6},
    "masked beside the ratio to the sampler": {"old_logp": "sampler", "mask_high": 1.8},
}  # fmt: skip


def algorithm_of(correction, loss="clip", **knobs):
    knobs = {"old_logp": "trainer", **LOSSES[loss], **CORRECTIONS[correction], **knobs}
    return Algorithm("grpo", **{"kl_coef": 0.0, **knobs}).resolve(LENGTH)


# --- the reference -------------------------------------------------------------------------


def policy(seed=3):
    """Logits float64 ``[T, V]`` of each sequence, and the sequences, sampled by other policies."""
    rng, made = np.random.default_rng(seed), []
    for size, advantage in zip((9, 6, 12, 3, 8), (1.9, -1.3, -0.4, 0.7, 1.1), strict=True):
        logits = rng.normal(0, 1.0, (size, VOCAB))
        tokens = rng.integers(0, VOCAB, size)
        mask = rng.random(size) < 0.7
        mask[0], mask[1] = False, True
        now = log_softmax(logits)[np.arange(size), tokens]
        proximal = now + rng.normal(0, 0.25, size)
        sampler = proximal + rng.normal(0.05, 0.5, size)
        made.append((logits, tokens, np.flatnonzero(mask), proximal, sampler, advantage))
    return made


def log_softmax(x):
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def ratio_of(level, gaps):
    """The ratio of each token, from the log-ratios of a sequence's tokens."""
    if level == "sequence":
        return [math.exp(math.fsum(gaps))] * len(gaps)
    if level == "geometric":
        return [math.prod(math.exp(g) for g in gaps) ** (1 / len(gaps))] * len(gaps)
    return [math.exp(g) for g in gaps]


def reference_loss(a, sequences, logits, start):
    """The loss at ``logits``; what has no gradient is computed at ``start``."""
    total = sum(len(at) for _, _, at, *_ in sequences)
    loss = 0.0
    for (_, tokens, at, proximal, sampler, advantage), x, x0 in zip(
        sequences, logits, start, strict=True
    ):
        now, begun = (log_softmax(z)[at, tokens[at]] for z in (x, x0))
        by_trainer = proximal[at] if a.old_logp == "trainer" else begun
        old = proximal[at] if a.old_logp == "trainer" else sampler[at]
        gaps = list(by_trainer - sampler[at])
        weights = [min(k, a.tis_cap) if a.tis_cap else 1.0 for k in ratio_of(a.tis_level, gaps)]
        for i, k in enumerate(ratio_of(a.mask_level, gaps)):
            if k < a.mask_low or (a.mask_high and k > a.mask_high):
                weights[i] = 0.0
        scale = 1 / (len(at) * len(sequences)) if a.normalise == "sequence" else 1 / total
        low, high = 1 - a.clip_low, 1 + a.clip_high
        for i, rho in enumerate(weights):
            r = math.exp(np.mean(now - old) if a.loss == "sequence_clip" else now[i] - old[i])
            if a.loss == "cispo":
                gain = min(max(math.exp(begun[i] - old[i]), low), high) * advantage * now[i]
            else:
                gain = min(r * advantage, min(max(r, low), high) * advantage)
                if a.dual_clip and advantage < 0:
                    gain = max(gain, a.dual_clip * advantage)
            loss -= scale * rho * gain
    return loss


def reference_gradient(a, sequences, step=1e-6):
    start = [x.copy() for x, *_ in sequences]
    slopes = []
    for number, x in enumerate(start):
        slope = np.zeros_like(x)
        for place in np.ndindex(x.shape):
            moved = []
            for sign in (1, -1):
                other = [z.copy() for z in start]
                other[number][place] += sign * step
                moved.append(reference_loss(a, sequences, other, start))
            slope[place] = (moved[0] - moved[1]) / (2 * step)
        slopes.append(slope)
    return reference_loss(a, sequences, start, start), slopes


# --- ours ----------------------------------------------------------------------------------


def ours(a, sequences):
    """Loss and gradient by the logits, all sequences packed."""
    made = [
        Member(
            tokens,
            np.isin(np.arange(len(tokens)), at).astype(np.float64),
            sampler,
            np.full(len(tokens), advantage),
            {"old_logp": proximal},
        )
        for _, tokens, at, proximal, sampler, advantage in sequences
    ]
    extra = ("old_logp",) if a.old_logp == "trainer" else ()
    parts, _, places = batches(made, 24, 1, a.normalise, 1, extra)
    assert len(parts) > 1
    count = sum(part.mask.sum() for part in parts)
    numbers = np.cumsum([0, *(len(s[1]) for s in sequences)])

    def loss(flat):
        total = 0.0
        logps = jax.nn.log_softmax(flat)
        for part, place in zip(parts, places, strict=True):
            logp = jnp.where(place > 0, logps[jnp.maximum(place - 1, 0), part.tokens], 0.0)
            total += policy_objective(logp, jnp.zeros_like(logp), part, a)[0]
        return total / count

    flat = jnp.asarray(np.concatenate([s[0] for s in sequences]), jnp.float32)
    value, slope = jax.value_and_grad(loss)(flat)
    return float(value), [np.asarray(slope[i:j]) for i, j in itertools.pairwise(numbers)]


PAIRS = dict(zip(CORRECTIONS, itertools.cycle(LOSSES)))
"""Correction -> the loss with which the default tests check it."""


@pytest.mark.parametrize(
    ("correction", "loss"),
    [
        pytest.param(c, n, marks=() if PAIRS[c] == n else pytest.mark.slow)
        for c, n in itertools.product(CORRECTIONS, LOSSES)
    ],
)
def test_a_correction_has_the_value_and_gradient_of_its_formula(correction, loss):
    a, sequences = algorithm_of(correction, loss), policy()
    expected, slopes = reference_gradient(a, sequences)
    plain = dataclasses.replace(a, tis_cap=0.0, mask_low=0.0, mask_high=0.0)
    start = [logits for logits, *_ in sequences]
    without = reference_loss(plain, sequences, start, start)
    assert abs(without - expected) > 1e-4  # the correction makes a difference here
    value, found = ours(a, sequences)
    assert value == pytest.approx(expected, rel=2e-5)
    for mine, wanted in zip(found, slopes, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=2e-6)


# --- properties ----------------------------------------------------------------------------


def results(a, sequences, **layout):
    loss, slopes = gradients(a, sequences, **layout)
    return [np.asarray(loss), *slopes[0]]


def assert_same(left, right, **tolerance):
    for one, other in zip(left, right, strict=True):
        if tolerance:
            np.testing.assert_allclose(one, other, **tolerance)
        else:
            np.testing.assert_array_equal(one, other)


levels = st.sampled_from(["token", "sequence", "geometric"])
losses = st.sampled_from(sorted(LOSSES))
seeds = st.integers(0, 1000)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(losses, levels, seeds)
def test_a_cap_that_no_ratio_reaches_is_none(loss, level, seed):
    capped, bare = (
        algorithm_of("decoupled PPO", loss, tis_cap=cap, tis_level=level) for cap in (1e5, 1e6)
    )
    sequences = members((6, 5, 7), seed)
    assert_same(results(capped, sequences), results(bare, sequences))


@settings(max_examples=12, deadline=None)
@given(losses, levels, seeds)
def test_bounds_that_no_ratio_reaches_mask_nothing(loss, level, seed):
    plain = algorithm_of("truncated by token", loss)
    masked = dataclasses.replace(plain, mask_low=1e-8, mask_high=1e6, mask_level=level)
    sequences = members((6, 5, 7), seed)
    assert_same(results(plain, sequences), results(masked, sequences))


@settings(max_examples=12, deadline=None)
@given(losses, levels, levels, st.floats(1, 5), st.floats(0.01, 1), st.floats(1.01, 9), seeds)
def test_where_the_trainer_agrees_with_the_sampler_the_gradient_is_the_plain_one(
    loss, level, other, cap, low, high, seed
):
    sequences = members(seed=seed)
    for s in sequences:
        s.logp[:] = s.arrays["old_logp"]
    corrected = algorithm_of(
        "decoupled PPO", loss, tis_cap=cap, tis_level=level, mask_low=low, mask_high=high,
        mask_level=other,
    )  # fmt: skip
    plain = dataclasses.replace(corrected, tis_cap=0.0, mask_low=0.0, mask_high=0.0)
    assert_same(results(corrected, sequences), results(plain, sequences))


@pytest.mark.parametrize(
    "loss", ["clip", *(pytest.param(n, marks=pytest.mark.slow) for n in LOSSES if n != "clip")]
)
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_packing_changes_no_corrected_gradient(correction, loss):
    a, sequences = algorithm_of(correction, loss), members()
    wanted = results(a, sequences)
    for layout in ({"length": 64, "rows": 1}, {"length": 19, "rows": 3}):
        assert_same(results(a, sequences, **layout), wanted, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_what_the_policy_did_not_write_corrects_nothing(correction):
    a = algorithm_of(correction)
    (batch,), (arrays,), _ = batches(members(), normalise=a.normalise, extra=("old_logp",))
    off = batch.mask == 0

    def everything(logp, batch):
        return jax.value_and_grad(
            lambda x: policy_objective(x, jnp.zeros_like(x), batch, a), has_aux=True
        )(logp)

    plain = everything(arrays["logp_now"], batch)
    other = batch._replace(
        **{k: np.where(off, np.float32(np.nan), getattr(batch, k)) for k in ("logp", "old_logp")}
    )
    moved = arrays["logp_now"] + np.where(off, np.float32(3.0), 0)
    jax.tree.map(np.testing.assert_array_equal, plain, everything(moved, other))


# --- statistics ----------------------------------------------------------------------------


def statistics(a, sequences, age=None):
    """Means over tokens in their last form."""
    (batch,), (arrays,), places = batches(sequences, normalise=a.normalise, extra=("old_logp",))
    if age is not None:
        flat = np.concatenate([[0], *age])
        batch = batch._replace(age=flat[places[0]].astype(np.int32))
    _, stats = policy_objective(arrays["logp_now"], arrays["entropy"], batch, a)
    return quotients({k: float(v) / float(batch.mask.sum()) for k, v in stats.items()})


def test_the_effective_sample_size_and_the_shares_are_those_of_the_weights():
    sequences = members()
    gap = [(s.arrays["old_logp"] - s.logp)[1:][s.mask[1:] > 0] for s in sequences]
    k = np.exp(np.concatenate(gap))
    weight = np.where((k >= 0.6) & (k <= 1.8), np.minimum(k, 1.5), 0)
    stats = statistics(algorithm_of("IcePop", tis_cap=1.5), sequences)
    assert stats["mismatch/frac_clipped"] == pytest.approx((k > 1.5).mean())
    assert stats["mismatch/frac_masked"] == pytest.approx(((k < 0.6) | (k > 1.8)).mean())
    assert 0 < stats["mismatch/frac_masked"] < 1
    assert stats["mismatch/weight"] == pytest.approx(weight.mean(), rel=1e-5)
    size = weight.sum() ** 2 / (weight**2).sum() / len(weight)
    assert stats["mismatch/ess"] == pytest.approx(size, rel=1e-5)
    assert 0 < size < 1
    plain = statistics(algorithm_of("IcePop", tis_cap=0.0, mask_low=0.0, mask_high=0.0), sequences)
    assert not {"mismatch/ess", "mismatch/weight", "mismatch/frac_masked"} & plain.keys()
    everything = statistics(algorithm_of("IcePop", mask_low=100.0, mask_high=200.0), sequences)
    assert everything["mismatch/ess"] == 0 and everything["mismatch/frac_masked"] == 1


def test_the_mismatch_of_an_age_is_that_of_its_tokens():
    sequences, rng = members(), np.random.default_rng(1)
    age = [rng.choice([0, 2, 5, AGES + 3], len(s.tokens)) for s in sequences]
    stats = statistics(algorithm_of("decoupled PPO"), sequences, age)
    on = [np.flatnonzero(s.mask[1:]) + 1 for s in sequences]
    gap = np.concatenate(
        [np.abs(s.arrays["old_logp"] - s.logp)[at] for s, at in zip(sequences, on, strict=True)]
    )
    ages = np.minimum(np.concatenate([a[at] for a, at in zip(age, on, strict=True)]), AGES - 1)
    found = {name: value for name, value in stats.items() if name.startswith("mismatch/age")}
    assert found.keys() == {f"mismatch/age_{n}" for n in (0, 2, 5, AGES - 1)}
    for n in (0, 2, 5, AGES - 1):
        assert found[f"mismatch/age_{n}"] == pytest.approx(gap[ages == n].mean(), rel=1e-5)


def test_old_data_need_a_correction_or_the_samplers_own_ratio():
    for knobs in ({"tis_cap": 2.0}, {"mask_high": 3.0}, {"old_logp": "sampler"}):
        Algorithm("grpo", **{"old_logp": "trainer", **knobs}).resolve(9).check_stale("data are old")
    with pytest.raises(UserError, match=r"^data are old and algorithm.old_logp is 'trainer'"):
        Algorithm("grpo", old_logp="trainer").resolve(9).check_stale("data are old")
