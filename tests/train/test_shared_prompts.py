"""A prompt that samples share is computed once, with unchanged results."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.model.compute import local_compute
from coa_jax.model.config import ModelConfig
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.batch import Example, pack, split_rows
from coa_jax.train.critic import init_critic
from coa_jax.train.losses import Net, PolicyLoss, ValueLoss
from coa_jax.train.objectives import weigh
from coa_jax.train.step import gradient_sums
from tests.random_params import gemma3, random_params
from tests.train.tiny_runs import rl_config

MODEL = ModelConfig("qwen2", 97, 32, 48, 2, 4, 2, 8, qkv_bias=True)
PARAMS = random_params(MODEL, 1)
COMPUTE = local_compute()
ROW, WHOLE = 64, 96


def group(prompt, sizes, seed):
    """Samples of one prompt: turns of the policy and the environment."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, MODEL.vocab_size, prompt)
    made = []
    for size in sizes:
        mask = (rng.random(prompt + size) < 0.7).astype(np.float32)
        mask[:prompt], mask[prompt : prompt + 1] = 0, 1
        tokens = np.concatenate([start, rng.integers(0, MODEL.vocab_size, size)]).astype(np.int32)
        logp = (-rng.uniform(2, 7, len(tokens)) * mask).astype(np.float32)
        made.append(Example(tokens, mask, logp, mask * np.float32(rng.normal())))
    return made


def sequences(batch):
    """What attention sees: (tokens, positions, mask, logp, advantage) of every sequence."""
    for row in range(batch.tokens.shape[0]):
        if batch.unfolded is None:
            places, ids = np.arange(batch.tokens.shape[1]), batch.segment_ids[row]
        else:
            places, ids = batch.unfolded.places[row], batch.unfolded.segment_ids[row]
        for segment in range(1, ids.max(initial=0) + 1):
            at = places[ids == segment]
            assert (np.diff(np.flatnonzero(ids == segment)) == 1).all()
            assert batch.positions[row, at].tolist() == list(range(len(at)))
            arrays = (batch.tokens, batch.mask, batch.logp, batch.advantage)
            yield tuple(tuple(x[row, at].tolist()) for x in arrays)


groups_of_sizes = st.lists(
    st.tuples(st.integers(1, 30), st.lists(st.integers(1, 30), min_size=1, max_size=5)),
    min_size=1,
    max_size=5,
)


@given(groups_of_sizes)
def test_attention_sees_every_sequence_whole(sizes):
    members = [e for seed, (prompt, own) in enumerate(sizes) for e in group(prompt, own, seed)]
    batch = pack(members, ROW, WHOLE)
    # As without sharing, where what stands in the places of a prompt has no loss.
    assert sorted(sequences(batch)) == sorted(sequences(pack(members, ROW)))
    # Every token that has a loss comes after the one from which it is predicted.
    for row in range(batch.tokens.shape[0]):
        places, back = batch.unfolded.places[row], batch.unfolded.back[row]
        used = batch.segment_ids[row] > 0
        assert (places[back][used] == np.flatnonzero(used)).all()
        learnt = np.flatnonzero(batch.mask[row])
        assert (places[back[learnt] - 1] == learnt - 1).all()
        assert (batch.segment_ids[row, learnt] == batch.segment_ids[row, learnt - 1]).all()


def test_a_row_has_a_prompt_once_and_its_last_token_for_each_sample():
    batch = pack(group(20, (8, 8, 8, 8), 0), ROW, 4 * 28)
    assert batch.tokens.shape[0] == 1
    assert int((batch.segment_ids > 0).sum()) == 28 + 3 * 9
    # Without sharing two fit.
    assert pack(group(20, (8, 8, 8, 8), 0), ROW).tokens.shape[0] == 2
    # Attention has room for three only.
    assert pack(group(20, (8, 8, 8, 8), 0), ROW, 3 * 28).tokens.shape[0] == 2


MEMBERS = [*group(17, (9, 5, 12, 3), 0), *group(6, (11, 4), 1), *group(1, (7, 2), 2)]


@functools.cache
def sums(
    loss, params_of=lambda: PARAMS, whole=0, rows=1, normalise="token", compute=COMPUTE, model=MODEL
):
    """Gradients and statistics over all of an update, and how many tokens were computed."""
    packed = pack(MEMBERS, ROW, whole)
    batches = weigh(split_rows(packed, rows), normalise)
    total = None

    def of_params(params, batch, _):
        return loss(params, batch, Net({}, model, compute))

    for batch in batches:
        if isinstance(loss, ValueLoss):
            batch = batch._replace(value=0.3 * batch.logp, returns=batch.advantage)
        one = jax.tree.map(lambda x: x[None], batch)
        step = jax.jit(gradient_sums, static_argnums=0)
        found = jax.device_get(step(of_params, params_of(), one, 1))
        total = found if total is None else jax.tree.map(np.add, total, found)
    return *total, int((packed.segment_ids > 0).sum())


def critic():
    return {**init_critic(PARAMS), "value_head": jax.random.normal(jax.random.key(3), (32,))}


def check_equal(found, expected, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max()),
        found[0],
        expected[0],
    )
    for name, value in expected[1].items():
        if not name.endswith("max"):
            np.testing.assert_allclose(found[1][name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    assert found[2] < expected[2]


def policy(name="dapo"):
    settings = {"overlong_buffer": 0} if name == "dapo" else {}
    return PolicyLoss(Algorithm(name, **settings).resolve(ROW), temperature=1.2)


def test_losses_and_gradients_are_those_of_prompts_that_are_not_shared():
    check_equal(sums(policy(), whole=WHOLE), sums(policy()))


def test_windows_count_positions_of_the_sequence_and_not_places_of_the_row():
    model = gemma3(MODEL, window=8)
    of = functools.partial(sums, policy(), lambda: random_params(model, 1), model=model)
    check_equal(of(whole=WHOLE), of())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_algorithms_that_look_at_sequences_find_them(name):
    loss = policy(name)
    options = {"normalise": loss.algorithm.normalise, "compute": local_compute(remat="full")}
    check_equal(sums(loss, whole=WHOLE, rows=2, **options), sums(loss, rows=3, **options))


@pytest.mark.slow
def test_values_are_those_of_prompts_that_are_not_shared():
    loss = ValueLoss(bound=0.2)
    check_equal(sums(loss, critic, whole=WHOLE), sums(loss, critic))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel",
    ["splash", *(pytest.param(k, marks=pytest.mark.slow) for k in ("cudnn", "pallas_gpu"))],
)
def test_kernels_share_prompts_as_the_reference_does(kernel):
    compute = local_compute(attention=kernel, interpret=True)
    check_equal(sums(policy(), whole=WHOLE, compute=compute), sums(policy()), 1e-4)


def test_rows_of_attention_that_are_shorter_than_rows_are_refused():
    with pytest.raises(UserError, match="attention_length is 100, and rows have 192 tokens"):
        rl_config("model", "tasks", attention_length=100)
    assert rl_config("model", "tasks", attention_length=300).attention_length == 300
