"""Training of adapters and decoding share the arrays of the frozen base."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from coa_jax.engine.config import EngineConfig
from coa_jax.engine.group import (
    free_engine_memory,
    make_engines,
    new_copies,
    parameter_copies,
    publish_all,
)
from coa_jax.engine.layout import publish, share_base, shares_base
from coa_jax.engine.memory import check_memory, engine_memory
from coa_jax.errors import UserError
from coa_jax.model.compute import local_compute
from coa_jax.model.config import LoraConfig, ModelConfig
from coa_jax.model.params import Adapted, join, select, without_adapters
from coa_jax.train.batch import Example, pack
from coa_jax.train.logps import token_logps
from tests.devices import on_devices
from tests.random_params import gemma3, random_params

LORA = LoraConfig(rank=2, alpha=4.0)
MODEL = ModelConfig("qwen2", 97, 32, 48, 3, 4, 2, 8, qkv_bias=True, tie_embeddings=False, lora=LORA)
GEMMA = gemma3(dataclasses.replace(MODEL, qkv_bias=False, tie_embeddings=True), window=5)
SHAPES = EngineConfig(slots=2, max_length=64, page_size=16)


def parts(model=MODEL, seed=0):
    """Adapters, the base in the layout for training, and the base that engines share."""
    params = random_params(model, seed)
    adapters, base = (select(model, params, adapter=kind) for kind in (True, False))
    copy = jax.tree.map(jnp.copy, base)
    return adapters, base, share_base(copy, without_adapters(model))


def batch():
    tokens = np.random.default_rng(0).integers(0, 97, 24).astype(np.int32)
    mask = np.ones(24, np.float32)
    cut = (slice(14), slice(14, 24))
    return pack([Example(tokens[at], mask[at], -mask[at], mask[at]) for at in cut], 17)


def total(adapters, params_of, model, remat):
    logps, _ = token_logps(params_of(adapters), model, batch(), local_compute(remat=remat))
    return jnp.sum(logps)


@pytest.mark.parametrize(
    ("model", "remat"),
    [
        pytest.param(MODEL, "none", marks=pytest.mark.slow, id="none"),
        pytest.param(MODEL, "full", id="full"),
        pytest.param(GEMMA, "dots", id="windows"),
    ],
)
def test_a_shared_base_gives_the_same_log_probabilities_and_gradients(model, remat):
    adapters, base, shared = parts(model)
    with_shared, with_copy = (
        jax.jit(jax.value_and_grad(total), static_argnums=(1, 2, 3))(
            adapters, params_of, model, remat
        )
        for params_of in (lambda own: Adapted(own, shared), lambda own: join(base, own))
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(close, with_shared, with_copy)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_the_backward_pass_keeps_no_copy_of_the_base(remat):
    adapters, base, shared = parts()

    def stacks(params_of):
        program = str(jax.make_jaxpr(jax.grad(total), static_argnums=(1, 2, 3))(
            adapters, params_of, MODEL, remat
        ))  # fmt: skip
        shapes = re.findall(r"f32\[(3,[\d,]+)\]", program)
        sizes = {math.prod(map(int, shape.split(","))) for shape in shapes}
        # Those of activations are multiples of 17, the number of tokens of a row.
        return {size for size in sizes if size >= kernel and size % 17}

    kernel = base["layers"]["mlp"]["gate_up"]["kernel"].size
    assert stacks(lambda own: join(base, own)) == {kernel}
    assert not stacks(lambda own: Adapted(own, shared))


def test_the_base_is_exported_as_it_was_loaded():
    adapters, base, shared = parts()
    stacked = Adapted(adapters, shared).stacked(MODEL)
    assert flatten_dict(stacked).keys() == flatten_dict(random_params(MODEL)).keys()
    jax.tree.map(np.testing.assert_array_equal, stacked, join(base, adapters))
    assert all(x.is_deleted() for layer in shared.layers for x in jax.tree.leaves(layer))


def arrays(params):
    """The arrays of a base in the layout for decoding, by identity."""
    flat = (flatten_dict(part) for part in (params.shared, *params.layers))
    return [id(x) for part in flat for path, x in part.items() if not path[-2].endswith("_lora")]


def test_engines_decode_with_the_very_arrays_of_the_shared_base():
    adapters, base, shared = parts()
    engines = make_engines(Adapted(adapters, shared), MODEL, dataclasses.replace(SHAPES, engines=2))
    new = jax.tree.map(lambda x: x + 1, adapters)
    assert arrays(engines[0].params) == arrays(shared)
    publish_all(engines, Adapted(new, shared))
    (beside,) = new_copies(engines, Adapted(new, shared))
    free_engine_memory(engines)
    publish_all(engines, Adapted(new, shared))
    (expected,) = publish(join(base, new), MODEL, engines[0].config)
    for published in (beside, *parameter_copies(engines)):
        assert arrays(published) == arrays(shared)
        jax.tree.map(np.testing.assert_array_equal, published, expected)


def test_an_engine_with_a_shared_base_needs_no_memory_for_a_copy():
    config = SHAPES.on_platform("cpu")
    memory = engine_memory(MODEL, config)
    free = memory.total - memory.parameters
    check_memory(MODEL, config, free, published=True)
    with pytest.raises(UserError, match=r"engine needs .* extend_buckets"):
        check_memory(MODEL, config, free)


def test_a_base_is_shared_only_by_adapters_in_the_dtype_of_the_engines():
    assert shares_base(MODEL, None, "float32", "float32")
    assert not shares_base(MODEL, None, "bfloat16", "float32")
    assert not shares_base(without_adapters(MODEL), None, "float32", "float32")


ON_A_MESH = """
import jax, numpy as np
from tests.train.test_shared_base import *
from coa_jax.model.params import shardings
from coa_jax.parallel.mesh import make_mesh

def shares(engine=0, **sizes):
    return shares_base(MODEL, make_mesh(**sizes), "float32", "float32", engine)

print(shares(data=2, tensor=2), shares(data=4), shares(2, data=2, tensor=2))
print(shares(fsdp=4), shares(fsdp=2, tensor=2), shares(1, data=2, tensor=2))

mesh = make_mesh(data=2, tensor=2)
params = jax.device_put(random_params(MODEL), shardings(MODEL, mesh))
adapters, base = (select(MODEL, params, adapter=kind) for kind in (True, False))
shared = share_base(jax.device_put(base, may_alias=False), without_adapters(MODEL))

def buffers(tree):
    leaves = jax.tree.leaves(tree)
    return {s.data.unsafe_buffer_pointer() for x in leaves for s in x.addressable_shards}

one, two = publish(Adapted(adapters, shared), MODEL, SHAPES)
for part in (one, two):
    added = buffers(part) - buffers(shared)
    assert added == buffers(part.adapters())
plain = make_engines(params, MODEL, SHAPES)
same = []
for part, engine in zip((one, two), plain):
    jax.tree.map(np.testing.assert_array_equal, part, engine.params)
    jax.tree.map(lambda x, y: same.append(x.sharding == y.sharding), part, engine.params)
print(all(same))
"""


def test_engines_on_a_mesh_share_their_part_of_the_base():
    assert on_devices(4, "-c", ON_A_MESH) == ["True True True", "False False False", "True"]
