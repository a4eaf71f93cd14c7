"""Tiny random models of each family as transformers stores them; transformers is the reference."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.tiny_tokenizer import train_tokenizer

CORPUS = [
    "<think>the answer is in the table, so search for the river</think>\n<plan>one</plan>\n",
    "Question: which country has the longest river? 12 of 345 people said it's Norrland.\n",
    "<wiki_search>the longest river</wiki_search>\n<observation>\nThe river is long\n",
] * 4

_SMALL = {
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_LOCAL, _FULL = "sliding_attention", "full_attention"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "qwen3-head-dim": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "llama-untied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama3-rope": (
        "Llama",
        {"rope_parameters": _LLAMA3_ROPE, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "qwen2-yarn": (
        "Qwen2",
        {"rope_parameters": {**_YARN_ROPE, "rope_theta": 50.0}, "tie_word_embeddings": True},
    ),
    # As Qwen asks for it: the other positions stay those of the pretraining.
    "qwen3-yarn": (
        "Qwen3",
        {
            "rope_parameters": {**_YARN_ROPE, "rope_theta": 1000.0, "beta_fast": 8.0},
            "max_position_embeddings": 64,
            "head_dim": 24,
            "tie_word_embeddings": False,
        },
    ),
    # Texts of the tests are longer than the window, and the last layer is local again.
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 7,
            "layer_types": [_LOCAL, _LOCAL, _FULL, _LOCAL],
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                _LOCAL: {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "qwen2-window": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                **_YARN_ROPE,
                "rope_theta": 10000.0,
                "mscale": 2.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
            "tie_word_embeddings": True,
        },
    ),
}


def in_turn(name: str, *values: Any, slow: Sequence[Any] = ()) -> pytest.MarkDecorator:
    """Parametrizes with values, for which the backends take turns; the other pairs are slow."""
    pairs = [(value, kind) for value in (*values, *slow) for kind in ("cpu", "reference")]
    quick = [pair for i, pair in enumerate(pairs[: 2 * len(values)]) if i % 4 in (0, 3)]
    return pytest.mark.parametrize(
        (name, "backend"),
        [pytest.param(*p, marks=() if p in quick else pytest.mark.slow) for p in pairs],
        indirect=["backend"],
    )


def sentencepiece_like(control: Sequence[str] = ()) -> Any:
    """A tokenizer in the manner of Llama 2: a sign for the space, and bytes with names."""
    vocab = {token: i for i, token in enumerate([*control, "\u2581", "h", "i", "<0x0A>"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    backend.add_special_tokens(list(control))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


# That of google/gemma-3-1b-it, without its parts for images.
GEMMA_TEMPLATE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\n'}}
{%- endif -%}
"""


def gemma_like() -> Any:
    """A tokenizer in the manner of Gemma 3: bytes as a fallback, and white space among the added
    tokens, which are not marked as special."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    white = ["\n\n", "\n\n\n", "\u2581\u2581", "\u2581\u2581\u2581"]
    letters = ["\n", "\u2581", *map(chr, range(33, 127)), "\u2581t", "th", "\u2581th", "ri"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: i for i, token in enumerate([*special, *bytes_, *white, *letters])}
    merges = [("\u2581", "t"), ("t", "h"), ("\u2581t", "h"), ("r", "i"), ("\n", "\n")]
    tokenizer = transformers.GemmaTokenizer(vocab=vocab, merges=merges)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=True) for t in white])
    tokenizer.add_special_tokens({"additional_special_tokens": special[-2:]})
    tokenizer.chat_template = GEMMA_TEMPLATE
    return tokenizer


@dataclasses.dataclass(frozen=True)
class Reference:
    """A model directory, and the model that transformers reads from it."""

    path: Path

    @functools.cached_property
    def torch_model(self) -> Any:
        """Skips the test where torch is missing."""
        pytest.importorskip("torch")
        auto = transformers.AutoModelForCausalLM
        model, told = auto.from_pretrained(self.path, output_loading_info=True)
        assert not any(told.values()), told  # no name is missing, unexpected or of another shape
        return model.eval()


def tensor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor as transformers stores it."""
    embed, heads, groups = (
        getattr(config, name)
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    width, vocab = config.intermediate_size, config.vocab_size
    dim = getattr(config, "head_dim", None) or embed // heads
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads * dim, embed),
        "self_attn.k_proj.weight": (groups * dim, embed),
        "self_attn.v_proj.weight": (groups * dim, embed),
        "self_attn.o_proj.weight": (embed, heads * dim),
        "mlp.gate_proj.weight": (width, embed),
        "mlp.up_proj.weight": (width, embed),
        "mlp.down_proj.weight": (embed, width),
        "input_layernorm.weight": (embed,),
        "post_attention_layernorm.weight": (embed,),
    }
    if config.model_type == "qwen2":
        for name, rows in (("q", heads), ("k", groups), ("v", groups)):
            layer[f"self_attn.{name}_proj.bias"] = (rows * dim,)
    if config.model_type in ("qwen3", "gemma3_text"):
        layer |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    if config.model_type == "gemma3_text":
        layer |= {f"{name}_feedforward_layernorm.weight": (embed,) for name in ("pre", "post")}
    shapes = {
        f"model.layers.{i}.{name}": shape
        for i in range(config.num_hidden_layers)
        for name, shape in layer.items()
    }
    shapes |= {"model.embed_tokens.weight": (vocab, embed), "model.norm.weight": (embed,)}
    return shapes if config.tie_word_embeddings else {**shapes, "lm_head.weight": (vocab, embed)}


def make_reference(family: str, path: Path, dtype: str = "float32") -> Reference:
    """Writes a random model whose every tensor, norms and biases too, is random; without torch."""
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_SMALL, **options})
    config.architectures, config.dtype = [f"{name.removesuffix('Text')}ForCausalLM"], dtype
    config.save_pretrained(path)
    rng = np.random.default_rng(0)
    tensors = {}
    for tensor, shape in tensor_shapes(config).items():
        scale, shift = (0.2, 1.0) if len(shape) == 1 else (0.15, 0.0)
        shift = 0.0 if name == "Gemma3Text" else shift  # which adds 1 itself
        tensors[tensor] = (rng.standard_normal(shape) * scale + shift).astype(jnp.dtype(dtype))
    safetensors.numpy.save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    train_tokenizer(CORPUS, 384, tags=("<think>", "</think>")).save_pretrained(path)
    return Reference(path)


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    root = tmp_path_factory.mktemp("references")
    return {family: make_reference(family, root / family) for family in FAMILIES}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as GGUF, from COA_JAX_SMOLLM2 or weights/SmolLM2-135M-Instruct."""
    default = Path(__file__).parents[2] / "weights" / "SmolLM2-135M-Instruct"
    path = Path(os.environ.get("COA_JAX_SMOLLM2", default))
    file = path if path.suffix == ".gguf" else next(iter(sorted(path.glob("*.gguf"))), path)
    if not file.is_file():
        pytest.skip("SmolLM2-135M-Instruct is not here: set COA_JAX_SMOLLM2 to its .gguf file")
    return file
