"""Lower bounds of a step's FLOPs and memory traffic, from the architecture alone.

FLOPs are useful work only, counted as in PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix
B), except that causal attention counts only the visible half and the output head counts only tokens
with a loss:

    6 P T  +  6 L H K sum(t^2)  +  6 D V M

P is the number of parameters in the layers' matrices, T the number of tokens, L layers, H query
heads of K dimensions, t the length of a sequence, D the width, V the vocabulary size, M the number
of tokens with a loss. The forward pass costs 2 FLOPs per parameter and token. The backward pass
costs twice as much, or the same where only adapters are trained; then the factors of P and D are 4.
Norms, biases, padding, recomputed activations, adapters and the optimiser count as zero: they make
a step slower, not more useful.
"""

from __future__ import annotations

from collections.abc import Sequence

from coa_jax.model.config import ModelConfig


def layer_params(config: ModelConfig) -> int:
    """Returns the number of parameters in the matrices of all layers."""
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return config.num_layers * config.hidden_size * (attention + 3 * config.intermediate_size)


def product_params(config: ModelConfig) -> int:
    """Returns the number of parameters that are multiplied for each token.

    An untied embedding table is only a lookup and does not count; a tied table is the output head.
    """
    return layer_params(config) + config.hidden_size * config.vocab_size


def forward_flops(config: ModelConfig, context: float) -> float:
    """Returns the FLOPs of the forward pass for one token that attends to ``context`` tokens."""
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * context
    return 2 * product_params(config) + attention


def train_flops(
    config: ModelConfig, lengths: Sequence[int], loss_tokens: float, adapters: bool = False
) -> float:
    """Returns the FLOPs of one forward and backward pass over sequences of given lengths.

    Args:
        config: the architecture.
        lengths: number of tokens of each sequence.
        loss_tokens: number of tokens with a loss.
        adapters: whether only adapters are trained.
    """
    products = layer_params(config) * sum(lengths)
    head = config.hidden_size * config.vocab_size * loss_tokens
    squares = sum(length * length for length in lengths)
    attention = config.num_layers * config.num_heads * config.head_dim * squares
    return float((4 if adapters else 6) * (products + head) + 6 * attention)


def decode_bytes(config: ModelConfig, batch: int, context: float, itemsize: int) -> float:
    """Returns the bytes that a decoding step reads: the weights once, and all keys and values.

    Args:
        config: the architecture.
        batch: number of sequences.
        context: tokens in the cache of each sequence.
        itemsize: bytes of a number.
    """
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim * context * batch
    return (product_params(config) + cache) * itemsize
