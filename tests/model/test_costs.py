"""Floors are those of the published architectures and of hand counts."""

from __future__ import annotations

import pytest

from coa_jax.errors import UserError
from coa_jax.model.config import ModelConfig
from coa_jax.model.costs import decode_bytes, forward_flops, product_params, train_flops
from coa_jax.model.shapes import ARCHITECTURES, architecture_of
from coa_jax.model.weights import num_params

# Numbers of parameters of the safetensors files on the Hugging Face hub.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
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
    # Beside adapters the weights have no gradients of their own.
    assert train_flops(config, 20, adapters=True) == train_flops(config, 20) - 2 * weights
    # Keys and values, 3 layers, 1 head of 4, 10 positions, 5 sequences, 2 bytes.
    assert decode_bytes(config, 5, 10, 2) == 2 * weights + 2 * (2 * 3 * 1 * 4 * 10 * 5)


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
    with pytest.raises(UserError, match="names no architecture; known are tiny"):
        architecture_of(path)
