"""The training loop that SFT, DPO, RFT and RL share.

After each step, the loop writes metrics and warnings, evaluates the model and saves a checkpoint if
these are due, and ends the run if SIGTERM has arrived. `fit` and `rl` define how a step trains.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import logging

from coa_jax.engine.engine import Engine
from coa_jax.errors import UserError
from coa_jax.evaluation.held_out import HeldOut
from coa_jax.model.api import Model
from coa_jax.model.params import Adapted
from coa_jax.model.peft_io import save_trained
from coa_jax.parallel import processes
from coa_jax.run.progress import progress
from coa_jax.run.run_dir import RunDir
from coa_jax.train.checkpoint import Checkpoints
from coa_jax.train.config import TrainingConfig
from coa_jax.train.fingerprints import digest, fingerprint
from coa_jax.train.metrics import peak_memory
from coa_jax.train.run_warnings import MetricHistory
from coa_jax.train.step import TrainState, check_updates
from coa_jax.train.stop import end_run, stop_on_sigterm


@dataclasses.dataclass
class Trained:
    """The model that a run trains, with its optimiser state, checkpoints and completed steps.

    Attributes:
        model: architecture and tokenizer of the model, without parameters.
        state: parameters and state of the optimiser.
        checkpoints: where checkpoints are written and read.
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
        """Whether SIGTERM cut off the evaluation after ``step``; a resumed run evaluates again."""
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
        trained: model, optimiser state and progress of the run.
        parts: names of the parts of a step; every row of metrics states the time of each part.
        shown: metrics that the progress bar shows, as {label: name}.
        held_out: evaluates the model during the run; None for no evaluations.
        evaluate_every: number of steps between two evaluations.
        engines: function that returns engines with the parameters of the newest step.
        hurry: function that a signal handler calls to end what a step waits for, such as rollouts.
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
        self._watch = MetricHistory(self.run.rows(self.phase))
        self._stopping, self._saved = False, self.trained.step
        self._row: dict[str, float] = {}

    def __enter__(self) -> Loop:
        trained = self.trained
        with contextlib.ExitStack() as stack:
            profile = Profile(self.config.profile_steps, self.run.path / "profile")
            self._profile = stack.enter_context(contextlib.closing(profile))
            self._stop = stack.enter_context(stop_on_sigterm(self._abandon))
            first = "step also compiles its programs" if trained.step < trained.total else ""
            bar = progress(self.phase.upper(), trained.total, initial=trained.step, first=first)
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
        """Returns whether ``step`` is a multiple of ``every``, or the last step of the run."""
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
            processes.set_activity(f"evaluation after step {trained.step}")
            parameters = digest(fingerprint(trained.state.params))
            figures = self.held_out.measure(trained.step, parameters, trained.model, self.engines)
        trained.extra["unmeasured"] = self.held_out is not None and figures is None
        return figures or {}

    def end_step(self, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of a step, warns of bad values, and saves a checkpoint if one is due.

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
    params = trained.state.all_params
    if isinstance(params, Adapted):
        params = params.stacked(trained.model.config)
    model = trained.model.replace(params=params)
    settings = dataclasses.asdict(config)
    save_trained(model, config.model, output, config.export_dtype, phase, settings)


# --- time and profile ---------------------------------------------------------------------


class Clock:
    """Measures the wall-clock seconds that each named phase of a step takes.

    A phase is a block ``with clock(name):``. `report` returns the seconds of each phase, and the
    time outside all phases since the clock was created.
    """

    def __init__(self, *names: str) -> None:
        """Starts the clock; the report includes the phases ``names`` even if they never run."""
        self.seconds: dict[str, float] = collections.defaultdict(float, dict.fromkeys(names, 0.0))
        self._began = time.monotonic()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Context manager that adds the time of its block to a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] += time.monotonic() - began

    def report(self) -> dict[str, float]:
        """Returns the seconds spent in each phase so far, as metrics ``time/...``.

        ``time/step`` is the time since the clock was created, and ``time/unaccounted`` is the part
        of this time outside all phases.
        """
        total, parts = time.monotonic() - self._began, dict(self.seconds)
        return {
            **{f"time/{name}": seconds for name, seconds in parts.items()},
            "time/step": total,
            "time/unaccounted": max(total - sum(parts.values()), 0.0),
        }


class Profile:
    """Records a profile of a range of training steps with `jax.profiler`.

    TensorBoard and xprof can show the profile.
    """

    def __init__(self, steps: tuple[int, ...], directory: Path):
        """Checks that the range of steps is valid; recording starts with `before`.

        Args:
            steps: the first and the last step to record; () for no recording.
            directory: folder to which the profile is written.

        Raises:
            UserError: ``steps`` is neither () nor two positive numbers in ascending order.
        """
        if steps and (len(steps) != 2 or not 0 < steps[0] <= steps[1]):
            raise UserError(
                f"profile_steps is {', '.join(map(str, steps))}; give the first and the last step "
                "to record, such as 3,5"
            )
        self._steps, self._directory = steps, directory
        self._recording = False

    def before(self, step: int) -> None:
        """Starts the recording if the step is in the range and no recording has started yet.

        The first call may be for a step in the middle of the range, because a resumed run may start
        there.
        """
        if self._steps and self._steps[0] <= step <= self._steps[1] and not self._recording:
            jax.profiler.start_trace(self._directory)
            self._recording = True

    def after(self, step: int) -> None:
        """Stops the recording if ``step`` is the last step of the range, or a later one."""
        if self._recording and step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Stops recording, and writes the profile to the directory."""
        if self._recording:
            self._recording = False
            jax.profiler.stop_trace()
