"""XLA's compiler for NVIDIA GPUs takes the GPU kernels, on machines without a GPU."""

from __future__ import annotations

import importlib.util
import warnings

import jax
import jax.numpy as jnp
import pytest

from coa_jax.model import cache
from coa_jax.model.attention.causal import causal_attention
from coa_jax.model.attention.choice import Case, missing, unmet
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig
from coa_jax.parallel.chips import CHIPS
from coa_jax.parallel.mesh import make_mesh, sharding_for
from coa_jax.parallel.slices import devices_of, parse_slice
from coa_jax.perf.aot.costs import count
from coa_jax.perf.aot.estimate import NO_AUTOTUNING, lower_on
from coa_jax.perf.aot.hlo import parse

needs_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="jax-cuda13-plugin is not installed: bash launch/setup_env.sh gpucompiler",
)
needs_cudnn = pytest.mark.skipif(
    importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.cudnn") is None,
    reason="its compiler is part of cuDNN (nvidia-cudnn-cu13, 0.5 GB), which is not installed",
)
pytestmark = [
    needs_gpu_compiler,
    pytest.mark.skipif(
        jax.default_backend() != "cpu", reason="test_kernels.py runs the kernels on the device"
    ),
]
KINDS = ["h100", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("a100", "b200", "l4"))]
ROWS, LENGTH, HEADS, GROUPS, WIDTH = 2, 1024, 2, 2, 128
PAGE, PAGES = 64, 16


def mesh_of(kind):
    return make_mesh(tensor=2, devices=devices_of(parse_slice(f"gpu:2x{kind}")))


def compiled(compute, program, *arguments, **options):
    """(Launches by kernel, memory) of a program that is compiled for GPUs."""
    with warnings.catch_warnings():  # the kernels are deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        device, lower = compute.mesh.devices.flat[0], jax.jit(program, **options).lower
        lowered = lower_on(device, compute.attention, lambda: lower(*arguments))
    found = lowered.compile(compiler_options=NO_AUTOTUNING)
    return count(parse(found.as_text()), 2).kernels, found.memory_analysis()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("pallas_gpu", {"mha_forward", "mha_preprocess_backward", "mha_backward"}),
        pytest.param(
            "cudnn",
            {"dot_product_attention_fwd", "dot_product_attention_bwd"},
            marks=needs_cudnn,
        ),
        pytest.param(
            "tokamax",
            {"tokamax_fwd", "tokamax_dkv", "tokamax_dq"},
            marks=pytest.mark.skipif(
                missing("causal", "tokamax") != "", reason="tokamax is not installed"
            ),
        ),
    ],
)
def test_gradients_of_packed_rows_compile_without_scores_in_memory(kind, name, kernels):
    mesh = mesh_of(kind)
    case = Case("cuda", "bfloat16", HEADS, GROUPS, WIDTH, capability=CHIPS[kind].capability)
    if reason := unmet("causal", name, case):  # tokamax is for Hopper only
        pytest.skip(reason)
    compute = Compute("bfloat16", attention=name, mesh=mesh)

    def array(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_for(mesh, axes, shape=shape))

    def loss(q, k, v, segments):
        return causal_attention(compute, (ROWS, LENGTH), segments)(q, k, v)[0].sum()

    kv = array((ROWS, LENGTH, HEADS, WIDTH), "float32", "batch", None, "kv_heads")
    q = array((ROWS, LENGTH, HEADS, GROUPS, WIDTH), "float32", "batch", None, "kv_heads")
    segments = array((ROWS, LENGTH), "int32", "batch")
    launches, memory = compiled(compute, jax.grad(loss, (0, 1, 2)), q, kv, kv, segments)
    assert kernels <= launches.keys()
    # The float32 scores of a chip, which has one of the two key/value heads.
    assert memory.temp_size_in_bytes < 4 * ROWS * GROUPS * LENGTH**2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("new", "kernel"), [(1, "paged_attention"), (64, "paged_prefill")])
def test_cached_steps_compile_and_copy_no_page(kind, new, kernel):
    mesh = mesh_of(kind)
    compute = Compute("bfloat16", attention="pallas_gpu", mesh=mesh, collectives="none")

    def array(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_for(mesh, axes, shape=shape))

    def step(q, pages, table, k, v, positions):
        pages = cache.write(pages, table, k, v, positions, compute)
        return cache.attend_to(pages, q, table, positions, compute), pages

    config = ModelConfig("llama", 8, 8, 8, 1, HEADS * GROUPS, HEADS, WIDTH)
    (pool,) = jax.eval_shape(
        lambda: cache.init_layers(config, ROWS * PAGES, PAGE, jnp.bfloat16, compute)
    )
    fresh = array((ROWS, new, HEADS, WIDTH), "float32", None, None, "kv_heads")
    launches, memory = compiled(
        compute,
        step,
        array((ROWS, new, HEADS, GROUPS, WIDTH), "float32", None, None, "kv_heads"),
        tuple(array(x.shape, "bfloat16", "kv_heads") for x in pool),
        array((ROWS, PAGES), "int32"),
        fresh,
        fresh,
        array((ROWS, new), "int32"),
        donate_argnums=1,
    )
    assert kernel in launches
    size = 2 * ROWS * PAGES * PAGE * HEADS * WIDTH * 2 // 2  # keys and values of a head, bfloat16
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 4
