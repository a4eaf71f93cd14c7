"""The policy: a decoder of the Llama family, built of Flax NNX modules.

Inside compiled functions, modules are merged with their parameters (`params.bind`), so ordinary
`jax.jit`, `jax.grad`, `jax.lax.scan` and `jax.checkpoint` apply to them. Dtype, backend and
sharding are one argument of every call, see `Compute`.

Shape letters: B batch, T new tokens, D hidden size, N key/value heads, G query heads per key/value
head, K head width, F MLP width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from coa_jax.model.attention.causal import Attend, Unfolded, causal_attention
from coa_jax.model.cache import Cache, LayerPages
from coa_jax.model.collectives import STREAM
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.linear import STDDEV, Linear, Lora, parameter
from coa_jax.model.remat import MIDDLE, MLP_PRODUCT, rematerialize
from coa_jax.model.rope import apply_rope, rope_tables


class Embed(nnx.Module):
    """Token embeddings ``[V, D]``, which also serve as the output head if the weights are tied.

    Args:
        count: size of the vocabulary, V.
        width: hidden size, D.
        rngs: random keys from which the initial values are drawn.
    """

    def __init__(self, count: int, width: int, *, rngs: nnx.Rngs):
        values = jax.random.normal(rngs.params(), (count, width)) * STDDEV
        self.embedding = parameter(values, ("vocab", "embed"))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Looks up the embeddings of token ids: int32 ``[...]`` to float32 ``[..., D]``."""
        return self.embedding[...][tokens].astype(jnp.float32)

    def attend(self, x: jax.Array, compute: Compute) -> jax.Array:
        """Computes logits from hidden states: ``[..., D]`` to float32 ``[..., V]``."""
        return compute.ops.attend(x, self.embedding[...], compute)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, in float32.

    Args:
        size: size of the last axis.
        axis: logical name of the last axis, for sharding rules.
        eps: epsilon, a number that is added to the mean square.
    """

    def __init__(self, size: int, axis: str, eps: float):
        self.scale = parameter(jnp.ones(size), (axis,))
        self.eps = eps

    def __call__(self, x: jax.Array, compute: Compute) -> jax.Array:
        """Normalises an array ``[..., size]``; returns float32 of the same shape."""
        return compute.ops.rms_norm(x, self.scale[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention: projections, rotary embedding, attention and output projection.

    Queries, keys and values share one kernel ``[D, N, G + 2, K]``. For each of the N key/value
    heads it holds G query heads, the key head and the value head. One matmul therefore computes all
    of them, and tensor parallelism shards N without separating a query from its keys.

    Args:
        config: the architecture.
        rngs: random keys from which the initial values are drawn.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = config
        d, n, g, k = c.hidden_size, c.num_kv_heads, c.num_groups, c.head_dim
        one = ("embed", "kv_heads", "qkv", "head")
        self.qkv = Linear((d,), (n, g + 2, k), one, rngs=rngs, use_bias=c.qkv_bias)
        heads = ("kv_heads", "groups", "head")
        self.out = Linear((n, g, k), (d,), (*heads, "embed"), rngs=rngs, stddev=_residual(c))
        self.q_norm = RMSNorm(k, "head", c.rms_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(k, "head", c.rms_eps) if c.qk_norm else None
        self.q_lora = _lora("q", (d,), (n, g, k), ("embed", *heads), c, rngs)
        self.k_lora = _lora("k", (d,), (n, 1, k), one, c, rngs)
        self.v_lora = _lora("v", (d,), (n, 1, k), one, c, rngs)
        self.o_lora = _lora("o", (n, g, k), (d,), (*heads, "embed"), c, rngs)
        self.groups = g

    def __call__(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], compute: Compute, attend: Attend
    ) -> tuple[jax.Array, LayerPages | None]:
        """Computes the attention of ``x [B, T, D]``, which is in the compute dtype.

        Args:
            x: normalised residual stream ``[B, T, D]``.
            rope: cosines and sines, see `rope.rope_tables`.
            compute: dtype, operations and sharding of the computation.
            attend: function that computes attention from q, k and v, over the sequence or over a
                cache.

        Returns:
            The output, float32 ``[B, T, D]``, and the layer's pages (None without a cache).
        """
        with jax.named_scope("qkv"):
            qkv = self.qkv(x, compute)
            q, k, v = jnp.split(qkv, (self.groups, self.groups + 1), axis=3)
            q = _adapted(q, self.q_lora, x, compute)
            k = _adapted(k, self.k_lora, x, compute)
            v = _adapted(v, self.v_lora, x, compute)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, compute), self.k_norm(k, compute)
        with jax.named_scope("rope"):
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        attended, pages = attend(q, k[:, :, :, 0], v[:, :, :, 0])
        attended = attended.astype(compute.dtype)
        # The constraint precedes the matmul, because the gradient is sharded like the operand of
        # the matmul.
        attended = compute.constrain(attended, "batch", None, "kv_heads", None, None)
        with jax.named_scope("out"):
            y = self.out(attended, compute)
            return _adapted(y, self.o_lora, attended, compute), pages


class MLP(nnx.Module):
    """SwiGLU (arXiv 2002.05202): ``(silu(x W_gate) * (x W_up)) W_down``.

    W_gate and W_up share one kernel ``[D, 2, F]``.

    Args:
        config: the architecture.
        rngs: random keys from which the initial values are drawn.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, d, f = config, config.hidden_size, config.intermediate_size
        self.gate_up = Linear((d,), (2, f), ("embed", "gate", "mlp"), rngs=rngs)
        self.down = Linear((f,), (d,), ("mlp", "embed"), rngs=rngs, stddev=_residual(c))
        self.gate_lora = _lora("gate", (d,), (1, f), ("embed", "gate", "mlp"), c, rngs)
        self.up_lora = _lora("up", (d,), (1, f), ("embed", "gate", "mlp"), c, rngs)
        self.down_lora = _lora("down", (f,), (d,), ("mlp", "embed"), c, rngs)

    def __call__(self, x: jax.Array, compute: Compute) -> jax.Array:
        """Maps ``x [B, T, D]`` in the compute dtype to float32 ``[B, T, D]``."""
        gate_up = self.gate_up(x, compute)
        if self.gate_lora is not None or self.up_lora is not None:
            gate, up = jnp.split(gate_up, 2, axis=-2)
            gate = _adapted(gate, self.gate_lora, x, compute)
            up = _adapted(up, self.up_lora, x, compute)
            gate_up = jnp.concatenate((gate, up), axis=-2)
        # Round before SwiGLU, as Hugging Face does. In bfloat16, the compiler for v5p then makes a
        # training step of a 32B model 3.5 % shorter, because the array is the largest of a layer.
        gate_up = compute.constrain(gate_up.astype(compute.dtype), "batch", None, None, "mlp")
        h = checkpoint_name(compute.ops.swiglu(gate_up), MLP_PRODUCT).astype(compute.dtype)
        h = compute.constrain(h, "batch", None, "mlp")
        return _adapted(self.down(h, compute), self.down_lora, h, compute)


class Layer(nnx.Module):
    """A decoder layer: attention, then an MLP, each pre-normalised and with a residual connection.

    Args:
        config: the architecture.
        rngs: random keys from which the initial values are drawn.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(config.hidden_size, "embed", config.rms_eps)
        self.attn = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, "embed", config.rms_eps)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], compute: Compute, attend: Attend
    ) -> tuple[jax.Array, LayerPages | None]:
        """Returns the residual stream after the layer, float32 ``[B, T, D]``, and its pages."""
        with jax.named_scope("norm"):
            # Round before the devices that share the row's matmuls receive the stream, which halves
            # the bytes sent.
            h = self.attn_norm(x, compute).astype(compute.dtype)
        y, pages = self.attn(h, rope, compute, attend)
        x = checkpoint_name(x + y, MIDDLE)
        with jax.named_scope("norm"):
            h = self.mlp_norm(x, compute).astype(compute.dtype)
        with jax.named_scope("mlp"):
            return x + self.mlp(h, compute), pages


class Decoder(nnx.Module):
    """The whole model: embeddings, layers, the final normalisation, and the output head.

    Args:
        config: the architecture.
        rngs: random keys from which the initial parameters are drawn.
        stacked: True if the module holds its layers, stacked along a first axis for `jax.lax.scan`;
            False if each call takes the layers as an argument.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, stacked: bool = True):
        self.embed = Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        if stacked:
            self.layers = stack(lambda rngs: Layer(config, rngs=rngs), config.num_layers, rngs)
        self.final_norm = RMSNorm(config.hidden_size, "embed", config.rms_eps)
        shape, axes = ((config.hidden_size,), (config.vocab_size,)), ("embed", "vocab")
        self.head = None if config.tie_embeddings else Linear(*shape, axes, rngs=rngs)
        self.config = config

    def __call__(
        self,
        tokens: Any,
        positions: Any,
        compute: Compute,
        *,
        segment_ids: Any = None,
        unfolded: Unfolded | None = None,
        layers: Sequence[Layer] | None = None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Computes the final hidden states of tokens.

        Args:
            tokens: token ids, int32 ``[B, T]``.
            positions: position of each token in its sequence, int32 ``[B, T]``. With a cache, the
                new keys and values are written at these positions; positions outside the cache are
                not written.
            compute: dtype, operations and sharding of the computation.
            segment_ids: int32 ``[B, T]``, index of each token's segment; a token attends only to
                its own segment. None if each row is a single segment. Must be None with a cache.
            unfolded: layout of rows whose sequences share a prompt, for attention; None if no
                sequences share a prompt. Must be None with a cache.
            layers: the layers, one by one, as decoding needs them: slices of a stack would be
                copied in the loop over decoding steps. None uses the stacked layers of the module.
            cache: keys and values of earlier tokens: a token at position p reads the positions 0 to
                p. None attends over the rows themselves.

        Returns:
            Hidden states, float32 ``[B, T, D]``, and the new cache (None without a cache).
        """
        tokens = jnp.asarray(tokens)
        positions = jnp.broadcast_to(jnp.asarray(positions), tokens.shape)
        rope = rope_tables(self.config, positions)
        x = compute.constrain(self.embed(tokens), *STREAM)
        if cache is not None:
            assert layers is not None
            pages: list[Any] = []
            for layer, before in zip(layers, cache.layers, strict=True):
                attend = cache.attention(before, positions, compute)
                x, after = layer(x, rope, compute, attend)
                pages.append(after)
            return self.final_norm(x, compute), cache._replace(layers=tuple(pages))
        attend = causal_attention(compute, tokens.shape, segment_ids, unfolded)
        if layers is not None:
            for layer in layers:
                x, _ = layer(x, rope, compute, attend)
        else:

            def body(x: jax.Array, layer: Layer) -> tuple[jax.Array, None]:
                return layer(x, rope, compute, attend)[0], None

            x, _ = jax.lax.scan(rematerialize(body, compute.remat), x, self.layers)
        return self.final_norm(x, compute), None

    @jax.named_scope("head")
    def logits(self, hidden: jax.Array, compute: Compute) -> jax.Array:
        """Computes logits from final hidden states: ``[..., D]`` to float32 ``[..., V]``."""
        if self.head is None:
            return self.embed.attend(hidden, compute)
        return compute.ops.linear(hidden, self.head.kernel[...], 1, compute)


def stack(create: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> Any:
    """Creates layers as a single module, in which the first axis of every parameter is the layer.

    Such a module can be the input of `jax.lax.scan` over layers.

    Args:
        create: function that creates one layer.
        count: number of layers.
        rngs: random keys from which the initial parameters are drawn.
    """
    first = {nnx.PARTITION_NAME: "layers"}
    stacked = nnx.vmap(lambda key: create(nnx.Rngs(key)), transform_metadata=first)
    return stacked(jax.random.split(rngs.params(), count))


def _residual(config: ModelConfig) -> float:
    """Returns the initial standard deviation of kernels that write to the residual stream.

    The scaling is that of GPT-2 (section 2.3). At initialisation, the residual stream is then
    dominated by the token embeddings rather than by the random layers.
    """
    return STDDEV * (2 * config.num_layers) ** -0.5


def _lora(
    name: str,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    axes: tuple[str, ...],
    config: ModelConfig,
    rngs: nnx.Rngs,
) -> Lora | None:
    """Creates the adapter of a projection; returns None if the projection has no adapter."""
    lora = config.lora
    if not lora.rank or name not in lora.projections:
        return None
    return Lora(inputs, outputs, axes, lora, rngs=rngs)


def _adapted(y: jax.Array, lora: Lora | None, x: jax.Array, compute: Compute) -> jax.Array:
    """Adds the adapter's result to the result of a projection."""
    return y if lora is None else y + lora(x, compute)
