"""Text encoders of the BERT family (arXiv 1810.04805) as Flax NNX modules.

The encoder shares modules and the reader of checkpoints with the decoder. In contrast to the
decoder, a token attends to all tokens of its text, and each sum is followed by a normalisation
(arXiv 1706.03762 §3.1).
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import unflatten_dict

from coa_jax.config.fields import field_annotations
from coa_jax.errors import UserError
from coa_jax.files import untrusted
from coa_jax.files.durable import read_json_object
from coa_jax.model.compute import Compute
from coa_jax.model.config import BertConfig
from coa_jax.model.decoder import Embed, stack
from coa_jax.model.hf_table import SAME, STACKED, STACKED_BIASES, TRANSPOSED, Row, Table
from coa_jax.model.hf_weights import TensorSource, read_params
from coa_jax.model.linear import Linear
from coa_jax.model.params import Params, specs_of

_ACTIVATIONS: dict[str, Any] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


def read_bert_config(folder: Path) -> BertConfig:
    """Reads the architecture of an encoder from a Hugging Face directory.

    Raises:
        UserError: ``config.json`` cannot be read, or its model type is not supported.
    """
    file = folder / "config.json"
    values = read_json_object(file)
    try:
        # In RoBERTa, the first position of a text is the padding index + 1.
        first = 0 if values["model_type"] == "bert" else values.get("pad_token_id", 1) + 1
        values["first_position"] = first
        values["max_tokens"] = values["max_position_embeddings"] - first
        needed = [
            k for k in field_annotations(BertConfig) if k in values or not hasattr(BertConfig, k)
        ]
        return BertConfig(**{key: values[key] for key in needed})
    except (UserError, *untrusted.MALFORMED) as error:
        raise UserError(f"{file}: {untrusted.reason(error)}") from None


_AXES = {"out_sharding": ("embed",), "eager_sharding": False}
LayerNorm = functools.partial(
    nnx.LayerNorm, use_fast_variance=False, scale_metadata=_AXES, bias_metadata=_AXES
)


class EncoderLayer(nnx.Module):
    """A BERT layer: attention, then an MLP, each with a residual connection and a normalisation."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        c, d, f = config, config.hidden_size, config.intermediate_size
        h, k = c.num_attention_heads, d // c.num_attention_heads
        create = functools.partial(Linear, rngs=rngs, use_bias=True)
        self.qkv = create((d,), (3, h, k), ("embed", "qkv", "heads", "head"))
        self.out = create((h, k), (d,), ("heads", "head", "embed"))
        self.attn_norm = LayerNorm(d, epsilon=c.layer_norm_eps, rngs=rngs)
        self.up = create((d,), (f,), ("embed", "mlp"))
        self.down = create((f,), (d,), ("mlp", "embed"))
        self.mlp_norm = LayerNorm(d, epsilon=c.layer_norm_eps, rngs=rngs)
        self.activation = c.hidden_act

    def __call__(self, x: jax.Array, lengths: jax.Array, compute: Compute) -> jax.Array:
        """Maps hidden states, float32 ``[batch, length, hidden]``, to those of the next layer.

        Keys beyond ``lengths``, int32 ``[batch]``, are masked.
        """
        q, k, v = jnp.moveaxis(self.qkv(x, compute), 2, 0)
        with jax.default_matmul_precision("highest"):
            mixed = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths)
        x = self.attn_norm(x + self.out(mixed, compute))
        inner = _ACTIVATIONS[self.activation](self.up(x, compute))
        return self.mlp_norm(x + self.down(inner, compute))


class Encoder(nnx.Module):
    """A BERT-like encoder, which maps token ids to hidden states.

    The embeddings of the token, of its position and of the first segment type are summed and
    normalised. The layers follow.
    """

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        c, d = config, config.hidden_size
        self.word = Embed(c.vocab_size, d, rngs=rngs)
        self.position = Embed(c.first_position + c.max_tokens, d, rngs=rngs)
        self.type = Embed(c.type_vocab_size, d, rngs=rngs)
        self.norm = LayerNorm(d, epsilon=c.layer_norm_eps, rngs=rngs)
        self.layers = stack(lambda rngs: EncoderLayer(c, rngs=rngs), c.num_hidden_layers, rngs)
        self.first_position = c.first_position

    def __call__(self, tokens: jax.Array, lengths: jax.Array, compute: Compute) -> jax.Array:
        """Computes the last hidden states of texts.

        Args:
            tokens: token ids, int32 ``[batch, length]``, padded on the right.
            lengths: int32 ``[batch]``, number of tokens of each text, at least 1.
            compute: dtype, operations and sharding of the computation.

        Returns:
            Hidden states, float32 ``[batch, length, hidden]``.
        """
        positions = self.first_position + jnp.arange(tokens.shape[1])
        x = self.word(tokens) + self.position(positions) + self.type(jnp.zeros(1, jnp.int32))

        def body(x: jax.Array, layer: EncoderLayer) -> tuple[jax.Array, None]:
            return layer(x, lengths, compute), None

        return jax.lax.scan(body, self.norm(x), self.layers)[0]


@functools.cache
def _abstract(config: BertConfig) -> Encoder:
    return nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0)))


def bind(config: BertConfig, params: Params) -> Encoder:
    """Returns an encoder module with the given parameters.

    To compute with the module, call this function inside a function that `jax.jit` compiles.
    Otherwise JAX runs the operations of the module one by one, which is slow.
    """
    return nnx.merge(nnx.graphdef(_abstract(config)), params)


_WORDS = "embeddings.word_embeddings.weight"
_LAYER = "encoder.layer.{}."
_PROJECTIONS = tuple(f"{_LAYER}attention.self.{name}" for name in ("query", "key", "value"))
_TABLE: Table = {
    ("word", "embedding"): Row((_WORDS,), *SAME),
    ("position", "embedding"): Row(("embeddings.position_embeddings.weight",), *SAME),
    ("type", "embedding"): Row(("embeddings.token_type_embeddings.weight",), *SAME),
    ("norm", "scale"): Row(("embeddings.LayerNorm.weight",), *SAME),
    ("norm", "bias"): Row(("embeddings.LayerNorm.bias",), *SAME),
    ("layers", "qkv", "kernel"): Row(tuple(f"{name}.weight" for name in _PROJECTIONS), *STACKED),
    ("layers", "qkv", "bias"): Row(tuple(f"{name}.bias" for name in _PROJECTIONS), *STACKED_BIASES),
    ("layers", "out", "kernel"): Row((f"{_LAYER}attention.output.dense.weight",), *TRANSPOSED),
    ("layers", "out", "bias"): Row((f"{_LAYER}attention.output.dense.bias",), *SAME),
    ("layers", "attn_norm", "scale"): Row((f"{_LAYER}attention.output.LayerNorm.weight",), *SAME),
    ("layers", "attn_norm", "bias"): Row((f"{_LAYER}attention.output.LayerNorm.bias",), *SAME),
    ("layers", "up", "kernel"): Row((f"{_LAYER}intermediate.dense.weight",), *TRANSPOSED),
    ("layers", "up", "bias"): Row((f"{_LAYER}intermediate.dense.bias",), *SAME),
    ("layers", "down", "kernel"): Row((f"{_LAYER}output.dense.weight",), *TRANSPOSED),
    ("layers", "down", "bias"): Row((f"{_LAYER}output.dense.bias",), *SAME),
    ("layers", "mlp_norm", "scale"): Row((f"{_LAYER}output.LayerNorm.weight",), *SAME),
    ("layers", "mlp_norm", "bias"): Row((f"{_LAYER}output.LayerNorm.bias",), *SAME),
}
"""Maps the path of each array to its tensors.

A checkpoint may put a prefix, such as ``bert.``, before the names of all tensors.
"""


def load_params(source: TensorSource, config: BertConfig, device: jax.Device) -> Params:
    """Reads the parameters of an encoder from a checkpoint, in float32, onto a device.

    Args:
        source: tensors of the checkpoint.
        config: the architecture.
        device: device on which the parameters are placed.

    Raises:
        UserError: a tensor is missing or does not fit, see `hf_weights.read_params`. Tensors of
            other parts of a model, such as a classifier, are ignored.
    """
    prefix = next((n.removesuffix(_WORDS) for n in source.shapes if n.endswith(_WORDS)), "")
    table = {
        path: dataclasses.replace(row, tensors=tuple(prefix + name for name in row.tensors))
        for path, row in _TABLE.items()
    }
    specs = specs_of(_abstract(config))
    places = unflatten_dict(dict.fromkeys(specs, jax.sharding.SingleDeviceSharding(device)))
    return read_params(source, table, specs, "float32", places, ".*")
