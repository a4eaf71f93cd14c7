"""On a mesh a kernel runs on each device's rows and heads, and the gradients are the same."""

import pytest

from tests.devices import on_devices

PROGRAM = """
import sys
import jax, numpy as np
from coa_jax.train.batch import Batch, stack
from coa_jax.train.losses import Net, SFTLoss
from coa_jax.train.step import gradient_sums
from coa_jax.model.compute import REFERENCE, Compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import shardings
from coa_jax.parallel.mesh import make_mesh
from coa_jax.parallel.placement import put_batch
from tests.random_params import random_params

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
params = random_params(config)

def gradients(compute):
    here = jax.device_put(params, shardings(config, compute.mesh))
    def loss(params, batch, _):
        return SFTLoss()(params, batch, Net({}, config, compute))

    only = put_batch(stack([batch], 1), compute.mesh)
    return jax.device_get(jax.jit(gradient_sums, static_argnums=0)(loss, here, only, 1))

expected, expected_stats = gradients(REFERENCE)
for case in sys.argv[1:]:
    *sizes, name, collectives = case.split(",")
    mesh = make_mesh(*map(int, sizes))
    how = {"attention": name, "collectives": collectives, "interpret": True, "remat": "full"}
    sums, stats = gradients(Compute(mesh=mesh, **how))
    np.testing.assert_allclose(stats["loss"], expected_stats["loss"], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max()),
        sums, expected,
    )
    print(case)
"""

# Four ways of tensor do not divide two key/value heads.
SOME = ["2,2,2,splash,compiler"]
OTHERS = [
    "2,2,2,xla,manual",
    *("1,1,1,xla,compiler", "2,1,2,xla,compiler", "1,2,4,xla,manual", "2,2,2,splash,manual"),
    *("1,2,4,splash,compiler", "2,2,2,pallas_gpu,compiler", "1,2,4,pallas_gpu,compiler"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_kernels_on_a_mesh_give_the_gradients_of_one_device(cases):
    assert on_devices(8, "-c", PROGRAM, *cases) == cases
