"""Measures how far training has moved a policy away from the policy with which its run began.

Only runs that train adapters are measured: their frozen parameters are the initial policy, so no
second copy is needed.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from coa_jax.model.adapters import product_norm, read_adapter
from coa_jax.model.compute import Compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.hf_weights import to_host
from coa_jax.model.params import Adapted, Params, without_adapters
from coa_jax.parallel.launch_order import launch_alone
from coa_jax.parallel.placement import put_batch
from coa_jax.train.batch import Batch
from coa_jax.train.experience import inputs, score
from coa_jax.train.objectives import kl_estimate
from coa_jax.train.step import TrainState

EVERY = 5
"""Number of steps between two measurements; each takes three forward passes of one micro-batch."""

_GREEDY = 1e-4  # temperature at which only the most probable token has a probability above 0


def movement(
    state: TrainState,
    batch: Batch,
    model_config: ModelConfig,
    compute: Compute,
    temperature: float,
    allowed: jax.Array | None = None,
    norm_before: float = 0.0,
) -> dict[str, float]:
    """Compares a policy with its state at the start of the run, on tokens that it has sampled.

    Without the adapters that the run trains, the policy is the initial policy, into which adapters
    of earlier runs were merged.

    Args:
        state: state of the policy, whose adapters are trained.
        batch: a micro-batch of sampled trajectories, on the host.
        model_config: architecture of the policy.
        compute: dtype, operations and sharding of the computation.
        temperature: sampling temperature.
        allowed: tokens that the run's constraint allows; None without constrained decoding.
        norm_before: norm of the adapters that an earlier run added to the initial model, see
            `norm_before`; 0 if unknown.

    Returns:
        ``moved/kl``, the k3 estimate of the KL divergence from the initial policy, in nats per
        token; ``moved/argmax``, the share of tokens that are the most probable choice under exactly
        one of the two policies; ``moved/norm``, see `adapter_norm`; and ``moved/of_sft``, this norm
        divided by ``norm_before``, if it is known.
    """
    placed = put_batch(inputs(batch), compute.mesh)

    def logps(params: Params | Adapted, config: ModelConfig, temperature: float) -> np.ndarray:
        def program(batch: Batch) -> jax.Array:
            return score(
                params,
                batch,
                allowed,
                model_config=config,
                compute=compute,
                temperature=temperature,
            )

        return np.asarray(to_host(launch_alone(compute.mesh, program, placed)))

    base = without_adapters(model_config)
    start = logps(state.base_params, base, temperature)
    before = logps(state.base_params, base, _GREEDY)
    after = logps(state.all_params, model_config, _GREEDY)
    changed = (before > -0.5) != (after > -0.5)  # the most probable token has the log-probability 0
    divergence = np.asarray(kl_estimate("k3", batch.logp, start))
    weights, count = batch.counts, max(float(batch.counts.sum()), 1.0)
    norm = float(adapter_norm(state.params, model_config.lora.alpha / model_config.lora.rank))
    return {
        "moved/kl": float((weights * divergence).sum() / count),
        "moved/argmax": float((weights * changed).sum() / count),
        "moved/norm": norm,
        **({"moved/of_sft": norm / norm_before} if norm_before else {}),
    }


@jax.jit
def adapter_norm(adapters: Params, scale: float) -> jax.Array:
    """Computes the Frobenius norm, over all layers, of what adapters add to the weights.

    Args:
        adapters: parameters of the adapters alone.
        scale: factor by which the products of their matrices are multiplied.
    """
    total = jnp.zeros(())
    for part in adapters["layers"].values():
        for pair in part.values():
            rank = pair["a"].shape[-1]
            a = pair["a"].reshape(len(pair["a"]), -1, rank)
            b = pair["b"].reshape(len(pair["b"]), rank, -1)
            # |A B|^2 is the sum of the elementwise product of two small matrices.
            total += jnp.sum(jnp.einsum("ldr,lds->lrs", a, a) * jnp.einsum("lrf,lsf->lrs", b, b))
    return scale * jnp.sqrt(total)


def norm_before(model_path: str) -> float:
    """Returns the norm of the adapters with which a model was trained; 0 if they are not found.

    Args:
        model_path: path of an adapter directory, or of a merged model, whose adapters are in the
            folder ``MODEL-adapters``.
    """
    for folder in (Path(model_path), Path(f"{model_path}-adapters")):
        if folder.is_dir() and (adapter := read_adapter(folder)) is not None:
            return product_norm(adapter)
    return 0.0
