"""What is compiled is what a run executes: the same arrays in the same places."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax

from coa_jax.aot.arrays import Setup, set_up
from coa_jax.aot.chips import Slice
from coa_jax.aot.programs import all_programs
from coa_jax.model.config import ModelConfig
from coa_jax.model.lora import LoraConfig
from coa_jax.model.weights import num_params
from tests.learn.tiny_runs import rl_config

MODEL = ModelConfig("llama", 61, 16, 24, 1, 2, 1, 8)
WEIGHTS = 4 * num_params(MODEL)  # bytes in float32


def tiny_setup(**changes: object) -> Setup:
    """A small RL run on one chip."""
    return set_up(
        rl_config(Path("m"), Path("t"), **changes),
        MODEL,
        Slice("gpu:1xh100", "h100", (1,)),
        jax.devices()[:1],
    )


CACHE = """
import sys, jax, jax.numpy as jnp
from coa_jax.aot.arrays import chip_bytes, paged_attention, pages, set_up
from coa_jax.aot.chips import Slice
from coa_jax.engine import layout
from coa_jax.engine.config import EngineConfig
from coa_jax.model.config import ModelConfig
from coa_jax.parallel.placement import MeshConfig, replicate
from tests.learn.tiny_runs import rl_config

for case in sys.argv[1:]:
    heads, dtype = case.split(",")
    model = ModelConfig("qwen2", 64, 128, 64, 2, 2 * int(heads), int(heads), 128)
    engine = EngineConfig(4, 192, page_size=16, dtype="bfloat16", cache_dtype=dtype)
    config = rl_config("m", "t", engine=engine, mesh=MeshConfig(1, 4, 1, 4))
    # The chips are simulated; what is chosen is what those of a TPU can run.
    setup = set_up(config, model, Slice("v5e:2x2", "v5e", (2, 2)), jax.devices())
    attention = paged_attention(setup)
    params = {"x": replicate(jnp.zeros(4), attention.mesh)}
    real = jax.tree.leaves(layout.new_layers(params, model, engine, attention))
    for expected, found in zip(real, jax.tree.leaves(pages(setup)), strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.sharding == expected.sharding, (found.sharding, expected.sharding)
    chip = sum(x.addressable_shards[0].data.nbytes for x in real)
    assert chip_bytes(pages(setup)) == chip
    print(case, attention.implementation, sum(x.nbytes for x in real) // chip)
"""


def test_the_cache_is_split_as_an_engine_splits_it():
    # A kernel's pages hold twice as many rows as heads, which four devices could split where they
    # cannot split two heads.  All of six heads stay on each device, and no kernel takes six.
    cases = {"2,": "ragged_paged 1", "4,": "ragged_paged 4", "6,": "xla 1", "4,int8": "xla 4"}
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", CACHE, *cases],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [" ".join(case) for case in cases.items()]


def test_while_the_policy_is_published_engines_have_their_old_one():
    lying = {program.name: program.lying for program in all_programs(tiny_setup())}
    # A slot has two pages of 128 positions of float32 keys and values.
    cache, head = 4 * 2 * 128 * 2 * 8 * 4, 4 * 61 * 16
    # Beside the parameters, which are the argument: two moments, counters, engine with its head.
    assert lying["publish"] == 2 * WEIGHTS + 5 * 4 + cache + WEIGHTS + head

    adapted = tiny_setup(lora=LoraConfig(rank=2))
    lying = {program.name: program.lying for program in all_programs(adapted)}
    adapters = lying["publish"] - WEIGHTS - 5 * 4 - cache - WEIGHTS - head
    # Three arrays of each: the adapters and their moments, beside the model and its merged copy.
    assert adapters > 0
    assert adapters % 3 == 0
    assert lying["merge"] == lying["publish"] - WEIGHTS - adapters // 3
