"""The variables that launch/ sets for compilers: each of their flags exists."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.test_launch import run

REPOSITORY = Path(__file__).resolve().parent.parent

COMPILE = """
import sys
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from coa_jax.parallel.slices import devices_of, parse_slice
from coa_jax.parallel.mesh import make_mesh
mesh = make_mesh(fsdp=-1, devices=devices_of(parse_slice(sys.argv[1])))
rows = NamedSharding(mesh, PartitionSpec("fsdp"))
x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=rows)
jax.jit(lambda a, b: jnp.sum(a @ b)).lower(x, x).compile()
print("compiled")
"""


def variables(kind):
    """Those of a preset, with a work directory."""
    script = f"""source {REPOSITORY}/launch/common.sh
words=(sft --config=x --workdir /mnt/runs/a)
presets {kind}
assignments"""
    done = run("bash", "-c", script)
    assert done.returncode == 0, done.stderr
    found = dict(word.split("=", 1) for word in shlex.split(done.stdout))
    assert found.pop("JAX_COMPILATION_CACHE_DIR") == "/mnt/runs/compiled"
    return found


def python(program, *arguments, **env):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY), **env}
    return run(sys.executable, "-c", program, *arguments, env=environment)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: bash launch/setup_env.sh tpu",
)
@pytest.mark.parametrize(
    ("kind", "topology"),
    [("tpu", "v5e:2x2"), ("v6e", "v6e:2x2"),
     *(pytest.param("tpu", each, marks=pytest.mark.slow) for each in ("v4:2x2x1", "v5p:2x2x1"))],
)  # fmt: skip
def test_the_compiler_of_tpus_takes_the_flags(kind, topology):
    done = python(COMPILE, topology, **variables(kind))
    assert done.stdout.strip() == "compiled", done.stderr[-2000:]


def test_the_compiler_of_tpus_would_refuse_a_flag_that_does_not_exist():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    done = python(COMPILE, "v5e:2x2", LIBTPU_INIT_ARGS="--xla_tpu_no_such_flag=1")
    assert done.returncode != 0
    assert "Unknown command line flag 'xla_tpu_no_such_flag'" in done.stderr


def test_xla_takes_the_flags_of_gpus():
    found = variables("cuda")
    assert set(found) == {"XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION"}
    done = python("import jax; print(jax.device_count())", **found)
    assert done.stdout.strip() == "1", done.stderr[-2000:]
