"""Wraps a user's own Flax NNX module, so that it can be trained by SFT."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from coa_jax.errors import UserError
from coa_jax.model.safetensors_io import Checkpoint, LocalFiles, write_safetensors

_FILE = "module.safetensors"


@dataclasses.dataclass(frozen=True, eq=False)
class Foreign:
    """A Flax NNX module of your own with its tokenizer, which SFT trains. It cannot decode.

    `train_sft` trains the module's `flax.nnx.Param`, on one device. `log_probs` computes its
    log-probabilities if each row of the batch holds a single sequence.

    Attributes:
        module: maps tokens, int32 ``[rows, length]``, to logits ``[rows, length, vocab]``. The
            logits at a position may depend only on the tokens up to this position. The shorter
            sequences of a batch are padded behind their last token.
        tokenizer: a tokenizer of the package transformers, for the ids that the module knows.
    """

    module: Callable[[Any], jax.Array]
    tokenizer: Any

    def __post_init__(self) -> None:
        if not isinstance(self.module, nnx.Module):
            name = type(self.module).__name__
            raise UserError(f"module is {name}; give a flax.nnx.Module that maps tokens to logits")

    def __call__(self, tokens: Any, positions: Any = None, segment_ids: Any = None) -> jax.Array:
        """Computes the logits of rows, see `log_probs`.

        Raises:
            UserError: a row has several sequences, which the module would mix.
        """
        packed = segment_ids is not None and not isinstance(segment_ids, jax.core.Tracer)
        if packed and np.max(segment_ids) > 1:
            raise UserError("a row has several sequences; give each its own row to this module")
        return self.module(tokens)

    def save(self, folder: str | Path) -> None:
        """Writes the module's parameters, in float32, and its tokenizer to a folder."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        params = nnx.to_flat_state(nnx.state(self.module, nnx.Param))
        arrays = {".".join(map(str, path)): np.asarray(value[...]) for path, value in params}
        shapes = {name: array.shape for name, array in arrays.items()}
        write_safetensors(target / _FILE, shapes, np.float32, arrays.items())
        self.tokenizer.save_pretrained(target)

    def restore(self, folder: str | Path) -> None:
        """Reads the parameters that `save` wrote, into the module.

        Raises:
            UserError: the folder has no parameters, or those of a module with other shapes.
        """
        path = Path(folder) / _FILE
        if not path.is_file():
            raise UserError(f"{path} is missing; give the folder of a trained module")
        checkpoint = Checkpoint(str(folder), LocalFiles(Path(folder), [_FILE]))
        flat = nnx.to_flat_state(nnx.state(self.module, nnx.Param))
        names = [".".join(map(str, keys)) for keys, _ in flat]
        shapes = {name: tuple(x.shape) for name, (_, x) in zip(names, flat, strict=True)}
        if shapes != checkpoint.shapes:
            raise UserError(f"{path} has other parameters than the module; create it as before")
        restored = [
            (keys, value.replace(jnp.asarray(checkpoint.read(name), value.dtype)))
            for name, (keys, value) in zip(names, flat, strict=True)
        ]
        nnx.update(self.module, nnx.from_flat_state(restored))
