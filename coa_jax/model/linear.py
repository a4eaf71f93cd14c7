"""Projections: a weight matrix, an optional bias, and their matmul on one device or on a mesh."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from coa_jax.model import collectives
from coa_jax.model.compute import Compute
from coa_jax.model.config import LoraConfig

STDDEV = 0.02
"""Standard deviation of the initial values of embeddings and kernels."""


def parameter(values: jax.Array, axes: tuple[str, ...], kind: Any = nnx.Param) -> Any:
    """Creates a parameter with logical axes in Flax's metadata for sharding.

    Flax does not shard the values by itself, because the names are not those of mesh axes.
    """
    return kind(values, out_sharding=axes, eager_sharding=False)


class Linear(nnx.Module):
    """A projection ``x W + b``, whose inputs and outputs may have several axes each.

    Attributes:
        kernel: the weight matrix W, ``[*inputs, *outputs]``.
        bias: the bias b, ``[*outputs]``; None for no bias.
        axes: logical names of the axes of W, for sharding rules.
        inputs: number of input axes.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: tuple[str, ...],
        *,
        rngs: nnx.Rngs,
        stddev: float = STDDEV,
        use_bias: bool = False,
    ):
        """Creates a kernel with normally distributed values and, if wanted, a bias of zeros.

        Args:
            inputs: sizes of the input axes.
            outputs: sizes of the output axes.
            axes: logical names of the kernel's axes.
            rngs: random keys from which the initial values are drawn.
            stddev: standard deviation of the initial values.
            use_bias: whether the projection has a bias.
        """
        values = jax.random.normal(rngs.params(), (*inputs, *outputs)) * stddev
        self.kernel = parameter(values, axes)
        self.bias = parameter(jnp.zeros(outputs), axes[len(inputs) :]) if use_bias else None
        self.axes, self.inputs = axes, len(inputs)

    def __call__(self, x: jax.Array, compute: Compute) -> jax.Array:
        """Maps ``x [..., *inputs]`` to float32 ``[..., *outputs]``."""
        kernel = self.kernel[...]
        if compute.mesh is None or compute.collectives == "none":
            y = compute.ops.linear(x, kernel, self.inputs, compute)
        else:
            y = collectives.linear(x, kernel, self.axes, self.inputs, compute)
        return y if self.bias is None else y + self.bias[...]


class Lora(nnx.Module):
    """A low-rank adapter, ``alpha / rank * (x A) B`` (arXiv 2106.09685 eq 3).

    As in PEFT, the initial values of A are random with a variance of 1 / (3 n), where n is the
    number of inputs. B is initially zero, so training starts from the unchanged model.

    Attributes:
        a: the matrix A, ``[*inputs, rank]``.
        b: the matrix B, ``[rank, *outputs]``.
        scale: the factor ``alpha / rank``.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: tuple[str, ...],
        config: LoraConfig,
        *,
        rngs: nnx.Rngs,
    ):
        """Creates an adapter for a kernel.

        Args:
            inputs: sizes of the kernel's input axes.
            outputs: sizes of the kernel's output axes.
            axes: logical names of the kernel's axes.
            config: rank and scale of the adapter.
            rngs: random keys from which the initial values are drawn.
        """
        count, stddev = len(inputs), (3 * math.prod(inputs)) ** -0.5
        a = jax.random.normal(rngs.params(), (*inputs, config.rank)) * stddev
        self.a = parameter(a, (*axes[:count], "rank"), nnx.LoRAParam)
        b = jnp.zeros((config.rank, *outputs))
        self.b = parameter(b, ("rank", *axes[count:]), nnx.LoRAParam)
        self.inputs, self.scale = count, config.alpha / config.rank

    def __call__(self, x: jax.Array, compute: Compute) -> jax.Array:
        """Maps ``x [..., *inputs]`` to float32 ``[..., *outputs]``."""
        # Without this barrier, XLA for GPUs merges the small matmul below with that of the adapted
        # kernel, and copies the kernel for it in each decoding step.
        x = jax.lax.optimization_barrier(x)
        low = compute.ops.linear(x, self.a[...], self.inputs, compute)
        return compute.ops.linear(low, self.b[...] * self.scale, 1, compute)
