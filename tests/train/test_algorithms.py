"""Presets and overrides: valid combinations, and errors that name the setting."""

from __future__ import annotations

import dataclasses

import pytest

from coa_jax.errors import UserError
from coa_jax.run.command import load_config
from coa_jax.run.settings import build_config
from coa_jax.train.algorithms import NAMES, UNSET, Algorithm, presets
from coa_jax.train.rl_config import RLConfig


@pytest.mark.parametrize("name", presets(100))
def test_a_preset_has_every_knob(name):
    chosen = Algorithm(name).resolve(100)
    assert chosen.name == name
    assert not [knob for knob in dataclasses.astuple(chosen) if knob in ("", UNSET)]
    assert chosen.resolve(100) == chosen


def test_each_knob_that_is_set_replaces_the_presets():
    for preset in presets(100):
        chosen = Algorithm(preset, clip_high=0.5, entropy_coef=0.125).resolve(100)
        assert (chosen.clip_high, chosen.entropy_coef) == (0.5, 0.125)
        assert chosen == dataclasses.replace(
            presets(100)[preset], clip_high=0.5, entropy_coef=0.125
        )
    assert Algorithm("grpo", kl_coef=0.0).resolve(100).kl_coef == 0  # 0 is not unset


def test_every_name_has_a_preset():
    assert tuple(presets(100)) == NAMES


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", ("group", "clip", "sequence", 0.2, 0.2)),
        ("dapo", ("group", "clip", "token", 0.2, 0.28)),
        ("dr_grpo", ("mean", "clip", "constant", 0.2, 0.2)),
        ("rloo", ("leave_one_out", "clip", "constant", 0.2, 0.2)),
        ("gspo", ("group", "sequence_clip", "sequence", 3e-4, 4e-4)),
        ("cispo", ("group", "cispo", "token", 1.0, 4.0)),
        ("reinforce++", ("batch", "clip", "token", 0.2, 0.2)),
        ("reinforce++_baseline", ("batch_baseline", "clip", "token", 0.2, 0.2)),
        ("ppo", ("gae", "clip", "token", 0.2, 0.2)),
    ],
)
def test_the_presets_are_those_of_the_papers(name, expected):
    a = Algorithm(name).resolve(100)
    assert (a.advantage, a.loss, a.normalise, a.clip_low, a.clip_high) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "grop"}, r"^name is 'grop'; give one of grpo, dapo"),
        (
            {"advantage": "std"},
            r"^advantage is 'std'; give one of group, .*, or package.module:name",
        ),
        ({"clip_high": -0.5}, r"^clip_high is -0.5; give a number from 0 to 1e\+06, or -1"),
        ({"clip_low": 1.5}, r"^clip_low is 1.5; give a number from 0 to 1, or -1"),
        ({"dual_clip": 0.5}, r"^dual_clip is 0.5; give a number above 1 and at most 1e\+06, or 0"),
        ({"loss": "cispo", "dual_clip": 3.0}, r"algorithm.dual_clip is 3.0 .*cispo"),
        ({"overlong_buffer": 101}, r"algorithm.overlong_buffer is 101 .*budget is 100"),
        ({"name": "ppo", "loss": "sequence_clip"}, r"algorithm.loss is 'sequence_clip' .*gae"),
        ({"kl_in": "reward"}, r"algorithm.kl_in is 'reward' .*kl_in=loss, or advantage=batch"),
        ({"kl": "k1"}, r"algorithm.kl is 'k1' .*mean is zero: give k2"),
        ({"tis_cap": 2.0}, r"algorithm.tis_cap is 2.0 .*old_logp=trainer"),
        ({"name": "ppo", "critic_learning_rate": 0.0}, r"algorithm.critic_learning_rate is 0.0"),
        ({"loss_length": 0}, r"^loss_length is 0; give a whole number from 1 to"),
    ],
)
def test_knobs_that_do_not_go_together_are_refused_by_name(changes, message):
    with pytest.raises(UserError, match=message):
        Algorithm(**changes).resolve(100)


def built(**changes):
    changes = {f"algorithm.{key}": value for key, value in changes.items()}
    values = load_config("configs/rl/factbook.py", changes).to_dict()
    del values["tools"]
    return build_config(RLConfig, values)


def test_a_command_line_chooses_an_algorithm_and_turns_its_knobs():
    assert built(name="gspo").chosen.loss == "sequence_clip"
    assert built(name="gspo").chosen.clip_high == 4e-4
    assert built(name="gspo", clip_high=0.01).chosen.clip_high == 0.01
    with pytest.raises(UserError, match=r"algorithm.name is 'gpso'"):
        built(name="gpso")


def test_the_small_policy_learns_as_it_always_has():
    a = built().chosen
    assert (a.advantage, a.loss, a.normalise, a.learn_from) == ("group", "clip", "token", "signal")
    assert (a.clip_low, a.clip_high, a.dual_clip, a.negative_weight) == (0.2, 0.28, 3.0, 0.25)
    assert a.kl_coef == a.entropy_coef == a.tis_cap == a.overlong_buffer == 0
