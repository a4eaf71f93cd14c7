"""FLOPs counted by hand, and the MFU of known chips."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from coa_jax.learn import flops
from coa_jax.learn.batch import Example, pack
from coa_jax.learn.flops import mfu, sequence_lengths, train_flops
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import num_params

CONFIG = ModelConfig("llama", 512, 64, 160, 2, 4, 2, 16)


def test_a_hand_count_of_a_small_model():
    # q, k, v, o, gate, up, down of a layer; 2 layers.
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160
    matrices = 6 * 2 * layer * (10 + 30)
    # Scores and mixing: 2 products of t x t x 16 for 4 heads, half of each causal, 3 passes.
    attention = 2 * 4 * (2 * 2 * 16) * (10 * 10 + 30 * 30) / 2 * 3
    head = 6 * 64 * 512 * 25
    assert train_flops(CONFIG, [10, 30], 25) == matrices + attention + head


def test_adapters_need_no_gradients_of_the_weights():
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160
    attention = 2 * 4 * (2 * 2 * 16) * (10 * 10 + 30 * 30) / 2 * 3
    # Forward, and backward to the activations: 2 FLOPs a parameter and token each.
    expected = 4 * (2 * layer * (10 + 30) + 64 * 512 * 25) + attention
    assert train_flops(CONFIG, [10, 30], 25, adapters=True) == expected


def test_long_sequences_of_a_large_model_cost_six_flops_a_parameter_and_token():
    config = ModelConfig("qwen2", 152_064, 3584, 18_944, 28, 28, 4, 128, tie_embeddings=False)
    tokens = 2048
    total = train_flops(config, [tokens], tokens)
    parameters = num_params(config) - 152_064 * 3584  # a look-up is no product
    attention = 6 * 28 * 28 * 128 * tokens**2
    assert total == pytest.approx(6 * parameters * tokens + attention, rel=1e-4)


def test_the_sequences_of_packed_rows_are_found_again():
    sizes = [5, 9, 3, 7, 16]
    zeros = [np.zeros(n, np.float32) for n in sizes]
    examples = [Example(np.ones(len(z), np.int32), z, z, z) for z in zeros]
    assert sorted(sequence_lengths([pack(examples, 16)])) == sorted(sizes)


def test_mfu_is_the_share_of_all_devices_and_absent_where_a_peak_is_unknown(monkeypatch):
    kind = jax.devices()[0].device_kind
    assert kind not in flops.PEAK_FLOPS and mfu(1e12, 1.0) == {}
    monkeypatch.setitem(flops.PEAK_FLOPS, kind, 4e12)
    assert mfu(1e12, 0.5) == {"perf/mfu": pytest.approx(0.5 / jax.device_count())}
