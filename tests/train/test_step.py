"""The compiled step: one program for any number of micro-batches; updates that are not finite are
skipped."""

import dataclasses

import jax
import numpy as np
import pytest

from coa_jax.errors import UserError
from coa_jax.model.api import load_model
from coa_jax.model.compute import local_compute
from coa_jax.model.config import ModelConfig
from coa_jax.perf.bench.measure import compile_count
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.batch import Example, pack, split_rows
from coa_jax.train.checkpoint import Checkpoints
from coa_jax.train.losses import PolicyLoss
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.step import check_updates, init_state, train_step
from tests import tiny_policy
from tests.random_params import random_params
from tests.train.tiny_runs import run_sft, sft_config

MODEL = ModelConfig("llama", 97, 32, 48, 1, 4, 2, 8)
DAPO = Algorithm("dapo", overlong_buffer=0).resolve(64)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, total_steps=20, warmup_steps=4)


def batches(count, advantage=1.0):
    rng = np.random.default_rng(0)
    mask = np.ones(12, np.float32)
    members = [
        Example(rng.integers(0, 97, 12).astype(np.int32), mask, -4 * mask, advantage * mask)
        for _ in range(2 * count)
    ]
    return split_rows(pack(members, 12), 2)


def fresh():
    params = jax.device_put(random_params(MODEL), jax.devices()[0])
    return init_state(params, OPTIMIZER)


def advance(state, parts, capacity=4):
    return train_step(
        state,
        parts,
        loss=PolicyLoss(DAPO, temperature=1.0),
        model_config=MODEL,
        compute=local_compute(),
        optimizer=OPTIMIZER,
        capacity=capacity,
    )


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_another_number_of_micro_batches_compiles_nothing():
    state, _ = advance(fresh(), batches(2))
    before = compile_count()
    for count in (1, 3, 4, 2):
        state, stats = advance(state, batches(count))
        assert stats["tokens"] == count * 22
    assert compile_count() == before
    advance(state, batches(5))  # no room: this one does
    assert compile_count() > before


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_an_update_that_is_not_finite_is_skipped_and_counted(poison):
    state, _ = advance(fresh(), batches(2))
    kept = bits((state.params, state.opt_state))
    bad = batches(2)
    bad[1].advantage[1, 5] = poison
    state, stats = advance(state, bad)
    assert bits((state.params, state.opt_state)) == kept
    assert not np.isfinite(stats["loss"]) or not np.isfinite(stats["optim/grad_norm"])
    assert (stats["optim/skipped"], stats["optim/skipped_in_a_row"]) == (1, 1)
    assert check_updates(stats) is None
    # The next one is what it would have been without it, its rate too.
    state, stats = advance(state, batches(3))
    other, _ = advance(fresh(), batches(2))
    other, expected = advance(other, batches(3))
    assert bits((state.params, state.opt_state)) == bits((other.params, other.opt_state))
    assert stats["optim/lr"] == expected["optim/lr"]
    assert (stats["optim/skipped"], stats["optim/skipped_in_a_row"]) == (1, 0)
    assert (int(state.step), int(other.step)) == (3, 2)


def test_too_many_skipped_updates_in_a_row_are_an_error():
    state, bad = fresh(), batches(1, advantage=np.nan)
    for _ in range(4):
        state, stats = advance(state, bad)
        assert check_updates(stats) is None
    state, stats = advance(state, bad)
    error = check_updates(stats)
    assert isinstance(error, UserError)
    assert str(error).startswith("the last 5 updates had a loss or gradient that is not finite")
    assert check_updates({}) is None  # an RL step without a signal


def test_skipped_updates_of_a_critic_are_an_error_too():
    policy = {"loss": 0.1, "optim/grad_norm": 0.2, "optim/skipped_in_a_row": 0}
    critic = {"critic/loss": np.inf, "critic/grad_norm": np.nan, "critic/skipped_in_a_row": 5}
    error = check_updates({**policy, **critic})
    assert str(error).startswith("the last 5 updates of the critic had a loss or gradient")
    assert "(loss inf, gradient norm nan)" in str(error)
    assert "algorithm.critic_learning_rate" in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_norm", 0),
        *((name, -1) for name in ("total_steps", "warmup_steps")),
        ("learning_rate", -1e-3),
        ("learning_rate", float("nan")),
        ("final_ratio", -3.0),
    ],
)
def test_a_number_with_which_an_optimiser_cannot_work_is_refused(name, value):
    with pytest.raises(UserError, match=f"^{name} is {value}"):
        dataclasses.replace(OPTIMIZER, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("b1", 1.0), ("b2", 1.5), ("eps", 0), ("eps", float("inf")), ("b3", 0.5)]
)
def test_an_option_with_which_adamw_cannot_work_is_refused(name, value):
    with pytest.raises(UserError, match=name):
        dataclasses.replace(OPTIMIZER, options={name: value})


@pytest.mark.slow
def test_a_run_that_cannot_go_on_saves_its_state_and_says_so(tmp_path):
    tiny_policy.write_sft_inputs(tmp_path)
    optimizer = OptimizerConfig(learning_rate=1e38, total_steps=30)
    config = sft_config(
        tmp_path / "base", tmp_path / "data.jsonl", optimizer=optimizer, checkpoint_every=100
    )
    with pytest.raises(UserError, match="the last 5 updates"):
        run_sft(tmp_path / "run", config)
    step = Checkpoints(tmp_path / "run" / "checkpoints" / "sft").steps()[-1]
    assert step is not None and 5 < step < 30
    like = init_state(load_model(tmp_path / "base").params, optimizer)
    state = Checkpoints(tmp_path / "run" / "checkpoints" / "sft").restore(step, like).state
    assert int(state.skipped_in_a_row) == 5
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_statistics_are_means_over_tokens_and_maxima():
    parts = batches(3)
    parts[2].logp[0, 3] = -9.0
    _, stats = advance(fresh(), parts)
    _, alone = advance(fresh(), parts[2:])
    assert stats["mismatch/abs_logp_max"] == alone["mismatch/abs_logp_max"] > 3
    losses = [advance(fresh(), [part])[1]["loss"] for part in parts]
    assert stats["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert stats["optim/lr"] == pytest.approx(2e-4)  # a fifth of the peak: warm-up of 4
