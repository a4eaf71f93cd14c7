"""On a mesh a kernel runs on each device's rows and heads, and the gradients are the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import jax, numpy as np
from coa_jax.learn.batch import Batch, stack
from coa_jax.learn.losses import bind, sft_loss
from coa_jax.learn.step import gradient_sums
from coa_jax.model.attention.choice import Attention
from coa_jax.model.config import ModelConfig
from coa_jax.model.sharding import shard_params
from coa_jax.model.weights import init_params
from coa_jax.parallel.mesh import make_mesh
from coa_jax.parallel.placement import put_batch

config = ModelConfig("llama", 384, 64, 96, 2, 4, 2, 32)
rng = np.random.default_rng(0)
rows, length = 8, 40
tokens = rng.integers(0, 384, (rows, length)).astype(np.int32)
segments = np.sort(rng.integers(1, 4, (rows, length)), axis=1).astype(np.int32)
starts = np.stack([np.searchsorted(row, row) for row in segments])
ones = np.ones((rows, length), np.float32)
batch = Batch(
    tokens, (np.arange(length) - starts).astype(np.int32), segments, ones, 0 * ones, 0 * ones
)
params = init_params(config, jax.random.key(0))

def gradients(mesh, attention):
    here = params if mesh is None else shard_params(params, config, mesh)
    loss = bind(sft_loss, dtype="float32", remat=True, attention=attention)
    sums = jax.jit(gradient_sums, static_argnames=("loss_fn", "model"))
    only = put_batch(stack([batch], 1), mesh)
    return jax.device_get(sums(here, only, 1, loss_fn=loss, model=config))

expected, expected_stats = gradients(None, Attention())
for case in sys.argv[1:]:
    *sizes, name = case.split(",")
    mesh = make_mesh(*map(int, sizes))
    sums, stats = gradients(mesh, Attention(name, mesh, interpret=True))
    np.testing.assert_allclose(stats["loss"], expected_stats["loss"], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max()),
        sums, expected,
    )
    print(case)
"""

# Four ways of tensor do not divide two key/value heads.
SOME = ["2,2,2,splash"]
OTHERS = ["1,1,1,xla", "2,1,2,xla", "1,2,4,splash", "2,2,2,pallas_gpu", "1,2,4,pallas_gpu"]


@pytest.mark.parametrize(
    "cases", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_kernels_on_a_mesh_give_the_gradients_of_one_device(cases):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *cases],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == cases
