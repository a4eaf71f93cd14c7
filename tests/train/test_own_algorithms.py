"""Advantages and losses outside of the package: MaxRL and SAPO of examples/, and mistakes."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coa_jax.errors import UserError
from coa_jax.train.advantages import advantages_of
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.losses import PolicyLoss, check_loss
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.update import group_examples
from tests.own_files import install
from tests.train.packed import gradients, members
from tests.train.test_advantages import group
from tests.train.tiny_runs import rl_config

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_algorithm"
ADVANTAGES = """
import numpy as np
from coa_jax.train.algorithms import marked

@marked(alone=True)
def long(rewards, lengths, base: float = 1.0):
    return rewards - base * lengths

@marked(whitened=True, alone=True)
def plain(rewards):
    return list(rewards)

def late(trajectories):
    return [np.arange(len(t.tokens)) * t.reward.value for t in trajectories]

def few(rewards): return rewards[:1]
def nan(rewards): return rewards / 0
def one(rewards): return 1.0
def short(trajectories): return [np.ones(1) for t in trajectories]
def text(rewards): return ["a" for _ in rewards]
def failing(rewards): return rewards["a"]
def asks(reward): return reward
def wants(rewards, power): return rewards
"""
LOSSES = """
import numpy as np
import jax, jax.numpy as jnp

def plain(logp, advantages): return -advantages * logp
def total(ratio): return ratio.sum()
def numbers(ratio): return 1.0
def named(ratio): return ratio, {"Big": ratio}
def taken(ratio): return ratio, {"entropy": ratio}
def largest(ratio): return ratio, {"ratio_max": ratio}
def shaped(ratio): return ratio, {"part": ratio[0]}
def listed(ratio): return ratio, [ratio]
def branching(ratio, advantages):
    if (advantages > 0).any():
        return ratio
    return -ratio
def of_numpy(ratio): return np.square(ratio)
def root(log_ratio): return jnp.sqrt(log_ratio)
def cusp(log_ratio): return jnp.sqrt(jnp.abs(log_ratio))
def fixed(ratio, advantages): return jax.lax.stop_gradient(ratio) * advantages
def whole(ratio): return (ratio > 1).astype(int)
def failing(ratio): return ratio.middle
def asks(rewards): return rewards
def looping(logp): return jax.lax.while_loop(lambda x: x.sum() < -99, lambda x: x + 1, logp)
"""


@pytest.fixture(autouse=True, scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_advantages.py").write_text(ADVANTAGES)
    (folder / "my_losses.py").write_text(LOSSES)
    install(folder, "soft", "coa_jax.losses", "soft", "sapo:sapo")
    install(folder, "likely", "coa_jax.advantages", "likely", "maxrl:maxrl")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.syspath_prepend(str(EXAMPLE))
        importlib.invalidate_caches()
        yield
    for name in ("my_advantages", "my_losses", "maxrl", "sapo"):
        sys.modules.pop(name, None)


def chosen(name="dapo", **knobs):
    return Algorithm(name, **knobs).resolve(100)


def own(advantage, values, **knobs):
    found = advantages_of(chosen(advantage=f"my_advantages:{advantage}", **knobs), group(values))
    return [value.tolist() for _, value in found]


# --- formulas -------------------------------------------------------------------------------


@given(st.lists(st.booleans() | st.none(), min_size=1, max_size=12))
def test_maxrl_weighs_right_answers_by_how_seldom_they_are(right):
    values = [None if r is None else float(r) for r in right]
    found = advantages_of(chosen(advantage="maxrl:maxrl"), group(values))
    graded = [r for r in right if r is not None]
    assert len(found) == len(graded)
    for trajectory, advantage in found:
        # N / K - 1 of the K right ones of N, and -1 of the others (arXiv 2602.02710).
        share = trajectory.reward.value * len(graded) / max(sum(graded), 1)
        expected = share - 1 if any(graded) else 0.0
        assert float(advantage) == pytest.approx(expected, rel=1e-6)


def sapo(sequences, tau_pos, tau_neg):
    """Loss and gradients of the mean over tokens, in float64 (arXiv 2511.20347)."""
    count = sum(s.mask.sum() for s in sequences)
    loss, slopes = 0.0, []
    for s in sequences:
        ratio = np.exp(s.arrays["logp_now"] - s.logp)
        tau = np.where(s.advantage > 0, tau_pos, tau_neg)
        gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
        loss -= (s.mask * 4 / tau * gate * s.advantage).sum() / count
        slopes.append(-s.mask * 4 * gate * (1 - gate) * ratio * s.advantage / count)
    return loss, slopes


@pytest.mark.parametrize("options", [{}, {"tau_pos": 0.5, "tau_neg": 3}])
def test_sapo_has_the_value_and_gradient_of_its_paper(options):
    sequences = members()
    expected, wanted = sapo(sequences, *{"tau_pos": 1.0, "tau_neg": 1.05, **options}.values())
    algorithm = chosen(loss="sapo:sapo", loss_options=options)
    for layout in ({}, {"length": 64, "rows": 1}, {"length": 19, "rows": 3}):
        loss, (by_logp, _) = gradients(algorithm, sequences, **layout)
        assert loss == pytest.approx(expected, rel=1e-5)
        for found, slope in zip(by_logp, wanted, strict=True):
            # Where a gate is nearly open, 1 - gate has few digits in float32.
            np.testing.assert_allclose(found, slope, rtol=1e-4, atol=2e-7)


def test_a_correction_multiplies_a_loss_of_ones_own():
    """With the trainer's old policy r is that to it, and rho leads there from the sampler."""
    sequences = members()
    algorithm = chosen(loss="my_losses:plain", old_logp="trainer", tis_cap=2.0)
    _, (by_logp, _) = gradients(algorithm, sequences)
    count = sum(s.mask.sum() for s in sequences)
    for found, s in zip(by_logp, sequences, strict=True):
        rho = np.minimum(np.exp(s.arrays["old_logp"] - s.logp), 2.0)
        np.testing.assert_allclose(found, -s.mask * rho * s.advantage / count, rtol=1e-4, atol=1e-8)


# --- what they may ask for and give ---------------------------------------------------------


def test_an_advantage_sees_the_graded_samples_alone():
    trajectories = group([1.0, None, 0.0], lengths=[3, 9, 5])
    algorithm = chosen(advantage="my_advantages:long", advantage_options={"base": 0.5})
    found = advantages_of(algorithm, trajectories)
    assert [(t.sample_id, float(a)) for t, a in found] == [(0, -0.5), (2, -2.5)]
    assert advantages_of(algorithm, group([None, None])) == []


def test_an_advantage_may_give_a_number_a_token():
    algorithm = chosen(advantage="my_advantages:late")
    one, two = group_examples(algorithm, group([1.0, None, 0.5], lengths=[3, 1, 2]), None)
    # The first token is the prompt's.
    assert one.advantage.tolist() == [0, 1, 2, 3]
    assert two.advantage.tolist() == [0, 0.5, 1]
    clipped = chosen("gspo", advantage="my_advantages:late")
    with pytest.raises(
        UserError, match=r"my_advantages:late .*algorithm\.loss=sequence_clip .* loss=clip"
    ):
        advantages_of(clipped, group([1.0, 0.0]))


def test_marks_say_of_an_own_advantage_what_those_of_a_built_in_one_say(tmp_path):
    knobs = {"kl_coef": 0.1, "kl_in": "reward"}
    mine = chosen(advantage="my_advantages:plain", **knobs)
    theirs = chosen(advantage="batch", **knobs)
    assert (mine.whitened, mine.alone, mine.needs_critic) == (True, True, False)
    for algorithm in (mine, theirs):
        (example, _) = group_examples(algorithm, group([0.7, 0.0], lengths=[3, 1]), None)
        assert example.advantage.tolist() == [0, 0, 0, np.float32(0.7)]
    with pytest.raises(
        UserError, match=r"^algorithm\.kl_in is 'reward' .*advantage=my_advantages:long "
    ):
        chosen(advantage="my_advantages:long", **knobs)
    single = {"group_size": 1, "groups": 8}
    alone = Algorithm("grpo", "my_advantages:long")
    config = rl_config(tmp_path, tmp_path, algorithm=alone, **single)
    assert isinstance(config, RLConfig)
    with pytest.raises(UserError, match="group_size is 1"):
        rl_config(tmp_path, tmp_path, algorithm=Algorithm("grpo", "my_advantages:late"), **single)


def test_losses_with_other_options_are_other_programs():
    one, two = (
        PolicyLoss(chosen(loss="sapo:sapo", loss_options={"tau_neg": tau}), 1.0)
        for tau in (1.5, 2.5)
    )
    assert one != two and one == dataclasses.replace(one)
    assert len({one, two, dataclasses.replace(one)}) == 2


def test_an_installed_package_gives_short_names():
    algorithm = chosen(advantage="likely", loss="soft", loss_options={"tau_neg": 2})
    assert algorithm.loss_call(ratio=1.0, advantages=-1.0, logp=0.0)[0] == 1.0
    assert [float(a) for _, a in advantages_of(algorithm, group([1.0, 0.0]))] == [1.0, -1.0]


# --- mistakes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("few", r"returned array\(\[1\.\]\) for the rewards \[1.0, 0.0\]; an advantage function"),
        ("nan", "returned array.*for each of the 2 samples, a finite number"),
        ("one", "returned 1.0 for the rewards"),
        ("short", r"an array with a finite number per token$"),
        ("text", r"returned \['a', 'a'\]"),
        ("failing", r"failed: IndexError: .*my_advantages.py:\d+\)$"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")
def test_what_an_advantage_gives_is_checked(name, message):
    with pytest.raises(UserError, match=f"^algorithm.advantage: my_advantages:{name}.*{message}"):
        own(name, [1.0, 0.0])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "total",
            r"returned float32\[\]; a loss returns an array with one number per token, "
            r"here float32\[2",
        ),
        ("numbers", "returned 1.0; a loss returns"),
        ("named", "returned the metric 'Big'; metrics are"),
        ("taken", "returned the metric 'entropy'; .* entropy, kl_old, kl_ref are reserved"),
        ("largest", "returned the metric 'ratio_max'"),
        ("shaped", "returned the metric 'part'"),
        ("listed", "returned the metric .*; metrics are a dictionary"),
        ("branching", r"failed: TracerBool.*my_losses.py:\d+\); a loss is a pure function"),
        ("of_numpy", r"failed: TracerArray.*my_losses.py:\d+\); a loss is a pure function"),
        ("root", "returned nan with the gradient nan for a token with ratio 0.1 and advantage 1;"),
        ("cusp", "with the gradient inf for a token with ratio 1 and"),
        ("fixed", "has no gradient by logp, so the policy would not be trained"),
        ("whole", r"returned int32\[2, 14\]"),
        ("failing", r"failed: AttributeError: .*middle \(.*my_losses.py:\d+\)"),
        ("looping", "ValueError: Reverse-mode differentiation does not work"),
    ],
)
def test_what_a_loss_gives_is_checked_before_a_run(name, message):
    with pytest.raises(UserError, match=f"^algorithm.loss: my_losses:{name}.*{message}"):
        check_loss(chosen(loss=f"my_losses:{name}"))


def test_a_sound_loss_passes_the_check():
    check_loss(chosen(loss="sapo:sapo"))
    check_loss(chosen(loss="my_losses:plain"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "my_losses:nothing"}, r"^algorithm.loss: my_losses:nothing: .*has no 'nothing'"),
        ({"loss": "sapo"}, "^loss is 'sapo'; give one of clip, sequence_clip, cispo,"),
        (
            {"loss": "sapo:sapo", "loss_options": {"tau": 1}},
            r"^algorithm.loss: sapo:sapo has no option 'tau'; did you mean 'tau_\w+'\?",
        ),
        (
            {"loss": "sapo:sapo", "loss_options": {"tau_pos": "much"}},
            "^algorithm.loss: the option tau_pos of sapo:sapo is 'much'; give a number",
        ),
        ({"loss_options": {"tau": 1}}, "^algorithm.loss: clip has no option 'tau'; it has none"),
        ({"loss": "my_losses:asks"}, "my_losses:asks needs 'rewards'; a loss gets these arguments"),
        ({"loss": "sapo:sapo", "dual_clip": 3.0}, "the loss sapo:sapo does not take it: give 0"),
        ({"advantage": "my_advantages:asks"}, r"needs 'reward'; did you mean 'rewards'\?"),
        ({"advantage": "my_advantages:wants"}, "my_advantages:wants needs 'power'"),
    ],
)
def test_a_name_or_an_option_that_does_not_fit_is_one_line(changes, message):
    with pytest.raises(UserError, match=message):
        chosen(**changes)
