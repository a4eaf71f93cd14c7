"""Reads GGUF files: configuration, dequantised tensors, and the tokenizer.

The module needs the optional package ``gguf``, which implements every quantisation type in NumPy.
The header is read here, because the package's reader takes seconds for the tokens of a vocabulary,
and trusts the counts of a damaged file.
"""

from __future__ import annotations

import dataclasses
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from coa_jax.config.installed import missing
from coa_jax.errors import UserError
from coa_jax.files import untrusted
from coa_jax.model.config import ModelConfig
from coa_jax.model.hf_config import config_from_hf

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_SCALING = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "finetuned": "finetuned",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Maps the metadata fields of a rotary scaling to keys of ``rope_scaling``."""


def gguf_file(path: str | Path) -> Path | None:
    """Finds the GGUF file that a path names.

    This is the path itself if it is a GGUF file, or the only GGUF file in the directory at the
    path.

    The result is None if there is no GGUF file, or if the path is a directory with ``config.json``.

    Raises:
        UserError: the directory has several GGUF files and no ``config.json``.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(f"{path} has {len(files)} .gguf files: name the one to load")
    return files[0] if files else None


class GgufFile:
    """A GGUF file, presented with the tensor names and the row order of Hugging Face.

    The class implements the protocol `TensorSource`.

    Attributes:
        where: path of the file, used in error messages.
        config: the architecture.
        shapes: shape of each tensor by Hugging Face name.

    Raises:
        UserError: the package ``gguf`` is not installed, the file is missing or damaged, or the
            architecture of the model is not supported.
    """

    def __init__(self, path: str | Path) -> None:
        self.where = str(path)
        try:
            import gguf  # noqa: F401 - quantisation types
        except ImportError:
            raise missing(f"{path}", "gguf", "gguf") from None
        if not Path(path).exists():
            raise UserError(f"{path} is missing: give the path of a GGUF file")
        try:
            with untrusted.open_file(path) as file:
                self._read(_Header(file))
            self._bytes = np.memmap(path, np.uint8, "r")
        except untrusted.MALFORMED as error:
            raise UserError(
                f"{path} is truncated or not a GGUF file "
                f"({untrusted.reason(error)}): fetch it again"
            ) from error

    def _read(self, header: _Header) -> None:
        self._metadata = header.metadata
        parts = int(self.metadata("split.count", 0))
        if parts > 1:
            raise UserError(
                f"{self.where} is one of {parts} parts: join them with `llama-gguf-split --merge`"
            )
        self._tensors = {_hf_name(name): tensor for name, tensor in header.tensors.items()}
        self.config = self._read_config()
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tensor.shape for name, tensor in self._tensors.items()
        }

    def metadata(self, key: str, default: Any = None) -> Any:
        """Returns the value of a metadata key of the file, such as ``"tokenizer.ggml.pre"``.

        Args:
            key: the key.
            default: result if the file does not have the key.
        """
        return self._metadata.get(key, default)

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Reads rows of a tensor as float32, in the row order of Hugging Face.

        The method reads and dequantises the whole tensor, and then returns the requested rows.
        """
        from gguf import dequantize

        tensor = self._tensors[name]
        data = np.asarray(self._bytes[tensor.start : tensor.start + math.prod(tensor.byte_shape)])
        try:
            values = dequantize(data.reshape(tensor.byte_shape), tensor.kind)
        except NotImplementedError:
            raise UserError(
                f"{self.where}: tensor {name} has type {tensor.kind.name}, which the gguf "
                "package does not dequantise: use another quantisation"
            ) from None
        values = values.reshape(tensor.shape).astype(np.float32, copy=False)
        if self.config.architecture == "llama" and name.endswith(
            ("q_proj.weight", "k_proj.weight")
        ):
            values = _unpermute(values, self.config.head_dim)
        return values[rows]

    def _read_config(self) -> ModelConfig:
        name = self.metadata("general.architecture")
        if str(name).startswith("gemma"):
            raise UserError(
                f"{self.where}: Gemma is not supported in GGUF: use the safetensors model"
            )

        def get(key: str, default: Any = None) -> Any:
            return self.metadata(f"{name}.{key}", default)

        if "rope_freqs.weight" in self._tensors:
            raise UserError(
                f"{self.where}: tensor rope_freqs.weight (rotary scaling of Llama 3) is not "
                "supported in GGUF: use the safetensors model"
            )
        vocab = get("vocab_size")
        if vocab is None and "model.embed_tokens.weight" in self._tensors:
            vocab = self._tensors["model.embed_tokens.weight"].shape[0]
        hf = {
            "model_type": name,
            "vocab_size": vocab,
            "hidden_size": get("embedding_length"),
            "intermediate_size": get("feed_forward_length"),
            "num_hidden_layers": get("block_count"),
            "num_attention_heads": get("attention.head_count"),
            "num_key_value_heads": get("attention.head_count_kv"),
            "head_dim": get("attention.key_length", get("rope.dimension_count")),
            "rope_theta": _decimal(get("rope.freq_base", 10_000.0)),
            "rope_scaling": self._rope_scaling(f"{name}.rope.scaling."),
            "rms_norm_eps": _decimal(get("attention.layer_norm_rms_epsilon", 1e-6)),
            "max_position_embeddings": get("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
        }
        return config_from_hf(hf, self.where)

    def _rope_scaling(self, prefix: str) -> dict[str, Any] | None:
        """Builds the ``rope_scaling`` of a ``config.json`` from the metadata with a prefix."""
        kind = self.metadata(f"{prefix}type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind}
        for key in self._metadata:
            if not key.startswith(prefix) or key == f"{prefix}type":
                continue
            value = self.metadata(key)
            # Readers of GGUF disagree on the effect of GGUF's attention factors for YaRN.
            if (field := _SCALING.get(key.removeprefix(prefix))) is None:
                raise UserError(f"{self.where}: {key} is not supported: use the safetensors model")
            scaling[field] = _decimal(value) if isinstance(value, float) else value
        return scaling


def _decimal(value: float) -> float:
    """Returns the shortest decimal number with the same float32 value; GGUF stores float32."""
    return float(str(np.float32(value)))


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """Where a tensor is in the file, and its shape as in Hugging Face; ``byte_shape`` in bytes."""

    shape: tuple[int, ...]
    byte_shape: tuple[int, ...]
    kind: Any  # a gguf.GGMLQuantizationType
    start: int


_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Maps the scalar types of metadata to the characters of `struct`."""
_STRING, _ARRAY = 8, 9


class _Header:
    """Everything before the tensor data of a GGUF file.

    All counts are compared with the size of the file before anything is read.

    Attributes:
        metadata: values by key.
        tensors: tensors by GGUF's names.

    Raises:
        ValueError: the header is damaged; the message says how.
    """

    def __init__(self, file: IO[bytes]):
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        magic, version, tensors, fields = self._numbers("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r}, version {version}")
        if max(tensors, fields) > self._size // 12:
            raise ValueError(f"it is too short for {tensors:,} tensors and {fields:,} fields")
        self.metadata: dict[str, Any] = {}
        for _ in range(fields):
            key, (kind,) = self._string(), self._numbers("I")
            if key in self.metadata:
                raise ValueError(f"it has the field {key} twice")
            self.metadata[key] = self._value(kind)
        places = [(self._string(), self._place()) for _ in range(tensors)]
        align = self.metadata.get("general.alignment", 32)
        if align <= 0 or align & (align - 1):
            raise ValueError(f"general.alignment is {align}, which is no power of two")
        start = -(-file.tell() // align) * align
        self.tensors = {name: self._tensor(*place, start) for name, place in places}
        if len(self.tensors) < tensors:
            raise ValueError("two tensors have the same name")

    def _take(self, count: int) -> bytes:
        if count > self._size - self._file.tell():
            raise ValueError(f"it ends before byte {self._file.tell() + count:,}")
        return self._file.read(count)

    def _numbers(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))

    def _string(self) -> str:
        # Bytes that are not UTF-8 are a fault only where the string is used.
        return self._take(*self._numbers("Q")).decode("utf-8", "surrogateescape")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise ValueError(f"it has a value of the unknown type {kind}")
        inner, count = self._numbers("IQ")
        if inner in _SCALARS:
            form = np.dtype(f"<{_SCALARS[inner]}")
            return np.frombuffer(self._take(count * form.itemsize), form).tolist()
        if inner != _STRING:
            raise ValueError(f"it has an array of the unknown type {inner}")
        if count > self._size // 8:
            raise ValueError(f"it is too short for {count:,} strings")
        return [self._string() for _ in range(count)]

    def _place(self) -> tuple[tuple[int, ...], int, int]:
        """Reads the shape of a tensor, the number of its type, and where its bytes begin."""
        (dimensions,) = self._numbers("I")
        if dimensions > 8:
            raise ValueError(f"it has a tensor of {dimensions:,} dimensions")
        # GGUF lists the fastest-varying dimension first.
        *shape, kind, offset = self._numbers(f"{dimensions}QIQ")
        return tuple(reversed(shape)), kind, offset

    def _tensor(self, shape: tuple[int, ...], kind: int, offset: int, start: int) -> _Tensor:
        from gguf import GGMLQuantizationType
        from gguf.quants import quant_shape_to_byte_shape

        quantised = GGMLQuantizationType(kind)
        byte_shape = tuple(quant_shape_to_byte_shape(shape, quantised))
        end = start + offset + math.prod(byte_shape)
        if end > self._size:
            raise ValueError(f"it ends before byte {end:,}")
        return _Tensor(shape, byte_shape, quantised, start + offset)


def _hf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{parts[3]}"
    return name


def _unpermute(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Restores the Hugging Face row order of Llama's queries and keys.

    In GGUF the two rows of a rotary pair are adjacent; Hugging Face pairs row i of a head with row
    i + K/2.
    """
    pairs = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
