"""Checks that an update fits into device memory before its arrays are allocated."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from coa_jax.engine.memory import format_bytes, free_memory
from coa_jax.errors import UserError
from coa_jax.model.config import ModelConfig


def check_rows(
    model_config: ModelConfig,
    rows: int,
    row_length: int,
    dtype: str,
    mesh: jax.sharding.Mesh | None,
) -> None:
    """Checks that the activations of a micro-batch can fit into device memory.

    The check counts only the activations that are kept for the backward pass under every setting of
    ``remat``: the residual stream before each layer, ``[layers, rows, row_length, hidden_size]``.
    The size of these activations is a lower bound, so the check refuses no micro-batch that would
    fit.

    Args:
        model_config: architecture of the model.
        rows: number of rows of the micro-batch.
        row_length: number of tokens per row.
        dtype: dtype of the matmul operands.
        mesh: devices over which the rows are split; None for one device.

    Raises:
        UserError: the residual stream is larger than the free memory of a device.
    """
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.local_devices)
    free = [count for count in map(free_memory, devices) if count is not None]
    of_a_row = (
        model_config.num_layers * row_length * model_config.hidden_size * jnp.dtype(dtype).itemsize
    )
    parts = 1 if mesh is None else mesh.size
    # Virtual devices of a CPU share its memory.
    there = min(free, default=0) * (parts if devices[0].platform != "cpu" else 1)
    if free and rows * of_a_row > there:
        advice = f"lower rows to {there // of_a_row}" if of_a_row <= there else "lower row_length"
        raise UserError(
            f"rows is {rows} and row_length is {row_length}: the backward pass keeps at least "
            f"{format_bytes(rows * of_a_row)}, and {format_bytes(there)} are free; {advice} or less"
        )
