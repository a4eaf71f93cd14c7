"""Compiles programs for TPUs without having the devices, and prints the results as JSON.

    python -m tests.model.attention.tpu_programs training|decoding|engine TOPOLOGY

It runs on a CPU with ``libtpu`` installed, which contains the compiler for real TPUs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from coa_jax.engine import programs
from coa_jax.engine.layout import kernels_for
from coa_jax.model import cache
from coa_jax.model.attention.choice import Case, resolve
from coa_jax.model.compute import Compute, training_compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import abstract_params, init_params, unstack
from coa_jax.parallel.mesh import AXES, sharding_for
from coa_jax.train.batch import Batch
from coa_jax.train.losses import Net, SFTLoss
from coa_jax.train.step import gradient_sums

MODEL = ModelConfig("llama", 2048, 512, 1024, 2, 8, 4, 128)
CASE = Case("tpu", "bfloat16", num_kv_heads=4, num_groups=2, head_dim=128, page_size=32)


def mesh_of(topology: str, *sizes: int) -> Mesh:
    # Without this variable only one process of a machine can load libtpu.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    chosen = np.asarray(devices[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(chosen, AXES, axis_types=(AxisType.Auto,) * 3)


def decode_compute(mesh: Mesh) -> Compute:
    """As of an engine on these chips."""
    name = resolve("paged", "auto", CASE)
    kernels = kernels_for("tpu")
    return Compute("bfloat16", attention=name, mesh=mesh, collectives="none", kernels=kernels)


def report(name: str, compiled: jax.stages.Compiled) -> None:
    memory = compiled.memory_analysis()
    calls = re.findall(
        r'%([\w-]+)[.\d]* = .*custom_call_target="tpu_custom_call"', compiled.as_text()
    )
    print(
        json.dumps(
            {
                "name": name,
                "kernels": sorted(set(calls)),
                "aliased_bytes": memory.alias_size_in_bytes,
                "temporary_bytes": memory.temp_size_in_bytes,
            }
        ),
        flush=True,
    )


def training(topology: str, rows: int = 4, length: int = 256) -> None:
    """Gradients of packed rows, sharded over four chips."""
    mesh = mesh_of(topology, 1, 2, 2)
    compute = training_compute(MODEL, dtype="bfloat16", remat="full", mesh=mesh)
    params = abstract_params(MODEL, mesh)

    def array(dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (1, rows, length), dtype, sharding=sharding_for(mesh, (None, "batch", None))
        )

    batch = Batch(*(array("int32") for _ in range(3)), *(array("float32") for _ in range(3)))
    number = jax.ShapeDtypeStruct((), "int32", sharding=NamedSharding(mesh, PartitionSpec()))

    def loss(params, batch, _):
        return SFTLoss()(params, batch, Net({}, MODEL, compute))

    sums = jax.jit(gradient_sums, static_argnums=0)
    report("training", sums.lower(loss, params, batch, number).compile())


def decoding(topology: str, tensor: int, new: int) -> None:
    """One layer of a cached step: write the new keys and values, attend to all."""
    mesh = mesh_of(topology, 1, 1, tensor)
    compute = decode_compute(mesh)
    rows, pages_each, size = 8, 16, CASE.page_size
    heads, groups, width = CASE.num_kv_heads, CASE.num_groups, CASE.head_dim

    def array(shape: tuple[int, ...], dtype: str, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_for(mesh, axes, shape=shape))

    def step(q, pages, table, k, v, positions):
        pages = cache.write(pages, table, k, v, positions, compute)
        return cache.attend_to(pages, q, table, positions, compute), pages

    config = ModelConfig("llama", 8, 8, 8, 1, heads * groups, heads, width)
    (pool,) = jax.eval_shape(
        lambda: cache.init_layers(config, rows * pages_each, size, jnp.bfloat16, compute)
    )
    fresh = array((rows, new, heads, width), "float32", None, None, "kv_heads")
    arguments = (
        array((rows, new, heads, groups, width), "float32", None, None, "kv_heads"),
        tuple(array(x.shape, "bfloat16", None, None, "kv_heads") for x in pool),
        array((rows, pages_each), "int32"),
        fresh,
        fresh,
        array((rows, new), "int32"),
    )
    compiled = jax.jit(step, donate_argnums=1).lower(*arguments).compile()
    report(f"{new} new, tensor={tensor}", compiled)


def engine(topology: str) -> None:
    """The programs of the engine: two decoded tokens at least, a prefill, copies of pages."""
    mesh = mesh_of(topology, 1, 1, 1)
    compute = decode_compute(mesh)
    whole = NamedSharding(mesh, PartitionSpec())

    def placed(function):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole),
            jax.eval_shape(function),
        )

    def int32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, "int32", sharding=whole)

    # A copy of one of the kernels would be larger than the cache.
    model = dataclasses.replace(MODEL, hidden_size=2048, intermediate_size=8192)
    rows, pages_each, size = 8, 16, CASE.page_size
    params = placed(
        lambda: jax.tree.map(
            lambda x: x.astype("bfloat16"),
            unstack(init_params(model, jax.random.key(0)), model, compute.kernels),
        )
    )
    layers = placed(lambda: cache.init_layers(model, rows * pages_each, size, "bfloat16", compute))
    state = placed(
        lambda: programs.DecodeState(
            *(jnp.zeros(rows, dtype) for dtype in ("int32", "int32", "int32", "bool")),
            jnp.zeros((rows, 3), "int32"),
            *(jnp.zeros(rows, dtype) for dtype in ("float32", "float32", "int32")),
        )
    )
    options = {"config": model, "compute": compute}
    decode = programs.decode_chunk.lower(
        params, layers, int32(rows, pages_each), state, int32(1), int32(), capacity=32, **options
    )
    report("decode", decode.compile())
    table, block = int32(16, pages_each), int32(16, 16)
    extend = programs.extend.lower(params, layers, table, block, block, **options)
    report("extend", extend.compile())
    copy = programs.copy_pages.lower(layers, int32(4), int32(4), compute=compute)
    report("copy", copy.compile())


if __name__ == "__main__":
    _, program, where = sys.argv
    if program == "training":
        training(where)
    elif program == "engine":
        engine(where)
    else:
        decoding(where, 1, 1)
        decoding(where, 2, 1)
        decoding(where, 1, 64)
