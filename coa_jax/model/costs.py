"""What a step has to read and to multiply at least, from the architecture alone."""

from __future__ import annotations

from coa_jax.model.config import ModelConfig
from coa_jax.model.params import num_params


def product_params(config: ModelConfig) -> int:
    """Parameters that take part in a token's products.

    An embedding table of its own is only looked up in; one that is tied is the output head.
    Norms and biases are counted too, which changes nothing that could be measured.
    """
    lookup = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    return num_params(config) - lookup


def forward_flops(config: ModelConfig, context: float) -> float:
    """FLOPs of a token that attends to ``context`` tokens: its products and its attention."""
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context
    return 2 * product_params(config) + attention


def train_flops(config: ModelConfig, length: int, adapters: bool = False) -> float:
    """FLOPs a token of a training step on causal sequences, without any recomputation.

    Args:
        config: the architecture.
        length: tokens of a sequence.
        adapters: whether only adapters are trained: the weights' own gradients cost nothing.  The
            adapters' FLOPs, a hundredth of the others, are not counted.
    """
    weights = 2 * product_params(config) if adapters else 0
    return 3 * forward_flops(config, length / 2) - weights


def decode_bytes(config: ModelConfig, batch: int, context: float, itemsize: int) -> float:
    """Bytes that a decoding step reads: the weights once, each sequence's keys and values."""
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * context * batch
    return (product_params(config) + cache) * itemsize
