"""Several engines share one copy of the parameters and the slots."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest

from coa_jax.engine.config import EngineConfig
from coa_jax.engine.engine import Engine
from coa_jax.engine.group import copies, make_engines, publish_all, take_copies
from coa_jax.errors import UserError
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import init_params

MODEL = ModelConfig("llama", 97, 32, 48, 2, 4, 2, 8)
SHAPES = EngineConfig(slots=5, max_length=64, chunk=4, page_size=16, engines=2)


def params(seed=0):
    return init_params(MODEL, jax.random.key(seed))


def test_engines_of_a_group_have_equal_parts_of_the_slots_and_one_copy_of_the_parameters():
    engines = make_engines(params(), MODEL, SHAPES)
    assert [engine.config.slots for engine in engines] == [3, 3]
    assert engines[0].params is engines[1].params
    assert len(copies(engines)) == 1


def test_a_pool_of_pages_is_divided():
    engines = make_engines(params(), MODEL, EngineConfig(4, 64, page_size=16, pages=9, engines=2))
    assert [engine.config.num_pages for engine in engines] == [4, 4]
    assert EngineConfig(slots=4, pages=1).share(2).pages == 1
    assert EngineConfig(slots=4).share(2).pages == 0


def test_new_parameters_reach_all_engines():
    engines = make_engines(params(), MODEL, SHAPES)
    publish_all(engines, params(1))
    (new,) = copies(engines)
    (other, _) = make_engines(params(1), MODEL, SHAPES)
    jax.tree.map(np.testing.assert_array_equal, new, other.params)
    take_copies(engines, [other.params])
    assert engines[1].params is other.params
    with pytest.raises(ValueError, match="3 copies for 2 engines"):
        take_copies(engines, [new] * 3)


def test_cpus_have_an_engine_for_each_core_and_sixteen_slots_and_others_have_one(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    asked = [EngineConfig(slots=slots).num_engines("cpu") for slots in (1, 31, 32, 47, 48, 256)]
    assert asked == [1, 1, 2, 2, 3, 3]
    assert EngineConfig(slots=256).num_engines("tpu") == 1
    assert EngineConfig(slots=256, pages=900).num_engines("cpu") == 1
    assert EngineConfig(slots=256, engines=5).num_engines("gpu") == 5


def test_more_engines_than_slots_are_refused():
    with pytest.raises(UserError, match="give at most slots"):
        EngineConfig(slots=2, engines=3)


def test_an_engine_alone_takes_all_slots():
    assert Engine(params(), MODEL, SHAPES).config.slots == 5
