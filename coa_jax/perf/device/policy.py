"""Checks a small policy on this device: its log-probabilities and its updates.

The policy has random weights with sharp attention, so a wrong position or a missing page changes
the log-probabilities of tokens. The policy samples as in a rollout: one prefill serves several
samples, and observations separate the turns. The trainer must compute the same log-probabilities
for the sampled tokens. Two SFT steps and two RL steps are then compared with the same steps in
float32 on this machine's CPU, with the reference operations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from coa_jax.data.trajectory import Reward, Trajectory
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.engine import Engine
from coa_jax.model.compute import REFERENCE, Compute, local_compute, training_compute
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Params, init_params
from coa_jax.perf.bench.models import rl_settings
from coa_jax.perf.bench.rollout import run_workload
from coa_jax.perf.bench.workload import Call, Script, Workload
from coa_jax.perf.device.attention import runs_here
from coa_jax.perf.device.checks import Check, executor, guarded, within
from coa_jax.train.algorithms import Algorithm
from coa_jax.train.batch import Batch, Example, pack, split_rows
from coa_jax.train.examples import trajectory_example
from coa_jax.train.experience import score
from coa_jax.train.losses import SFTLoss
from coa_jax.train.optimizer import OptimizerConfig
from coa_jax.train.step import init_state, train_step
from coa_jax.train.update import update

SAMPLING, TRAINING = "sampler against trainer", "training steps"
MODEL = ModelConfig("llama", 512, 256, 512, 2, 4, 2, 128)
LENGTH, ROW, TEMPERATURE, GROUP_SIZE = 144, 256, 0.7, 4
OPTIMIZER = OptimizerConfig(1e-4, 4, final_ratio=1.0, weight_decay=0.0)
# Limits of the largest and of the mean difference of log-probabilities, in nats.  In float32 on a
# CPU the largest difference is below 1e-5.
GAPS = {"float32": (2e-4, 2e-5), "bfloat16": (0.3, 0.03)}
# Limits of the relative difference of losses and gradient norms from float32 on the CPU.
UPDATES = {"float32": 1e-3, "bfloat16": 0.05}


def sharp_params() -> Params:
    """Returns random parameters of `MODEL` as NumPy arrays.

    The scale of the parameters makes attention sharp, so that errors in attention show in the
    results.
    """
    params = jax.jit(init_params, static_argnums=0)(MODEL, jax.random.key(0))

    def scaled(path: tuple[Any, ...], x: jax.Array) -> np.ndarray:
        return np.asarray(x) * (5 if "qkv" in jax.tree_util.keystr(path) else 1)

    return jax.tree_util.tree_map_with_path(scaled, params)


def computes() -> Iterator[tuple[Compute, Compute | None]]:
    """Yields pairs (trainer, sampler) of `Compute` that must give the same log-probabilities.

    If the sampler is None, the engine chooses its `Compute` (dtype and kernels), as in a run. On a
    CPU, the last pair runs kernels of other platforms in interpret mode: splash attention (for
    TPUs) in the trainer, and the Pallas kernel for GPUs in the sampler. Other kernels are left out,
    because they cannot be interpreted within a compiled program.
    """
    yield local_compute("float32"), None
    yield training_compute(MODEL, dtype="bfloat16"), None
    if jax.default_backend() == "cpu":
        (trainer,), _ = runs_here("causal", "splash", MODEL.head_dim)
        (sampler,), _ = runs_here("paged", "pallas_gpu", MODEL.head_dim)
        # These choices give the layout of an engine with several slots on a CPU, see
        # `engine.layout.publish`.
        yield trainer, dataclasses.replace(sampler, collectives="none", kernels="outputs_first")


# --- sampling ------------------------------------------------------------------------------


def sampled(params: Params, dtype: str, compute: Compute | None) -> tuple[list[Trajectory], str]:
    """Samples a group of trajectories from one prompt, in the agent loop of a run.

    Each trajectory has two turns, with an observation between them.

    Args:
        params: parameters of `MODEL` on the device.
        dtype: dtype of the engine.
        compute: `Compute` of the engine, with this dtype; None lets the engine choose.

    Returns:
        The trajectories, and the name of the engine's attention implementation.
    """
    rng = np.random.default_rng(3)

    def ids(size: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, MODEL.vocab_size, size).tolist())

    prompt = ids(41)
    scripts = [
        Script(0, (23 + 5 * sample,) * 2, (Call(0.0, ids(9 + sample)),))
        for sample in range(GROUP_SIZE)
    ]
    shapes = EngineConfig(
        GROUP_SIZE, LENGTH, 8, (64,), 16, dtype=dtype, page_size=16, decode_programs=1
    )
    engine = Engine(params, MODEL, shapes, compute=compute)
    workload = Workload("device", 0, (prompt,), tuple(scripts))
    group = [
        dataclasses.replace(one, reward=Reward(float(one.sample_id % 2)))
        for one in run_workload([engine], workload, TEMPERATURE)
    ]
    return group, engine.compute.attention


def _batch(group: Sequence[Trajectory], decoded: int = 0) -> Batch:
    """Packs a group of trajectories into a batch.

    The positions of the tokens that the decoding program read are shifted by ``decoded``.
    """
    batch = pack([trajectory_example(one, 0.0) for one in group], ROW)
    # The decoding program read a token if the policy wrote the next token.
    fed = np.pad(batch.mask[:, 1:], ((0, 0), (0, 1))).astype(np.int32)
    return batch._replace(positions=batch.positions + decoded * fed)


def gap(
    params: Params, trainer: Compute, sampler: Compute | None
) -> tuple[Check, list[Trajectory]]:
    """Compares the log-probabilities of the sampler with those of the trainer.

    Args:
        params: parameters of `MODEL` on the device.
        trainer: dtype and kernels of the trainer; the sampler uses the same dtype.
        sampler: dtype and kernels of the sampler; None lets the engine choose.

    Returns:
        The check, and the sampled trajectories.
    """
    group, attention = sampled(params, trainer.dtype, sampler)

    def differences(decoded: int = 0, temperature: float = TEMPERATURE) -> np.ndarray:
        batch = _batch(group, decoded)
        logps = score(params, batch, model_config=MODEL, compute=trainer, temperature=temperature)
        return np.abs(np.asarray(logps) - batch.logp)[batch.mask > 0]

    gaps = differences()
    largest, mean = GAPS[trainer.dtype]
    limits = {"largest": largest, "mean": mean}
    measured = {"largest": float(gaps.max()), "mean": float(gaps.mean())}
    why = ""
    if not (measured["largest"] <= largest and measured["mean"] <= mean):
        faults = {
            "the sampler's log-probabilities lack the temperature": {"temperature": 1.0},
            "decoding rotates queries and keys by one position too many": {"decoded": 1},
            "decoding rotates queries and keys by one position too few": {"decoded": -1},
        }
        for fault, options in faults.items():
            other = differences(**options)  # type: ignore[arg-type]
            if other.max() <= largest and other.mean() <= mean:
                why = fault
    name = f"{trainer.dtype}: {attention} against {trainer.attention}"
    return within(SAMPLING, name, measured, limits, why), group


# --- learning ------------------------------------------------------------------------------


def sft_steps(params: Params, compute: Compute) -> list[dict[str, float]]:
    """Makes two SFT steps on packed random sequences.

    Args:
        params: parameters of `MODEL` on the device.
        compute: dtype and kernels of the steps.

    Returns:
        The statistics of each step by name.
    """
    rng = np.random.default_rng(5)
    examples = []
    for size in (200, 130, 90, 251):
        zeros = np.zeros(size, np.float32)
        mask = (rng.random(size) < 0.7).astype(np.float32)
        ids = rng.integers(0, MODEL.vocab_size, size, np.int32)
        examples.append(Example(ids, mask, zeros, zeros))
    batches, state = split_rows(pack(examples, ROW), 2), init_state(params, OPTIMIZER)
    step_stats = []
    for _ in range(2):
        state, stats = train_step(
            state, batches, loss=SFTLoss(), model_config=MODEL, compute=compute, optimizer=OPTIMIZER
        )
        step_stats.append(stats)
    return step_stats


def rl_steps(
    params: Params, compute: Compute, group: list[Trajectory]
) -> tuple[list[dict[str, float]], float]:
    """Makes two RL steps on a group of trajectories.

    Args:
        params: parameters of `MODEL` on the device.
        compute: dtype and kernels of the trainer.
        group: trajectories with rewards, see `sampled`.

    Returns:
        The statistics of the steps, and their effect in nats per token: the increase in the mean
        log-probability of samples with reward 1, minus that of samples with reward 0.
    """
    config = rl_settings(
        EngineConfig(GROUP_SIZE, LENGTH, dtype=compute.dtype),
        OPTIMIZER,
        groups=1,
        group_size=GROUP_SIZE,
        temperature=TEMPERATURE,
        rows=1,
        row_length=ROW,
        remat="none",
        algorithm=Algorithm("dapo", overlong_buffer=0),
    )
    signs = [
        _batch([one for one in group if one.reward is not None and one.reward.value == reward])
        for reward in (1.0, 0.0)
    ]

    def preference(params: Params) -> float:
        right, wrong = (
            np.asarray(
                score(params, one, model_config=MODEL, compute=compute, temperature=TEMPERATURE)
            )
            for one in signs
        )
        return float(right.sum() / signs[0].mask.sum() - wrong.sum() / signs[1].mask.sum())

    state = init_state(params, OPTIMIZER)
    before, step_stats = preference(state.params), []
    for version in range(2):
        state, _, stats = update(config, state, MODEL, [group], compute, version=version)
        step_stats.append(stats)
    return step_stats, preference(state.params) - before


Steps = tuple[list[dict[str, float]], list[dict[str, float]], float]
"""SFT statistics, RL statistics, and the gain of rewarded samples; see `rl_steps`."""


def steps(params: Params, compute: Compute, group: list[Trajectory], device: Any) -> Steps:
    """Makes two SFT steps and two RL steps on a device.

    Args:
        params: parameters of `MODEL` as NumPy arrays.
        compute: dtype and kernels of the trainer.
        group: trajectories with rewards, see `sampled`.
        device: JAX device on which the steps run.
    """
    with jax.default_device(device):
        of_sft = sft_steps(jax.device_put(params, device), compute)
        return of_sft, *rl_steps(jax.device_put(params, device), compute, group)


def learning(compute: Compute, found: Steps, right: Steps) -> Iterator[Check]:
    """Compares the statistics of training steps with the statistics of reference steps.

    Args:
        compute: dtype and kernels of the compared steps.
        found: result of `steps` with ``compute`` on the device.
        right: result of `steps` with `REFERENCE` (float32, no kernels) on the CPU.
    """
    limit, name = UPDATES[compute.dtype], f"{compute.dtype}, attention {compute.attention}"
    yield _steps(f"SFT {name}", found[0], right[0], limit)
    check = _steps(f"RL {name}", found[1], right[1], limit)
    gain = found[2]
    if not gain > 0:
        text = f"{check.text}; rewarded samples became less likely ({gain:+.3g} nats per token)"
        check = dataclasses.replace(check, verdict="FAIL", text=text)
    yield dataclasses.replace(check, figures={**check.figures, "gain": gain, "its gain": right[2]})


def _steps(
    name: str, trained: Sequence[dict[str, float]], right: Sequence[dict[str, float]], limit: float
) -> Check:
    measured: dict[str, float] = {}
    for number, (mine, theirs) in enumerate(zip(trained, right, strict=True), 1):
        loss = abs(mine["loss"] - theirs["loss"]) / max(abs(theirs["loss"]), 0.1)
        norm = abs(mine["optim/grad_norm"] / theirs["optim/grad_norm"] - 1)
        measured |= {f"loss {number}": loss, f"gradient {number}": norm}
    return within(TRAINING, name, measured, dict.fromkeys(measured, limit))


def all_checks() -> Iterator[Check]:
    """Checks the log-probabilities, and then training steps, of each pair from `computes`."""
    device, host = jax.local_devices()[0], sharp_params()
    try:
        beside = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS does not include the CPU
        beside = device
    params, pairs = jax.device_put(host, device), tuple(computes())
    with executor() as threads:
        samples = [threads.submit(gap, params, *pair) for pair in pairs]
        for (trainer, _), sample in zip(pairs, samples, strict=True):
            yield from guarded(SAMPLING, trainer.dtype, functools.partial(_gap_of, sample))
        # All trainers train on the samples of the first pair. Its sampler computes in float32.
        group = samples[0].result()[1]
        right = threads.submit(steps, host, REFERENCE, group, beside)
        trained = [threads.submit(steps, host, trainer, group, device) for trainer, _ in pairs]
        for (trainer, _), future in zip(pairs, trained, strict=True):
            check = functools.partial(_learning_of, trainer, future, right)
            yield from guarded(TRAINING, trainer.dtype, check)


def _gap_of(sample: Future[tuple[Check, list[Trajectory]]]) -> list[Check]:
    return [sample.result()[0]]


def _learning_of(compute: Compute, trained: Future[Steps], right: Future[Steps]) -> Iterator[Check]:
    return learning(compute, trained.result(), right.result())
