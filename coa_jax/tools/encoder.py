"""Encodes texts as vectors with models of the BERT family (E5, BGE, MiniLM, ...) in JAX.

The models are read from Hugging Face directories. The vector of a text is a unit vector: the mean
of the last hidden states (Sentence-BERT, arXiv 1908.10084 §3), or the first hidden state if the
pooling configuration of the directory says so. The default prefixes "query: " and "passage: " are
those with which E5 was trained (arXiv 2212.03533 §4.1).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.errors import UserError
from coa_jax.files import untrusted
from coa_jax.files.durable import read_json_object
from coa_jax.model import encoder
from coa_jax.model.compute import REFERENCE
from coa_jax.model.config import BertConfig, EncoderConfig
from coa_jax.model.encoder import bind, load_params, read_bert_config
from coa_jax.model.params import Params
from coa_jax.model.safetensors_io import local_checkpoint
from coa_jax.storage import model_folder

_SHORTEST = 16
"""Number of tokens in the smallest compiled shape. Each further shape has twice as many tokens."""


@functools.partial(jax.jit, static_argnames=("config", "pooling"))
def _embed(
    params: Params, tokens: jax.Array, lengths: jax.Array, *, config: BertConfig, pooling: str
) -> jax.Array:
    """Computes the unit vectors of texts, float32 of shape ``[B, D]``.

    `model.encoder.Encoder` describes the arguments.
    """
    hidden = bind(config, params)(tokens, lengths, REFERENCE)
    if pooling == "cls":
        pooled = hidden[:, 0]
    else:
        inside = jnp.arange(tokens.shape[1]) < lengths[:, None]
        pooled = hidden.mean(axis=1, where=inside[:, :, None])
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


class TextEncoder:
    """A loaded encoder. Several threads may use the same encoder.

    Attributes:
        config: settings of the encoder.
        width: number of components of a vector.
        fingerprint: hash of the model's files and settings. Encoders with equal fingerprints
            compute equal vectors.
    """

    def __init__(self, config: EncoderConfig):
        """Loads the encoder from its directory.

        Raises:
            UserError: a file is missing, or the model is not supported. The message names the file.
        """
        folder = model_folder(config.path).expanduser()
        try:
            self._load(folder, config)
            # The model runs once, because only this detects token ids without an embedding.
            vector = self.queries(["capital of Peru"])
        except UserError as error:
            raise UserError(f"encoder: {error}") from None
        except untrusted.MALFORMED as error:
            why = untrusted.reason(error)
            raise UserError(f"encoder: {folder} is not a usable model: {why}") from error
        if not np.isfinite(vector).all():
            raise UserError(f"encoder: {folder} computes a vector with NaN; use another model")

    def _load(self, folder: Path, config: EncoderConfig) -> None:
        bert, pooling = read_bert_config(folder), _pooling(folder)
        self.config, self.width = config, bert.hidden_size
        self._longest = min(config.max_tokens, _longest(folder, bert.max_tokens))
        self._device = _device(config.device)
        checkpoint = local_checkpoint(folder)
        params = load_params(checkpoint, bert, self._device)
        self._program = functools.partial(_embed, params, config=bert, pooling=pooling)
        self._tokenizer = _tokenizer(folder / "tokenizer.json", self._longest)
        if (ids := self._tokenizer.get_vocab_size()) > (rows := bert.vocab_size):
            raise ValueError(f"its tokenizer has {ids:,} tokens, but only {rows:,} embeddings")
        names = (*checkpoint.files.names, "config.json", "tokenizer.json")
        files = [folder / name for name in names]
        self.fingerprint = _fingerprint(files, config, self._longest, pooling)

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Encodes N queries as unit vectors, float32 of shape ``[N, width]``."""
        return self._encode([self.config.query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """Encodes N passages as unit vectors, float32 of shape ``[N, width]``."""
        return self._encode([self.config.passage_prefix + text for text in texts])

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        vectors = np.zeros((len(rows), self.width), np.float32)
        # Texts of similar length form a batch, so that batches contain little padding.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for start in range(0, len(order), self.config.batch_size):
            chosen = order[start : start + self.config.batch_size]
            length = min(max(_power_of_2(len(rows[chosen[-1]])), _SHORTEST), self._longest)
            batch = min(_power_of_2(len(chosen)), self.config.batch_size)
            tokens, lengths = np.zeros((batch, length), np.int32), np.ones(batch, np.int32)
            for i, row in enumerate(rows[j] for j in chosen):
                tokens[i, : len(row)], lengths[i] = row, len(row)
            arguments = jax.device_put((tokens, lengths), self._device)
            vectors[chosen] = np.asarray(self._program(*arguments))[: len(chosen)]
        return vectors


def _power_of_2(number: int) -> int:
    """Returns the smallest power of 2 that is at least ``number``."""
    return 1 << (number - 1).bit_length()


def _device(name: str) -> jax.Device:
    try:
        return jax.local_devices(backend=name or None)[0]
    except RuntimeError as error:
        raise UserError(
            f"the backend {name!r} is not available: {error} (if JAX_PLATFORMS is set, only"
            " the backends that it names are available)"
        ) from None


def _pooling(folder: Path) -> str:
    """Returns how the hidden states of a text become one vector: ``mean`` or ``cls``."""
    file = folder / "1_Pooling" / "config.json"
    values = read_json_object(file) if file.is_file() else {"pooling_mode_mean_tokens": True}
    modes = [key for key, on in values.items() if key.startswith("pooling_mode_") and on is True]
    if modes not in (["pooling_mode_mean_tokens"], ["pooling_mode_cls_token"]):
        raise UserError(f"{file}: the pooling must be either mean or cls")
    return "cls" if modes == ["pooling_mode_cls_token"] else "mean"


def _longest(folder: Path, positions: int) -> int:
    """Returns the maximum number of tokens of a text.

    This is the number of positions, or the maximum length in training if that is smaller.
    """
    file = folder / "sentence_bert_config.json"
    trained = read_json_object(file).get("max_seq_length") if file.is_file() else None
    return min(positions, int(trained or positions))


def _tokenizer(path: Path, longest: int) -> Any:
    # The library tokenizers is used, because the tokenizers of transformers are not thread-safe.
    from tokenizers import Tokenizer

    try:
        untrusted.read_json(path, 256 << 20)
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare exceptions
        raise UserError(
            f"{path} cannot be read: {error}; AutoTokenizer.from_pretrained(FOLDER)"
            ".save_pretrained(FOLDER) of transformers writes one"
        ) from None
    tokenizer.enable_truncation(longest)
    tokenizer.no_padding()
    return tokenizer


def _fingerprint(files: Sequence[Path], config: EncoderConfig, longest: int, pooling: str) -> str:
    parts = [config.query_prefix, config.passage_prefix, longest, pooling]
    digest = hashlib.sha256(json.dumps(parts).encode())
    for file in (*files, Path(__file__), Path(encoder.__file__)):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
