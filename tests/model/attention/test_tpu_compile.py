"""The compiler of real TPUs takes the TPU kernels, on one chip and on a mesh."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: bash launch/setup_env.sh tpu",
)
TOPOLOGIES = [
    "v5e:2x2",
    pytest.param("v6e:2x2", marks=pytest.mark.slow),
    pytest.param("v5p:2x2x1", marks=pytest.mark.slow),
]
POOL_BYTES = 8 * 16 * 32 * 2 * 4 * 128 * 2  # pages, positions, keys and values, heads, width, bf16


def compiled(program, topology):
    """What `tpu_programs` reports, by name; in a process of its own because libtpu logs a lot."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.model.attention.tpu_programs", program, topology],
        # Without the second, libtpu asks a cloud's metadata server which machine this is.
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        },
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row.pop("name"): row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_sharded_training_step_compiles_with_splash_attention(topology):
    kernels = compiled("training", topology)["training"]["kernels"]
    for part in ("fwd", "dq", "dkv"):
        assert any(name.startswith(f"splash_mha_{part}_segmented") for name in kernels), kernels


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_cached_steps_compile_with_ragged_paged_attention_and_copy_no_page(topology):
    programs = compiled("decoding", topology)
    assert set(programs) == {"1 new, tensor=1", "1 new, tensor=2", "64 new, tensor=1"}
    for name, program in programs.items():
        assert program["kernels"] == ["ragged_paged_attention_kernel"]
        pool = POOL_BYTES // (2 if "tensor=2" in name else 1)
        assert program["aliased_bytes"] == pool
        assert program["temporary_bytes"] < pool / 4


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_programs_of_the_engine_compile_and_copy_neither_cache_nor_weights(topology):
    programs = compiled("engine", topology)
    for name in ("decode", "extend"):
        assert programs[name]["kernels"] == ["ragged_paged_attention_kernel"]
    for program in programs.values():
        assert program["aliased_bytes"] >= 2 * POOL_BYTES
        assert program["temporary_bytes"] < 2 * POOL_BYTES
