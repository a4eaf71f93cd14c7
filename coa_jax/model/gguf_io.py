"""Reads GGUF files: configuration, dequantised tensors, and the tokenizer.

The module needs the optional package ``gguf``, which implements every quantisation type in NumPy.
"""

from __future__ import annotations

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
            self._read(_open(Path(path)))
        except untrusted.MALFORMED as error:
            # The library's reader does not check the file; these exceptions mean damaged bytes.
            raise UserError(
                f"{path} is truncated or not a GGUF file "
                f"({untrusted.reason(error)}): fetch it again"
            ) from error

    def _read(self, reader: Any) -> None:
        self._metadata = {
            key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")
        }
        parts = int(self.metadata("split.count", 0))
        if parts > 1:
            raise UserError(
                f"{self.where} is one of {parts} parts: join them with `llama-gguf-split --merge`"
            )
        self._tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
        self.config = self._read_config()
        self.shapes: Mapping[str, tuple[int, ...]] = {
            # GGUF lists the fastest-varying dimension first.
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }

    def metadata(self, key: str, default: Any = None) -> Any:
        """Returns the value of a metadata key of the file, such as ``"tokenizer.ggml.pre"``.

        Args:
            key: the key.
            default: result if the file does not have the key.
        """
        field = self._metadata.get(key)
        try:
            return default if field is None else field.contents()
        except untrusted.MALFORMED as error:
            why = untrusted.reason(error)
            raise UserError(f"{self.where}: {key} cannot be read ({why}): fetch it again") from None

    def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
        """Reads rows of a tensor as float32, in the row order of Hugging Face.

        The method reads and dequantises the whole tensor, and then returns the requested rows.
        """
        from gguf import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type).reshape(self.shapes[name])
        except NotImplementedError:
            raise UserError(
                f"{self.where}: tensor {name} has type {tensor.tensor_type.name}, which the gguf "
                "package does not dequantise: use another quantisation"
            ) from None
        values = values.astype(np.float32, copy=False)
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
            vocab = int(self._tensors["model.embed_tokens.weight"].shape[-1])
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


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise missing(f"{path}", "gguf", "gguf") from None
    if not path.exists():
        raise UserError(f"{path} is missing: give the path of a GGUF file")
    with untrusted.open_file(path) as file:
        _walk(file)
    return GGUFReader(path)


_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Number of bytes of each scalar type of metadata."""
_STRING, _ARRAY = 8, 9


def _walk(file: IO[bytes]) -> None:
    """Checks that everything before the tensor data lies inside the file.

    If a count in the file is damaged, the library's reader would read beyond the end of the file,
    as many times as the count says.

    Raises:
        ValueError: the header is damaged; the message says how.
    """
    size = os.fstat(file.fileno()).st_size

    def number(form: str) -> int:
        return struct.unpack(form, file.read(struct.calcsize(form)))[0]

    def skip(count: int) -> None:
        if count > size - file.tell():
            raise ValueError(f"it ends before byte {file.tell() + count:,}")
        file.seek(count, os.SEEK_CUR)

    def value(kind: int) -> None:
        if kind not in (*_SIZES, _STRING, _ARRAY):
            raise ValueError(f"it has a value of the unknown type {kind}")
        if kind == _STRING:
            skip(number("<Q"))
        elif kind != _ARRAY:
            skip(_SIZES[kind])
        else:
            inner, count = number("<I"), number("<Q")
            if inner == _ARRAY:
                raise ValueError("it holds an array of arrays")
            if inner != _STRING:
                skip(count * _SIZES.get(inner, size))
            elif count > size // 8:
                raise ValueError(f"it is too short for {count:,} strings")
            else:
                for _ in range(count):
                    skip(number("<Q"))

    try:
        magic, version, tensors, fields = struct.unpack("<4sIQQ", file.read(24))
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"it begins with {magic!r}, version {version}")
        if max(tensors, fields) > size // 12:
            raise ValueError(f"it is too short for {tensors:,} tensors and {fields:,} fields")
        for _ in range(fields):
            skip(number("<Q"))
            value(number("<I"))
        for _ in range(tensors):
            skip(number("<Q"))
            skip(8 * number("<I") + 12)
    except struct.error as error:
        raise ValueError("it is cut off") from error


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
