"""The critic: a transformer like the policy with one number at the end instead of logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from coa_jax.learn.batch import Batch
from coa_jax.model.attention.choice import REFERENCE, Attention
from coa_jax.model.config import ModelConfig
from coa_jax.model.forward import forward
from coa_jax.model.weights import Params


def init_critic(params: Params) -> Params:
    """A critic whose body is a copy of a policy's and whose values are 0.

    Returns:
        The policy's parameters without an output head, and ``value_head``, float32 ``[D]``.
    """
    body = {name: value for name, value in params.items() if name != "head"}
    copies = jax.tree.map(jnp.copy, body)
    norm = params["final_norm"]
    head = jnp.zeros(norm.shape, jnp.float32)
    if isinstance(norm.sharding, NamedSharding):
        head = jax.device_put(head, NamedSharding(norm.sharding.mesh, PartitionSpec()))
    return {**copies, "value_head": head}


def token_values(
    params: Params,
    config: ModelConfig,
    batch: Batch,
    *,
    dtype: Any,
    remat: bool,
    attention: Attention = REFERENCE,
) -> jax.Array:
    """Value of the state in which every token was written, given the tokens before it.

    Returns:
        float32 ``[R, T]``; index 0 of a row is 0.
    """
    hidden, _ = forward(
        params,
        config,
        batch.tokens,
        batch.positions,
        batch.segment_ids,
        dtype=dtype,
        remat=remat,
        attention=attention,
        unfolded=batch.unfolded,
    )
    head = params["value_head"]
    values = jnp.einsum("rtd,d->rt", hidden[:, :-1], head, precision="highest")
    return jnp.pad(values, ((0, 0), (1, 0)))
