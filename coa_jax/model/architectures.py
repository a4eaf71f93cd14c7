"""Published architectures by name, with which a model can be analysed without its files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from coa_jax import storage
from coa_jax.errors import UserError
from coa_jax.model.adapters import read_adapter
from coa_jax.model.config import ModelConfig
from coa_jax.model.hf_config import config_from_hf, read_config

_QWEN25 = functools.partial(ModelConfig, "qwen2", rope_theta=1e6, qkv_bias=True, max_position=32768)
_QWEN3 = functools.partial(ModelConfig, "qwen3", rope_theta=1e6, qk_norm=True, max_position=40960)


def _gemma3(v: int, d: int, f: int, layers: int, h: int, n: int, **keys: Any) -> ModelConfig:
    """Returns the architecture of a Gemma 3; the config's defaults have the other values."""
    sizes = {
        "vocab_size": v,
        "hidden_size": d,
        "intermediate_size": f,
        "num_hidden_layers": layers,
        "num_attention_heads": h,
        "num_key_value_heads": n,
    }
    return config_from_hf({"model_type": "gemma3_text", **sizes, **keys})


# The values come from each model's config.json on the Hugging Face Hub; `tiny` is for trying out
# commands. The numbers are V, D, F, L, H, N and K of `ModelConfig`.
ARCHITECTURES: dict[str, ModelConfig] = {
    "tiny": ModelConfig("llama", 512, 64, 128, 2, 4, 2, 16),
    "smollm2-135m": ModelConfig(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, rope_theta=1e5, rms_eps=1e-5, max_position=8192
    ),
    "qwen2.5-0.5b": _QWEN25(151936, 896, 4864, 24, 14, 2, 64),
    "qwen2.5-1.5b": _QWEN25(151936, 1536, 8960, 28, 12, 2, 128),
    "qwen2.5-3b": _QWEN25(151936, 2048, 11008, 36, 16, 2, 128),
    "qwen2.5-7b": _QWEN25(152064, 3584, 18944, 28, 28, 4, 128, tie_embeddings=False),
    "qwen2.5-14b": _QWEN25(152064, 5120, 13824, 48, 40, 8, 128, tie_embeddings=False),
    "qwen2.5-32b": _QWEN25(152064, 5120, 27648, 64, 40, 8, 128, tie_embeddings=False),
    "gemma-3-1b": _gemma3(262144, 1152, 6912, 26, 4, 1, sliding_window=512),
    "gemma-3-4b": _gemma3(
        *(262208, 2560, 10240, 34, 8, 4),
        sliding_window=1024,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "qwen3-0.6b": _QWEN3(151936, 1024, 3072, 28, 16, 8, 128),
    "qwen3-1.7b": _QWEN3(151936, 2048, 6144, 28, 16, 8, 128),
    "qwen3-4b": _QWEN3(151936, 2560, 9728, 36, 32, 8, 128),
    "qwen3-14b": _QWEN3(151936, 5120, 17408, 40, 40, 8, 128, tie_embeddings=False),
}


def architecture_of(model: str) -> tuple[str, ModelConfig]:
    """Returns the name and the architecture of a model, without reading weights.

    The architecture comes from the ``config.json`` of ``model``, which is a directory, a URL, or an
    id of the Hugging Face Hub. If there is no such directory, and the Hub has no such model or
    cannot be reached, ``model`` must contain a name of `ARCHITECTURES`, as
    ``weights/Qwen2.5-Coder-7B-Instruct`` does; coder and instruct models have the shapes of their
    base model. The name ``tiny`` counts only as the last part of the path, because the names of
    other models may contain this word.

    Raises:
        UserError: the model cannot be read, and its path contains no known name; or its config is
            not supported.
    """
    if storage.is_url(model) or (Path(model) / "config.json").is_file():
        return model, read_config(storage.model_folder(model, weights=False))
    why = "there is no such directory"
    try:
        folder = storage.hub_description(model) or Path(model)
    except UserError as error:
        folder, why = Path(model), str(error).removeprefix(f"{model}: ")
    if (folder / "config.json").is_file():
        return model, read_config(folder)
    if (adapter := read_adapter(folder)) is not None:
        return architecture_of(adapter.base)
    text = model.lower().replace("-coder", "")
    last = Path(text).name
    matching = [
        name for name in ARCHITECTURES if (name == last if name == "tiny" else name in text)
    ]
    if not matching:
        raise UserError(
            f"model {model!r}: {why}; and the path names no architecture; known are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return (name := max(matching, key=len)), ARCHITECTURES[name]
