"""Several engines share one copy of the parameters and the slots."""

from __future__ import annotations

import dataclasses
import os
import weakref

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from coa_jax.engine import layout
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.engine.group import (
    engines_sharing_parameters,
    free_engine_memory,
    install_copies,
    make_engines,
    parameter_copies,
    publish_all,
)
from coa_jax.errors import UserError
from coa_jax.model.config import LoraConfig, ModelConfig
from coa_jax.model.params import join, merge_adapters, select, without_adapters
from tests.devices import on_devices
from tests.random_params import random_params

MODEL = ModelConfig("llama", 97, 32, 48, 2, 4, 2, 8)
SHAPES = EngineConfig(slots=5, max_length=64, chunk=4, page_size=16, engines=2)


def params(seed=0):
    return random_params(MODEL, seed)


def test_engines_of_a_group_have_equal_parts_of_the_slots_and_one_copy_of_the_parameters():
    engines = make_engines(params(), MODEL, SHAPES)
    assert [engine.config.slots for engine in engines] == [3, 3]
    assert engines[0].params is engines[1].params
    assert len(parameter_copies(engines)) == 1


def test_engines_without_a_dtype_have_that_of_the_platform():
    (engine,) = make_engines(params(), MODEL, EngineConfig(2, 64, page_size=16, dtype="auto"))
    assert engine.config.dtype == "float32"  # on a CPU


def test_in_the_memory_of_a_pool_no_sequence_gives_way_where_every_slot_is_whole():
    pool = EngineConfig(16, 64, page_size=16, pages=19)
    assert (pool.whole().slots, pool.whole().pages) == (4, 0)
    assert dataclasses.replace(pool, pages=5).whole().slots == 2
    assert SHAPES.whole() == SHAPES


def test_a_pool_of_pages_is_divided():
    engines = make_engines(params(), MODEL, EngineConfig(4, 64, page_size=16, pages=9, engines=2))
    assert [engine.config.num_pages for engine in engines] == [4, 4]
    assert EngineConfig(slots=4, pages=1).share(2).pages == 1
    assert EngineConfig(slots=4).share(2).pages == 0


def test_engines_that_share_parameters_may_have_more_slots_and_pages_of_their_own_for_each():
    engines = make_engines(params(), MODEL, EngineConfig(4, 64, page_size=16, pages=9, engines=2))
    for whole, pages in ((False, 4), (True, 16)):
        more = engines_sharing_parameters(engines, parameter_copies(engines), 7, whole=whole)
        assert [engine.config.slots for engine in more] == [4, 4]
        assert [engine.config.num_pages for engine in more] == [pages, pages]


def test_new_parameters_reach_all_engines():
    engines = make_engines(params(), MODEL, SHAPES)
    publish_all(engines, params(1))
    (new,) = parameter_copies(engines)
    (other, _) = make_engines(params(1), MODEL, SHAPES)
    jax.tree.map(np.testing.assert_array_equal, new, other.params)
    install_copies(engines, [other.params])
    assert engines[1].params is other.params
    with pytest.raises(ValueError, match="3 copies for 2 engines"):
        install_copies(engines, [new] * 3)


def sampled(engine):
    """Tokens and their log-probabilities of one sample."""
    engine.extend([(0, 0, [5, 9, 2])])
    sampling = SamplingParams(temperature=1.0)
    engine.start(0, 3, last_token=2, limit=20, key=(0, 0, 0), sampling=sampling)
    engine.set_active(0, True)
    tokens, logps = [], []
    while engine.any_active:
        chunk = engine.decode()
        tokens += chunk.tokens[0, : chunk.count[0]].tolist()
        logps += chunk.logps[0, : chunk.count[0]].tolist()
    engine.release(0)
    return tokens, logps


def test_new_adapters_reach_engines_that_keep_the_other_parameters():
    adapted = dataclasses.replace(MODEL, lora=LoraConfig(rank=2, alpha=60.0))
    old, new = random_params(adapted, 0), random_params(adapted, 1)
    new = join(select(adapted, old, adapter=False), select(adapted, new, adapter=True))
    engines = make_engines(old, adapted, dataclasses.replace(SHAPES, dtype="bfloat16"))
    before = parameter_copies(engines)[0]
    publish_all(engines, new)
    after = parameter_copies(engines)[0]
    assert engines[1].params is after
    for layer, other in zip(before.layers, after.layers, strict=True):
        for path, values in flatten_dict(layer).items():
            kept = flatten_dict(other)[path] is values
            assert kept == (path[-1] not in ("a", "b")), path
            assert values.dtype == ("bfloat16" if kept else "float32")
    assert after.shared is before.shared
    # With all parameters, and after the memory was given back, the same comes out.
    anew = make_engines(new, adapted, dataclasses.replace(SHAPES, dtype="bfloat16"))
    free_engine_memory(engines)
    publish_all(engines, new)
    for one, other in ((after, anew[0].params), (after, engines[0].params)):
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_adapters_beside_the_model_decode_what_the_merged_model_decodes():
    adapted = dataclasses.replace(MODEL, lora=LoraConfig(rank=2, alpha=60.0))
    params = random_params(adapted, 1)
    tokens, logps = sampled(make_engines(params, adapted, SHAPES)[0])
    merged = make_engines(merge_adapters(adapted, params), without_adapters(adapted), SHAPES)
    same, theirs = sampled(merged[0])
    assert tokens == same
    np.testing.assert_allclose(logps, theirs, rtol=0, atol=1e-5)
    plain = make_engines(select(adapted, params, adapter=False), MODEL, SHAPES)
    assert np.abs(np.subtract(sampled(plain[0])[1][:1], logps[:1])).max() > 1e-4


def test_engines_that_gave_their_memory_back_decode_as_before():
    weights = params()
    engines = make_engines(weights, MODEL, SHAPES)
    before = [sampled(engine) for engine in engines]
    held = [weakref.ref(x) for x in jax.tree.leaves((engines[0].params, engines[0]._pages))]
    free_engine_memory(engines)
    assert not any(array() for array in held)
    assert not any(x.is_deleted() for x in jax.tree.leaves(weights))
    publish_all(engines, weights)
    assert len(parameter_copies(engines)) == 1
    assert [sampled(engine) for engine in engines] == before


def test_cpus_have_an_engine_for_each_core_and_sixteen_slots_and_others_have_one(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    asked = [EngineConfig(slots=slots).num_engines("cpu") for slots in (1, 31, 32, 47, 48, 256)]
    assert asked == [1, 1, 2, 2, 3, 3]
    assert EngineConfig(slots=256).num_engines("tpu") == 1
    assert EngineConfig(slots=256, pages=900).num_engines("cpu") == 1
    assert EngineConfig(slots=256, engines=5).num_engines("gpu") == 5


def test_more_engines_than_slots_are_refused():
    with pytest.raises(UserError, match=r"^engines is 3; .* slots, 2$"):
        EngineConfig(slots=2, engines=3)


def test_an_engine_alone_takes_all_slots():
    assert Engine(params(), MODEL, SHAPES).config.slots == 5


APART = """
import sys, threading, jax, numpy as np
from coa_jax.engine import programs
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.group import (
    install_copies,
    make_engines,
    new_copies,
    on_separate_devices,
    parameter_copies,
    publish_all,
)
from coa_jax.model.config import LoraConfig, ModelConfig
from coa_jax.model.params import join, shardings, split_trained, without_adapters
from coa_jax.parallel.placement import (rollout_devices, training_mesh)
from coa_jax.parallel.config import MeshConfig
from tests.random_params import random_params

lora = ModelConfig("qwen2", 384, 48, 96, 2, 4, 2, 16, qkv_bias=True, lora=LoraConfig(rank=2))
model = without_adapters(lora)
*sizes, tensor, aside = map(int, sys.argv[1].split(","))
mesh_config = MeshConfig(*sizes, tensor, aside)
mesh, devices = training_mesh(mesh_config, rollouts=True), rollout_devices(mesh_config)
assert {d.id for d in devices} == set(range(8 - aside, 8))
shapes = EngineConfig(2, 96, 32, (32,), page_size=16, cache_dtype=sys.argv[2])
prompt = np.random.default_rng(0).integers(0, 384, 21).tolist()

def params(seed):
    whole = jax.tree.map(lambda x: 4 * np.asarray(x), random_params(model, seed))
    return jax.device_put(whole, shardings(model, mesh))

def started(engine):
    engine.extend([(0, 0, prompt)])
    again(engine)

def again(engine):
    engine.start(0, len(prompt), last_token=prompt[-1], limit=90, key=(0, 0, 0),
                 sampling=SamplingParams())
    engine.set_active(0, True)

def chunk(engine):
    again(engine)
    decoded = engine.decode()
    return decoded.tokens[0].tolist(), decoded.logps[0].tolist()

# On the devices of training, and on others: the same bits, with the parameters that were published.
expected, engines = [], []
for where in ((), devices):
    engines = make_engines(params(0), model, shapes, tensor=tensor, aside=where)
    assert on_separate_devices(engines, params(0)) == bool(where)
    for engine in engines:
        started(engine)
    old = [chunk(engine) for engine in engines]
    publish_all(engines, params(1))
    new = [chunk(engine) for engine in engines]
    begun = split_trained({}, lora, 0, mesh)[0]
    others = make_engines(join(params(1), begun), lora, shapes, tensor=tensor, aside=where)
    kept = [engine.params.shared["embed"]["embedding"] for engine in others]
    adapters = jax.tree.map(lambda x: x + 0.1, begun)
    publish_all(others, join(params(1), adapters))
    assert all(x is e.params.shared["embed"]["embedding"] for x, e in zip(kept, others))
    for engine in others:
        started(engine)
    adapted = [chunk(engine) for engine in others]
    expected.append([old[0], new[0], adapted[0]])
    assert all(found == every[0] for every in (old, new, adapted) for found in every)
assert expected[0] == expected[1]
old, new, adapted = (tokens for tokens, _ in expected[0])
assert len({tuple(x) for x in (old, new, adapted)}) == 3
print("equal")

# Engines are on their devices with all that they have, and a chunk asks nothing of the others.
for engine in engines:
    inputs = engine._decode_arguments(np.zeros(1, np.int32), 2)[0]
    arrays = [x for x in jax.tree.leaves(inputs) if isinstance(x, jax.Array)]
    assert {d for x in arrays for d in x.devices()} <= set(devices)
print("placed")

# A chunk keeps the old parameters if others are published, and used up by an update, meanwhile.
publish_all(engines, params(0))
engine, training = engines[0], params(1)
again(engine)
arguments, static = engine._decode_arguments(np.zeros(1, np.int32), 2)
engine._pages, _, running = programs.decode_chunk(*arguments, **static)
publish_all(engines, training)
jax.tree.map(lambda x: x.delete(), training)
assert np.asarray(running.tokens)[0].tolist() == old
assert chunk(engine)[0] == new

# So does a thread that decodes all the time.
seen, ended = [], threading.Event()

def decode():
    while not ended.is_set():
        seen.append(chunk(engine)[0])

thread = threading.Thread(target=decode)
thread.start()
for turn in range(20):
    publish_all(engines, params(turn % 2))
last = new_copies(engines, params(0))
ended.set()
thread.join()
assert {tuple(tokens) for tokens in seen} <= {tuple(old), tuple(new)}
assert chunk(engine)[0] == new
install_copies(engines, last)
assert chunk(engine)[0] == old
print("safe")
"""


# DATA,FSDP,TENSOR,DECODE_TENSOR,ROLLOUT_DEVICES of eight devices, and the dtype of the cache.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "cache"),
    [
        ("1,2,2,2,4", ""),
        ("1,2,1,1,1", ""),
        ("1,2,2,1,4", ""),
        ("1,1,1,1,3", "int8"),
        ("2,2,1,2,2", "int8"),
    ],
)
def test_engines_on_devices_of_their_own_sample_the_same_bits_while_they_are_published_to(
    case, cache
):
    assert on_devices(8, "-c", APART, case, cache, optimized=True) == ["equal", "placed", "safe"]


def test_rollout_devices_that_make_no_groups_are_refused():
    with pytest.raises(
        UserError, match=r"in each process, the 1 mesh.rollout_devices and the 1 training"
    ):
        layout.run_groups(None, 2, jax.devices()[:1])
    with pytest.raises(UserError, match=r"must divide, in each process, the 1 .* and the 3"):
        layout.rollout_mesh(jax.devices()[:1], 3, 3, 1)
    assert layout.rollout_mesh(jax.devices()[:1], 1, 3, 1).devices.shape == (1, 1)
