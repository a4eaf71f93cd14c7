"""Copies the metrics of a run to Weights & Biases (W&B).

With `WANDB_MODE=offline` no account is needed. The W&B id is stored in the run directory, so that a
resumed run continues the same curves.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coa_jax.config.installed import missing
from coa_jax.errors import UserError
from coa_jax.files import durable


class WandbRun:
    """The connection to a run at W&B.

    Attributes:
        id: id of the run at W&B.
    """

    def __init__(self, directory: Path, project: str, config: Mapping[str, Any]) -> None:
        """Starts a run at W&B, or continues the run whose id is stored in the run directory.

        Args:
            directory: the run directory.
            project: name of the W&B project.
            config: config of the run, which W&B shows.

        Raises:
            UserError: the package ``wandb`` is not installed, or W&B rejects the run.
        """
        try:
            import wandb
        except ImportError as error:
            raise missing("--wandb_project", "wandb", "wandb") from error
        path = directory / "wandb.json"
        saved = durable.read_json_object(path) if path.exists() else {}
        self.id = str(saved.get("id") or secrets.token_hex(4))
        durable.write_json(path, {"id": self.id, "project": project})
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
        """Logs metrics as ``PHASE/NAME``, with a separate step axis for each phase.

        W&B's own step cannot serve as the axis, because it must not decrease, but a resumed run
        repeats the steps after its last checkpoint.

        Args:
            phase: the part of the run that writes the metrics, such as ``rl``.
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
        """Closes the connection to W&B; a resumed run can continue the same W&B run."""
        self._run.finish()
