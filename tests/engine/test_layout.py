"""Engines on several devices: the tokens of one device, pages split by heads, one compilation."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from coa_jax.engine import layout
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.layout import decode_mesh, groups_of
from coa_jax.errors import UserError
from coa_jax.model.cache import layer_axes
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig
from coa_jax.parallel.mesh import AXES, make_mesh
from tests.devices import on_devices
from tests.random_params import random_params

PROGRAM = """
import dataclasses, sys, jax, numpy as np
from coa_jax.engine import programs
from coa_jax.engine.config import EngineConfig, SamplingParams
from coa_jax.engine.engine import Engine
from coa_jax.engine.group import make_engines, publish_all
from coa_jax.engine.memory import engine_memory
from coa_jax.errors import UserError
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import shardings
from coa_jax.parallel.mesh import make_mesh
from tests.random_params import random_params

config = ModelConfig("qwen2", 384, 48, 96, 2, 4, 2, 16, qkv_bias=True, tie_embeddings=False)
params = jax.tree.map(lambda x: 4 * np.asarray(x), random_params(config))
# A pool of pages that all slots share.
shapes = EngineConfig(4, 64, 8, (32,), page_size=16, pages=18, decode_programs=1)
rng = np.random.default_rng(0)
prompts = [rng.integers(0, 384, n).tolist() for n in (5, 17, 21, 9)]

def sampled(engine):
    for slot in range(4):
        assert engine.reserve(slot, 60)
    engine.extend([(slot, 0, prompt) for slot, prompt in enumerate(prompts)])
    for slot, prompt in enumerate(prompts):
        engine.start(slot, len(prompt), last_token=prompt[-1], limit=40, key=(0, slot, 0),
                     sampling=SamplingParams(1.0))
        engine.set_active(slot, True)
    tokens, logps = [[] for _ in prompts], [[] for _ in prompts]
    while engine.any_active:
        chunk = engine.decode()
        for slot in range(4):
            tokens[slot] += chunk.tokens[slot, : chunk.count[slot]].tolist()
            logps[slot] += chunk.logps[slot, : chunk.count[slot]].tolist()
    for slot in range(4):
        engine.release(slot)
    return tokens, np.concatenate(logps)

def compiled():
    return programs.decode_chunk._cache_size() + programs.extend._cache_size()

expected, expected_logps = sampled(Engine(jax.device_put(params), config, shapes))
for case in sys.argv[1:]:
    *sizes, tensor = map(int, case.split(","))
    mesh = make_mesh(*sizes)
    placed = jax.device_put(params, shardings(config, mesh))
    engines = make_engines(placed, config, shapes, tensor=tensor)
    size = tensor or sizes[2]
    assert len(engines) == 8 // size
    engine = engines[-1]
    assert len(jax.tree.leaves(engine.params)[0].devices()) == size
    keys = engine._pages[0].keys
    assert keys.addressable_shards[0].data.shape[1] == (1 if size == 2 else 2), keys.sharding
    gate_up = engine.params.layers[0]["mlp"]["gate_up"]["kernel"]
    width = gate_up.addressable_shards[0].data.shape[-1]
    assert width == 96 // size
    cache = [array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(engine._pages)]
    assert sum(cache) == engine_memory(config, shapes, size).cache
    try:
        Engine(engine.params, config, dataclasses.replace(shapes, slots=2**24))
    except UserError as error:
        assert (f"on each of {size} devices" in str(error)) == (size > 1)
    else:
        raise AssertionError("larger than the machine")
    tokens, logps = sampled(engine)
    assert tokens == expected, sizes
    assert np.abs(logps - expected_logps).max() < 1e-4
    before = compiled()
    publish_all(engines, placed)
    jax.tree.map(lambda x: x.delete(), placed)  # as a donating update does
    assert sampled(engine)[0] == expected
    assert compiled() == before
    print(*sizes, tensor)
"""


# Two devices split the two key/value heads, four do not; one is a group of its own.
OTHERS = ["1,8,1,4", "8,1,1,0", "1,1,8,0"]


@pytest.mark.parametrize("cases", [["2,2,2,0"], pytest.param(OTHERS, marks=pytest.mark.slow)])
def test_engines_of_every_layout_sample_what_one_device_samples(cases):
    assert on_devices(8, "-c", PROGRAM, *cases, optimized=True) == [
        case.replace(",", " ") for case in cases
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_ops")
@pytest.mark.parametrize("tied", [True, False])
def test_weights_on_a_cpu_have_their_outputs_first(tied):

    config = ModelConfig("qwen2", 70, 32, 48, 2, 4, 2, 8, qkv_bias=True, tie_embeddings=tied)
    params = random_params(config)
    (copies,) = layout.publish(params, config, EngineConfig())
    assert copies.kernels == "outputs_first"
    kernels = flatten_dict(copies.layers[1])
    assert {path: x.shape for path, x in kernels.items() if path[-1] == "kernel"} == {
        ("attn", "qkv", "kernel"): (2, 4, 8, 32),
        ("attn", "out", "kernel"): (32, 2, 2, 8),
        ("mlp", "gate_up", "kernel"): (2, 48, 32),
        ("mlp", "down", "kernel"): (32, 48),
    }
    plain = layout.publish_program(config, "float32", None)(params)
    tokens, positions = np.arange(12).reshape(2, 6) % 70, np.arange(6)
    found = []
    for weights in (copies, plain):
        compute = layout.engine_compute(config, EngineConfig(), weights)
        assert compute.backend == "cpu" and compute.kernels == weights.kernels
        decoder, layers = weights.bind(config)
        hidden, _ = decoder(tokens, positions, compute, layers=layers)
        found.append(decoder.logits(hidden, compute))
    np.testing.assert_allclose(*found, atol=1e-5)
    assert np.abs(found[0]).max() > 0.01


def test_an_engine_computes_with_the_backend_of_its_platform_or_the_one_asked_for(monkeypatch):

    config = ModelConfig("llama", 70, 32, 48, 1, 4, 2, 8)
    params = random_params(config)
    monkeypatch.setenv("COA_JAX_OPS", "reference")
    shapes = EngineConfig(slots=2)
    (copies,) = layout.publish(params, config, shapes)
    compute = layout.engine_compute(config, shapes, copies)
    assert copies.kernels == "inputs_first"
    assert compute == Compute(collectives="none")
    monkeypatch.setenv("COA_JAX_OPS", "fast")
    with pytest.raises(UserError, match="COA_JAX_OPS is 'fast'; give one of reference, cpu"):
        layout.engine_compute(config, shapes, copies)


def test_heads_that_cannot_be_split_stay_together_in_every_layout():
    config = ModelConfig("qwen2", 384, 48, 96, 2, 4, 2, 16)
    for name, axis in (("xla", 1), ("pallas_gpu", 0), ("ragged_paged", 2)):
        compute = Compute(attention=name)
        assert layer_axes(config, compute, 2)[axis] == "kv_heads"
        assert layer_axes(config, compute, 4) == (None,) * 4


def test_groups_that_cannot_be_made_are_refused():
    with pytest.raises(UserError, match="decode_tensor is 3: it must divide 1 devices"):
        decode_mesh(make_mesh(), 3)
    assert decode_mesh(make_mesh()).devices.shape == (1, 1, 1)


class Device:
    """What is read of a device."""

    def __init__(self, number, process, coords=()):
        self.id, self.process_index, self.coords = number, process, coords


class Training:
    """A mesh of training on devices that are not here."""

    def __init__(self, devices):
        self.devices = devices
        self.shape = dict(zip(AXES, devices.shape, strict=True))


def test_a_group_is_of_one_process():
    pairs = np.array([Device(n, n // 2) for n in range(8)]).reshape(1, 2, 4)
    with pytest.raises(UserError, match="4 devices that decode together span processes"):
        decode_mesh(Training(pairs))
    # Of the first process two devices are as far apart as those of no other.
    uneven = np.array([Device(n, p) for n, p in enumerate((0, 1, 0, 2, 1, 3, 2, 3))])
    with pytest.raises(UserError, match="a divisor of the 2 devices of a process"):
        decode_mesh(Training(uneven.reshape(1, 4, 2)))


def torus(x, y, z):
    """Chips of a slice whose hosts have 2 x 2 x 1 of them, ``[x, y, z]``."""
    chips = np.empty((x, y, z), object)
    for number, at in enumerate(np.ndindex(x, y, z)):
        host = (at[0] // 2, at[1] // 2, at[2])
        chips[at] = Device(number, int(np.ravel_multi_index(host, (x // 2, y // 2, z))), at)
    return chips


@pytest.mark.parametrize("shape", [(4, 4, 8), (4, 4, 4), (8, 16, 16), (4, 4, 12), (2, 2, 1)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_chips_that_decode_together_are_neighbours_in_one_host(shape, order, tensor):
    chips = torus(*shape).transpose(order)
    for axis in (1, 2):  # the last axes of the torus as tensor
        sizes = (1, int(np.prod(chips.shape[:axis])), -1)
        groups = groups_of(decode_mesh(Training(chips.reshape(sizes)), tensor), tensor)
        assert groups.shape == (chips.size // tensor, tensor)
        assert len({d.id for d in groups.flat}) == chips.size
        for group in groups:
            assert len({d.process_index for d in group}) == 1
            extent = np.ptp([d.coords for d in group], axis=0) + 1
            assert extent.prod() == tensor


needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: bash launch/setup_env.sh tpu",
)


@needs_tpu_compiler
@pytest.mark.parametrize("sizes", [(1, 32, 4), (1, 128, 1), (4, 8, 4), (1, 16, 8)])
def test_engines_lie_within_the_hosts_of_a_slice(sizes):
    from coa_jax.parallel.slices import devices_of, parse_slice

    devices = devices_of(parse_slice("v5p:4x4x8"))
    groups = groups_of(decode_mesh(make_mesh(*sizes, devices=devices), 4), 4)
    assert {len({d.process_index for d in group}) for group in groups} == {1}


SCATTERED = """
import sys, jax, numpy as np
from coa_jax.engine import layout
from coa_jax.engine.config import EngineConfig
from coa_jax.model.config import ModelConfig
from flax.traverse_util import flatten_dict
from coa_jax.model.params import shardings
from coa_jax.parallel.mesh import make_mesh
from tests.random_params import random_params

config = ModelConfig("qwen2", 384, 48, 96, 2, 8, 4, 16, qkv_bias=True, tie_embeddings=False)
params = random_params(config)
expected = layout.publish_program(config, "float32", None)(params)
# As on a slice: devices 0, 1, 4 and 5 are of one host, the rest of another.
axes = layout.group_axes(np.array([0, 0, 1, 1, 0, 0, 1, 1]), 4)
for case in sys.argv[1:]:
    sizes = tuple(map(int, case.split(",")))
    placed = jax.device_put(params, shardings(config, make_mesh(*sizes)))
    mesh = layout.Mesh(make_mesh(*sizes).devices.reshape(axes[0]), axes[1])
    everywhere = layout.publish_program(config, "float32", mesh)(placed)
    for group, wanted in zip(layout.groups_of(mesh, 4), ({0, 1, 4, 5}, {2, 3, 6, 7}), strict=True):
        assert {device.id for device in group} == wanted, group
        for path, axis in (
            (("mlp", "gate_up", "kernel"), 2),
            (("attn", "qkv", "kernel"), 1),
            (("attn_norm", "scale"), None),
        ):
            whole, array = (flatten_dict(p.layers[1])[path] for p in (expected, everywhere))
            whole = np.asarray(whole)
            pieces = {shard.device: shard.data for shard in array.addressable_shards}
            parts = [whole] * 4 if axis is None else np.split(whole, 4, axis)
            for device, part in zip(group, parts, strict=True):
                np.testing.assert_array_equal(pieces[device], part)
    print(*sizes)
"""


@pytest.mark.parametrize(
    "cases", [["1,2,4"], pytest.param(["1,8,1", "2,2,2"], marks=pytest.mark.slow)]
)
def test_groups_that_lie_apart_in_the_order_of_training_get_their_copies(cases):
    assert on_devices(8, "-c", SCATTERED, *cases, optimized=True) == [
        case.replace(",", " ") for case in cases
    ]
