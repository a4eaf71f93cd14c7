"""The architecture of a decoder-only policy, and the settings of adapters and text encoders."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Literal

from absl import logging

from coa_jax.config.fields import (
    MAX_INT,
    Between,
    Bounded,
    Items,
    Natural,
    OneOf,
    Place,
    Positive,
    Prose,
    Size,
    Times,
)

Architecture = Literal["llama", "qwen2", "qwen3", "gemma3"]
Activation = Literal["silu", "gelu_tanh"]

DTYPES = ("float32", "bfloat16")
"""Names of the dtypes that parameters and matmul operands can have."""


def cpu_dtype(cpuinfo: str = "/proc/cpuinfo") -> str:
    """Returns the dtype of matmul operands with which this machine's processor trains faster.

    Args:
        cpuinfo: file in which Linux lists the instructions of the processor.

    Returns:
        "bfloat16" if the processor multiplies bfloat16 (AVX512-BF16 or AMX), else "float32". A
        processor without these instructions converts bfloat16 to float32 before it multiplies.
    """
    try:
        words = set(Path(cpuinfo).read_text(encoding="utf-8").split())
    except OSError:
        return "float32"
    return "bfloat16" if words & {"avx512_bf16", "amx_bf16"} else "float32"


PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
"""Names of the projections of a layer that can have adapters."""


REMAT = ("none", "dots", "weight_dots", "offload", "attention_block", "attention", "full")
"""Names of the rematerialisation policies, see `model.remat.POLICIES`."""


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Scaling of the rotary frequencies in Llama 3.1 and later (``rope_type: llama3``).

    Attributes:
        factor: factor by which the wavelengths of slow components are stretched.
        low_freq_factor: components that make fewer turns than this over ``original_max_position``
            positions are stretched by the whole ``factor``.
        high_freq_factor: components that make more turns than this over ``original_max_position``
            positions stay unchanged.
        original_max_position: context length of pretraining, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclasses.dataclass(frozen=True)
class YarnRope:
    """Scaling of the rotary frequencies by YaRN (Peng et al. 2023, arXiv 2309.00071).

    Qwen uses YaRN for contexts of up to 131,072 tokens.

    Attributes:
        factor: factor by which the wavelengths of slow components are stretched.
        original_max_position: context length of pretraining, in tokens.
        beta_fast: components that make more turns than this over ``original_max_position``
            positions stay unchanged.
        beta_slow: components that make fewer turns than this over ``original_max_position``
            positions are stretched by the whole ``factor``.
        attention_factor: factor by which cosines and sines are multiplied; None computes the factor
            from the other fields.
        mscale, mscale_all_dim: weights of ``log(factor)`` in the numerator and the denominator of
            the attention factor; used only if both are set.
        truncate: whether the borders of the blended range are rounded to whole numbers. The blended
            range holds the indices of the components between ``beta_fast`` and ``beta_slow``.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class LinearRope:
    """Scaling of the rotary frequencies by a constant (``rope_type: linear``).

    Attributes:
        factor: factor by which all wavelengths are stretched.
    """

    factor: float


RopeScaling = Llama3Rope | YarnRope | LinearRope


@dataclasses.dataclass(frozen=True)
class LocalAttention:
    """Sliding-window attention, which the local layers of a model use in place of full attention.

    Attributes:
        window: number of positions that a token sees in a local layer: its own and those before.
        layers: for each layer of the model, whether the layer is local.
        rope_theta: base of the rotary frequencies of local layers, which are not scaled; None if
            local layers have the frequencies of the other layers.
    """

    window: int
    layers: tuple[bool, ...]
    rope_theta: float | None = None


@dataclasses.dataclass(frozen=True)
class LoraConfig(Bounded):
    """Settings of low-rank adapters (LoRA), which are trained in place of the whole model.

    Attributes:
        rank: rank of every adapter; 0 trains the whole model instead of adapters. With -1, a run
            chooses 32 if memory is too small for the training state of the whole model, else 0.
        alpha: scale of the adapters; the output of an adapter is multiplied by ``alpha / rank``.
        projections: names of the projections that get adapters, from `PROJECTIONS`.
    """

    rank: Annotated[int, Between(0, MAX_INT, also=(-1,))] = 0
    alpha: Positive = 32.0
    projections: Annotated[
        tuple[Annotated[str, OneOf(*PROJECTIONS)], ...], Items(1, len(PROJECTIONS))
    ] = PROJECTIONS


@dataclasses.dataclass(frozen=True)
class EncoderConfig(Bounded):
    """The settings of the model that encodes texts as vectors.

    Attributes:
        path: Hugging Face directory of a BERT or XLM-RoBERTa model, with ``config.json``,
            safetensors and ``tokenizer.json``; "" for no encoder.
        query_prefix: text before each query. The default is the prefix of the E5 models. For a
            model that was trained without prefixes, set "".
        passage_prefix: text before each passage.
        max_tokens: maximum number of tokens of a text. Longer texts are truncated. If the model has
            a smaller maximum, the model's maximum is used.
        batch_size: maximum number of texts in a batch.
        device: JAX backend that runs the encoder. The default "cpu" leaves the accelerator to the
            policy; "" means the default backend of JAX.
    """

    path: Place = ""
    query_prefix: Prose = "query: "
    passage_prefix: Prose = "passage: "
    max_tokens: Annotated[int, Between(1, 2**20)] = 512
    batch_size: Annotated[int, Between(1, 2**16)] = 32
    device: Annotated[str, OneOf("", "cpu", "gpu", "cuda", "rocm", "tpu")] = "cpu"

    def __bool__(self) -> bool:
        return bool(self.path)


@dataclasses.dataclass(frozen=True)
class BertConfig(Bounded):
    """The architecture of a BERT-like encoder, as far as the forward pass needs it.

    The fields have the names of ``config.json``, except ``first_position`` and ``max_tokens``,
    which are computed from other fields of the file. A field that has a default here may be missing
    in the file.

    Attributes:
        model_type: family of the model.
        vocab_size: number of rows of the token embedding.
        hidden_size: width of a layer's input and output.
        intermediate_size: width inside the feed-forward block of a layer.
        num_hidden_layers: number of layers.
        num_attention_heads: number of attention heads of a layer.
        layer_norm_eps: number that a layer normalisation adds to the variance.
        first_position: row of the position embedding that the first token of a text uses.
        max_tokens: maximum number of tokens of a text.
        type_vocab_size: number of rows of the segment embedding.
        hidden_act: name of the activation function in the feed-forward block.
        position_embedding_type: kind of the position embedding.
    """

    model_type: Literal["bert", "roberta", "xlm-roberta"]
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Times
    num_attention_heads: Size
    layer_norm_eps: Positive
    first_position: Natural
    max_tokens: Size
    type_vocab_size: Size = 2
    hidden_act: Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"] = "gelu"
    position_embedding_type: Literal["absolute"] = "absolute"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-shaped decoder: RMSNorm, rotary positions, grouped-query attention, gated MLP.

    Attributes:
        architecture: model family, which determines the Hugging Face class of a saved model.
        vocab_size: V, number of rows of the embedding table, which may exceed the tokenizer's
            vocabulary.
        hidden_size: D, width of the residual stream.
        intermediate_size: F, width of the gated MLP.
        num_layers: L, number of layers.
        num_heads: H, number of query heads, a multiple of ``num_kv_heads``.
        num_kv_heads: N, number of key/value heads.
        head_dim: K, width of a head, which need not be ``hidden_size / num_heads``.
        rope_theta: base of the rotary frequencies.
        rope_scaling: scaling of the rotary frequencies, see `Llama3Rope`, `YarnRope` and
            `LinearRope`; None for no scaling.
        local: the layers with sliding-window attention; None if all layers have full attention.
        rms_eps: number that is added to the mean square in every RMSNorm.
        norm_offset: number that is added to the learned factors of every RMSNorm (1 in Gemma).
        post_norms: whether the results of attention and MLP are normalised before they are added to
            the residual stream (as in Gemma).
        activation: activation function of the gate in the MLP.
        scale_embeddings: whether token embeddings are multiplied by ``sqrt(hidden_size)`` (as in
            Gemma).
        tie_embeddings: whether the embedding table, transposed, also serves as the output head.
        qkv_bias: whether the q, k and v projections have a bias (as in Qwen2).
        qk_norm: whether queries and keys are normalised per head (as in Qwen3).
        query_scalar: number whose square root divides the attention scores; None for ``head_dim``.
        max_position: ``max_position_embeddings`` of the config file. If the model uses YaRN, this
            may be the context length before scaling; `positions` is the length after scaling.
        lora: adapters that are added to the weight matrices; there are none if the rank is 0.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local: LocalAttention | None = None
    rms_eps: float = 1e-6
    norm_offset: float = 0.0
    post_norms: bool = False
    activation: Activation = "silu"
    scale_embeddings: bool = False
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    query_scalar: float | None = None
    max_position: int = 4096
    lora: LoraConfig = LoraConfig()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary positions need pairs")

    @property
    def num_groups(self) -> int:
        """G, the number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, the number of positions that a token sees; None for all positions."""
        if self.local is None:
            return (None,) * self.num_layers
        return tuple(self.local.window if local else None for local in self.local.layers)

    @property
    def positions(self) -> int:
        """Maximum number of tokens of a context that the model supports, after scaling by YaRN."""
        if isinstance(self.rope_scaling, YarnRope):
            return round(self.rope_scaling.original_max_position * self.rope_scaling.factor)
        return self.max_position


@functools.cache
def warn_of_positions(model_config: ModelConfig, length: int, setting: str) -> None:
    """Logs a warning, once, if sequences may be longer than the context length of the model.

    Args:
        model_config: the architecture.
        length: length of the longest possible sequence, in tokens.
        setting: name of the setting that allows this length, for the text of the warning.
    """
    if length > model_config.positions:
        origin = "max_position_embeddings"
        if isinstance(model_config.rope_scaling, YarnRope):
            origin = "original_max_position_embeddings times YaRN's factor"
        logging.warning(
            f"{setting} lets sequences have {length} tokens, but the model was trained for "
            f"{model_config.positions} positions ({origin}): beyond them it may write nonsense; "
            f"lower {setting}, or train it for more"
        )
