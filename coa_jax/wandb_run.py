"""Copies a run's metrics to Weights & Biases; `WANDB_MODE=offline` needs no account.

The W&B id of the run is stored in its directory, so that a resumed run continues the same curves.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coa_jax import files
from coa_jax.errors import UserError
from coa_jax.installed import missing


class WandbRun:
    """A run at W&B.

    Attributes:
        id: its W&B id.
    """

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        """Starts the W&B run of a directory, or continues it.

        Args:
            directory: the run directory.
            project: W&B project.
            config: config of the run.

        Raises:
            UserError: the package is missing, or W&B rejects the run.
        """
        try:
            import wandb
        except ImportError as error:
            raise missing("--wandb_project", "wandb", "wandb") from error
        path = directory / "wandb.json"
        known = files.read_json_object(path) if path.exists() else {}
        self.id = str(known.get("id") or secrets.token_hex(4))
        files.write_json(path, {"id": self.id, "project": project})
        try:
            self._run = wandb.init(
                project=project,
                id=self.id,
                name=directory.resolve().name,
                dir=directory,
                config=dict(config),
                resume="allow",
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.errors.Error as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"W&B project {project}: {reason}; run `wandb login`, or set WANDB_MODE=offline"
            ) from error
        self._phases: set[str] = set()

    def scalars(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Logs values as ``PHASE/NAME``, with a separate step axis for each phase.

        W&B's own step only grows, but a resumed run repeats the steps after its checkpoint.

        Args:
            phase: phase of the run.
            step: step of the phase.
            values: metrics by name.
        """
        if phase not in self._phases:
            self._phases.add(phase)
            self._run.define_metric(f"{phase}/step")
            self._run.define_metric(f"{phase}/*", step_metric=f"{phase}/step")
        named = {f"{phase}/{name}": value for name, value in values.items()}
        self._run.log({**named, f"{phase}/step": step})

    def close(self) -> None:
        """Closes the connection; the run may be continued later."""
        self._run.finish()
