"""The policy as one Flax NNX module: a decoder that maps tokens to logits, with its tokenizer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from coa_jax.errors import UserError
from coa_jax.model.compute import Compute, local_compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Params, bind, merge_adapters, param_dtype, without_adapters


@dataclasses.dataclass(frozen=True, eq=False)
class _Texts:
    """What belongs to a model besides its arrays.

    Flax compares the attributes of modules; objects of this class are compared by identity.
    """

    tokenizer: Any
    card: Mapping[str, Any]


class Model(nnx.Module):
    """A policy: a module that maps tokens to logits, with its architecture and its tokenizer.

    ``nnx.value_and_grad`` and ``nnx.Optimizer`` train the module. Its parameters are
    `flax.nnx.Param`; those of LoRA adapters are `flax.nnx.LoRAParam`. Each has the logical names of
    its axes in ``out_sharding``, from which ``nnx.get_partition_spec`` derives shardings.

    Attributes:
        config: the architecture.
        decoder: the module with the parameters; None if the model was loaded by `describe_model`.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        tokenizer: Any,
        card: Mapping[str, Any] | None = None,
    ):
        """Creates a policy from its parts.

        Args:
            config: the architecture.
            params: the parameters, stacked over layers; {} for a description without parameters.
            tokenizer: the tokenizer. A model without tokenizer files has a `MissingTokenizer`,
                which can be saved but not used.
            card: the card of the model, see `model.card`; None for no card.
        """
        self.config = config
        self.decoder = bind(config, params) if params else None
        self._texts = _Texts(tokenizer, card or {})

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self._texts.tokenizer

    @property
    def card(self) -> Mapping[str, Any]:
        """The card of the model, which records how the policy was prompted; {} without a card."""
        return self._texts.card

    @property
    def params(self) -> Params:
        """The parameters as a nested dict of arrays, the form that the training step takes."""
        return {} if self.decoder is None else nnx.to_pure_dict(nnx.state(self.decoder))

    def replace(self, **changes: Any) -> Model:
        """Returns a copy of this model with other values of some arguments of the constructor."""
        parts = {name: getattr(self, name) for name in ("config", "tokenizer", "card")}
        params = {} if "params" in changes else {"params": self.params}
        return Model(**{**parts, **params, **changes})

    def merged(self, dtype: str | None = None) -> Model:
        """Returns a model without LoRA adapters, which are added to the weight matrices.

        Args:
            dtype: dtype of the sums and of all other parameters; None for the dtype of the model's
                parameters. A model without adapters is returned as it is.
        """
        if not self.config.lora.rank:
            return self
        params = merge_adapters(self.config, self.params, dtype)
        return self.replace(config=without_adapters(self.config), params=params)

    def __call__(self, tokens: Any, positions: Any = None, segment_ids: Any = None) -> jax.Array:
        """Computes the next-token logits of whole sequences.

        ``jax.jit``, ``jax.grad`` and the transformations of Flax NNX may trace the call. Matmuls
        are computed in the dtype of the parameters.

        Args:
            tokens: token ids ``[batch, length]``: an array, or nested lists of equal length.
            positions: position of each token in its sequence, ``[batch, length]``; None for 0, 1,
                2 and so on.
            segment_ids: index of each token's segment, ``[batch, length]``; a token attends only to
                its own segment. None if each row is a single segment.

        Returns:
            Logits, float32 ``[batch, length, vocab]``; the logits at position t predict token
            t + 1.

        Raises:
            UserError: ``tokens`` is not two-dimensional, is empty, does not consist of integers, or
                contains an id outside the vocabulary. Ids that are traced are not compared with the
                vocabulary.
        """
        tokens = _checked(tokens, self.config.vocab_size)
        if positions is None:
            positions = np.arange(tokens.shape[1])
        params = self.params
        compute = local_compute(str(param_dtype(params)))
        return _logits(params, tokens, positions, segment_ids, config=self.config, compute=compute)


@functools.partial(jax.jit, static_argnames=("config", "compute"))
def _logits(
    params: Params,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array | None,
    *,
    config: ModelConfig,
    compute: Compute,
) -> jax.Array:
    decoder = bind(config, params)
    hidden, _ = decoder(tokens, positions, compute, segment_ids=segment_ids)
    return decoder.logits(hidden, compute)


def _checked(tokens: Any, vocab_size: int) -> jax.Array:
    """Returns token ids as an array int32 ``[batch, length]``; see `Model.__call__`."""
    traced = isinstance(tokens, jax.core.Tracer)
    try:
        ids = tokens if traced else np.asarray(tokens)
    except ValueError:
        raise UserError("tokens have rows of different length: pad them to one length") from None
    if ids.ndim != 2 or not ids.size:
        raise UserError(f"tokens have shape {list(ids.shape)}: give [batch, length], not empty")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise UserError(f"tokens have dtype {ids.dtype}: give integer ids")
    bad = np.zeros((0, 2)) if traced else np.argwhere((ids < 0) | (ids >= vocab_size))
    if len(bad):
        row, column = bad[0]
        raise UserError(
            f"tokens[{row}][{column}] is {ids[row, column]}, outside the vocabulary of "
            f"{vocab_size}: use the tokenizer that belongs to the model"
        )
    return jnp.asarray(ids, jnp.int32)
