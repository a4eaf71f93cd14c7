"""Text encoders of the BERT family (E5, BGE, MiniLM, ...) in JAX, from Hugging Face directories.

A text becomes one unit vector: the mean of its last hidden states (Sentence-BERT, arXiv 1908.10084
§3), or the first of them where the directory says so.  E5 (arXiv 2212.03533 §4.1) was trained
with "query: " and "passage: " in front of its texts, which is the default.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax import reading
from coa_jax.bounds import Between, Bounded, OneOf, Place, Prose
from coa_jax.errors import UserError
from coa_jax.files import read_json_object

_SHORTEST = 16
"""Tokens of the smallest shape that is compiled; the others double from there."""

_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}
_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
"""Our name of each part of a layer -> its name in a checkpoint."""


@dataclasses.dataclass(frozen=True)
class EncoderConfig(Bounded):
    """Which model turns texts into vectors.

    Attributes:
        path: Hugging Face directory (``config.json``, safetensors, ``tokenizer.json``) of a BERT or
            XLM-RoBERTa; "" for none.
        query_prefix: stands before each query; E5's. Models that know none want "".
        passage_prefix: stands before each passage.
        max_tokens: longest text, if the model takes as many; the rest of it is left out.
        batch_size: texts of a product, at most.
        device: backend that computes, "cpu" to leave the accelerator to the policy; "" for the
            default one.
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
class _Shape:
    """What of ``config.json`` the program depends on; static, so it must hash."""

    heads: int
    epsilon: float
    activation: str
    first_position: int
    pooling: str


Params = dict[str, Any]


@functools.partial(jax.jit, static_argnames="shape")
def embed(params: Params, tokens: jax.Array, mask: jax.Array, *, shape: _Shape) -> jax.Array:
    """Unit vectors of texts.

    Args:
        params: of `_read_params`.
        tokens: int32 [batch, length], padded on the right.
        mask: float32 [batch, length], 1 where there is a token; one at least in each row.
        shape: of the model.

    Returns:
        float32 [batch, width].
    """
    positions = shape.first_position + jnp.arange(tokens.shape[1])
    first = params["word"][tokens] + params["position"][positions] + params["type"][0]
    bias = jnp.where(mask[:, None, None, :] > 0, 0.0, -jnp.inf)

    def layer(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
        q, k, v = (_split(_dense(x, p[name]), shape.heads) for name in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(q.shape[-1])
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores + bias), v)
        attended = _dense(mixed.reshape(x.shape), p["out"])
        x = _norm(x + attended, p["attention_norm"], shape.epsilon)
        inner = _ACTIVATIONS[shape.activation](_dense(x, p["up"]))
        return _norm(x + _dense(inner, p["down"]), p["norm"], shape.epsilon), None

    with jax.default_matmul_precision("highest"):
        hidden, _ = jax.lax.scan(
            layer, _norm(first, params["norm"], shape.epsilon), params["layers"]
        )
    if shape.pooling == "cls":
        pooled = hidden[:, 0]
    else:
        weights = mask[:, :, None]
        pooled = (hidden * weights).sum(1) / weights.sum(1)
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


def _dense(x: jax.Array, p: Params) -> jax.Array:
    return x @ p["weight"] + p["bias"]


def _norm(x: jax.Array, p: Params, epsilon: float) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centred).mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + epsilon) * p["weight"] + p["bias"]


def _split(x: jax.Array, heads: int) -> jax.Array:
    return x.reshape(*x.shape[:-1], heads, -1)


class Encoder:
    """A loaded encoder; safe to use from many threads.

    Attributes:
        config: its settings.
        width: numbers of a vector.
        fingerprint: names the model by its files and settings: equal ones give equal vectors.
    """

    def __init__(self, config: EncoderConfig):
        """Reads the directory.

        Raises:
            UserError: a file is missing or not of a model that is known; the message names it.
        """
        folder = Path(config.path).expanduser()
        try:
            self._load(folder, config)
            # Shapes that do not go together, and ids beyond the vocabulary, show in the use only.
            vector = self.queries(["capital of Peru"])
        except reading.MALFORMED as error:
            why = reading.reason(error)
            raise UserError(f"encoder: {folder} is no model that can be used: {why}") from error
        if not np.isfinite(vector).all():
            raise UserError(f"encoder: {folder} computes a vector that holds NaN; use another")

    def _load(self, folder: Path, config: EncoderConfig) -> None:
        values = _json(folder / "config.json")
        self._shape = _read_shape(folder, values)
        weights, files = _read_weights(folder)
        self.config = config
        self._longest = min(config.max_tokens, _longest(folder, values, self._shape))
        self._device = _device(config.device)
        params = _read_params(folder, weights, int(values["num_hidden_layers"]))
        self._params = jax.device_put(params, self._device)
        self.width = int(params["word"].shape[1])
        files += [folder / "config.json", folder / "tokenizer.json"]
        self._tokenizer = _tokenizer(folder / "tokenizer.json", self._longest)
        ids, rows = self._tokenizer.get_vocab_size(), len(params["word"])
        if ids > rows:
            raise ValueError(f"its tokenizer has {ids:,} tokens, the model {rows:,} embeddings")
        self.fingerprint = _fingerprint(files, config, self._longest, self._shape.pooling)

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of queries, float32 [number, width]."""
        return self._encode([self.config.query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of passages, float32 [number, width]."""
        return self._encode([self.config.passage_prefix + text for text in texts])

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        vectors = np.zeros((len(rows), self.width), np.float32)
        # Texts of like length go together, so that little is computed on padding.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for start in range(0, len(order), self.config.batch_size):
            chosen = order[start : start + self.config.batch_size]
            vectors[chosen] = self._embed([rows[i] for i in chosen])
        return vectors

    def _embed(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        length = min(_power(max(map(len, rows)), _SHORTEST), self._longest)
        batch = min(_power(len(rows), 1), self.config.batch_size)
        tokens, mask = np.zeros((batch, length), np.int32), np.zeros((batch, length), np.float32)
        mask[len(rows) :, 0] = 1.0
        for i, row in enumerate(rows):
            tokens[i, : len(row)], mask[i, : len(row)] = row, 1.0
        arguments = jax.device_put((tokens, mask), self._device)
        return np.asarray(embed(self._params, *arguments, shape=self._shape))[: len(rows)]


def _power(number: int, least: int) -> int:
    """The smallest of ``least``, twice that, ... that is not below ``number``."""
    while least < number:
        least *= 2
    return least


def _device(name: str) -> jax.Device:
    try:
        return jax.local_devices(backend=name or None)[0]
    except RuntimeError as error:
        raise UserError(
            f"encoder: the backend {name!r} is not there: {error} (a JAX_PLATFORMS that names one"
            " backend leaves out the others)"
        ) from None


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path)
    except UserError as error:
        raise UserError(f"encoder: {error}") from None


def _read_shape(folder: Path, values: Mapping[str, Any]) -> _Shape:
    kind = values.get("model_type")
    if kind not in ("bert", "xlm-roberta", "roberta"):
        raise UserError(
            f"encoder: {folder} holds a model of type {kind!r}; bert, roberta and xlm-roberta are"
            " known"
        )
    if values.get("position_embedding_type", "absolute") != "absolute":
        raise UserError(f"encoder: {folder}: only absolute positions are known")
    activation = values.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UserError(f"encoder: {folder}: hidden_act {activation!r} is none of {known}")
    pooling_file, pooling = folder / "1_Pooling" / "config.json", "mean"
    if pooling_file.is_file():
        on = {key for key, value in _json(pooling_file).items() if value is True}
        modes = {key for key in on if key.startswith("pooling_mode_")}
        if modes not in ({"pooling_mode_mean_tokens"}, {"pooling_mode_cls_token"}):
            raise UserError(f"encoder: {pooling_file}: only one of mean and cls is known")
        pooling = "cls" if "pooling_mode_cls_token" in modes else "mean"
    # RoBERTa counts positions from the one behind that of padding.
    first = 0 if kind == "bert" else int(values.get("pad_token_id", 1)) + 1
    heads, epsilon = int(values["num_attention_heads"]), float(values["layer_norm_eps"])
    if heads < 1:
        raise ValueError(f"num_attention_heads is {heads}")
    return _Shape(heads, epsilon, activation, first, pooling)


def _longest(folder: Path, values: Mapping[str, Any], shape: _Shape) -> int:
    """Tokens for which there are positions, or fewer where the model was trained with fewer."""
    positions = int(values["max_position_embeddings"]) - shape.first_position
    if positions < 1:
        raise ValueError(f"max_position_embeddings leaves {positions} positions")
    trained = folder / "sentence_bert_config.json"
    if trained.is_file():
        return min(positions, int(_json(trained).get("max_seq_length") or positions))
    return positions


def _read_weights(folder: Path) -> tuple[dict[str, np.ndarray], list[Path]]:
    """All tensors by their names without a prefix of the whole model, and the files."""
    from safetensors.numpy import load_file

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(_json(index).get("weight_map", {}).values()))
    else:
        names = ["model.safetensors"]
    files = [folder / name for name in names]
    found: dict[str, np.ndarray] = {}
    for file in files:
        try:
            reading.open_file(file).close()
            found.update(load_file(file))
        except Exception as error:  # its errors have no common class
            raise UserError(f"encoder: {file} cannot be read: {error}") from None
    prefixes = ("bert.", "roberta.")
    return {
        next((k.removeprefix(p) for p in prefixes if k.startswith(p)), k): v
        for k, v in found.items()
    }, files


def _read_params(folder: Path, weights: Mapping[str, np.ndarray], layers: int) -> Params:
    def tensor(name: str) -> np.ndarray:
        if name not in weights:
            raise UserError(f"encoder: {folder} has no tensor {name}")
        values = np.asarray(weights[name], np.float32)
        if not np.isfinite(values).all():
            raise UserError(f"encoder: {folder}: tensor {name} holds NaN or infinite values")
        return values

    def part(name: str) -> Params:
        weight = tensor(f"{name}.weight")
        # PyTorch stores a product's matrix as (out, in).
        return {"weight": weight.T if weight.ndim == 2 else weight, "bias": tensor(f"{name}.bias")}

    stack = [
        {ours: part(f"encoder.layer.{i}.{theirs}") for ours, theirs in _LAYER.items()}
        for i in range(layers)
    ]
    return {
        "word": tensor("embeddings.word_embeddings.weight"),
        "position": tensor("embeddings.position_embeddings.weight"),
        "type": tensor("embeddings.token_type_embeddings.weight"),
        "norm": part("embeddings.LayerNorm"),
        "layers": jax.tree.map(lambda *arrays: np.stack(arrays), *stack),
    }


def _tokenizer(path: Path, longest: int) -> Any:
    # Its own library and not transformers', whose tokenizers may not be used by several threads.
    from tokenizers import Tokenizer

    try:
        reading.read_json(path, 256 << 20)
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # its errors have no class of their own
        raise UserError(
            f"encoder: {path} cannot be read: {error}; AutoTokenizer.from_pretrained(FOLDER)"
            ".save_pretrained(FOLDER) of transformers writes one"
        ) from None
    tokenizer.enable_truncation(longest)
    tokenizer.no_padding()
    return tokenizer


def _fingerprint(files: Sequence[Path], config: EncoderConfig, longest: int, pooling: str) -> str:
    parts = [config.query_prefix, config.passage_prefix, longest, pooling]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()
