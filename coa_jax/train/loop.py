"""What the steps of SFT, DPO, RFT and RL have in common.

A step is measured and written to the metrics; warnings, evaluations and checkpoints follow it; and
SIGTERM ends the run after it. `fit` and `rl` say how a step trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from coa_jax.engine.engine import Engine
from coa_jax.evaluation.held_out import HeldOut
from coa_jax.model.api import Model
from coa_jax.model.peft_io import save_trained
from coa_jax.parallel import processes
from coa_jax.run.progress import progress
from coa_jax.run.run_dir import RunDir
from coa_jax.train.checkpoint import Checkpoints
from coa_jax.train.clock import Clock, Profile
from coa_jax.train.config import TrainingConfig
from coa_jax.train.fingerprints import digest, fingerprint
from coa_jax.train.metrics import peak_memory
from coa_jax.train.step import TrainState, check_updates
from coa_jax.train.stop import end_run, stop_on_sigterm
from coa_jax.train.watch import Watch


@dataclasses.dataclass
class Trained:
    """What a run trains, and how far the run is.

    Attributes:
        model: architecture and tokenizer of the model, without parameters.
        state: parameters and state of the optimiser.
        checkpoints: checkpoints of the run.
        step: number of completed steps.
        total: number of steps of the run.
        extra: further values of a checkpoint, such as the position in the data.
    """

    model: Model
    state: TrainState
    checkpoints: Checkpoints
    step: int
    total: int
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def unmeasured(self) -> bool:
        """Whether a signal ended the evaluation after ``step``; a resumed run repeats it."""
        return self.extra.get("unmeasured", False)

    def save(self, metrics: Mapping[str, float]) -> None:
        """Writes a checkpoint.

        Args:
            metrics: metrics of the step. If the setting ``keep_best`` names one of them, its value
                decides whether the checkpoint is the best checkpoint.
        """
        self.checkpoints.save(self.step, self.state, dict(self.extra), metrics=metrics)


@dataclasses.dataclass(kw_only=True)
class Loop:
    """The steps of a run, from its newest checkpoint to its last step.

    ::

        with Loop(...) as loop:
            for clock in loop:
                ...  # train, and advance ``trained.step``
                loop.end_step(metrics)

    The iteration ends after the last step, or after the step in which SIGTERM arrived.

    Attributes:
        config: settings of the run.
        run: directory of the run, for metrics.
        phase: name of the training stage in metrics.
        trained: what the run trains.
        parts: names of the parts of a step whose time every row of metrics states.
        shown: metrics that the progress bar shows, as {label: name}.
        held_out: evaluates the model during the run; None for no evaluations.
        evaluate_every: number of steps between two evaluations.
        engines: function that returns engines with the parameters of the newest step.
        hurry: function that ends what a step waits for. A signal handler calls it.
        saved: function that is called after each checkpoint.
    """

    config: TrainingConfig
    run: RunDir
    phase: str
    trained: Trained
    parts: Sequence[str]
    shown: Mapping[str, str]
    held_out: HeldOut | None = None
    evaluate_every: int = 0
    engines: Callable[[], Sequence[Engine]] = lambda: ()
    hurry: Callable[[], None] = lambda: None
    saved: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.clock = Clock(*self.parts)
        self._watch = Watch(self.run.rows(self.phase))
        self._stopping, self._saved = False, self.trained.step
        self._row: dict[str, float] = {}

    def __enter__(self) -> Loop:
        trained = self.trained
        with contextlib.ExitStack() as stack:
            profile = Profile(self.config.profile_steps, self.run.path / "profile")
            self._profile = stack.enter_context(contextlib.closing(profile))
            self._stop = stack.enter_context(stop_on_sigterm(self._abandon))
            bar = progress(self.phase.upper(), total=trained.total, initial=trained.step)
            self._bar = stack.enter_context(bar)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def _abandon(self) -> None:
        self.hurry()
        if self.held_out is not None:
            self.held_out.abandon()

    def __iter__(self) -> Iterator[Clock]:
        """Yields the clock of each step, see `end_step`."""
        trained = self.trained
        if trained.unmeasured:
            self.run.add_metrics(trained.step, self.phase, **self._measured())
            self._stopping = trained.unmeasured
        self.clock = Clock(*self.parts)
        while trained.step < trained.total and not self._stopping:
            before = trained.step
            self._profile.before(before + 1)
            yield self.clock
            if trained.step == before:  # the step was abandoned
                break
        if self._saved < trained.step:
            self._save()

    def due(self, every: int) -> bool:
        """Returns whether something that happens every few steps, and at the end, is due now."""
        return self.trained.step % every == 0 or self.trained.step == self.trained.total

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation follows the newest step."""
        return self.held_out is not None and self.due(self.evaluate_every)

    def evaluate(self) -> dict[str, float]:
        """Evaluates the model if an evaluation is due, and returns the metrics ``eval/...``."""
        if not self.evaluation_due:
            return {}
        with self.clock("evaluation"):
            return self._measured()

    def _measured(self) -> dict[str, float]:
        trained, figures = self.trained, None
        if self.held_out is not None:
            processes.doing(f"evaluation after step {trained.step}")
            parameters = digest(fingerprint(trained.state.model))
            figures = self.held_out.measure(trained.step, parameters, trained.model, self.engines)
        trained.extra["unmeasured"] = self.held_out is not None and figures is None
        return figures or {}

    def end_step(self, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step, warns about them, and saves a checkpoint if one is due.

        All processes agree on whether to save and whether to stop.

        Raises:
            UserError: the loss or the gradient of several updates in a row was not finite; the
                state has been saved.
        """
        step, config = self.trained.step, self.config
        self._row = {**metrics, **peak_memory(), **self.clock.report()}
        self.run.metrics(step, self.phase, **self._row)
        self._profile.after(step)
        for text in self._watch.see({**self._row, "step": step}):
            logging.warning("%s, step %d: %s", self.phase.upper(), step, text)
        self.clock = Clock(*self.parts)
        overdue = self.trained.checkpoints.overdue(config.checkpoint_seconds)
        self._stopping, due = self._stop.agreed(config.mesh.wait_seconds, overdue)
        error = check_updates(self._row)
        if due or self._stopping or error or self.due(config.checkpoint_every):
            with self.clock("checkpoint"):
                self._save()
        if error:
            raise error
        self._bar.update(1, **{label: self._row[name] for label, name in self.shown.items()})

    def _save(self) -> None:
        self.trained.save(self._row)
        self._saved = self.trained.step
        self.saved()


def export(config: TrainingConfig, trained: Trained, output: Path, phase: str) -> None:
    """Writes the trained model to ``output``, or ends the process if the run was asked to stop."""
    if trained.step < trained.total or trained.unmeasured:
        end_run(trained.step, trained.total)
    model = trained.model.replace(params=trained.state.model)
    settings = dataclasses.asdict(config)
    save_trained(model, config.model, output, config.export_dtype, phase, settings)
