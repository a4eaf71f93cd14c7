"""Memory and times of compiled programs, and what the compiler says of programs that do not fit."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from coa_jax.parallel.chips import CHIPS
from coa_jax.parallel.slices import devices_of, parse_slice
from coa_jax.perf.aot.costs import Costs
from coa_jax.perf.aot.estimate import _add_plans, _compiled, advice, exceeded, roofline
from coa_jax.perf.aot.programs import Program
from tests.train.tiny_runs import rl_config

needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed: bash launch/setup_env.sh tpu",
)


@pytest.mark.slow
@needs_tpu_compiler
def test_memory_of_a_tpu_program_is_the_number_by_which_the_compiler_refuses_programs():
    def needed(steps):
        def program(x):
            last, all_before = jax.lax.scan(lambda c, _: (jnp.tanh(c @ x), c), x, length=steps)
            return all_before.sum(0) + last

        row = _compiled(Program("train", lambda: jax.jit(program).lower(x), 1, 0, chips), where)
        return row["bytes_per_chip"]["total"], row.get("refused", False)

    where = parse_slice("v5e:2x2")
    chips = devices_of(where)[:1]
    on_chip = jax.sharding.SingleDeviceSharding(chips[0])
    x = jax.ShapeDtypeStruct((2**14, 2**14), "float32", sharding=on_chip)  # 1 GiB
    (fitting, _), (refused, too_much) = needed(12), needed(13)
    assert too_much
    # One more step saves one more array.
    assert refused - fitting == pytest.approx(2**30, rel=0.01)
    assert fitting < CHIPS["v5e"].hbm_bytes < refused


def test_what_kernels_have_that_are_not_compiled_is_counted_as_temporary():
    where, x = parse_slice("gpu:1xh100"), jax.ShapeDtypeStruct((8,), "float32")
    program = Program("train", lambda: jax.jit(jnp.sin).lower(x), 1, 0, jax.devices()[:1])
    plain, more = (
        _compiled(dataclasses.replace(program, kernel_bytes=size), where)["bytes_per_chip"]
        for size in (0, 10**9)
    )
    assert more == {**plain, **{k: plain[k] + 10**9 for k in ("temporaries", "total")}}


def test_a_program_takes_as_long_as_its_slowest_part():
    chip = CHIPS["h100"]
    costs = Costs(flops=2 * chip.flops, hbm_bytes=chip.hbm_bandwidth)
    costs.sent = {("all-gather", 8): chip.link_bandwidth, ("all-reduce", 16): 100e9}
    times = roofline(costs, chip)
    # Within eight chips over links, beyond over the network of 50 GB/s.
    assert (times["compute_s"], times["hbm_s"], times["ici_s"]) == (2, 1, 1 + 2)
    assert (times["step_s"], times["serial_s"]) == (3, 6)
    # A quarter of the products are of kernels, which take four times as long at a quarter.
    costs.kernel_flops = costs.flops / 4
    assert roofline(costs, chip, 0.25)["compute_s"] == 2 * (3 / 4 + 1 / 4 * 4)


def test_programs_that_may_run_together_need_memory_together():
    def row(name, temporaries, aliased=0):
        used = {"arguments": 10, "output": 5, "temporaries": temporaries, "aliased": aliased}
        return {"name": name, "bytes_per_chip": {**used, "total": 15 + temporaries - aliased}}

    rows = [row("train", 100, aliased=5), row("score", 20), row("decode", 7), row("extend", 30)]
    before = [each["bytes_per_chip"]["total"] for each in rows]
    _add_plans(rows)
    more = [each["bytes_per_chip"]["total"] - b for each, b in zip(rows, before, strict=True)]
    assert more == [35, 35, 100, 100]


@pytest.mark.parametrize(
    ("program", "remat", "said"),
    [
        ("train", "none", "remat to full (it is none)"),
        ("critic", "dots", "remat to full (it is dots)"),
        ("train", "full", ""),
        ("score", "none", ""),
    ],
)
def test_who_runs_out_of_memory_is_told_to_keep_less_where_that_helps(program, remat, said):
    config = rl_config(Path("m"), Path("t"), remat=remat)
    rows = [{"name": program, "bytes_per_chip": {"total": 90 * 10**9, "temporaries": 60 * 10**9}}]
    line = advice(config, rows, {"resume": 70 * 10**9}, 80e9, 0.1)
    assert line.startswith(f"{program} needs 90.0 GB per chip, and 72.0 GB are available")
    assert said in line
    assert ("remat" in line) == bool(said)


@pytest.mark.parametrize(
    ("text", "gib"),
    [
        ("Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm.", 20.5),
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (69.56G) "
            "exceeds available HBM (15.75G).",
            69.56,
        ),
    ],
)
def test_the_refusal_of_the_compiler_is_read(text, gib):
    assert exceeded(f"RESOURCE_EXHAUSTED: {text}") == int(gib * 1024**3)


class Refusing:
    """A lowered program for which the compiler reports a fault."""

    def __init__(self, fault: str):
        self.fault = fault

    def compile(self, compiler_options: Any) -> None:
        raise jax.errors.JaxRuntimeError(self.fault)


TOO_LARGE = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm."


def test_a_program_that_the_compiler_refused_has_the_memory_that_it_needs():
    where = parse_slice("gpu:1xh100")
    program = Program("train", lambda: Refusing(TOO_LARGE), 1, 10**9, jax.devices()[:1])
    row = _compiled(program, where)
    needed = int(20.5 * 1024**3) + 10**9
    assert (row["refused"], row["roofline"]) == (True, None)
    assert row["bytes_per_chip"] == {"total": needed, "lying": 10**9}
    other = dataclasses.replace(program, lower=lambda: Refusing("INTERNAL: something else"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        _compiled(other, where)


def test_other_faults_of_the_compiler_are_not_taken_for_refusals():
    assert exceeded("INTERNAL: something else") is None
