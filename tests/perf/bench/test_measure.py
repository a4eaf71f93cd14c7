"""Shared parts of the benchmarks: peak performance, compilations, statistics."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from coa_jax.perf.bench.measure import (
    best_seconds,
    compile_count,
    peak_flops,
    read_bandwidth,
    spread,
)


def test_ceilings_are_those_of_a_computer():
    assert 1e8 < read_bandwidth(megabytes=16) < 1e14
    assert 1e8 < peak_flops("float32", size=256) < 1e16


def test_the_fastest_call_counts_and_the_first_does_not():
    calls = []

    def call():
        calls.append(None)
        return jnp.zeros(())

    assert 0 < best_seconds(call, seconds=0.0) < 10
    assert len(calls) == 2


def test_every_compilation_is_counted():
    before = compile_count()
    double = jax.jit(lambda x: 2 * x)
    for size in (3, 3, 4):
        double(jnp.zeros(size)).block_until_ready()
    # One program for each size; making the zeros may be one more each.
    assert 2 <= compile_count() - before <= 4
    before = compile_count()
    double(jnp.zeros(3)).block_until_ready()
    assert compile_count() == before


def test_a_spread_rounds_measurements_but_not_counts():
    assert spread([0.1234567, 2.0, 1.0]) == {"median": 1.0, "min": 0.12346, "max": 2.0}
    assert spread([1234567, 7, 8]) == {"median": 8, "min": 7, "max": 1234567}
