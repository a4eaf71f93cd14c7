"""Direct preference optimisation (DPO) on graded trajectories (Rafailov et al., arXiv 2305.18290).

DPO serves as a baseline for reinforcement learning: among the trajectories of a task, trajectories
with a higher reward are preferred to trajectories with a lower reward. Both sequences of a pair
share a row, so the loss of a pair never spans two micro-batches.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from coa_jax.data.trajectory import Trajectory
from coa_jax.errors import UserError
from coa_jax.model.api import describe_model, download_once, load_weights
from coa_jax.model.hf_weights import to_host
from coa_jax.model.params import Params, whole, without_adapters
from coa_jax.parallel import processes
from coa_jax.parallel.placement import put_batch, training_mesh
from coa_jax.run.run_dir import RunDir
from coa_jax.train.batch import Batch, pack, split_rows
from coa_jax.train.config import DPOConfig
from coa_jax.train.data import Update, UpdateSequence, shuffled
from coa_jax.train.defaults import completed
from coa_jax.train.examples import trajectory_example
from coa_jax.train.experience import score
from coa_jax.train.fit import fit
from coa_jax.train.logps import token_logps
from coa_jax.train.losses import Net
from coa_jax.train.metrics import sequence_lengths
from coa_jax.train.objectives import Stats
from coa_jax.train.rejection import read_graded, value

Pair = tuple[Trajectory, Trajectory]
"""(chosen, rejected): the preferred trajectory, and the trajectory that has a lower reward."""


def train(config: DPOConfig, run: RunDir, output: Path) -> None:
    """Trains a model by DPO, and writes it to ``output``.

    Each pair is a better and a worse trajectory of one task, from the file ``config.traces``.

    Args:
        config: settings of the run.
        run: directory of the run, for metrics and checkpoints.
        output: directory for the trained model.

    Raises:
        UserError: no two trajectories of this file form a pair under the settings.
    """
    graded = read_graded(config.traces, config.phase)
    pairs = make_pairs(graded, config.min_gap, config.per_task, config.row_length or sys.maxsize)
    if not pairs:
        length = config.row_length
        raise UserError(
            f"{config.traces}: among {len(graded)} graded trajectories, no two of one task have "
            f"rewards that differ by {config.min_gap}"
            + (f" and at most {length} tokens together: raise row_length, " if length else ": ")
            + "lower min_gap, or sample more"
        )
    tasks = len({chosen.task_id for chosen, _ in pairs})
    print(f"{len(pairs)} pairs of {tasks} tasks", flush=True)
    download_once(config.model)
    longest = max(sum(len(one.tokens) for one in pair) for pair in pairs)
    model = describe_model(config.model, config.lora)
    config = completed(config, model.config, longest, len(pairs), run=run.path)
    mesh = training_mesh(config.mesh, config.rows)
    reference = load_weights(config.model, mesh, config.loaded_dtype)
    compute, base = config.compute(model.config, mesh), without_adapters(model.config)

    def weights() -> Params:
        # Updates donate parameters that are trained, and the reference must stay.
        return reference if config.lora.rank else jax.tree.map(jnp.copy, reference)

    def with_reference(update: Update) -> Update:
        processes.barrier("scores of the reference", config.mesh.wait_seconds)

        def scored(batch: Batch) -> Batch:
            placed = put_batch(batch, mesh)
            logps = score(reference, placed, model_config=base, compute=compute)
            return batch._replace(ref_logp=to_host(logps))

        return dataclasses.replace(update, batches=[scored(batch) for batch in update.batches])

    fit(
        config,
        run,
        output,
        model,
        weights=weights,
        loss=DPOLoss(config.beta),
        compute=compute,
        updates=functools.partial(
            PairUpdates, pairs=pairs, order=shuffled([len(pairs)], (1.0,), config.seed)
        ),
        complete=with_reference,
        epoch=len(pairs),
        longest=max(len(trajectory.tokens) for pair in pairs for trajectory in pair),
        phase="dpo",
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PairUpdates(UpdateSequence):
    """Successive updates of a DPO run; every process has all rows of an update.

    Attributes:
        pairs: pairs to train on.
    """

    pairs: Sequence[Pair]

    def make_update(self, positions: range) -> Update:
        """Creates an update from the pairs at the given positions of the stream."""
        chosen = [self.pairs[self.order[position]] for position in positions]
        batches = pair_batches(chosen, self.length, self.rows)
        tokens = sum(float(np.sum(batch.mask, dtype=np.float64)) for batch in batches)
        return Update(batches, 0, sequence_lengths(batches), tokens, positions.stop)


def make_pairs(
    trajectories: Sequence[Trajectory], min_gap: float, per_task: int, length: int
) -> list[Pair]:
    """Makes pairs of a better and a worse trajectory of the same task, for DPO.

    The best trajectory of a task is paired with the worst one, the second best with the second
    worst, and so on. Samples with branches are left out, because a pair compares two sequences.

    Args:
        trajectories: graded trajectories.
        min_gap: minimum difference between the rewards of a pair.
        per_task: maximum number of pairs of one task.
        length: maximum number of tokens of a pair, both trajectories together. Longer pairs are
            left out, and a warning states how many.
    """
    by_task: dict[str, list[Trajectory]] = defaultdict(list)
    whole = [trajectory for trajectory in trajectories if not trajectory.branches]
    if left := len(trajectories) - len(whole):
        logging.warning("%d samples with several token sequences are left out", left)
    for trajectory in whole:
        by_task[trajectory.task_id].append(trajectory)
    pairs: list[Pair] = []
    long = 0
    for members in by_task.values():
        ranked = sorted(members, key=value, reverse=True)  # stable for equal rewards
        most = len(pairs) + per_task
        for chosen, rejected in zip(ranked, ranked[::-1], strict=True):
            if len(pairs) == most or value(chosen) - value(rejected) < min_gap:
                break
            if len(chosen.tokens) + len(rejected.tokens) > length:
                long += 1
                continue
            pairs.append((chosen, rejected))
    if long:
        logging.warning("%d pairs have more than %d tokens and are left out", long, length)
    return pairs


def pair_batches(pairs: Sequence[Pair], length: int, rows: int) -> list[Batch]:
    """Packs pairs into micro-batches, one pair per row.

    Args:
        pairs: pairs with at most ``length`` tokens each.
        length: number of tokens of a row, T.
        rows: number of rows of a micro-batch, R.

    Returns:
        Micro-batches of the shape ``[R, T]``. ``advantage`` is 1 at the policy tokens of the chosen
        sequence and -1 at the policy tokens of the rejected sequence. ``weight`` makes the loss a
        mean over pairs, see `objectives.weigh`.
    """
    packed = [
        pack([trajectory_example(chosen, 1.0), trajectory_example(rejected, -1.0)], length)
        for chosen, rejected in pairs
    ]
    whole = jax.tree.map(lambda *parts: np.concatenate(parts), *packed)
    weight = whole.mask.sum(dtype=np.float64) / len(pairs)
    return [
        batch._replace(weight=(batch.mask * weight).astype(np.float32))
        for batch in split_rows(whole, rows)
    ]


@dataclasses.dataclass(frozen=True)
class DPOLoss:
    """The DPO loss of a micro-batch of pairs; see `dpo_objective`.

    Attributes:
        beta: factor of the difference of log-ratios, see `DPOConfig`.
    """

    beta: float

    def __call__(self, params: Params, batch: Batch, net: Net) -> tuple[jax.Array, Stats]:
        """Computes the loss of a micro-batch; see `losses.Loss`."""
        every = whole(params, net.frozen)
        logp, _ = token_logps(
            every, net.model_config, batch, net.compute, mask=batch.mask, entropy=False
        )
        return dpo_objective(logp, batch, self.beta)


def dpo_objective(logp: jax.Array, batch: Batch, beta: float) -> tuple[jax.Array, Stats]:
    """Computes ``-log sigmoid(beta (log p_w / ref_w - log p_l / ref_l))``, summed over pairs.

    This is eq 7 of the DPO paper (arXiv 2305.18290). p is the policy and ref the reference model; w
    is the chosen and l the rejected sequence. The log-ratio of a sequence is the sum of the
    log-ratios of the tokens that the policy wrote; observations do not count.

    Args:
        logp: log-probabilities of the tokens under the policy, float32 ``[R, T]``.
        batch: a micro-batch of `pair_batches`, with ``ref_logp``.
        beta: factor of the difference of log-ratios, see `DPOConfig`.

    Returns:
        The loss, float32 ``[]``, and statistics by name, which are summed over pairs.
    """
    assert batch.ref_logp is not None
    assert batch.weight is not None
    on = batch.mask > 0
    log_ratio = jnp.where(on, logp - batch.ref_logp, 0.0)
    sign = jnp.where(on, batch.advantage, 0.0)
    margin = jnp.sum(sign * log_ratio, axis=1)
    weight = jnp.max(batch.weight * batch.mask, axis=1)  # 0 in a row of padding
    loss = jnp.sum(weight * jax.nn.softplus(-beta * margin))
    chosen = jnp.sum(jnp.maximum(sign, 0.0) * log_ratio, axis=1)
    return loss, {
        "loss": loss,
        "dpo/accuracy": jnp.sum(weight * (margin > 0)),
        "dpo/margin": jnp.sum(weight * beta * margin),
        "dpo/chosen_log_ratio": jnp.sum(weight * chosen),
    }
