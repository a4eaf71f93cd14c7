"""Updates of each algorithm on trajectories whose rewards are known."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coa_jax.data.trajectory import Author, Reward
from coa_jax.engine.config import EngineConfig
from coa_jax.errors import UserError
from coa_jax.model.compute import local_compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import init_params
from coa_jax.rollout.request import RolloutConfig
from coa_jax.train.algorithms import Algorithm, presets
from coa_jax.train.batch import pack
from coa_jax.train.examples import trajectory_example
from coa_jax.train.experience import complete_experience, score
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.step import init_state, train_step
from coa_jax.train.update import (
    _merged,
    critic_state,
    group_examples,
    quotients,
    reference_params,
    update,
)
from tests.train.bare import bare
from tests.train.test_gae import reference_gae
from tests.train.tiny_runs import rl_config

MODEL = ModelConfig("llama", 61, 16, 24, 1, 2, 1, 8)
LENGTH = 40
COMPUTE = local_compute()
SCORING = {"model_config": MODEL, "compute": COMPUTE, "temperature": 1.2}
DEFAULT = ("gspo",)
REWARDED = [name for name in presets(LENGTH) if name != "opd"]
NAMES = [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in REWARDED]


def config(name, **changes):
    knobs = changes.pop("knobs", {})
    return rl_config(
        Path("unused"),
        Path("unused"),
        **{
            "algorithm": Algorithm(name, **knobs),
            "row_length": LENGTH,
            "rollout": RolloutConfig(LENGTH, 3, 16),
            "engine": EngineConfig(4, LENGTH, 8, (32,)),
            "optimizer": OptimizerConfig(3e-3, 8, final_ratio=1.0, weight_decay=0.0),
            **changes,
        },
    )


@functools.cache
def params():
    return init_params(MODEL, jax.random.key(2))


def logps(parameters, examples):
    batch = pack(examples, LENGTH)
    found = score(parameters, batch, **SCORING)
    return batch, np.asarray(found, np.float64)


@functools.cache
def groups(number=2):
    """Groups of four; two of each are right.  The policy itself has sampled them."""
    rng, made = np.random.default_rng(7), []
    for task in range(number):
        group = []
        for sample in range(4):
            size = int(rng.integers(9, 18))
            author = rng.choice([Author.POLICY, Author.ENVIRONMENT], size, p=[0.7, 0.3])
            author[:2], author[2] = Author.PROMPT, Author.POLICY
            tokens, reward = rng.integers(0, 61, size), Reward(float(sample % 2))
            group.append(bare(tokens, author, task_id=f"t{task}", sample_id=sample, reward=reward))
        made.append(group)
    for group in made:
        for trajectory in group:
            _, own = logps(params(), [trajectory_example(trajectory, 0.0)])
            trajectory.logp[:] = np.where(
                trajectory.author == Author.POLICY, own[0, : len(trajectory.tokens)], 0
            )
    return made


def preference(parameters):
    """How much likelier right trajectories are than wrong ones."""
    found = {0.0: 0.0, 1.0: 0.0}
    for group in groups():
        for trajectory in group:
            batch, own = logps(parameters, [trajectory_example(trajectory, 0.0)])
            found[trajectory.reward.value] += float((own * batch.mask).sum() / batch.mask.sum())
    return found[1.0] - found[0.0]


def run(settings, steps=1):
    start = jax.tree.map(jnp.copy, params())
    reference, critic = reference_params(settings, start), critic_state(settings, start)
    state, history = init_state(start, settings.optimizer), []
    for _ in range(steps):
        state, critic, stats = update(
            settings, state, MODEL, groups(), COMPUTE, critic=critic, reference=reference
        )
        history.append(stats)
    return state, critic, history


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [("rloo", 2 / 3), pytest.param("dr_grpo", 0.5, marks=pytest.mark.slow)],
)
def test_the_range_of_advantages_is_that_of_the_algorithm(name, expected):
    # Two of four are right: 1 less the mean of the other three, and less the mean of all.
    _, _, (stats,) = run(config(name))
    assert stats["adv/max"] == pytest.approx(expected)
    assert stats["adv/min"] == pytest.approx(-expected)


@pytest.mark.parametrize("name", NAMES)
def test_an_algorithm_makes_what_was_right_likelier(name):
    before = preference(params())
    state, critic, history = run(config(name), 4)
    assert all(np.isfinite(value) for stats in history for value in stats.values())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    assert preference(state.params) > before + 0.01
    # Before the first update the policy is the one that sampled.
    first = history[0]
    assert first["policy/clip_low"] == first["policy/clip_high"] == 0
    assert first["mismatch/abs_logp_max"] < 1e-5
    assert first["policy/kl_old"] < 1e-9
    # After it the trajectories are old: by the ratio of the loss, or by that of its correction.
    by = "mismatch/kl" if Algorithm(name).resolve(LENGTH).old_logp == "trainer" else "policy/kl_old"
    assert history[-1][by] > 1e-6
    assert ("policy/kl_ref" in first) == (Algorithm(name).resolve(LENGTH).kl_coef > 0)
    if name == "ppo":
        assert critic is not None and int(critic.step) == 4
        assert history[-1]["critic/loss"] < history[0]["critic/loss"]
        assert first["critic/explained_variance"] == pytest.approx(0, abs=1e-6)  # values are 0
    else:
        assert critic is None


@pytest.mark.parametrize(
    ("name", "mini_batch"),
    [
        pytest.param("dapo", 0, marks=pytest.mark.slow),
        pytest.param("ppo", 0, marks=pytest.mark.slow),
        ("own", 0),
    ]
    + [pytest.param(name, 1, marks=pytest.mark.slow) for name in REWARDED],
)
def test_identical_samples_are_computed_once_and_learned_as_often_as_they_occur(
    name, mini_batch, monkeypatch
):
    # Each group has two different right samples, one of them three times, and a wrong one twice.
    repeated = [[g[1], g[0], g[1], g[3], g[0], g[1]] for g in groups()]
    optimizer = OptimizerConfig(
        1.0, 8, options={"eps": 1.0}, clip_norm=1e9
    )  # moves along the gradient
    settings = config(
        "grpo" if name == "own" else name, mini_batch=mini_batch, optimizer=optimizer, group_size=6,
        knobs={"loss": "tests.train.test_update:squared_ratio"} if name == "own" else {},
    )  # fmt: skip
    rows = []

    def noting(state, batches, **options):
        rows.append(sum(int((b.segment_ids > 0).sum()) for b in batches))
        return train_step(state, batches, **options)

    def learn():
        start = jax.tree.map(jnp.copy, params())
        reference, critic = reference_params(settings, start), critic_state(settings, start)
        state = init_state(start, settings.optimizer)
        return update(settings, state, MODEL, repeated, COMPUTE, critic=critic, reference=reference)

    monkeypatch.setattr("coa_jax.train.update.train_step", noting)
    merged, merged_critic, stats = learn()
    tokens, rows[:] = sum(rows), []
    monkeypatch.setattr("coa_jax.train.update.merge_identical", list)
    separate, separate_critic, wanted = learn()
    assert tokens < 0.6 * sum(rows)
    assert stats == pytest.approx({**wanted, "time/score": stats["time/score"]}, rel=1e-4, abs=1e-6)
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), separate.params, params())
    assert max(jax.tree.leaves(moved)) > 1e-4
    for ours, theirs in ((merged, separate), (merged_critic, separate_critic)):
        if ours is not None:
            for one, other in zip(*map(jax.tree.leaves, (ours.params, theirs.params)), strict=True):
                np.testing.assert_allclose(one, other, atol=1e-5 * max(jax.tree.leaves(moved)))


def squared_ratio(ratio, advantages):
    return -advantages * ratio * ratio


@pytest.mark.slow
def test_later_updates_of_a_step_are_off_policy_by_the_trainers_own_measure():
    """With log-probabilities of the trainer the sampler's mismatch is measured, not clipped."""
    shifted = [
        [t.__class__(**{**vars(t), "logp": t.logp + np.float32(0.4)}) for t in group]
        for group in groups()
    ]
    settings = config("dapo", knobs={"old_logp": "trainer", "tis_cap": 1.5}, mini_batch=1)
    start = jax.tree.map(jnp.copy, params())
    state = init_state(start, settings.optimizer)
    state, _, stats = update(settings, state, MODEL, shifted, COMPUTE)
    assert int(state.step) == 2
    assert stats["policy/clip_low"] == stats["policy/clip_high"] == 0
    assert 1e-9 < stats["policy/kl_old"] < 1e-2  # 0 in the first update, not in the second
    gap = stats["mismatch/abs_logp_mean"]
    assert gap == pytest.approx(0.4, rel=1e-4)  # every policy token is that far off
    assert stats["mismatch/kl"] == pytest.approx(np.exp(-0.4) - 1 + 0.4, rel=1e-3)
    assert stats["mismatch/frac_clipped"] == 0


@pytest.mark.parametrize("name", ["dapo", pytest.param("ppo", marks=pytest.mark.slow)])
def test_a_steps_statistics_are_those_of_all_its_updates(name, monkeypatch):
    seen = {"loss": [], "value": []}

    def noting(*arguments, **options):
        state, stats = train_step(*arguments, **options)
        seen["value" if "value" in stats else "loss"].append(dict(stats))
        return state, stats

    monkeypatch.setattr("coa_jax.train.update.train_step", noting)
    _, _, (stats,) = run(config(name, mini_batch=1, optimizer=OptimizerConfig(0.05, 8)))
    first, second = seen["loss"]
    tokens = [first["tokens"], second["tokens"]]
    assert stats["tokens"] == sum(tokens) and tokens[0] != tokens[1]
    for figure in ("loss", "policy/kl_old", "policy/clip_high", "policy/entropy", "adv/abs_mean"):
        mean = np.average([first[figure], second[figure]], weights=tokens)
        assert stats[figure] == pytest.approx(mean, rel=1e-6), figure
    assert first["policy/kl_old"] < 1e-9 < stats["policy/kl_old"]
    assert stats["optim/grad_norm"] == max(first["optim/grad_norm"], second["optim/grad_norm"])
    assert {k: v for k, v in stats.items() if "mismatch" in k} == {
        k: v for k, v in quotients(first).items() if "mismatch" in k
    }
    assert stats["mismatch/abs_logp_max"] < 1e-5 < second["mismatch/abs_logp_max"]
    for old, new in zip(seen["value"][:1], seen["value"][1:], strict=True):
        mean = np.average([old["loss"], new["loss"]], weights=tokens)
        assert stats["critic/loss"] == pytest.approx(mean, rel=1e-6)


def updates_of(settings, number, monkeypatch, version=0):
    """Tasks of each update in its order, all batches, and statistics; parameters do not change."""
    members = groups(number)
    tasks = {learnt(t).tobytes(): t.task_id for g in members for t in g}
    seen = []

    def noting(state, batches, **options):
        seen.append(batches)
        return train_step(state, batches, **options)

    with monkeypatch.context() as patch:
        patch.setattr("coa_jax.train.update.train_step", noting)
        start = jax.tree.map(jnp.copy, params())
        state = init_state(start, settings.optimizer)
        _, _, stats = update(settings, state, MODEL, members, COMPUTE, version=version)
    orders = [
        {
            tasks[batch.tokens[row, at].tobytes()]
            for batch in batches
            for row, at in sequences(batch)
        }
        for batches in seen
    ]
    return orders, seen, stats


def learnt(trajectory):
    """Tokens up to the last that the policy wrote."""
    return trajectory.tokens[: np.flatnonzero(trajectory.author == Author.POLICY)[-1] + 1]


def test_mini_batches_have_a_fixed_size_and_a_short_step_makes_fewer_updates(monkeypatch):
    settings = config("dr_grpo", groups=7, mini_batch=2)
    assert settings.updates_per_step == 4
    sizes = {7: [2, 2, 2, 1], 5: [2, 2, 1], 4: [2, 2], 1: [1]}
    for number, wanted in sizes.items():
        orders, _, stats = updates_of(settings, number, monkeypatch)
        assert [len(order) for order in orders] == wanted
        assert set().union(*orders) == {f"t{i}" for i in range(number)}
        # In the order of the groups.
        assert orders[0] == {f"t{i}" for i in range(min(number, 2))}
        policy_tokens = sum(t.num_policy_tokens for g in groups(number) for t in g)
        assert stats["tokens"] == policy_tokens
    # The schedule counts updates, a run its steps.
    assert settings.optimizer.total_steps // settings.updates_per_step == 2
    assert config("dr_grpo", groups=7).updates_per_step == 1


@pytest.mark.slow
def test_later_epochs_take_the_groups_in_an_order_of_the_seed_and_the_step(monkeypatch):
    knobs = {"old_logp": "trainer", "tis_cap": 2.0}
    settings = config(
        "dr_grpo", groups=6, mini_batch=2, epochs=3, knobs=knobs, optimizer=OptimizerConfig(3e-3, 9)
    )
    assert settings.updates_per_step == 9
    orders, seen, _ = updates_of(settings, 6, monkeypatch)
    epochs = [orders[at : at + 3] for at in (0, 3, 6)]
    for epoch in epochs:
        assert [len(order) for order in epoch] == [2, 2, 2]
        assert set().union(*epoch) == {f"t{i}" for i in range(6)}
    assert epochs[0] == [{"t0", "t1"}, {"t2", "t3"}, {"t4", "t5"}]
    assert epochs[1] != epochs[0] and epochs[2] not in epochs[:2]
    assert updates_of(settings, 6, monkeypatch)[0] == orders
    assert updates_of(settings, 6, monkeypatch, version=1)[0] != orders
    # All updates are compared with the policy before the first, and so are their advantages.
    for batches in seen:
        for batch in batches:
            before = np.asarray(
                score(params(), batch._replace(weight=None, old_logp=None), **SCORING)
            )
            np.testing.assert_allclose(batch.old_logp, before, rtol=1e-5, atol=1e-5)
            assert batch.old_logp[batch.mask > 0].all()


@pytest.mark.slow
def test_every_epoch_has_what_a_critic_and_a_reference_said_before_the_first(monkeypatch):
    settings = config("ppo", groups=3, mini_batch=1, epochs=2, knobs={"lam": 0.9})
    members, seen = groups(3), []

    def noting(state, batches, **options):
        seen.append(batches)
        return train_step(state, batches, **options)

    monkeypatch.setattr("coa_jax.train.update.train_step", noting)
    start = jax.tree.map(jnp.copy, params())
    critic, reference = critic_state(settings, start), reference_params(settings, start)
    update(
        settings, init_state(start, settings.optimizer), MODEL, members, COMPUTE,
        critic=critic, reference=reference,
    )  # fmt: skip

    def told(batches, names):
        """Arrays of each sequence by its tokens."""
        return {
            batch.tokens[row, at].tobytes(): [getattr(batch, name)[row, at] for name in names]
            for batch in batches
            for row, at in sequences(batch)
        }

    for names, turn in ((("advantage", "ref_logp"), 0), (("value", "returns"), 1)):
        of_updates = [told(batches, names) for batches in seen[turn::2]]
        assert len(of_updates) == 6
        first, second = ({}, {})
        for part, into in zip(of_updates, [first] * 3 + [second] * 3, strict=True):
            into |= part
        assert first.keys() == second.keys() and len(first) == 12
        for tokens, arrays in first.items():
            for one, other in zip(arrays, second[tokens], strict=True):
                np.testing.assert_array_equal(one, other)


def test_an_update_that_was_skipped_is_in_no_mean_but_says_why_if_it_is_the_last():
    def stats(loss, in_a_row):
        return {
            "loss": loss,
            "policy/entropy": loss,
            "optim/grad_norm": loss,
            "optim/lr": 0.1,
            "optim/skipped": 1.0,
            "optim/skipped_in_a_row": in_a_row,
            "tokens": 4.0,
        }

    merged = _merged([stats(1.0, 0), stats(np.nan, 1), stats(3.0, 0)])
    assert merged == stats(2.0, 0) | {"optim/grad_norm": 3.0, "tokens": 12.0}
    assert list(merged) == list(stats(2.0, 0))  # rows have one order in every process
    merged = _merged([stats(1.0, 0), stats(np.inf, 1)])
    assert merged["loss"] == merged["optim/grad_norm"] == np.inf
    assert (merged["policy/entropy"], merged["optim/skipped_in_a_row"]) == (1.0, 1)
    alone = stats(1 / 3, 0)
    assert _merged([alone]) == alone and _merged([]) == {}


def experience(settings, reference=None, critic=None):
    algorithm = settings.chosen
    examples = [e for group in groups() for e in group_examples(algorithm, group, None)]
    batch = pack(examples, LENGTH)
    (filled,), stats = complete_experience(
        algorithm,
        [batch],
        MODEL,
        params(),
        critic=critic,
        reference=reference,
        temperature=settings.temperature,
        compute=COMPUTE,
    )
    return batch, filled, stats


def sequences(batch):
    for row in range(batch.tokens.shape[0]):
        for segment in range(1, batch.segment_ids[row].max() + 1):
            yield row, np.flatnonzero(batch.segment_ids[row] == segment)


def test_a_penalty_in_the_reward_counts_for_the_tokens_before_it():
    reference = init_params(MODEL, jax.random.key(9))
    settings = config("reinforce++", knobs={"kl_coef": 0.3})
    batch, filled, _ = experience(settings, reference)
    other = np.asarray(score(reference, batch, **SCORING), np.float64)
    expected = np.zeros(batch.mask.shape)
    for row, at in sequences(batch):
        mask = batch.mask[row, at]
        rewards = batch.advantage[row, at] - 0.3 * (batch.logp[row, at] - other[row, at])
        expected[row, at] = reference_gae(rewards, np.zeros(len(at)), mask, 1.0, 1.0)
    on = batch.mask > 0
    expected = (expected - expected[on].mean()) / expected[on].std() * on
    np.testing.assert_allclose(filled.advantage, expected, rtol=1e-4, atol=1e-5)
    # The reward of a trajectory is that of its last token.
    assert np.count_nonzero(batch.advantage) == sum(
        t.reward.value > 0 for group in groups() for t in group
    )


def test_ppo_learns_returns_and_takes_values_off():
    settings = config("ppo", knobs={"gamma": 0.98, "lam": 0.9, "kl_coef": 0.0})
    critic = critic_state(settings, params()).params
    critic = {**critic, "value_head": jax.random.normal(jax.random.key(1), (16,))}
    batch, filled, stats = experience(settings, critic=critic)
    values = np.asarray(filled.value, np.float64)
    assert values.any()
    advantages = np.zeros(batch.mask.shape)
    for row, at in sequences(batch):
        advantages[row, at] = reference_gae(
            batch.advantage[row, at], values[row, at], batch.mask[row, at], 0.98, 0.9
        )
    on = batch.mask > 0
    returns = advantages + values
    np.testing.assert_allclose(np.asarray(filled.returns)[on], returns[on], rtol=1e-4, atol=1e-5)
    whitened = (advantages - advantages[on].mean()) / advantages[on].std() * on
    np.testing.assert_allclose(filled.advantage, whitened, rtol=1e-4, atol=1e-4)
    explained = 1 - (returns - values)[on].var() / returns[on].var()
    assert stats["critic/explained_variance"] == pytest.approx(explained, rel=1e-3, abs=1e-4)


def test_a_value_reads_nothing_after_its_state():
    """The value of token t is that of the tokens before it: changing t changes no earlier value."""
    from coa_jax.train.critic import init_critic, token_values

    critic = {**init_critic(params()), "value_head": jax.random.normal(jax.random.key(1), (16,))}
    batch = pack([trajectory_example(groups()[0][0], 0.0)], LENGTH)
    changed = batch._replace(tokens=batch.tokens.copy())
    changed.tokens[0, 5] = (changed.tokens[0, 5] + 1) % 61
    left, right = (
        np.asarray(token_values(critic, b, model_config=MODEL, compute=COMPUTE))
        for b in (batch, changed)
    )
    np.testing.assert_array_equal(left[:, :6], right[:, :6])
    assert (left[0, 6:8] != right[0, 6:8]).all()


def test_groups_of_one_need_an_algorithm_that_does_not_compare():
    assert config("ppo", group_size=1).group_size == 1
    with pytest.raises(UserError, match="group_size is 1, and the algorithm compares samples"):
        config("grpo", group_size=1)
    with pytest.raises(UserError, match="group_size is 1"):
        config("ppo", knobs={"learn_from": "signal"}, group_size=1)
