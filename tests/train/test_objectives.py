"""Objectives of all algorithms, values and gradients, against float64 implementations in PyTorch.

The references use no packing: they iterate over sequences, as the formulas of the papers do.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from coa_jax.train.algorithms import Algorithm, presets
from coa_jax.train.objectives import policy_objective, value_objective
from tests.train.packed import batches, by_member, gradients, members

torch = pytest.importorskip("torch")
LENGTH = 40

VARIANTS = {
    **{name: Algorithm(name) for name in presets(LENGTH)},
    "grpo of the paper": Algorithm("dapo", dual_clip=10.0, negative_weight=0.25),
    "k2 and entropy": Algorithm("dapo", kl="k2", kl_coef=0.3, entropy_coef=0.02),
    "recomputed": Algorithm("grpo", old_logp="trainer"),
    "truncated weights": Algorithm("dapo", old_logp="trainer", tis_cap=1.5),
    "gspo with truncated weights": Algorithm("gspo", old_logp="trainer", tis_cap=1.5, kl_coef=0.1),
    "one-sided cispo": Algorithm("cispo", clip_low=0.5, clip_high=0.2, normalise="sequence"),
}


def reference_kl(kind, d):
    return {"k1": d, "k2": d**2 / 2, "k3": torch.exp(-d) - 1 + d}[kind]


def reference_loss(a, sequences, logps, entropies):
    """The loss of an update: sequences one by one, as in the papers."""
    total = sum(float(s.mask[1:].sum()) for s in sequences)
    loss = torch.zeros((), dtype=torch.float64)
    for s, logp, entropy in zip(sequences, logps, entropies, strict=True):
        at = [t for t in range(1, len(s.tokens)) if s.mask[t]]
        sampler, trainer = torch.tensor(s.logp[at]), torch.tensor(s.arrays["old_logp"][at])
        old = trainer if a.old_logp == "trainer" else sampler
        new, reference = logp[at], torch.tensor(s.arrays["ref_logp"][at])
        advantage = float(s.advantage[0]) * (a.negative_weight if s.advantage[0] < 0 else 1.0)
        ratio = torch.exp(new - old)
        if a.loss == "sequence_clip":
            ratio = torch.exp((new - old).mean()) * torch.ones(len(at), dtype=torch.float64)
        bounded = torch.clamp(ratio, 1 - a.clip_low, 1 + a.clip_high)
        if a.loss == "cispo":
            gain = bounded.detach() * advantage * new
        else:
            gain = torch.minimum(ratio * advantage, bounded * advantage)
            if a.dual_clip and advantage < 0:
                gain = torch.maximum(gain, torch.full_like(gain, a.dual_clip * advantage))
        if a.tis_cap:
            gap = trainer - sampler
            if a.tis_level == "geometric":
                gap = gap.mean() * torch.ones_like(gap)
            gain = gain * torch.clamp(torch.exp(gap), max=a.tis_cap)
        token = -gain - a.entropy_coef * entropy[at]
        if a.kl_coef and a.kl_in == "loss":
            token = token + a.kl_coef * reference_kl(a.kl, new - reference)
        weight = {
            "token": 1 / total,
            "sequence": 1 / (len(at) * len(sequences)),
            "constant": 1 / (a.loss_length * len(sequences)),
        }[a.normalise]
        loss = loss + (token * weight).sum()
    return loss


@pytest.mark.parametrize("name", VARIANTS)
def test_an_algorithm_has_the_value_and_gradient_of_its_paper(name):
    algorithm, sequences = VARIANTS[name].resolve(LENGTH), members()
    logps, entropies = (
        [torch.tensor(s.arrays[key], requires_grad=True) for s in sequences]
        for key in ("logp_now", "entropy")
    )
    expected = reference_loss(algorithm, sequences, logps, entropies)
    expected.backward()
    loss, (by_logp, by_entropy) = gradients(algorithm, sequences)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    for found, tensors in ((by_logp, logps), (by_entropy, entropies)):
        for slope, tensor in zip(found, tensors, strict=True):
            wanted = np.zeros_like(slope) if tensor.grad is None else tensor.grad.numpy()
            np.testing.assert_allclose(slope, wanted, rtol=2e-5, atol=1e-8)
    assert any(slope.any() for slope in by_logp)


@pytest.mark.parametrize("name", VARIANTS)
def test_neither_packing_nor_micro_batches_nor_padding_change_a_gradient(name):
    algorithm, sequences = VARIANTS[name].resolve(LENGTH), members()
    loss, slopes = gradients(algorithm, sequences)
    for layout in ({"length": 64, "rows": 1}, {"length": 19, "rows": 3}):
        other_loss, other = gradients(algorithm, sequences, **layout)
        assert other_loss == pytest.approx(loss, rel=1e-5)
        for left, right in zip(slopes[0] + slopes[1], other[0] + other[1], strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_what_the_policy_did_not_write_has_exactly_no_influence(name):
    algorithm = VARIANTS[name].resolve(LENGTH)
    (batch,), (arrays,), _ = batches(members(), normalise=algorithm.normalise)
    off = batch.mask == 0
    assert off.any()

    @jax.jit
    def everything(logp, entropy, batch):
        (loss, stats), slopes = jax.value_and_grad(
            lambda *x: policy_objective(*x, batch, algorithm), (0, 1), has_aux=True
        )(logp, entropy)
        return loss, stats, slopes

    plain = everything(arrays["logp_now"], arrays["entropy"], batch)
    names = ("logp", "advantage", "old_logp", "ref_logp", "value", "returns")
    for junk in (9.0, np.nan):
        other = batch._replace(
            **{k: np.where(off, np.float32(junk), getattr(batch, k)) for k in names}
        )
        moved = [arrays[k] + np.where(off, np.float32(3.0), 0) for k in ("logp_now", "entropy")]
        jax.tree.map(np.testing.assert_array_equal, plain, everything(*moved, other))
    for slope in plain[2]:
        assert not np.asarray(slope)[off].any()


@pytest.mark.parametrize("bound", [0.0, 0.3])
def test_the_critic_has_the_clipped_squared_error_of_ppo(bound):
    sequences = members()
    (batch,), (arrays,), places = batches(sequences)
    values = arrays["logp_now"]  # any numbers
    (loss, stats), slope = jax.value_and_grad(
        lambda v: value_objective(v, batch, bound), has_aux=True
    )(values)
    tensors = [torch.tensor(s.arrays["logp_now"], requires_grad=True) for s in sequences]
    expected, clipped = torch.zeros((), dtype=torch.float64), 0
    for s, v in zip(sequences, tensors, strict=True):
        for t in range(1, len(s.tokens)):
            if not s.mask[t]:
                continue
            old, target = float(s.arrays["value"][t]), float(s.arrays["returns"][t])
            error = (v[t] - target) ** 2
            if bound:
                bounded = (old + torch.clamp(v[t] - old, -bound, bound) - target) ** 2
                clipped += int(bounded > error)
                error = torch.maximum(error, bounded)
            expected = expected + 0.5 * error
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    assert float(stats["frac_clipped"]) == clipped
    assert bool(clipped) == bool(bound)
    for found, tensor in zip(by_member(sequences, places, [slope]), tensors, strict=True):
        np.testing.assert_allclose(found, tensor.grad.numpy(), rtol=1e-5, atol=1e-8)
    off = batch.mask == 0
    other = batch._replace(
        **{k: np.where(off, np.nan, getattr(batch, k)) for k in ("value", "returns")}
    )
    again = jax.value_and_grad(lambda v: value_objective(v, other, bound)[0])(
        values + np.where(off, np.float32(3.0), 0)
    )
    np.testing.assert_array_equal(again[0], loss)
    np.testing.assert_array_equal(again[1], slope)


def test_statistics_are_sums_over_the_policys_tokens():
    algorithm, sequences = VARIANTS["truncated weights"].resolve(LENGTH), members()
    algorithm = dataclasses.replace(algorithm, kl_coef=0.1)
    (batch,), (arrays,), _ = batches(sequences)
    _, stats = policy_objective(arrays["logp_now"], arrays["entropy"], batch, algorithm)
    new, old, ref, sampled, advantage = (
        np.concatenate([x(s)[1:][s.mask[1:] > 0] for s in sequences])
        for x in (
            lambda s: s.arrays["logp_now"],
            lambda s: s.arrays["old_logp"],
            lambda s: s.arrays["ref_logp"],
            lambda s: s.logp,
            lambda s: s.advantage,
        )
    )
    ratio, gap = np.exp(new - old), old - sampled
    expected = {
        "policy/clip_low": ((advantage < 0) & (ratio < 0.8)).sum(),
        "policy/clip_high": ((advantage > 0) & (ratio > 1.28)).sum(),
        "policy/kl_old": (ratio - 1 - np.log(ratio)).sum(),
        "policy/kl_ref": (np.exp(ref - new) - 1 - (ref - new)).sum(),
        "adv/abs_mean": np.abs(advantage).sum(),
        "mismatch/abs_logp_mean": np.abs(gap).sum(),
        "mismatch/abs_logp_max": np.abs(gap).max(),
        "mismatch/kl": (np.exp(gap) - 1 - gap).sum(),
        "mismatch/frac_clipped": (np.exp(gap) > 1.5).sum(),
    }
    for name, value in expected.items():
        assert float(stats[name]) == pytest.approx(value, rel=1e-4), name
        assert value > 0, name
