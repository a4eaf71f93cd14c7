"""Model FLOPs of training and the share of the accelerators' peak that a step reaches (MFU).

Useful work only, counted as PaLM does (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), with
causal attention counted once and the output head only where there is a loss:

    6 P T  +  6 L H K sum(t^2)  +  6 D V M

P parameters of the layers' matrices, T tokens of the sequences, L layers, H query heads of K
dimensions, t the length of a sequence, D the width, V the vocabulary, M tokens with a loss.  The
forward pass costs 2 FLOPs a parameter and token, the backward pass twice as much, or as much where
only adapters are trained: then 4 stands for 6 at P and at D.  Padding, recomputed activations,
adapters and the optimiser count nothing: they make a step slower, not better.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from coa_jax.learn.batch import Batch
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import specs, without_adapters

# Dense bf16 FLOP/s of a device as JAX names it, from the vendors' data sheets.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
}


def train_flops(
    model: ModelConfig, lengths: Sequence[int], loss_tokens: float, adapters: bool = False
) -> float:
    """Model FLOPs of one forward and backward pass over sequences of these lengths.

    Args:
        model: the architecture.
        lengths: tokens of each sequence.
        loss_tokens: how many of them have a loss.
        adapters: whether only adapters are trained.
    """
    matrices = sum(
        np.prod(spec.shape, dtype=np.float64)
        for path, spec in specs(without_adapters(model)).items()
        if path[0] == "layers" and path[-1] == "kernel"
    )
    tokens = np.asarray(lengths, np.float64)
    heads = model.num_kv_heads * model.num_groups
    attention = model.num_layers * heads * model.head_dim * np.sum(tokens**2)
    head = model.hidden_size * model.vocab_size * loss_tokens
    return float((4 if adapters else 6) * (matrices * np.sum(tokens) + head) + 6 * attention)


def sequence_lengths(batches: Sequence[Batch]) -> list[int]:
    """Tokens of each sequence that is packed into batches; a shared prompt counts for the first."""
    lengths: list[int] = []
    for batch in batches:
        for row in np.asarray(batch.segment_ids):
            lengths.extend(np.bincount(row)[1:].tolist())
    return [length for length in lengths if length]


def mfu(flops: float, seconds: float) -> dict[str, float]:
    """``perf/mfu`` of all devices; nothing where a device's peak is not known."""
    devices = jax.devices()
    peak = PEAK_FLOPS.get(devices[0].device_kind)
    if peak is None or seconds <= 0:
        return {}
    return {"perf/mfu": flops / (seconds * peak * len(devices))}
