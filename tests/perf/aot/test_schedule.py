"""The time of a schedule equals hand counts: what is hidden, what waits, what shares links."""

from __future__ import annotations

import numpy as np
import pytest

from coa_jax.parallel.chips import Chip
from coa_jax.perf.aot.hlo import parse
from coa_jax.perf.aot.schedule import Machine, play

# 100 FLOP/s and byte/s; 60 bytes a second over six links.
CHIP = Chip(flops=100.0, hbm_bytes=10**9, hbm_bandwidth=100.0, link_bandwidth=60.0)
# Two chips along the first axis, two along the second.
PLACES = np.array([(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)])
RINGS = (2, 2, 1)

# A product of 2000 FLOPs (20 s); gathers of 100 float32 (400 bytes sent to one other chip, which
# two links of an axis do in 20 s).
PROGRAM = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[10,10], w: f32[10,10]) -> f32[10,10] {
  %x = f32[10,10]{1,0:S(1)} parameter(0)
  %w = f32[10,10]{1,0:S(1)} parameter(1)
BODY
  ROOT %out = f32[10,10]{1,0:S(1)} copy(%x)
}
"""
PRODUCT = (
    "  %dot.N = f32[10,10]{1,0:S(1)} dot(%x, %w), "
    "lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
)
START = (
    "  %start.N = (f32[10,10]{1,0:S(1)}, f32[20,10]{1,0:S(1)}) all-gather-start(%x), "
    "replica_groups={GROUPS}, dimensions={0}\n"
)
DONE = "  %done.N = f32[20,10]{1,0:S(1)} all-gather-done(%start.N)\n"
WHOLE = (
    "  %whole.N = f32[20,10]{1,0:S(1)} all-gather(%x), replica_groups={GROUPS}, dimensions={0}\n"
)
FIRST, SECOND = "{{0,1},{2,3}}", "{{0,2},{1,3}}"


def played(*lines, rings=RINGS):
    """The timeline of lines; each has a number of its own and maybe groups."""
    body = "".join(
        line.replace("N ", f"{n} ").replace("N)", f"{n})").replace("{GROUPS}", groups)
        for line, n, groups in lines
    )
    return play(parse(PROGRAM.replace("BODY\n", body)), Machine(CHIP, PLACES, rings))


@pytest.mark.parametrize(
    ("lines", "total", "waiting"),
    [
        # Begun before a product and awaited after it.
        ([(START, 1, FIRST), (PRODUCT, 1, ""), (DONE, 1, "")], 20, 0),
        # Awaited at once.
        ([(START, 1, FIRST), (DONE, 1, ""), (PRODUCT, 1, "")], 40, 20),
        # Not split.
        ([(WHOLE, 1, FIRST), (PRODUCT, 1, "")], 40, 20),
        # Two over the same links, then over different ones.
        ([(START, 1, FIRST), (START, 2, FIRST), (PRODUCT, 1, ""), (DONE, 2, "")], 40, 20),
        ([(START, 1, FIRST), (START, 2, SECOND), (PRODUCT, 1, ""), (DONE, 2, "")], 20, 0),
        # Over both axes: three times the bytes at twice the speed.
        ([(WHOLE, 1, "{{0,1,2,3}}")], 30, 30),
    ],
)
def test_collectives_hide_behind_what_runs_between_start_and_done(lines, total, waiting):
    found = played(*lines)
    assert (found.total, found.waiting) == (pytest.approx(total), pytest.approx(waiting))


def test_without_a_link_from_the_last_chip_to_the_first_a_collective_takes_twice_as_long():
    gather = (WHOLE, 1, FIRST)
    assert played(gather, rings=(2, 2, 0)).total == pytest.approx(20)
    assert played(gather, rings=(0, 2, 0)).total == pytest.approx(40)
    # Two of the four chips of a ring are a line.
    assert played(gather, rings=(4, 2, 0)).total == pytest.approx(40)
    # Over both axes: 1,200 bytes over two links of a ring, and two of a line.
    assert played((WHOLE, 1, "{{0,1,2,3}}"), rings=(2, 0, 0)).total == pytest.approx(40)


def test_a_kernel_takes_as_long_as_its_assumed_share_of_the_peak_says():
    kernel = (
        "  %q = bf16[2,8,4]{2,1,0:S(1)} parameter(2)\n"
        "  %splash_mha_fwd.N = bf16[2,8,4]{2,1,0:S(1)} custom-call(%q), "
        'custom_call_target="tpu_custom_call"\n'
    )
    text = PROGRAM.replace("BODY\n", kernel.replace("N ", "1 "))
    # Two products of half of 8 x 8, of two heads of width 4: 1,024 FLOPs.
    for share, seconds in ((1.0, 10.24), (0.5, 20.48)):
        found = play(parse(text), Machine(CHIP, PLACES, RINGS, share))
        assert found.total == pytest.approx(seconds)


def test_an_operation_takes_the_longer_of_its_products_and_its_traffic():
    in_memory = PRODUCT.replace("f32[10,10]{1,0:S(1)} dot", "f32[10,10]{1,0} dot")
    found = played((in_memory, 1, ""))
    assert (found.total, found.beyond) == (20, 0)  # 400 bytes take 4 s of the 20
    slow = Machine(Chip(100.0, 10**9, 10.0, 60.0), PLACES, RINGS)
    text = PROGRAM.replace("BODY\n", in_memory.replace("N ", "1 "))
    found = play(parse(text), slow)
    assert (found.total, found.beyond) == (40, 20)


def test_an_operation_takes_the_cycles_that_the_compiler_says():
    line = PRODUCT.rstrip("\n") + ', backend_config={"estimated_cycles":"50"}\n'
    text = PROGRAM.replace("BODY\n", line.replace("N ", "1 "))
    for clock, total in ((2.0, 25), (0.0, 20)):
        chip = Chip(100.0, 10**9, 100.0, 60.0, clock=clock)
        found = play(parse(text), Machine(chip, PLACES, RINGS))
        assert (found.total, found.beyond) == (total, total - 20)


def test_a_loop_counts_as_often_as_it_turns():
    from tests.perf.aot.test_costs import TPU

    module = parse(TPU)
    chip = Chip(1e12, 10**9, 1e12, 6e9)
    places = np.array([(n // 4, n % 4, 0) for n in range(128)])
    found = play(module, Machine(chip, places, (32, 4, 1)))
    sent = 2 * 64 * 4 * 9 * 128 * 4 * 3 / 4  # by each chip of a ring of four, along one axis
    assert found.whole == pytest.approx(14 * sent / 2e9)
    product = 2 * 64 * 3584 * 4 * 9 * 128 / 1e12
    assert found.total == pytest.approx(14 * (product + sent / 2e9), rel=0.01)


def test_what_goes_to_neighbours_uses_one_direction():
    permute = (
        "  %start.N = (f32[10,10]{1,0:S(1)}, f32[10,10]{1,0:S(1)}) collective-permute-start(%x), "
        "source_target_pairs={PAIRS}\n"
    )
    done = "  %done.N = f32[10,10]{1,0:S(1)} collective-permute-done(%start.N)\n"
    there, back = "{{0,1},{1,0},{2,3},{3,2}}", "{{1,0},{0,1},{3,2},{2,3}}"
    one = [(permute.replace("{PAIRS}", there), 1, ""), (done, 1, "")]
    assert played(*one).total == pytest.approx(40)  # 400 bytes over one link of 10 a second
    both = [(permute.replace("{PAIRS}", p), n, "") for n, p in ((1, there), (2, back))]
    assert played(*both, (done, 1, ""), (done, 2, "")).total == pytest.approx(40)
    same = [(permute.replace("{PAIRS}", there), n, "") for n in (1, 2)]
    assert played(*same, (done, 1, ""), (done, 2, "")).total == pytest.approx(80)


@pytest.mark.parametrize(
    ("start", "done"),
    [
        ("(f32[64,10]{1,0}, f32[10,10]{1,0:S(1)}, s32[]{:S(2)}) slice-start(%all)", "slice"),
        (
            "((f32[64,10]{1,0}, s32[], s32[]), f32[10,10]{1,0:S(1)}, s32[]{:S(2)}) "
            "dynamic-slice-start(%all, %at, %at)",
            "dynamic-slice",
        ),
    ],
)
def test_a_slice_is_fetched_beside_operations(start, done):
    fetched = (
        "  %all = f32[64,10]{1,0} parameter(2)\n  %at = s32[] parameter(3)\n"
        f"  %start.N = {start}\n",
        1,
        "",
    )
    awaited = (f"  %done.N = f32[10,10]{{1,0:S(1)}} {done}-done(%start.N)\n", 1, "")
    # Of the array in the memory the slice's 400 bytes are read, in 4 s.
    found = played(fetched, awaited)
    assert (found.total, found.beyond, found.waiting) == (4, 4, 0)
    assert played(fetched, (PRODUCT, 1, ""), awaited).total == 20


def test_what_is_sent_inside_a_fusion_uses_the_links():
    from tests.perf.aot.test_costs import SCATTERED

    places = np.array([(n % 4, n // 4, 0) for n in range(8)])
    found = play(parse(SCATTERED), Machine(Chip(100.0, 10**9, 1e9, 60.0), places, (4, 2, 1)))
    # Three quarters of 400,000 bytes over the two links of an axis.
    assert (found.total, found.whole, found.waiting) == (15_000, 15_000, 15_000)
