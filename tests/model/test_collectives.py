"""Matmuls on a mesh of eight simulated devices against NumPy in float64."""

from __future__ import annotations

import pytest

from tests.devices import on_devices

PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from coa_jax.model import collectives
from coa_jax.model.collectives import STREAM, _Split
from coa_jax.model.compute import Compute
from coa_jax.parallel.mesh import make_mesh, sharding_for

rng = np.random.default_rng(0)
WIDENING, NARROWING = ("embed", "kv_heads", "head"), ("kv_heads", "head", "embed")


def put(x, mesh, axes):
    return jax.device_put(x, sharding_for(mesh, axes, shape=x.shape))


def check(name, got, wanted, dtype):
    error = np.abs(np.asarray(got, np.float64) - wanted).max() / np.abs(wanted).max()
    assert error < (1e-6 if dtype == "float32" else 2e-2), (name, error)


def linear(axes, inputs, compute):
    return lambda x, w: collectives.linear(x, w, axes, inputs, compute)


def agree(compute, rows, tokens, heads, hidden):
    mesh, dtype = compute.mesh, compute.dtype
    x, g = (rng.normal(size=(rows, tokens, n)) for n in (hidden, hidden))
    w, y_g = rng.normal(size=(hidden, heads, 3)), rng.normal(size=(rows, tokens, heads, 3))
    f32 = lambda *arrays: (jnp.asarray(a, jnp.float32) for a in arrays)
    x32, w32, g32, y_g32 = f32(x, w, g, y_g)

    wide = jax.jit(lambda x, w: jax.vjp(linear(WIDENING, 1, compute), x, w))
    y, back = wide(put(x32, mesh, STREAM), put(w32, mesh, WIDENING))
    dx, dw = jax.jit(lambda f, g: f(g))(back, put(y_g32, mesh, ("batch", None, "kv_heads", None)))
    assert (y.dtype, dx.dtype, dw.dtype) == ("float32",) * 3
    check("wide", y, np.einsum("btk,kuv->btuv", x, w), dtype)
    check("wide dx", dx, np.einsum("btuv,kuv->btk", y_g, w), dtype)
    check("wide dw", dw, np.einsum("btk,btuv->kuv", x, y_g), dtype)

    v, v_g, w = y_g, g, rng.normal(size=(heads, 3, hidden))
    slim = jax.jit(lambda x, w: jax.vjp(linear(NARROWING, 2, compute), x, w))
    inner = put(y_g32, mesh, ("batch", None, "kv_heads", None))
    y, back = slim(inner, put(jnp.asarray(w, jnp.float32), mesh, NARROWING))
    dx, dw = jax.jit(lambda f, g: f(g))(back, put(g32, mesh, STREAM))
    assert (y.dtype, dx.dtype, dw.dtype) == ("float32",) * 3
    check("slim", y, np.einsum("btuv,uvk->btk", v, w), dtype)
    check("slim dx", dx, np.einsum("btk,uvk->btuv", v_g, w), dtype)
    check("slim dw", dw, np.einsum("btuv,btk->uvk", v, v_g), dtype)


way, strategy, backend, *cases = sys.argv[1:]
if way == "around":  # what TPUs do
    _Split.scatter_product = _Split.scatter_around
splits = []
found = collectives._split
collectives._split = lambda *args: splits.append(found(*args)) or splits[-1]
for case in cases:
    *axes, rows, tokens, heads, hidden, written_out = map(int, case.split(","))
    mesh = make_mesh(*axes)
    for dtype in ("float32", "bfloat16"):
        splits.clear()
        compute = Compute(dtype, backend=backend, mesh=mesh, collectives=strategy)
        agree(compute, rows, tokens, heads, hidden)
        assert all((split is not None) == bool(written_out) for split in splits)
        assert bool(splits) == (strategy == "manual")
print("all agree")
"""


def run(way, *cases, strategy="manual", backend="reference"):
    printed = on_devices(8, "-c", PROGRAM, way, strategy, backend, *cases)
    assert printed == ["all agree"]


# data, fsdp, tensor, rows, tokens, heads, hidden, and whether the movements are written out.
DIVIDED = ("1,2,4,2,8,4,48,1", "2,2,2,4,6,4,48,1", "1,1,8,1,16,8,48,1", "2,1,4,4,8,4,50,1")


@pytest.mark.parametrize("way", ["at_once", "around"])
def test_products_and_gradients_are_those_of_the_whole(way):
    run(way, *DIVIDED)


def test_a_mesh_without_tensor_groups_splits_rows_and_weights():
    run("at_once", "2,4,1,8,5,3,48,1", "8,1,1,8,4,3,47,1", "1,8,1,16,4,3,48,1")


def test_what_does_not_divide_is_left_to_the_compiler():
    # Rows, tokens, heads, hidden: one of each does not.
    cases = ("1,4,2,6,8,4,48,0", "1,2,4,2,7,4,48,0", "1,1,4,2,8,2,48,0", "1,4,2,4,8,4,50,0")
    run("at_once", *cases)


@pytest.mark.slow
def test_the_compiler_places_the_collectives_of_any_sizes(backend):
    run("at_once", *DIVIDED[:2], "1,4,2,6,7,5,50,1", strategy="compiler", backend=backend)
