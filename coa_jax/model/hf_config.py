"""Converts Hugging Face ``config.json`` to and from :class:`ModelConfig`.

A model is accepted only if the forward pass computes it exactly. A key that would change the
arithmetic (another rotary type, a bias, a soft cap) is rejected rather than ignored,
and the error names the key.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from coa_jax.config.fields import Between, Count, Natural, Positive, Size, check, parts
from coa_jax.errors import UserError
from coa_jax.files import durable
from coa_jax.model.config import (
    Activation,
    Architecture,
    LinearRope,
    Llama3Rope,
    LocalAttention,
    ModelConfig,
    RopeScaling,
    YarnRope,
)

HF_CLASSES: dict[Architecture, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_MULTIMODAL = "Gemma3ForConditionalGeneration"
# Defaults of transformers for keys that a config.json leaves out.
_MAX_POSITION: dict[Architecture, int] = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
# The configs of released multimodal models leave out most of these keys.
_GEMMA3: Mapping[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_ORIGINAL = "original_max_position_embeddings"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ACTIVATIONS: dict[Activation, tuple[str, str]] = {
    "silu": ("hidden_act", "silu"),
    "gelu_tanh": ("hidden_activation", "gelu_pytorch_tanh"),
}
"""Key and value of each activation in a ``config.json``."""
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
"""Options of YaRN, which have the same names in `YarnRope`."""
_Heads = Annotated[int, Between(1, 2**16)]
# Larger values show that a file is damaged.
_Layers = Annotated[int, Between(1, 10_000)]
_Theta = Annotated[float, Between(0, 1e30, above=True)]
_Eps = Annotated[float, Between(0, 1, above=True)]


def read_config(directory: str | Path) -> ModelConfig:
    """Reads the architecture from the ``config.json`` of a model directory.

    Raises:
        UserError: the file is missing, is not a JSON object, or describes a model whose forward
            pass is not implemented here; the message names the key.
    """
    path = Path(directory) / "config.json"
    if not path.exists():
        raise UserError(f"{path} is missing: not a Hugging Face model directory")
    return config_from_hf(durable.read_json_object(path), str(path))


def config_from_hf(hf: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Reads the architecture from a parsed ``config.json``.

    Args:
        hf: the parsed file, in the format of transformers 4 (``rope_theta``, ``rope_scaling``) or
            of transformers 5 (``rope_parameters``). Of a multimodal Gemma 3, the text model is
            read.
        where: name of the file, used in error messages.

    Raises:
        UserError: a key is missing, is malformed, or has a value that is not supported.
    """
    if _MULTIMODAL in check(hf.get("architectures") or [], list, f"{where}: architectures"):
        text: Any = hf.get("text_config")
        hf = {**check(text, dict, f"{where}: text_config"), "architectures": [HF_CLASSES["gemma3"]]}
    architecture = _architecture(hf, where)
    gemma = architecture == "gemma3"
    if gemma:
        hf = _gemma3(hf, where)
    _refuse_unsupported(hf, architecture, where)

    def get(key: str, annotation: Any, default: Any = None) -> Any:
        return _value(hf, key, annotation, where, default)

    heads, hidden = get("num_attention_heads", _Heads), get("hidden_size", Size)
    width = get("head_dim", _Heads, 128 if architecture == "qwen3" else hidden // heads)
    max_position = get("max_position_embeddings", Count, _MAX_POSITION.get(architecture))
    theta, scaling = _rope(hf, max_position, where)
    scalar = get("query_pre_attn_scalar", Positive) if gemma else width
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=get("vocab_size", Count),
            hidden_size=hidden,
            intermediate_size=get("intermediate_size", Size),
            num_layers=get("num_hidden_layers", _Layers),
            num_heads=heads,
            num_kv_heads=get("num_key_value_heads", _Heads, heads),
            head_dim=width,
            rope_theta=theta,
            rope_scaling=scaling,
            local=_local(hf, architecture, where),
            rms_eps=get("rms_norm_eps", _Eps, 1e-6),
            norm_offset=1.0 if gemma else 0.0,
            post_norms=gemma,
            activation="gelu_tanh" if gemma else "silu",
            scale_embeddings=gemma,
            tie_embeddings=get("tie_word_embeddings", bool, False),
            qkv_bias=architecture == "qwen2",
            qk_norm=architecture in ("qwen3", "gemma3"),
            query_scalar=None if scalar == width else scalar,
            max_position=max_position,
        )
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None


def config_to_hf(
    config: ModelConfig, dtype: str, eos_ids: Sequence[int] = (), pad_id: int | None = None
) -> dict[str, Any]:
    """Returns the content of a ``config.json`` for transformers 4 and 5, and for serving engines.

    Args:
        config: the architecture.
        dtype: dtype of the saved tensors, such as ``"bfloat16"``.
        eos_ids: ids that end a generation.
        pad_id: id of the padding token; None if there is no such token.
    """
    c, rope = config, _rope_to_hf(config.rope_scaling)
    activation, function = _ACTIVATIONS[c.activation]
    gemma = c.architecture == "gemma3"
    hf = {
        "architectures": [HF_CLASSES[c.architecture]],
        "model_type": _model_type(c.architecture),
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        activation: function,
        "max_position_embeddings": c.max_position,
        "rms_norm_eps": c.rms_eps,
        "tie_word_embeddings": c.tie_embeddings,
        "rope_theta": c.rope_theta,
        "rope_scaling": rope if c.rope_scaling is not None else None,
        "rope_parameters": {**rope, "rope_theta": c.rope_theta},
        "bos_token_id": None,
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else list(eos_ids) or None,
        "pad_token_id": pad_id,
        "attention_dropout": 0.0,
        "use_cache": True,
    }
    if c.architecture != "qwen2":
        hf["attention_bias"] = False
    if c.architecture == "llama":
        hf["mlp_bias"] = False
    elif not gemma:
        hf["use_sliding_window"] = c.local is not None
    if c.local is not None:
        kinds = [_SLIDING if local else _FULL for local in c.local.layers]
        hf |= {"sliding_window": c.local.window, "layer_types": kinds}
        if not gemma:
            hf["max_window_layers"] = c.local.layers.index(True)
    if gemma:
        assert c.local is not None
        base = c.local.rope_theta
        hf["rope_local_base_freq"] = base
        hf["query_pre_attn_scalar"] = _whole(float(c.query_scalar or c.head_dim))
        hf["rope_parameters"] = {
            _FULL: hf["rope_parameters"],
            _SLIDING: {"rope_type": "default", "rope_theta": base},
        }
    return hf


def _gemma3(hf: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the config of a Gemma 3 with all keys, in the format of transformers 4."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if hf.get(key):
            raise UserError(f"{where}: {key} is not supported: Gemma 3 has no such setting")
    hf = {**_GEMMA3, **{key: value for key, value in hf.items() if value is not None}}
    rope = hf.get("rope_parameters")
    if isinstance(rope, Mapping) and rope.keys() & {_FULL, _SLIDING}:
        local = check(rope.get(_SLIDING) or {}, dict, f"{where}: rope_parameters.{_SLIDING}")
        if local.get("rope_type", "default") != "default":
            raise UserError(f"{where}: the rope of {_SLIDING} is scaled, which is not supported")
        hf["rope_local_base_freq"] = local.get("rope_theta", hf["rope_local_base_freq"])
        hf["rope_parameters"] = rope.get(_FULL)
    return hf


def _model_type(architecture: Architecture) -> str:
    return "gemma3_text" if architecture == "gemma3" else architecture


def _architecture(hf: Mapping[str, Any], where: str) -> Architecture:
    names = check(hf.get("architectures") or [], list, f"{where}: architectures")
    for architecture, cls in HF_CLASSES.items():
        if cls in names or (not names and hf.get("model_type") == _model_type(architecture)):
            return architecture
    listed = str(", ".join(map(str, names)) or hf.get("model_type") or "none")[:200]
    raise UserError(
        f"{where}: architecture {listed} is not supported: use one of "
        + ", ".join(HF_CLASSES.values())
    )


def _refuse_unsupported(hf: Mapping[str, Any], architecture: Architecture, where: str) -> None:
    key, function = _ACTIVATIONS["gelu_tanh" if architecture == "gemma3" else "silu"]
    value = hf.get(key, function)
    if value != function and (function, value) != ("silu", "swish"):
        raise UserError(
            f"{where}: {key} {reprlib.repr(value)} is not supported: only {function} is"
        )
    # In Llama and Qwen3, attention_bias also adds a bias to the output projection. Qwen2 ignores
    # the key: its q, k and v always have a bias.
    for key in ("attention_bias", "mlp_bias"):
        if _value(hf, key, bool, where, False) and (key == "mlp_bias" or architecture != "qwen2"):
            raise UserError(f"{where}: {key} true is not supported for {architecture} models")
    if hf.get("quantization_config"):
        raise UserError(
            f"{where}: quantization_config is present: use the unquantised model (bfloat16)"
        )


def _local(hf: Mapping[str, Any], architecture: Architecture, where: str) -> LocalAttention | None:
    """Reads which layers have sliding-window attention, and the window."""
    kinds = check(hf.get("layer_types") or [], list, f"{where}: layer_types")
    if unknown := [kind for kind in kinds if kind not in (_FULL, _SLIDING)]:
        raise UserError(f"{where}: layer type {reprlib.repr(unknown[0])} is not supported")
    window, layers = hf.get("sliding_window", 4096), _value(hf, "num_hidden_layers", _Layers, where)
    if architecture == "gemma3":
        period = _value(hf, "sliding_window_pattern", Count, where)
        kinds = kinds or [_FULL if i % period == 0 else _SLIDING for i in range(1, layers + 1)]
    elif architecture == "llama" or not hf.get("use_sliding_window") or window is None:
        if _SLIDING in kinds:
            raise UserError(
                f"{where}: layer_types has {_SLIDING}, but {architecture} models have no window "
                "without use_sliding_window: set it, or leave out layer_types"
            )
        return None
    elif not kinds:
        # Layers from max_window_layers on use the window. The released Qwen2 configs have a window,
        # but set max_window_layers to the number of layers, so no layer uses the window.
        first = hf.get("max_window_layers", 28)
        first = check(_whole(first), Natural, f"{where}: max_window_layers")
        kinds = [_SLIDING if i >= first else _FULL for i in range(layers)]
    if len(kinds) != layers:
        raise UserError(f"{where}: layer_types has {len(kinds)} entries for {layers} layers")
    local = tuple(kind == _SLIDING for kind in kinds)
    if architecture == "gemma3":
        base = _value(hf, "rope_local_base_freq", _Theta, where)
    elif not any(local):
        return None
    else:
        base = None
    return LocalAttention(_value(hf, "sliding_window", Count, where, 4096), local, base)


def _rope(hf: Mapping[str, Any], max_position: int, where: str) -> tuple[float, RopeScaling | None]:
    """Reads the rotary base and the rotary scaling."""
    rope: Mapping[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        entry = hf.get(key) or rope
        if not isinstance(entry, Mapping):
            raise UserError(f"{where}: {key} {reprlib.repr(entry)} is not an object")
        rope = rope or entry
        # Users set the older key to extend the context; transformers uses it too.
        if _scaling(entry) != _scaling(rope):
            raise UserError(
                f"{where}: rope_parameters and rope_scaling differ; keep only the right entry"
            )
    bases = {**hf, **(hf.get("rope_parameters") or {}), **rope}
    theta = _value(bases, "rope_theta", _Theta, where, 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise UserError(
            f"{where}: rope type {reprlib.repr(kind)} is not supported: only default, linear, "
            "llama3 and yarn"
        )
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial not in (1, None):
        raise UserError(
            f"{where}: partial_rotary_factor {reprlib.repr(partial)} is not supported: only 1 is"
        )
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearRope(_value(rope, "factor", Positive, where))
    # transformers may prefer a value outside the entry.
    if hf.get(_ORIGINAL) not in (None, rope.get(_ORIGINAL)):
        raise UserError(f"{where}: {_ORIGINAL} is outside rope_scaling: move it there")
    if kind == "yarn":
        return theta, _yarn(rope, theta, max_position, where)
    low, high = (_value(rope, f"{end}_freq_factor", Positive, where) for end in ("low", "high"))
    if low >= high:
        raise UserError(f"{where}: low_freq_factor {low:g} is not below high_freq_factor {high:g}")
    return theta, Llama3Rope(
        factor=_value(rope, "factor", Positive, where),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_value(rope, _ORIGINAL, Count, where),
    )


def _yarn(rope: Mapping[str, Any], theta: float, max_position: int, where: str) -> YarnRope:
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", _ORIGINAL}
    # The key "finetuned" says that the weights were trained with the scaling; it changes no
    # arithmetic.
    if unknown := sorted(rope.keys() - known - {*_YARN, "finetuned"}):
        raise UserError(
            f"{where}: {reprlib.repr(unknown[0])} of the yarn rope is not supported: only "
            + ", ".join(_YARN)
        )
    options = {
        key: _value(rope, key, Positive, where) for key in _YARN[:-1] if rope.get(key) is not None
    }
    if "truncate" in rope:  # transformers reads null as false
        options["truncate"] = _value(rope, "truncate", bool, where, False)
    yarn = YarnRope(
        factor=_value(rope, "factor", Positive, where),
        # If the file has no such key, max_position_embeddings is the length before the scaling.
        original_max_position=_value(rope, _ORIGINAL, Count, where, max_position),
        **options,
    )
    if yarn.beta_slow > yarn.beta_fast:
        raise UserError(
            f"{where}: beta_slow {yarn.beta_slow:g} is above beta_fast {yarn.beta_fast:g}"
        )
    if theta <= 1:
        raise UserError(f"{where}: rope_theta {theta:g} is too small for yarn: it must exceed 1")
    return yarn


def _rope_to_hf(scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns the scaling as an entry ``rope_scaling``, without options that have their default."""
    if scaling is None:
        return {"rope_type": "default"}
    if isinstance(scaling, LinearRope):
        return {"rope_type": "linear", "factor": scaling.factor}
    kind = "yarn" if isinstance(scaling, YarnRope) else "llama3"
    values = {f.name: getattr(scaling, f.name) for f in dataclasses.fields(scaling)}
    original = values.pop("original_max_position")
    options = {k: v for k, v in values.items() if v != getattr(YarnRope, k, None)}
    return {"rope_type": kind, _ORIGINAL: original, **options}


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a rope entry without its base, with its type under the key ``rope_type``."""
    rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "type")}
    return {"rope_type": rope.get("type", "default"), **rest}


def _value(
    hf: Mapping[str, Any], key: str, annotation: Any, where: str, default: Any = None
) -> Any:
    """Returns a value of a parsed file after checking its type and bounds, see `fields.check`.

    Args:
        hf: the parsed file, or an object in the file.
        key: key of the value.
        annotation: type and bounds of the value.
        where: name of the file, used in error messages.
        default: result if the key is absent or null; None if the file must have the key.
    """
    value = default if hf.get(key) is None else hf[key]
    if value is None:
        raise UserError(f"{where}: {key} is missing")
    kind = parts(annotation)[0]
    value = check(_whole(value) if kind is int else value, annotation, f"{where}: {key}")
    return float(value) if kind is float else value


def _whole(value: Any) -> Any:
    """Converts a float without a fraction to an int: some exporters write 4096 as 4096.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
