"""Computes lower bounds of a step's FLOPs and memory traffic from the architecture alone.

Only useful FLOPs are counted. The count follows PaLM (Chowdhery et al. 2022, arXiv 2204.02311,
appendix B), except that causal attention includes only the visible half, and the output head
includes only tokens with a loss:

    6 P T  +  6 L H K sum(t^2)  +  6 D V M

In a layer with a window of w positions, t^2 - (t - w)^2 takes the place of t^2 if t exceeds w.

The letters are:

- P: number of parameters in the matrices of the layers
- T: number of tokens; t: length of a sequence
- L: number of layers
- H: number of query heads; K: dimension of a head
- D: hidden size; V: vocabulary size
- M: number of tokens with a loss

The forward pass costs 2 FLOPs per parameter and token. The backward pass costs twice as much. If
only adapters are trained, the backward pass costs as much as the forward pass; the factors of the
first and the last term are then 4. Norms, biases, padding, recomputed activations, adapters and the
optimiser are not counted, because they make a step slower but not more useful.
"""

from __future__ import annotations

from collections.abc import Sequence

from coa_jax.model.config import ModelConfig


def layer_params(config: ModelConfig) -> int:
    """Returns the number of parameters in the weight matrices of all layers together."""
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return config.num_layers * config.hidden_size * (attention + 3 * config.intermediate_size)


def product_params(config: ModelConfig) -> int:
    """Returns the number of parameters that each token is multiplied by: layers and output head.

    The embedding table is not counted, because embedding a token is only a lookup. If the table
    also serves as the output head, it is counted once, as the output head.
    """
    return layer_params(config) + config.hidden_size * config.vocab_size


def forward_flops(config: ModelConfig, context: float) -> float:
    """Returns the FLOPs of the forward pass for one token that attends to ``context`` tokens."""
    attended = sum(min(context, window or context) for window in config.windows)
    attention = 4 * config.num_heads * config.head_dim * attended
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
    squares = sum(
        length * length - max(0, length - (window or length)) ** 2
        for length in lengths
        for window in config.windows
    )
    attention = config.num_heads * config.head_dim * squares
    return float((4 if adapters else 6) * (products + head) + 6 * attention)


def decode_bytes(config: ModelConfig, batch: int, context: float, itemsize: int) -> float:
    """Returns the number of bytes of weights, keys and values that a decoding step reads.

    Args:
        config: the architecture.
        batch: number of sequences.
        context: number of tokens in the cache of each sequence.
        itemsize: number of bytes of a weight, key or value.
    """
    attended = sum(min(context, window or context) for window in config.windows)
    cache = 2 * config.num_kv_heads * config.head_dim * attended * batch
    return (product_params(config) + cache) * itemsize
