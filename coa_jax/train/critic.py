"""The critic: a transformer like the policy, with a scalar value head instead of an output head."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from coa_jax.model.compute import Compute
from coa_jax.model.config import LoraConfig, ModelConfig
from coa_jax.model.params import Params, abstract_params, bind
from coa_jax.parallel.launch_order import mesh_of
from coa_jax.parallel.placement import replicate
from coa_jax.train.batch import Batch


def init_critic(params: Params) -> Params:
    """Creates a critic that has float32 copies of the policy's layers.

    The critic predicts 0 for every token.

    Returns:
        The policy's parameters without the output head, and ``value_head``, float32 ``[D]``.
    """
    body = {name: value for name, value in params.items() if name != "head"}
    copies = jax.tree.map(lambda x: jnp.copy(x).astype(jnp.float32), body)
    norm = params["final_norm"]["scale"]
    head = replicate(jnp.zeros(norm.shape, jnp.float32), mesh_of(norm))
    return {**copies, "value_head": head}


def abstract_critic(model_config: ModelConfig, mesh: Mesh | None) -> Params:
    """Returns the shapes and shardings of a critic's parameters, the result of `init_critic`.

    Args:
        model_config: architecture of the policy.
        mesh: devices of the run; None for one device.
    """
    body = abstract_params(critic_config(model_config), mesh)
    norm = body["final_norm"]["scale"]
    sharding = norm.sharding if mesh is None else NamedSharding(mesh, PartitionSpec())
    return {**body, "value_head": jax.ShapeDtypeStruct(norm.shape, jnp.float32, sharding=sharding)}


def critic_config(model_config: ModelConfig) -> ModelConfig:
    """Returns the architecture of the critic of a policy with the architecture ``model_config``.

    The layers are those of the policy, without adapters; the critic has no output head.
    """
    return dataclasses.replace(model_config, tie_embeddings=True, lora=LoraConfig())


def token_values(
    params: Params, batch: Batch, *, model_config: ModelConfig, compute: Compute
) -> jax.Array:
    """Computes the value of the state before each token.

    The state before a token consists of all preceding tokens of the same sequence.

    Args:
        params: parameters of a critic.
        batch: packed rows.
        model_config: architecture of the policy.
        compute: dtype, operations and sharding of the computation.

    Returns:
        Values, float32 ``[R, T]``. The value at index 0 of a row is 0, because no token precedes
        the first token.
    """
    body = {name: value for name, value in params.items() if name != "value_head"}
    hidden, _ = bind(critic_config(model_config), body)(
        batch.tokens,
        batch.positions,
        compute,
        segment_ids=batch.segment_ids,
        unfolded=batch.unfolded,
    )
    values = jnp.einsum("rtd,d->rt", hidden[:, :-1], params["value_head"], precision="highest")
    return jnp.pad(values, ((0, 0), (1, 0)))
