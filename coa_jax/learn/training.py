"""Settings that all training runs have in common."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import jax

from coa_jax.bounds import Bounded, Count, Items, OneOf, Place, Seconds, Seed, Size
from coa_jax.learn.step import OptimizerConfig
from coa_jax.model.attention.choice import implementations
from coa_jax.model.compute import Compute, training_compute
from coa_jax.model.config import DTYPES, ModelConfig
from coa_jax.model.remat import POLICIES
from coa_jax.parallel.placement import MeshConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Bounded):
    """Settings of a run that updates a model.

    Attributes:
        model: Hugging Face directory to start from.
        seed: seed of the order of the data and of everything that is drawn.
        rows: rows of a micro-batch.
        row_length: tokens of a row.
        dtype: dtype of the matmul operands; parameters and their gradients stay float32.
        remat: which activations the backward pass computes again, see `model.remat.POLICIES`.
        optimizer: AdamW and its schedule; ``total_steps`` is the length of the run in updates.
        checkpoint_every: steps between two checkpoints.
        checkpoint_seconds: a step that ends as long after the last checkpoint has one too.  The run
            goes on while a checkpoint is written, so that a machine which is taken away in a long
            step costs that step only.
        mesh: axes over which parameters and rows are sharded.
        attention: implementation in training: ``auto`` or a name, see docs/kernels.md.
        keep_last: number of newest checkpoints that stay.
        export_dtype: of the model that is written at the end; checkpoints keep float32.
        profile_steps: (first, last) step that `jax.profiler` records into WORKDIR/profile.
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
        """How updates compute.

        Args:
            model: the architecture.
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
