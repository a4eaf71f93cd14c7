"""Costs of compiled programs equal hand counts, loops and devices included."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

from coa_jax.perf.aot.costs import Costs, count, group
from coa_jax.perf.aot.hlo import parse, trip_count
from tests.devices import on_devices


def costs_of(function, *arguments, chips=1, data_trips=()) -> Costs:
    compiled = jax.jit(function).lower(*arguments).compile()
    return count(parse(compiled.as_text()), chips, data_trips)


def test_a_product_in_nested_scans_counts_as_often_as_it_runs():
    def program(x, weights):
        def outer(x, w):
            return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0], None

        return jax.lax.scan(outer, x, weights)[0]

    x, weights = jnp.ones((128, 256)), jnp.ones((5, 256, 256))
    costs = costs_of(program, x, weights)
    assert costs.flops == 5 * 3 * 2 * 128 * 256 * 256
    assert costs.unknown_loops == 0


def test_gradients_with_recomputation_take_four_products_for_one():
    def loss(weights, x):
        body = jax.checkpoint(lambda x, w: (jnp.sin(x @ w), None))
        return jnp.sum(jax.lax.scan(body, x, weights)[0])

    costs = costs_of(jax.grad(loss), jnp.ones((6, 64, 64)), jnp.ones((32, 64)))
    once = 6 * 2 * 32 * 64 * 64
    # Forward, again, and the gradients of weights and inputs.
    assert costs.flops == 4 * once


def test_a_loop_that_ends_by_data_counts_as_often_as_is_said():
    def program(x, w, n):
        return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]

    arguments = (jnp.ones((64, 64)), jnp.ones((64, 64)), jnp.int32(9))
    costs = costs_of(program, *arguments, data_trips=(7,))
    assert (costs.flops, costs.unknown_loops) == (7 * 2 * 64**3, 1)
    assert costs_of(program, *arguments).flops == 2 * 64**3


SENT = """
import json, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from coa_jax.perf.aot.costs import count
from coa_jax.perf.aot.hlo import parse
from coa_jax.parallel.mesh import make_mesh
split, mesh = PartitionSpec("fsdp"), make_mesh(fsdp=8)
def shard(x):
    body = lambda total, _: (total + jax.lax.psum(jnp.sin(total), "fsdp"), None)
    return jax.lax.scan(body, x, length=5)[0]
program = jax.shard_map(shard, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
x = jax.ShapeDtypeStruct((8 * 512, 16), "float32", sharding=NamedSharding(mesh, split))
costs = count(parse(jax.jit(program).lower(x).compile().as_text()), 8)
print(json.dumps([[*key, sent] for key, sent in costs.sent.items()]))
"""


def test_what_is_sent_in_a_loop_is_that_of_a_ring():
    (sent,) = on_devices(8, "-c", SENT, optimized=True)
    part = 512 * 16 * 4
    assert json.loads(sent) == [["all-reduce", 8, 5 * 2 * part * 7 / 8]]


def test_weights_are_read_once_a_layer_and_not_as_a_stack():
    def program(x, weights):
        return jax.lax.scan(lambda x, w: (x * w, None), x, weights)[0]

    x, weights = jnp.ones(4096), jnp.ones((10, 4096))
    moved = costs_of(program, x, weights).hbm_bytes
    least = 10 * 3 * 4096 * 4  # of a layer its weights, what comes and what goes
    assert least <= moved < 2 * least


# --- the form of TPU programs --------------------------------------------------------------

# Two of four axes of a product lie in the window; the loop does not say how often it runs.
TPU = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%fused (p: bf16[64,3584], q: bf16[3584,4,9,128]) -> f32[64,4,9,128] {
  %p = bf16[64,3584]{1,0:T(8,128)(2,1)} parameter(0)
  %q = bf16[3584,4,9,128]{3,0,2,1:T(8,128)(2,1)} parameter(1)
  %r = bf16[64,3584,1,1]{1,0,3,2:T(8,128)(2,1)} bitcast(%p)
  ROOT %convolution.1 = f32[64,4,9,128]{3,0,1,2:T(8,128)} convolution(%r, %q), \
window={size=9x4 pad=8_8x3_3 rhs_reversal=1x1}, dim_labels=bf10_i10o->b10f, metadata={op_name="x(y"}
}

%cond (state.1: (s32[], bf16[64,3584], bf16[3584,4,9,128])) -> pred[] {
  %state.1 = (s32[]{:T(128)}, bf16[64,3584]{1,0}, /*index=2*/bf16[3584,4,9,128]{3,0,2,1}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %bound = s32[]{:T(128)} constant(28)
  ROOT %less = pred[]{:T(512)} compare(%i.1, %bound), direction=LT
}

%body (state.2: (s32[], bf16[64,3584], bf16[3584,4,9,128])) -> (s32[], bf16[64,3584], bf16[3584,4,9,128]) {
  %state.2 = (s32[]{:T(128)}, bf16[64,3584]{1,0}, bf16[3584,4,9,128]{3,0,2,1}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%state.2), index=0
  %one = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%i.2, %one)
  %x.2 = bf16[64,3584]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%state.2), index=1
  %w.2 = bf16[3584,4,9,128]{3,0,2,1:T(8,128)(2,1)} get-tuple-element(%state.2), index=2
  %product = f32[64,4,9,128]{3,0,1,2:T(8,128)} fusion(%x.2, %w.2), kind=kOutput, calls=%fused
  %reduced = f32[64,4,9,128]{3,0,1,2:T(8,128)} all-reduce(%product), \
replica_groups=mesh['axis_0'=32,'axis_1'=4] {'axis_1'}, to_apply=%add
  ROOT %out = (s32[]{:T(128)}, bf16[64,3584]{1,0}, bf16[3584,4,9,128]{3,0,2,1}) tuple(%next, %x.2, %w.2)
}

ENTRY %main (x: bf16[64,3584], w: bf16[3584,4,9,128]) -> (s32[], bf16[64,3584], bf16[3584,4,9,128]) {
  %x = bf16[64,3584]{1,0:T(8,128)(2,1)} parameter(0)
  %w = bf16[3584,4,9,128]{3,0,2,1:T(8,128)(2,1)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %zero.copy = s32[]{:T(128)} copy(%zero)
  %start = (s32[]{:T(128)}, bf16[64,3584]{1,0}, bf16[3584,4,9,128]{3,0,2,1}) tuple(%zero.copy, %x, %w)
  ROOT %loop = (s32[]{:T(128)}, bf16[64,3584]{1,0}, bf16[3584,4,9,128]{3,0,2,1}) while(%start), \
condition=%cond, body=%body
}
"""  # noqa: E501


def test_a_tpu_program_is_read():
    module = parse(TPU)
    loop = module.computations["main"]["loop"]
    assert trip_count(module, module.computations["main"], loop) == 14  # 0, 2, ..., 26
    costs = count(module, 128)
    # A window over an axis that the input lacks only says where each result goes.
    assert costs.flops == 14 * 2 * 64 * 3584 * 4 * 9 * 128
    result, weights = 64 * 4 * 9 * 128 * 4, 3584 * 4 * 9 * 128 * 2
    assert costs.sent == {("all-reduce", 4): 14 * 2 * result * 3 / 4}
    # x lies on the chip; the result is written, read and written by the sum over the chips.
    assert costs.hbm_bytes == pytest.approx(14 * (weights + 3 * result), rel=1e-3)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[2,32]<=[32,2]T(1,0)", 32),
        ("mesh['axis_0'=32,'axis_1'=2,'axis_2'=1] {'axis_0','axis_2'}", 32),
        ("mesh['a'=2,'b'=1,'c'=32], device_ids=([32,2]T(1,0)) {'a','c'}", 64),
        ("{}", 128),
    ],
)
def test_groups_of_collectives_are_read_in_every_form(groups, size):
    text = TPU.replace("mesh['axis_0'=32,'axis_1'=4] {'axis_1'}", groups)
    assert len(group(parse(text).computations["body"]["reduced"], 128)) == size


def test_attention_kernels_count_half_of_the_square():
    text = """HloModule jit_f

ENTRY %main (q: bf16[14,1024,128], k: bf16[2,1024,128]) -> bf16[14,1024,128] {
  %q = bf16[14,1024,128]{2,1,0} parameter(0)
  %k = bf16[2,1024,128]{2,1,0} parameter(1)
  ROOT %KERNEL.2 = bf16[14,1024,128]{2,1,0} custom-call(%q, %k, %k), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501
    product = 2 * 14 * 1024 * 1024 * 128 / 2
    for name, products in (("splash_mha_fwd_x", 2), ("splash_mha_dkv", 4), ("splash_mha_dq", 3)):
        assert count(parse(text.replace("KERNEL", name)), 1).flops == products * product


WRITTEN = """HloModule jit_f

%second (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[]{:T(256)} parameter(0)
  ROOT %b = bf16[]{:T(256)} parameter(1)
}

%fused (pool: bf16[4096,128,2,128], at: s32[16,2], new: bf16[16,2,128]) -> bf16[4096,128,2,128] {
  %pool = bf16[4096,128,2,128]{3,2,1,0:T(2,128)(2,1)} parameter(0)
  %at = s32[16,2]{1,0:T(8,128)} parameter(1)
  %new = bf16[16,2,128]{2,1,0:T(2,128)(2,1)} parameter(2)
  ROOT %scatter.1 = bf16[4096,128,2,128]{3,2,1,0:T(2,128)(2,1)} scatter(%pool, %at, %new), \
update_window_dims={1,2}, inserted_window_dims={0,1}, scatter_dims_to_operand_dims={0,1}, \
index_vector_dim=1, to_apply=%second
}

ENTRY %main (pool: bf16[4096,128,2,128], at: s32[16,2], new: bf16[16,2,128]) -> bf16[4096,128,2,128] {
  %pool.1 = bf16[4096,128,2,128]{3,2,1,0:T(2,128)(2,1)} parameter(0)
  %at.1 = s32[16,2]{1,0:T(8,128)} parameter(1)
  %new.1 = bf16[16,2,128]{2,1,0:T(2,128)(2,1)} parameter(2)
  ROOT %written = bf16[4096,128,2,128]{3,2,1,0:T(2,128)(2,1)} fusion(%pool.1, %at.1, %new.1), \
kind=kCustom, calls=%fused
}
"""  # noqa: E501


def test_what_is_scattered_into_a_pool_inside_a_fusion_is_all_that_moves():
    new, at = 16 * 2 * 128 * 2, 16 * 2 * 4
    # Read and written; the pool, 268 MB, stays where it is.
    assert count(parse(WRITTEN), 1).hbm_bytes == 2 * new + at


@pytest.mark.parametrize(
    ("space", "touched"), [("S(1)", 1), ("S(0)", 2)], ids=["on the chip", "in the memory"]
)
@pytest.mark.parametrize(
    ("operands", "call"),
    [
        ("s32[256,16]{0,1:T(8,128)}", "slice-start(%table)"),
        ("s32[256,16]{0,1:T(8,128)}, s32[], s32[]", "dynamic-slice-start(%table, %at, %at)"),
    ],
    ids=["slice", "dynamic-slice"],
)
def test_of_a_slice_that_is_fetched_only_the_slice_moves(operands, call, space, touched):
    text = f"""HloModule jit_f

ENTRY %main (table: s32[256,16], at: s32[]) -> s32[256,1] {{
  %table = s32[256,16]{{0,1:T(8,128)}} parameter(0)
  %at = s32[]{{:T(128)S(6)}} parameter(1)
  %start = (({operands}), s32[256,1]{{0,1:T(1,128){space}}}, s32[]{{:S(2)}}) {call}
  ROOT %done = s32[256,1]{{0,1:T(1,128){space}}} {call.partition("-start")[0]}-done(%start)
}}
"""
    assert count(parse(text), 1).hbm_bytes == touched * 256 * 4


SCATTERED = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%all-reduce-scatter.clone.1 (input: f32[1000,100]) -> f32[250,100] {
  %input = f32[1000,100]{1,0:T(8,128)S(1)} parameter(0)
  %all-reduce.1 = f32[1000,100]{1,0:T(8,128)} all-reduce(%input), \
replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %partition = u32[] partition-id()
  %zero = u32[] constant(0)
  ROOT %part = f32[250,100]{1,0:T(8,128)} dynamic-slice(%all-reduce.1, %partition, %zero), \
dynamic_slice_sizes={250,100}
}

ENTRY %main (x: f32[1000,100]) -> f32[250,100] {
  %x = f32[1000,100]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %fusion.1 = f32[250,100]{1,0:T(8,128)S(1)} fusion(%x), kind=kCustom, \
calls=%all-reduce-scatter.clone.1
}
"""


def test_a_sum_of_which_each_chip_keeps_its_part_is_a_reduce_scatter():
    sent = 1000 * 100 * 4 * 3 / 4
    assert count(parse(SCATTERED), 8).sent == {("reduce-scatter", 4): sent}
    # One who reads all of it needs the sum everywhere.
    whole = SCATTERED.replace("f32[250,100]", "f32[1000,100]").replace("dynamic-slice(", "negate(")
    assert count(parse(whole), 8).sent == {("all-reduce", 4): 2 * sent}
