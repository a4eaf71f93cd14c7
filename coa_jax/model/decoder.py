"""The policy: a decoder of the Llama family and its relatives, built of Flax NNX modules.

Inside compiled functions, modules are merged with their parameters (`params.bind`), so ordinary
`jax.jit`, `jax.grad`, `jax.lax.scan` and `jax.checkpoint` apply to them. Dtype, backend and
sharding are one argument of every call, see `Compute`.

Shape letters: B batch, T new tokens, D hidden size, N key/value heads, G query heads per key/value
head, K head width, F MLP width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    """Token embeddings ``[vocab, hidden]``, which also serve as the output head if they are tied.

    Args:
        count: size of the vocabulary.
        width: hidden size.
        rngs: random keys from which the initial values are drawn.
    """

    def __init__(self, count: int, width: int, *, rngs: nnx.Rngs):
        values = jax.random.normal(rngs.params(), (count, width)) * STDDEV
        self.embedding = parameter(values, ("vocab", "embed"))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Looks up the embeddings of token ids: int32 ``[...]`` to float32 ``[..., D]``."""
        return self.embedding[...][tokens].astype(jnp.float32)

    def attend(self, x: jax.Array, compute: Compute) -> jax.Array:
        """Computes logits, float32 ``[..., vocab]``, from hidden states ``[..., hidden]``."""
        return compute.ops.attend(x, self.embedding[...], compute)


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation over the last axis, in float32.

    Args:
        size: size of the last axis.
        axis: logical name of the last axis, for sharding rules.
        config: the architecture, which gives epsilon and the offset of the learned factors.
    """

    def __init__(self, size: int, axis: str, config: ModelConfig):
        self.scale = parameter(jnp.full(size, 1.0 - config.norm_offset), (axis,))
        self.eps, self.offset = config.rms_eps, config.norm_offset

    def __call__(self, x: jax.Array, compute: Compute) -> jax.Array:
        """Normalises an array ``[..., size]``; returns float32 of the same shape."""
        scale = self.scale[...]
        if self.offset:
            scale = scale.astype(jnp.float32) + self.offset
        return compute.ops.rms_norm(x, scale, self.eps)


class Attention(nnx.Module):
    """Grouped-query attention: projections, rotary embedding, attention and output projection.

    Queries, keys and values share one weight matrix ``[hidden, kv_heads, group + 2, head_dim]``,
    where ``group`` query heads share a key head and a value head. One matmul therefore computes all
    of them, and tensor parallelism shards ``kv_heads`` without separating a query from its keys.

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
        self.q_norm = RMSNorm(k, "head", c) if c.qk_norm else None
        self.k_norm = RMSNorm(k, "head", c) if c.qk_norm else None
        # Attention divides the scores by sqrt(K).
        self.query_factor = 1.0 if c.query_scalar is None else (k / c.query_scalar) ** 0.5
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
        if self.query_factor != 1.0:
            q = q * self.query_factor
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

    W_gate and W_up share one array ``[hidden, 2, width]``. In Gemma, GELU takes the place of SiLU.

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
        self.activation = c.activation

    def __call__(self, x: jax.Array, compute: Compute) -> jax.Array:
        """Maps ``x [B, T, D]`` in the compute dtype to float32 ``[B, T, D]``."""
        gate_up = self.gate_up(x, compute)
        if self.gate_lora is not None or self.up_lora is not None:
            gate, up = jnp.split(gate_up, 2, axis=-2)
            gate = _adapted(gate, self.gate_lora, x, compute)
            up = _adapted(up, self.up_lora, x, compute)
            gate_up = jnp.concatenate((gate, up), axis=-2)
        # Round before the activation, as Hugging Face does. In bfloat16, the compiler for v5p then
        # makes a training step of a 32B model 3.5 % shorter, because the array is the largest of a
        # layer.
        gate_up = compute.constrain(gate_up.astype(compute.dtype), "batch", None, None, "mlp")
        gated = compute.ops.swiglu if self.activation == "silu" else compute.ops.geglu
        h = checkpoint_name(gated(gate_up), MLP_PRODUCT).astype(compute.dtype)
        h = compute.constrain(h, "batch", None, "mlp")
        return _adapted(self.down(h, compute), self.down_lora, h, compute)


class Layer(nnx.Module):
    """A decoder layer: attention, then an MLP, each pre-normalised and with a residual connection.

    If the architecture has post-norms, the results of attention and MLP are normalised too, before
    they are added to the residual stream.

    Args:
        config: the architecture.
        rngs: random keys from which the initial values are drawn.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, "embed", config)

        self.attn_norm, self.mlp_norm = norm(), norm()
        self.attn = Attention(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.attn_post_norm = norm() if config.post_norms else None
        self.mlp_post_norm = norm() if config.post_norms else None

    def __call__(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], compute: Compute, attend: Attend
    ) -> tuple[jax.Array, LayerPages | None]:
        """Returns the residual stream after the layer, float32 ``[B, T, D]``, and its pages."""
        with jax.named_scope("norm"):
            # Round before the devices that share the row's matmuls receive the stream, which halves
            # the bytes sent.
            h = self.attn_norm(x, compute).astype(compute.dtype)
        y, pages = self.attn(h, rope, compute, attend)
        if self.attn_post_norm is not None:
            y = self.attn_post_norm(y, compute)
        x = checkpoint_name(x + y, MIDDLE)
        with jax.named_scope("norm"):
            h = self.mlp_norm(x, compute).astype(compute.dtype)
        with jax.named_scope("mlp"):
            y = self.mlp(h, compute)
        if self.mlp_post_norm is not None:
            y = self.mlp_post_norm(y, compute)
        return x + y, pages


class PickedLayers(NamedTuple):
    """Layers for `jax.lax.scan` whose parameters are not stacked along a first axis.

    Attributes:
        scanned: pytree of arrays, over whose first axis the scan iterates.
        pick: returns a layer, given the elements of ``scanned`` that belong to the layer.
    """

    scanned: Any
    pick: Callable[[Any], Layer]


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
        self.final_norm = RMSNorm(config.hidden_size, "embed", config)
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
        layers: Sequence[Layer] | PickedLayers | None = None,
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
                copied in the loop over decoding steps. Without a cache, they may be picked one by
                one in a loop over layers. None uses the stacked layers of the module.
            cache: keys and values of earlier tokens: a token at position p reads the positions 0 to
                p. None attends over the rows themselves.

        Returns:
            Hidden states, float32 ``[B, T, D]``, and the new cache (None without a cache).
        """
        tokens = jnp.asarray(tokens)
        positions = jnp.broadcast_to(jnp.asarray(positions), tokens.shape)
        local, windows = self.config.local, self.config.windows
        rope = local_rope = rope_tables(self.config, positions)
        if local is not None:
            local_rope = rope_tables(self.config, positions, local=True)
        x = self.embed(tokens)
        if self.config.scale_embeddings:
            # The factor is rounded, as in transformers: in bfloat16 to 55.5 for D = 3072.
            x = x * jnp.asarray(self.config.hidden_size**0.5, compute.dtype)
        x = compute.constrain(x, *STREAM)
        if cache is not None:
            assert layers is not None and not isinstance(layers, PickedLayers)
            pages: list[Any] = []
            for layer, before, window in zip(layers, cache.layers, windows, strict=True):
                attend = cache.attention(before, positions, compute, window)
                x, after = layer(x, local_rope if window else rope, compute, attend)
                pages.append(after)
            return self.final_norm(x, compute), cache._replace(layers=tuple(pages))
        where = None if local is None else positions
        attend = causal_attention(compute, tokens.shape, segment_ids, unfolded, where)
        if layers is not None and not isinstance(layers, PickedLayers):
            for layer, window in zip(layers, windows, strict=True):
                windowed = functools.partial(attend, window=window)
                x, _ = layer(x, local_rope if window else rope, compute, windowed)
            return self.final_norm(x, compute), None

        def body(x: jax.Array, scanned: tuple[Any, Any]) -> tuple[jax.Array, None]:
            layer, is_local = scanned
            if layers is not None:
                layer = layers.pick(layer)
            if local is None:
                return layer(x, rope, compute, attend)[0], None
            # One program computes all layers: the window of the others has all positions.
            window = jnp.where(is_local, local.window, jnp.iinfo(jnp.int32).max)
            tables = jax.tree.map(functools.partial(jnp.where, is_local), local_rope, rope)
            return layer(x, tables, compute, functools.partial(attend, window=window))[0], None

        kinds = None if local is None else jnp.array(local.layers)
        scanned = self.layers if layers is None else layers.scanned
        repeated = rematerialize(body, compute.remat, picked=layers is not None)
        x, _ = jax.lax.scan(repeated, x, (scanned, kinds))
        return self.final_norm(x, compute), None

    @jax.named_scope("head")
    def logits(self, hidden: jax.Array, compute: Compute) -> jax.Array:
        """Computes logits, float32 ``[..., vocab]``, from final hidden states ``[..., hidden]``."""
        if self.head is None:
            return self.embed.attend(hidden, compute)
        return compute.ops.linear(hidden, self.head.kernel[...], 1, compute)


def stack(create: Callable[[nnx.Rngs], nnx.Module], count: int, rngs: nnx.Rngs) -> Any:
    """Creates layers as a single module; the first axis of every parameter numbers the layers.

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
