"""What a step has to read and to multiply at least, from the architecture alone.

FLOPs are useful work only, counted as PaLM does (Chowdhery et al. 2022, arXiv 2204.02311, appendix
B), with causal attention counted once and the output head only where there is a loss:

    6 P T  +  6 L H K sum(t^2)  +  6 D V M

P parameters of the layers' matrices, T tokens of the sequences, L layers, H query heads of K
dimensions, t the length of a sequence, D the width, V the vocabulary, M tokens with a loss.  The
forward pass costs 2 FLOPs a parameter and token, the backward pass twice as much, or as much where
only adapters are trained: then 4 stands for 6 at P and at D.  Norms, biases, padding, recomputed
activations, adapters and the optimiser count nothing: they make a step slower, not better.
"""

from __future__ import annotations

from collections.abc import Sequence

from coa_jax.model.config import ModelConfig


def layer_params(config: ModelConfig) -> int:
    """Parameters of the matrices of all layers."""
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return config.num_layers * config.hidden_size * (attention + 3 * config.intermediate_size)


def product_params(config: ModelConfig) -> int:
    """Parameters that take part in a token's products.

    An embedding table of its own is only looked up in; one that is tied is the output head.
    """
    return layer_params(config) + config.hidden_size * config.vocab_size


def forward_flops(config: ModelConfig, context: float) -> float:
    """FLOPs of a token that attends to ``context`` tokens: its products and its attention."""
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context
    return 2 * product_params(config) + attention


def train_flops(
    config: ModelConfig, lengths: Sequence[int], loss_tokens: float, adapters: bool = False
) -> float:
    """FLOPs of one forward and backward pass over sequences of these lengths.

    Args:
        config: the architecture.
        lengths: tokens of each sequence.
        loss_tokens: how many of them have a loss.
        adapters: whether only adapters are trained.
    """
    products = layer_params(config) * sum(lengths)
    head = config.hidden_size * config.vocab_size * loss_tokens
    squares = sum(length * length for length in lengths)
    attention = config.num_layers * config.num_heads * config.head_dim * squares
    return float((4 if adapters else 6) * (products + head) + 6 * attention)


def decode_bytes(config: ModelConfig, batch: int, context: float, itemsize: int) -> float:
    """Bytes that a decoding step reads: the weights once, each sequence's keys and values."""
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * context * batch
    return (product_params(config) + cache) * itemsize
