"""Settings that all training runs have in common."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax

from coa_jax.config.fields import Bounded, Count, Items, OneOf, Place, Seconds, Seed, Size
from coa_jax.model.attention.choice import implementations
from coa_jax.model.compute import Compute, training_compute
from coa_jax.model.config import DTYPES, ModelConfig
from coa_jax.model.remat import POLICIES
from coa_jax.parallel.placement import MeshConfig
from coa_jax.train.step import OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Bounded):
    """Settings that all training runs have.

    Attributes:
        model: Hugging Face directory of the initial model.
        seed: seed of the order of the data and of all random numbers.
        rows: number of rows per micro-batch.
        row_length: number of tokens per row.
        dtype: dtype of the matmul operands; parameters and their gradients stay float32.
        remat: name of the rematerialisation policy, which says which activations the backward pass
            recomputes, see `model.remat.POLICIES`.
        optimizer: settings of AdamW and of its learning rate; ``total_steps`` is the number of
            updates of the run.
        checkpoint_every: number of steps between two checkpoints.
        checkpoint_seconds: number of seconds after the last checkpoint at which the next one is
            due. It is saved at the end of the step in progress, in addition to the checkpoints of
            ``checkpoint_every``, unless a checkpoint is still being written. If steps take longer
            than this and the storage writes a checkpoint within one step, the run saves every step.
            A preemption then costs the step in progress, and also the step before if its checkpoint
            was not complete. Training continues while a checkpoint is written.
        mesh: sizes of the mesh axes over which parameters and rows are sharded.
        attention: implementation of attention in training: ``auto``, or a name, see
            docs/kernels.md.
        keep_last: number of newest checkpoints to keep.
        export_dtype: dtype of the model that is exported at the end; checkpoints are float32.
        profile_steps: first and last step that `jax.profiler` records, into the folder
            WORKDIR/profile; () for no profile.
    """

    model: Place
    seed: Seed
    rows: Size
    row_length: Size
    dtype: Annotated[str, OneOf(*DTYPES)]
    remat: Annotated[str, OneOf(*POLICIES)]
    optimizer: OptimizerConfig
    checkpoint_every: Count
    checkpoint_seconds: Seconds = 300.0
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    attention: Annotated[str, OneOf("auto", *implementations("causal"))] = "auto"
    keep_last: Count = 2
    export_dtype: Annotated[str, OneOf(*DTYPES)] = "bfloat16"
    profile_steps: Annotated[tuple[Count, ...], Items(0, 2)] = ()

    def compute(self, model: ModelConfig, mesh: jax.sharding.Mesh | None) -> Compute:
        """Returns the dtype, operations and sharding with which updates are computed.

        Args:
            model: architecture of the model.
            mesh: devices of the run; None for one device.

        Raises:
            UserError: ``attention`` names an implementation that cannot run on these devices.
        """
        return training_compute(
            model,
            dtype=self.dtype,
            remat=self.remat,
            attention=self.attention,
            mesh=mesh,
            collectives=self.mesh.collectives,
        )
