"""Checkpoints of a run: everything that its next step depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from coa_jax.errors import UserError
from coa_jax.learn.step import TrainState


class Checkpoints:
    """The newest states of a run in ``directory``, each written whole or not at all.

    A state goes with a small JSON dict (the data cursor and what else is not an array).
    """

    def __init__(self, directory: str | Path, keep: int = 2):
        """Opens the directory, which is made when it does not exist."""
        self._manager = ocp.CheckpointManager(
            Path(directory).resolve(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep, create=True, enable_async_checkpointing=False
            ),
        )

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(
        self,
        step: int,
        state: TrainState,
        extra: dict[str, Any],
        critic: TrainState | None = None,
    ) -> None:
        """Writes a checkpoint; returns when it is on disk."""
        items = {"state": ocp.args.StandardSave(state._asdict()), "extra": ocp.args.JsonSave(extra)}
        if critic is not None:
            items["critic"] = ocp.args.StandardSave(critic._asdict())
        self._manager.save(step, args=ocp.args.Composite(**items))
        self._manager.wait_until_finished()

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """Reads a checkpoint into the shapes, dtypes and shardings of ``like``.

        Raises:
            UserError: it holds another model or another optimiser.
        """
        restored = self._read(step, state=_restore_as(like), extra=ocp.args.JsonRestore())
        return TrainState(**restored["state"]), restored["extra"]

    def restore_critic(self, step: int, like: TrainState) -> TrainState:
        """The critic of a checkpoint, as `restore`."""
        return TrainState(**self._read(step, critic=_restore_as(like))["critic"])

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (ValueError, KeyError) as error:
            raise UserError(
                f"{self._manager.directory}: checkpoint {step} does not fit this configuration "
                f"({str(error).splitlines()[0][:200]}); use the configuration that it was written "
                "with, or another workdir"
            ) from error

    def close(self) -> None:
        """Releases the directory."""
        self._manager.close()


def _restore_as(like: TrainState) -> Any:
    return ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, like._asdict()))
