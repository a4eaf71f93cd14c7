"""Losses and their gradients against independent float64 references."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from coa_jax.errors import UserError
from coa_jax.model.compute import local_compute
from coa_jax.model.config import LoraConfig, ModelConfig
from coa_jax.model.params import bind, specs
from coa_jax.model.policy import Model
from coa_jax.train import logps, step
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.batch import Example, pack, split_rows
from coa_jax.train.logps import log_probs, token_logps
from coa_jax.train.losses import Net, PolicyLoss, SFTLoss
from coa_jax.train.optimizer import (
    OptimizerConfig,
    make_optimizer,
    reference_to,
    schedule,
    schedule_of,
)
from coa_jax.train.step import init_state, train_step
from tests.random_params import random_params

MODEL = ModelConfig("qwen2", 97, 32, 48, 2, 4, 2, 8, qkv_bias=True)
PARAMS = random_params(MODEL, 1)
COMPUTE = local_compute()
SFT = SFTLoss()
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "algorithms.md"


def examples(sizes=(12, 7, 19, 3, 16), seed=0, advantages=None):
    rng = np.random.default_rng(seed)
    made = []
    for i, size in enumerate(sizes):
        mask = (rng.random(size) < 0.6).astype(np.float32)
        mask[0] = 0
        advantage = advantages[i] if advantages else 0.0
        made.append(
            Example(
                rng.integers(0, MODEL.vocab_size, size).astype(np.int32),
                mask,
                (-rng.uniform(2, 7, size) * mask).astype(np.float32),
                (mask * advantage).astype(np.float32),
            )
        )
    return made


@functools.partial(jax.jit, static_argnames=("loss", "compute"))
def loss_and_gradient(params, batch, loss, compute=COMPUTE):
    return jax.value_and_grad(lambda p: loss(p, batch, Net({}, MODEL, compute))[0])(params)


@functools.partial(jax.jit, static_argnames=("temperature", "chunk"))
def scores(batch, temperature=1.0, chunk=2048):
    with mock.patch.object(logps, "CHUNK", chunk):
        return token_logps(PARAMS, MODEL, batch, COMPUTE, temperature=temperature)


def assert_same_tree(left, right, **tolerance):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, **({"rtol": 2e-5, "atol": 1e-5} | tolerance)),
        left,
        right,
    )


def test_sft_loss_is_the_cross_entropy_of_the_masked_tokens_in_torch(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from coa_jax.model.api import load_model
    from tests.tiny_tokenizer import train_tokenizer

    torch.manual_seed(0)
    reference = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )
    reference.save_pretrained(tmp_path)
    train_tokenizer(["words"], 300).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    members = [e for e in examples() if e.mask.any()]
    batch = pack(members, 32)
    assert batch.tokens.shape[0] < len(members)  # some share a row
    (loss, _), gradients = jax.jit(
        jax.value_and_grad(lambda p: SFT(p, batch, Net({}, model.config, COMPUTE)), has_aux=True)
    )(model.params)
    expected = 0.0
    for e in members:
        labels = torch.tensor(np.where(e.mask > 0, e.tokens, -100), dtype=torch.long)
        logits = reference(torch.tensor(e.tokens[None], dtype=torch.long)).logits[0]
        expected = expected + torch.nn.functional.cross_entropy(
            logits[:-1].double(), labels[1:], reduction="sum", ignore_index=-100
        )
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(
        gradients["embed"]["embedding"],
        reference.model.embed_tokens.weight.grad,
        rtol=1e-3,
        atol=1e-4,
    )


def test_packed_losses_are_the_sum_of_separate_losses():
    members = examples()
    packed, gradient = loss_and_gradient(PARAMS, pack(members, 32), SFT)
    # Both have as many rows, so that one program serves them.
    rows = pack(members, 32).tokens.shape[0]
    separate = [split_rows(pack([e], 32), rows)[0] for e in members]
    alone = [loss_and_gradient(PARAMS, batch, SFT) for batch in separate]
    assert float(packed) == pytest.approx(sum(float(loss) for loss, _ in alone), rel=1e-5)
    assert_same_tree(gradient, jax.tree.map(lambda *g: sum(g), *(g for _, g in alone)))


def rows_of(batch, groups):
    """Micro-batches of two rows each: the given rows, filled up with padding."""
    return [
        split_rows(jax.tree.map(operator.itemgetter(np.asarray(group)), batch), 2)[0]
        for group in groups
    ]


def test_log_probs_of_a_policy_are_those_of_its_logits():
    batch, policy = pack(examples(), 32), Model(MODEL, PARAMS, None)
    found = jax.jit(log_probs, static_argnames="temperature")(policy, batch, temperature=0.7)
    own = log_probs(lambda *arrays: policy(*arrays), batch, 0.7)  # as of a module of the user
    np.testing.assert_allclose(batch.mask * found, batch.mask * own, rtol=1e-5, atol=1e-5)


class Bigrams(nnx.Module):
    """A model that is not of this package."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(MODEL.vocab_size, MODEL.vocab_size, rngs=rngs)

    def __call__(self, tokens, positions, segment_ids):
        return self.table(tokens)


def test_a_module_of_the_user_learns_packed_rows():
    batch, module = pack(examples(), 32), Bigrams(nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, optax.adam(0.1), wrt=nnx.Param)

    def loss(module):
        return -jnp.sum(batch.mask * log_probs(module, batch)) / jnp.sum(batch.mask)

    losses = []
    for _ in range(10):
        value, gradients = nnx.value_and_grad(loss)(module)
        optimizer.update(module, gradients)
        losses.append(float(value))
    assert losses[-1] < 0.7 * losses[0]


def test_an_update_does_not_depend_on_micro_batches():
    optimizer = OptimizerConfig(learning_rate=1e-2, total_steps=9, clip_norm=1e9)
    batch = pack(examples(), 20)
    assert batch.tokens.shape[0] == 3
    results, programs = [], []
    for groups in ([[0, 1], [2]], [[2], [1], [0]], [[2, 0], [1]]):
        state = init_state(jax.tree.map(jnp.copy, PARAMS), optimizer)
        parts = rows_of(batch, groups)
        state, stats = train_step(
            state, parts, loss=SFT, model_config=MODEL, compute=COMPUTE, optimizer=optimizer
        )
        results.append((state.opt_state, stats))
        programs.append(step.train_program._cache_size())
    for moments, stats in results[1:]:
        # Adam's first step hardly depends on the size of a gradient; its moments do.
        assert_same_tree(moments, results[0][0])
        assert stats == pytest.approx(results[0][1], rel=1e-5)
    assert results[0][1]["tokens"] == batch.mask.sum()
    assert programs[0] == programs[1] == programs[2]  # any number of them, one compilation


@pytest.mark.slow
def test_rematerialisation_and_chunks_of_the_vocabulary_change_nothing():
    batch = pack(examples(), 32)
    plain = loss_and_gradient(PARAMS, batch, SFT)
    assert_same_tree(
        plain, loss_and_gradient(PARAMS, batch, SFT, dataclasses.replace(COMPUTE, remat="full"))
    )
    for left, right in zip(scores(batch), scores(batch, chunk=7), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


def test_the_entropy_is_that_of_the_distribution_at_the_temperature():
    batch = pack(examples((9,)), 9)
    _, entropy = scores(batch, temperature=0.7)
    decoder = bind(MODEL, PARAMS)
    hidden, _ = decoder(batch.tokens, batch.positions, COMPUTE)
    logits = np.asarray(decoder.logits(hidden, COMPUTE), np.float64)[0] / 0.7
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    expected = -(probs * np.log(probs)).sum(-1)
    np.testing.assert_allclose(entropy[0, 1:], expected[:-1], rtol=1e-5)
    assert entropy[0, 0] == 0


@jax.jit
@jax.grad
def weighted_gradient(params, batch, slope):
    logps, _ = token_logps(params, MODEL, batch, COMPUTE, temperature=0.9)
    return jnp.sum(logps * slope)


def reference_policy_loss(logp, batch, clip):
    """Loss and its derivative by each log-probability, token by token in float64."""
    loss, low, high = 0.0, 0, 0
    slope = np.zeros(logp.shape)
    for at in zip(*np.nonzero(batch.mask), strict=True):
        a = float(batch.advantage[at])
        a *= clip.negative_weight if a < 0 else 1.0
        ratio = np.exp(logp[at] - float(batch.logp[at]))
        bounded = min(max(ratio, 1 - clip.clip_low), 1 + clip.clip_high)
        objective, moves = a * ratio, True
        if a * bounded < objective:
            objective, moves = a * bounded, False
        if clip.dual_clip and a < 0 and a * clip.dual_clip > objective:
            objective, moves = a * clip.dual_clip, False
        loss -= objective
        slope[at] = -a * ratio if moves else 0.0
        low += a < 0 and ratio < 1 - clip.clip_low
        high += a > 0 and ratio > 1 + clip.clip_high
    return loss, slope, low, high


@pytest.mark.parametrize(
    "clip",
    [{}, {"clip_low": 0.1, "clip_high": 0.25, "dual_clip": 0.0}, {"negative_weight": 0.25}],
)
def test_policy_loss_is_the_clipped_objective(clip):
    clip = Algorithm("dapo", **clip).resolve(32)
    members = examples(advantages=[1.0, -1.0, 0.5, 2.0, -0.7])
    batch = pack(members, 32)
    old, _ = scores(batch, temperature=0.9)
    # Ratios on both sides of every bound, the dual one too.
    shift = np.random.default_rng(2).choice([-1.6, -0.3, -0.15, 0.0, 0.15, 0.3], old.shape)
    batch = batch._replace(logp=((np.asarray(old) + shift) * batch.mask).astype(np.float32))
    policy_loss = PolicyLoss(clip, temperature=0.9)
    (loss, stats), gradient = jax.jit(
        jax.value_and_grad(lambda p: policy_loss(p, batch, Net({}, MODEL, COMPUTE)), has_aux=True)
    )(PARAMS)
    logp = np.asarray(old, np.float64)
    expected, slope, low, high = reference_policy_loss(logp, batch, clip)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert (float(stats["policy/clip_low"]), float(stats["policy/clip_high"])) == (low, high)
    assert low > 0
    assert high > 0
    gap = np.abs((logp - batch.logp) * batch.mask)
    assert float(stats["mismatch/abs_logp_mean"]) == pytest.approx(gap.sum(), rel=1e-4)
    assert float(stats["mismatch/abs_logp_max"]) == pytest.approx(gap.max(), rel=1e-4)

    expected_gradient = weighted_gradient(PARAMS, batch, slope)
    assert_same_tree(gradient, expected_gradient, rtol=1e-3, atol=1e-4)


def test_a_token_without_loss_has_no_influence():
    members = examples((10, 8), advantages=[1.0, -1.0])
    for member in members:
        member.mask[-1] = 0
    algorithm = Algorithm("dapo").resolve(20)
    policy_loss = PolicyLoss(algorithm, temperature=1.0)
    batch = pack(members, 20)
    noise = np.where(batch.mask > 0, 0, 9.0).astype(np.float32)
    # The last tokens of both sequences are targets only: nothing reads on from them.
    tokens = batch.tokens.copy()
    for at in (9, 17):
        assert batch.mask[0, at] == 0
        tokens[0, at] = (tokens[0, at] + 5) % MODEL.vocab_size
    other = batch._replace(
        tokens=tokens, advantage=batch.advantage + noise, logp=batch.logp - noise
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        loss_and_gradient(PARAMS, batch, policy_loss),
        loss_and_gradient(PARAMS, other, policy_loss),
    )


@pytest.mark.parametrize(
    ("warmup", "ratio", "total"), [(0, 0.0, 10), (4, 0.1, 20), (1, 1.0, 16), (3, 0.5, 3)]
)
def test_the_rate_rises_linearly_and_falls_as_a_cosine(warmup, ratio, total):
    config = OptimizerConfig(0.02, total, warmup_steps=warmup, final_ratio=ratio)
    rates = [float(schedule(config)(s)) for s in range(total + 3)]
    start = 0.02 / (warmup + 1)
    for s, rate in enumerate(rates):
        if s < warmup:
            expected = start + (0.02 - start) * s / warmup
        else:
            done = min((s - warmup) / max(total - warmup, 1), 1.0)
            expected = 0.02 * (ratio + (1 - ratio) * (1 + np.cos(np.pi * done)) / 2)
        assert rate == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert rates[0] > 0  # the first update is not wasted


def update_of(optimizer):
    """Two updates of constant parameters, with a gradient above the bound on its norm."""
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.5), PARAMS)
    state = optimizer.init(params)
    for gradients in (params, jax.tree.map(lambda x: -2 * x, params)):
        updates, state = optimizer.update(gradients, state, params)
    return updates


@pytest.mark.slow
def test_a_path_names_an_optimiser_with_the_schedule_of_the_settings():
    config = OptimizerConfig(
        0.1, 10, warmup_steps=2, weight_decay=0.0, path="optax:lion", options={"b1": 0.3}
    )
    lion = optax.lion(schedule(config), b1=0.3, weight_decay=0.0)
    assert_same_tree(update_of(make_optimizer(config)), update_of(lion))
    assert make_optimizer(dataclasses.replace(config)) is make_optimizer(config)


def test_an_object_is_used_with_the_bound_on_the_gradient_and_its_own_schedule():
    for rate in (0.1, 0.2):  # the second object has the name of the first
        config = OptimizerConfig(9.0, 10, path=reference_to(optax.sgd(rate)))
        clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate))
        assert_same_tree(update_of(make_optimizer(config)), update_of(clipped))
        assert schedule_of(config) is None


def test_the_documented_function_has_a_schedule_of_its_own(tmp_path, monkeypatch):
    (program,) = re.findall(r"```python\n(# my_optimizers\.py\n.*?)```", DOCUMENT.read_text(), re.S)
    (tmp_path / "my_optimizers.py").write_text(program)
    monkeypatch.syspath_prepend(tmp_path)
    options = {"peak": 0.5, "rise": 1, "stay": 1, "fall": 2}
    config = OptimizerConfig(9.0, 4, path="my_optimizers:lion", options=options)
    optimizer, params, rates = make_optimizer(config), {"kernel": jnp.zeros(2)}, []
    state = optimizer.init(params)
    for _ in range(5):
        updates, state = optimizer.update({"kernel": jnp.ones(2)}, state, params)
        rates.append(-float(updates["kernel"][0]))
    assert rates == [0.0, 0.5, 0.5, 0.25, 0.0]
    assert schedule_of(config) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "optax:lyon"}, r"optimizer\.path: optax:lyon: .* has no 'lyon'; did you mean"),
        ({"path": "optax:cosine_decay_schedule"}, r"needs 'init_value'"),
        ({"path": "math:dist"}, r"optimizer\.path"),
        ({"path": "optax:lion", "options": {"b3": 1.0}}, r"optax:lion has no option 'b3'"),
        (
            {"path": "optax:constant_schedule", "options": {"value": 1.0}},
            r"optimizer\.path: optax:constant_schedule returned .* no optax GradientTransformation",
        ),
    ],
)
def test_what_is_no_optimiser_is_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        make_optimizer(OptimizerConfig(0.1, 10, **settings))


def test_matrices_decay_and_norms_and_biases_do_not():
    model = dataclasses.replace(MODEL, qk_norm=True, tie_embeddings=False, lora=LoraConfig(rank=2))
    params = unflatten_dict({path: jnp.ones(3) for path in specs(model)})
    optimizer = make_optimizer(OptimizerConfig(1.0, 10, final_ratio=1.0, weight_decay=0.5))
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    decayed = {path[-1] for path, update in flatten_dict(updates).items() if update.any()}
    assert decayed == {"embedding", "kernel", "a", "b"}
    assert {path[-1] for path, update in flatten_dict(updates).items() if not update.any()} == {
        "scale",
        "bias",
    }
