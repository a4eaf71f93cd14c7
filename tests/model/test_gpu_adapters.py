"""XLA's compiler for NVIDIA GPUs adds adapters to a layer without copies of its weight matrices."""

from __future__ import annotations

import importlib.util

import jax
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from coa_jax.model.compute import Compute
from coa_jax.model.config import LoraConfig, ModelConfig
from coa_jax.model.decoder import MLP
from coa_jax.parallel.slices import devices_of, parse_slice
from coa_jax.perf.aot.estimate import NO_AUTOTUNING

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="jax-cuda13-plugin is not installed: bash launch/setup_env.sh gpucompiler",
)


def test_adapters_copy_no_weight_matrix():
    lora = LoraConfig(rank=16, alpha=16.0)
    config = ModelConfig("llama", 64, 512, 2048, 1, 4, 2, 128, lora=lora)
    module = nnx.eval_shape(lambda: MLP(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(module)
    (device,) = devices_of(parse_slice("gpu:1xh100"))

    def array(shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    def mlp(params, x):
        return nnx.merge(graph, params)(x, Compute("bfloat16"))

    params = jax.tree.map(lambda x: array(x.shape), nnx.to_pure_dict(state))
    lowered = jax.jit(mlp).lower(params, array((16, 1, 512)))
    memory = lowered.compile(compiler_options=NO_AUTOTUNING).memory_analysis()
    kernel = params["gate_up"]["kernel"]
    assert memory.temp_size_in_bytes < kernel.size * kernel.dtype.itemsize / 4
