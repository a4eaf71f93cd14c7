"""Floors are those of the published architectures and of hand counts."""

from __future__ import annotations

import dataclasses

import pytest
import transformers

from coa_jax.errors import UserError
from coa_jax.model.architectures import ARCHITECTURES, architecture_of
from coa_jax.model.config import LocalAttention, ModelConfig
from coa_jax.model.costs import (
    decode_bytes,
    forward_flops,
    layer_params,
    product_params,
    train_flops,
)
from coa_jax.model.hf_config import config_to_hf
from coa_jax.model.params import num_params

# Numbers of parameters of the safetensors files on the Hugging Face hub.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "gemma-3-1b": 999_885_952,
    # 4,300,079,472 less the vision tower (416,866,032) and its projector (2,950,272).
    "gemma-3-4b": 3_880_263_168,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_architectures_have_as_many_parameters_as_the_published_models(name):
    assert num_params(ARCHITECTURES[name]) == PUBLISHED[name]


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_matrices_of_products_are_those_that_transformers_multiplies_by(name):
    config = ARCHITECTURES[name]
    hf = config_to_hf(config, "float32")
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        net = getattr(transformers, hf["architectures"][0])(transformers.AutoConfig.for_model(**hf))
    linear = {n: m.weight.numel() for n, m in net.named_modules() if isinstance(m, torch.nn.Linear)}
    assert product_params(config) == sum(linear.values())
    assert layer_params(config) == sum(linear.values()) - linear["lm_head"]


CONFIG = ModelConfig("llama", 512, 64, 160, 2, 4, 2, 16)
# q, k, v, o, gate, up, down of a layer.
LAYER = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 160


def test_a_hand_count_of_a_small_model():
    matrices = 6 * 2 * LAYER * (10 + 30)
    # Scores and mixing: 2 products of t x t x 16 for 4 heads, half of each causal, 3 passes.
    attention = 2 * 4 * (2 * 2 * 16) * (10 * 10 + 30 * 30) / 2 * 3
    head = 6 * 64 * 512 * 25
    assert train_flops(CONFIG, [10, 30], 25) == matrices + attention + head


def test_adapters_need_no_gradients_of_the_weights():
    attention = 2 * 4 * (2 * 2 * 16) * (10 * 10 + 30 * 30) / 2 * 3
    # Forward, and backward to the activations: 2 FLOPs a parameter and token each.
    expected = 4 * (2 * LAYER * (10 + 30) + 64 * 512 * 25) + attention
    assert train_flops(CONFIG, [10, 30], 25, adapters=True) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_a_lookup_is_no_product(tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    assert product_params(config) == 2 * LAYER + 64 * 512


def test_training_costs_three_times_what_the_tokens_cost_that_it_feeds():
    # A causal sequence of 20 attends to 10 tokens on average.
    assert train_flops(CONFIG, [20], 20) == 3 * 20 * forward_flops(CONFIG, 10)


def test_a_window_bounds_the_pairs_of_a_layer():
    local = dataclasses.replace(CONFIG, local=LocalAttention(4, (True, False)))
    pairs = [sum(min(i, 4) for i in range(1, 31)), 30 * 31 // 2]  # with the token itself
    # A causal square is counted as half of t x t, and one in a window likewise without diagonals.
    halves = [pairs[0] - 4 / 2, pairs[1] - 30 / 2]
    one = 3 * 2 * 4 * 2 * 16  # passes, products, heads, FLOPs of a pair
    found = train_flops(local, [30], 0) - 6 * 2 * LAYER * 30
    assert found == one * sum(halves)
    weights = product_params(CONFIG)
    assert forward_flops(local, 10) == 2 * weights + 2 * 2 * 4 * 16 * (4 + 10)
    assert decode_bytes(local, 5, 10, 2) == 2 * weights + 2 * (2 * 2 * 16 * (4 + 10) * 5)
    assert forward_flops(local, 3) == forward_flops(CONFIG, 3)


def test_flops_and_bytes_of_a_decoded_token_equal_a_hand_count():
    weights = product_params(CONFIG)
    # Two products, each of a multiplication and an addition, by 2 layers, 4 heads of 16, 10 keys.
    assert forward_flops(CONFIG, 10) == 2 * weights + 2 * 2 * 2 * 4 * 16 * 10
    # Keys and values, 2 layers, 2 heads of 16, 10 positions, 5 sequences, 2 bytes.
    assert decode_bytes(CONFIG, 5, 10, 2) == 2 * weights + 2 * (2 * 2 * 2 * 16 * 10 * 5)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/mnt/weights/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("weights/Qwen2.5-Coder-32B-Instruct", "qwen2.5-32b"),
        ("runs/sft-qwen2.5-3b/model", "qwen2.5-3b"),
        ("weights/SmolLM2-135M-Instruct", "smollm2-135m"),
        ("tiny", "tiny"),
    ],
)
def test_a_model_that_is_not_here_is_known_by_its_name(path, name):
    assert architecture_of(path) == (name, ARCHITECTURES[name])


@pytest.mark.parametrize("path", ["runs/sft/model", "weights/TinyLlama-1.1B-Chat", "tiny/model"])
def test_a_model_without_a_known_name_is_refused(path):
    with pytest.raises(UserError, match=f"^model '{path}': .*known are tiny, smollm2-135m"):
        architecture_of(path)
