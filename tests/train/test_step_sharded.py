"""On every mesh, losses and updates equal those of one device, and state is sharded."""

import pytest

from coa_jax.model.api import Model, save_model
from coa_jax.model.config import ModelConfig
from tests.devices import on_devices
from tests.random_params import gemma3, random_params
from tests.tiny_tokenizer import train_tokenizer

# Two key/value heads: two devices split them, eight cannot.
CONFIG = ModelConfig("qwen2", 384, 48, 96, 2, 4, 2, 16, qkv_bias=True)

PROGRAM = """
import sys, jax, numpy as np
from coa_jax.train.batch import Batch
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.losses import PolicyLoss, SFTLoss
from coa_jax.train.step import (init_state, train_step)
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.model.api import load_model
from coa_jax.model.compute import local_compute
from coa_jax.parallel.mesh import make_mesh

rng = np.random.default_rng(0)
rows, length = 8, 24
tokens = rng.integers(0, 384, (rows, length)).astype(np.int32)
segments = np.sort(rng.integers(0, 3, (rows, length)), axis=1).astype(np.int32)[:, ::-1]
starts = np.stack([np.array([np.argmax(row == s) for s in row]) for row in segments])
positions = (np.arange(length) - starts).astype(np.int32)
mask = ((rng.random((rows, length)) < 0.6) & (positions > 0) & (segments > 0)).astype(np.float32)
logp = rng.normal(-6, 0.3, (rows, length)).astype(np.float32)
advantage = rng.normal(0, 1, (rows, length)).astype(np.float32)
batch = Batch(tokens, positions, segments, mask, logp, advantage)
halves = [jax.tree.map(lambda x: x[at], batch) for at in (slice(0, 8), slice(3, 11))]
halves[1] = jax.tree.map(lambda x: np.concatenate([x, 0 * x[:3]]), halves[1])
# With so large an eps an update is nearly linear in the gradient: what is compared is the gradient.
optimizer = OptimizerConfig(
    learning_rate=1.0, total_steps=9, final_ratio=1.0, weight_decay=0.0, clip_norm=1e9,
    options={"eps": 1.0},
)

def run(mesh, kind, collectives="compiler"):
    loss = SFTLoss() if kind == "sft" else PolicyLoss(
        Algorithm("dapo", overlong_buffer=0).resolve(64), temperature=1.3
    )
    model = load_model(sys.argv[1], mesh=mesh)
    before = jax.tree.map(np.array, model.params)
    state = init_state(model.params, optimizer)
    history = []
    for _ in range(2):
        state, stats = train_step(
            state, halves, loss=loss, model_config=model.config, optimizer=optimizer,
            compute=local_compute(mesh=mesh, collectives=collectives),
        )
        history.append(stats)
    adam = next(part for part in jax.tree.leaves(
        state.opt_state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu"))
    for moments in (adam.mu, adam.nu):
        jax.tree.map(
            lambda p, m: None if m.sharding.is_equivalent_to(p.sharding, p.ndim)
            else sys.exit(f"{p.sharding} {m.sharding}"),
            state.params, moments,
        )
    change = jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, before)
    return state, history, change

expected = {}
for kind, *sizes, collectives in [case.split(",") for case in sys.argv[2:]]:
    if kind not in expected:
        expected[kind] = run(None, kind)
    mesh = make_mesh(*map(int, sizes))
    state, history, change = run(mesh, kind, collectives)
    _, right_history, right_change = expected[kind]
    for stats, right in zip(history, right_history):
        assert stats.keys() == right.keys()
        for name in right:
            np.testing.assert_allclose(stats[name], right[name], rtol=1e-5, atol=1e-6, err_msg=name)
    # Parameters near 1 have steps of 1.2e-7 themselves.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max() + 3e-7),
        change, right_change,
    )
    qkv = state.params["layers"]["attn"]["qkv"]["kernel"]
    parts = int(sizes[1]) * (int(sizes[2]) if int(sizes[2]) <= 2 else 1)
    assert qkv.addressable_shards[0].data.size == qkv.size // parts, qkv.sharding
    print(kind, *sizes, collectives)
"""


SOME = ["rl,2,2,2,manual"]
SHAPES = ["8,1,1", "1,8,1", "1,1,8", "2,4,1", "4,2,1", "2,2,2", "4,1,2", "1,4,2", "1,2,4"]
ALL = [
    f"{kind},{shape},{collectives}"
    for kind in ("sft", "rl")
    for shape in SHAPES
    for collectives in ("compiler", "manual")
]


@pytest.mark.parametrize(
    ("config", "cases"),
    [
        (CONFIG, SOME),
        pytest.param(CONFIG, ALL, marks=pytest.mark.slow),
        pytest.param(gemma3(CONFIG, window=6), ALL, marks=pytest.mark.slow),
    ],
    ids=["some", "all", "gemma3"],
)
def test_losses_and_updates_on_a_mesh_equal_those_of_one_device(config, cases, tmp_path):
    params = random_params(config)
    save_model(Model(config, params, train_tokenizer(["the river"], 300)), tmp_path)
    printed = on_devices(8, "-c", PROGRAM, str(tmp_path), *cases)
    assert printed == [case.replace(",", " ") for case in cases]
