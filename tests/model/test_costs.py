"""Floors are those of the published architectures and of hand counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from coa_jax.bench.costs import decode_bytes, forward_flops, product_params, train_flops
from coa_jax.bench.measure import best_seconds, compile_count, peak_flops, read_bandwidth, spread
from coa_jax.bench.models import ARCHITECTURES
from coa_jax.model.config import ModelConfig
from coa_jax.model.weights import num_params

# Numbers of parameters of the safetensors files on the Hugging Face hub.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_architectures_have_as_many_parameters_as_the_published_models(name):
    assert num_params(ARCHITECTURES[name]) == PUBLISHED[name]


@pytest.mark.parametrize("tied", [True, False])
def test_a_lookup_is_no_product(tied):
    config = ModelConfig("llama", 100, 8, 16, 1, 2, 1, 4, tie_embeddings=tied)
    layer = 8 * (2 + 1 + 1) * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8
    assert product_params(config) == layer + 8 + 100 * 8


def test_flops_and_bytes_equal_a_hand_count():
    config = ModelConfig("llama", 100, 8, 16, 3, 2, 1, 4)
    weights = product_params(config)
    # Two products, each of a multiplication and an addition, by 3 layers, 2 heads of 4, 10 keys.
    assert forward_flops(config, 10) == 2 * weights + 2 * 2 * 3 * 2 * 4 * 10
    # A causal sequence of 20 attends to 10 tokens on average; backward is twice forward.
    assert train_flops(config, 20) == 3 * forward_flops(config, 10)
    # Keys and values, 3 layers, 1 head of 4, 10 positions, 5 sequences, 2 bytes.
    assert decode_bytes(config, 5, 10, 2) == 2 * weights + 2 * (2 * 3 * 1 * 4 * 10 * 5)


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
