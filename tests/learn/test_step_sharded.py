"""On a mesh, training state is split as the parameters are, and updates are those of one device."""

import os
import subprocess
import sys
from pathlib import Path

import jax

from coa_jax.model.api import Model, save_model
from coa_jax.model.bpe import train_bpe
from coa_jax.model.config import ModelConfig
from coa_jax.model.weights import init_params

CONFIG = ModelConfig("qwen2", 384, 48, 96, 2, 4, 2, 16, qkv_bias=True)

PROGRAM = """
import sys, jax, numpy as np
from coa_jax.learn.batch import Batch
from coa_jax.learn.losses import bind, sft_loss
from coa_jax.learn.step import OptimizerConfig, init_state, train_step
from coa_jax.model.api import load_model
from coa_jax.parallel.mesh import make_mesh
from coa_jax.parallel.placement import put_batch

rng = np.random.default_rng(0)
tokens = rng.integers(0, 384, (8, 24)).astype(np.int32)
ones = np.ones((8, 24), np.float32)
ones[:, 0] = 0
positions = np.broadcast_to(np.arange(24, dtype=np.int32), (8, 24))
batch = Batch(tokens, positions, np.ones((8, 24), np.int32), ones, 0 * ones, 0 * ones)
optimizer = OptimizerConfig(learning_rate=1e-2, total_steps=4)
loss = bind(sft_loss, dtype="float32", remat=False)
finals = []
for mesh in (None, make_mesh(2, 2, 2)):
    model = load_model(sys.argv[1], mesh=mesh)
    state = init_state(model.params, optimizer)
    for _ in range(3):
        state, stats = train_step(
            state, [put_batch(batch, mesh)], loss_fn=loss, model=model.config, optimizer=optimizer
        )
        adam = next(part for part in jax.tree.leaves(
            state.opt_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu"))
        for moments in (adam.mu, adam.nu):
            jax.tree.map(
                lambda p, m: None if m.sharding.is_equivalent_to(p.sharding, p.ndim)
                else sys.exit(f"{p.sharding} {m.sharding}"),
                state.params, moments,
            )
    finals.append((jax.tree.map(np.asarray, state.params), stats["loss"]))
qkv = state.params["layers"]["qkv"]
assert qkv.addressable_shards[0].data.size == qkv.size // 4, qkv.sharding
(one, loss_one), (many, loss_many) = finals
assert abs(loss_one - loss_many) < 1e-4 * loss_one, (loss_one, loss_many)
# Adam divides by the root of tiny second moments, so that rounding shows.
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), one, many)
print("equal")
"""


def test_moments_are_split_as_parameters_are_and_updates_equal_those_of_one_device(tmp_path):
    params = init_params(CONFIG, jax.random.key(0))
    save_model(Model(CONFIG, params, train_bpe(["the river"], 300)), tmp_path)
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == "equal", done.stderr[-3000:]
