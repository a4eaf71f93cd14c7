"""Checkpoints of a run, which contain everything that the run's next step depends on.

A checkpoint is written in the background while the run continues, and appears under its number only
when it is complete. A checkpoint contains fingerprints of its arrays, computed on their devices
before the save, and of its other contents. After reading a checkpoint, on any mesh,
`Checkpoints.newest` compares the fingerprints. If the checkpoint was damaged (a torn file after a
power cut, a flipped bit, an incomplete copy), the run resumes from the checkpoint before it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging as python_logging
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint import checkpoint_managers

from coa_jax.errors import Outage, UserError
from coa_jax.parallel import processes
from coa_jax.parallel.config import MeshConfig
from coa_jax.storage.checkpoint_folders import (
    is_bucket,
    is_outage,
    is_passing,
    prepared,
    telling_outage,
)
from coa_jax.train.fingerprints import digest, fingerprint
from coa_jax.train.step import TrainState

_FINGERPRINT, _EXTRA, _STATE = "fingerprint", "extra", "state"

_Mode = ocp.options.AtomicityMode

_WRITE_S = 7 * 24 * 3600
"""Seconds after which Orbax gives up writing; a slow disk is no fault, so the number is large."""


class Damaged(Exception):
    """Raised if the contents of a checkpoint differ from the contents that were saved."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that has been read.

    Attributes:
        step: number of the checkpoint.
        state: parameters and optimiser state.
        extra: the JSON values that were saved, such as the position in the data.
        more: further trees of arrays by name. A tree that was requested, but is not in the
            checkpoint, is missing.
    """

    step: int
    state: TrainState
    extra: dict[str, Any]
    more: dict[str, Any]


@functools.cache
def _tell_faults_once() -> None:
    """Keeps Orbax and TensorStore from printing tracebacks of errors that `Checkpoints` raises.

    On a full disk many writes fail at the same time, each in its own thread. Orbax logs all of
    these errors, and `Checkpoints.wait` raises one of them. TensorStore prints another error for
    every write that is unfinished when Orbax closes its event loop.
    """
    folder, shown = os.path.dirname(ocp.__file__), sys.unraisablehook

    def is_news(record: Any) -> bool:
        frames = traceback.extract_tb(record.exc_info[2]) if record.exc_info else ()
        return not any(frame.filename.startswith(folder) for frame in frames)

    def show(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            shown(unraisable)

    for name in ("absl", "asyncio"):
        python_logging.getLogger(name).addFilter(is_news)
    sys.unraisablehook = show


class Checkpoints:
    """Saves and restores the checkpoints of a run; keeps the newest ones and the best one."""

    def __init__(
        self,
        directory: str | Path,
        keep: int = 2,
        best: str = "",
        *,
        read_only: bool = False,
        wait_seconds: float = MeshConfig.wait_seconds,
        before_save: Callable[[], None] = lambda: None,
    ):
        """Opens the directory, or creates it.

        Checkpoints that a killed run left incomplete are removed.

        Args:
            directory: directory that contains only checkpoints: a local path or a URL.
            keep: number of newest checkpoints to keep, at least 1.
            best: metric that selects the best checkpoint, which is kept beside the newest ones; ""
                for no best checkpoint. Lower values are better if the metric's name ends in
                ``loss``, higher values otherwise.
            read_only: whether the directory is left unchanged, because a run may be writing to it.
                Incomplete checkpoints are then not removed either.
            wait_seconds: number of seconds to wait for the slowest process, see
            `processes.barrier`.
            before_save: function that each process calls before a checkpoint is written. The
                function writes data to disk that must be complete before the checkpoint exists.
        """
        _tell_faults_once()
        self._saved = time.monotonic()
        self.best_metric, self._sign = best, -1.0 if best.endswith("loss") else 1.0
        policy: Any = checkpoint_managers.LatestN(keep)
        if best:
            highest = checkpoint_managers.BestN(
                get_metric_fn=self._quality, n=1, keep_checkpoints_without_metrics=False
            )
            policy = checkpoint_managers.AnyPreservationPolicy([policy, highest])
        self.directory, self._wait_seconds = prepared(directory), wait_seconds
        self._before_save = before_save
        if not read_only and processes.index() == 0 and not self.directory.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
        self._manager = self._open_manager(policy, read_only)
        self._reader = _reader_alone()

    def _open_manager(self, policy: Any, read_only: bool) -> ocp.CheckpointManager:
        """Opens the directory with Orbax, which keeps the checkpoints that the policy chooses."""
        verbosity = logging.get_verbosity()
        if read_only:
            logging.set_verbosity(logging.ERROR)  # hides Orbax's warning of a read-only directory
        try:
            return ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=policy,
                    best_fn=self._quality if self.best_metric else None,
                    create=False,
                    # Without a list of processes, Orbax's barriers are programs on all devices,
                    # outside the order of `launch_lock`.
                    multiprocessing_options=ocp.options.MultiprocessingOptions(
                        active_processes=set(range(processes.count()))
                    ),
                    # These checkpoints have no root metadata, for which processes would wait.
                    save_root_metadata=False,
                    read_only=read_only,
                    cleanup_tmp_directories=not read_only,
                    enable_async_checkpointing=True,
                    async_options=ocp.options.AsyncOptions(timeout_secs=_WRITE_S),
                    atomicity_options=ocp.options.AtomicityOptions(
                        # A local file system renames a folder atomically; a bucket cannot.
                        mode=_Mode.COMMIT_FILE if is_bucket(self.directory) else _Mode.AUTO
                    ),
                ),
            )
        finally:
            logging.set_verbosity(verbosity)

    def _quality(self, metrics: Mapping[str, float]) -> float:
        # A checkpoint without this metric is worse than every other.
        return self._sign * metrics.get(self.best_metric, -self._sign * math.inf)

    def steps(self) -> list[int]:
        """Returns the steps of the checkpoints that were written completely, in ascending order."""
        return sorted(self._manager.all_steps())

    def overdue(self, seconds: float) -> bool:
        """Returns whether the last save began ``seconds`` ago, and no checkpoint is being written.

        Before the first save, the time counts from the creation of this object.
        """
        late = time.monotonic() - self._saved >= seconds
        return late and not self._manager.is_saving_in_progress()

    def best(self) -> int | None:
        """Returns the step of the checkpoint with the best metric; None if none has the metric."""
        step = self._manager.best_step() if self.best_metric else None
        known = {} if step is None else self._manager.metrics(step) or {}
        return step if self.best_metric in known else None

    def save(
        self,
        step: int,
        state: TrainState,
        extra: dict[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins to write a checkpoint, and returns once the arrays may be changed or donated.

        Args:
            step: number of the checkpoint, higher than all earlier numbers.
            state: parameters and optimiser state.
            extra: JSON values to save.
            metrics: metrics of the step. A checkpoint can become the best checkpoint only if
                ``metrics`` has a finite value for the metric that selects the best checkpoint.
            more: further trees of arrays by name; each is saved in a folder of its own.

        Raises:
            OSError: the previous checkpoint could not be written, for example because the disk is
                full. Older checkpoints are intact.
            Outage: the bucket could not be reached for several minutes.
        """
        self.wait()
        self._before_save()
        self._saved = time.monotonic()
        trees = {_STATE: state, **(more or {})}
        marks = {name: fingerprint(_plain(tree)) for name, tree in trees.items()}
        marks[_EXTRA] = [digest(extra)]
        value = (metrics or {}).get(self.best_metric, math.nan)
        if self.best_metric and self.best_metric not in (metrics or {}):
            logging.warning(
                "%s: checkpoint %d cannot be the best one: its step has no metric %r",
                self.directory,
                step,
                self.best_metric,
            )
        # Orbax's barriers have a deadline, which processes miss if a bucket holds up process 0.
        with telling_outage(self.directory):
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{name: ocp.args.StandardSave(_plain(tree)) for name, tree in trees.items()},
                    extra=ocp.args.JsonSave(extra),
                    fingerprint=ocp.args.JsonSave(marks),
                ),
                metrics={self.best_metric: float(value)} if math.isfinite(value) else None,
                force=True,
            )

    def wait(self) -> None:
        """Waits until the last checkpoint has been written.

        Raises:
            OSError: the checkpoint could not be written.
            Outage: the bucket could not be reached for several minutes.
        """
        with telling_outage(self.directory):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def newest(self, like: TrainState, more: Mapping[str, Any] | None = None) -> Restored | None:
        """Reads the newest undamaged checkpoint; returns None if there is no checkpoint.

        The method tries the newest checkpoint first, then older ones. Once one has been read, all
        newer checkpoints, which are damaged, are renamed to ``damaged-STEP``, with a warning for
        each.

        Args:
            like: a state whose shapes, dtypes and shardings the result will have, see `restore`.
            more: shapes of further trees to read, by name, see `restore`.

        Raises:
            UserError: the checkpoint belongs to another model or optimiser, the file system refuses
                access, or every checkpoint is damaged.
        """
        faults: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                restored = self.restore(step, like, more)
            except Damaged as error:
                faults[step] = str(error)
            else:
                self._set_aside(faults, step)
                return restored
        if faults:
            newest, fault = next(iter(faults.items()))
            raise UserError(
                f"{self.directory}: every checkpoint is damaged ({newest}: {fault}); restore the "
                "directory from a copy, or remove it to start the run again"
            )
        return None

    def _set_aside(self, faults: Mapping[int, str], good: int) -> None:
        for step, fault in faults.items() if processes.index() == 0 else ():
            aside = self.directory / f"damaged-{step}"
            while aside.exists():
                aside = aside.with_name(aside.name + "-again")
            logging.warning(
                "%s: checkpoint %d is damaged (%s); resuming from checkpoint %d; renamed the "
                "damaged checkpoint to %s",
                self.directory,
                step,
                fault,
                good,
                aside.name,
            )
            (self.directory / str(step)).rename(aside)
        if faults:
            processes.barrier("setting aside of damaged checkpoints", self._wait_seconds)
            self._manager.reload()

    def restore(
        self, step: int, like: TrainState, more: Mapping[str, Any] | None = None
    ) -> Restored:
        """Reads a checkpoint into the shapes, dtypes and shardings of ``like``.

        Each process reads the parts on its own devices. An error in one process is raised in all
        processes.

        Args:
            step: number of the checkpoint.
            like: a state, or a tree of shapes and shardings in its place. The mesh may differ from
                the mesh of the run that saved the checkpoint.
            more: shapes of further trees to read, by name; trees that the checkpoint lacks are left
                out.

        Raises:
            UserError: the checkpoint belongs to another model or optimiser, or the file system
                refuses access.
            Damaged: the contents differ from the contents that were saved.
        """
        read_state, fault = None, None
        try:
            read_state = self._read(step, like, more or {})
        except (UserError, Damaged) as error:
            fault = error
        # All processes compute the fingerprints below together. A process whose reading failed
        # would not take part, and the other processes would wait for that process.
        self._agree(fault)
        assert read_state is not None
        read, likes = read_state
        torn = [
            name
            for name, tree in likes.items()
            if fingerprint(_plain(read[name])) != read[_FINGERPRINT][name]
        ]
        if read[_FINGERPRINT].get(_EXTRA) != [digest(read[_EXTRA])]:
            fault = Damaged("its cursor or trajectories are not those that were saved")
        if torn:
            fault = Damaged(f"the arrays of its {torn[0]} are not those that were saved")
        self._agree(fault)
        trees = {
            name: tree._replace(**read[name]) if hasattr(tree, "_asdict") else read[name]
            for name, tree in likes.items()
        }
        return Restored(step, trees.pop(_STATE), read[_EXTRA], trees)

    def _agree(self, fault: UserError | Damaged | None) -> None:
        """Raises the same error in all processes: the error of the first process that has one.

        A `UserError` of any process takes precedence over `Damaged`, because the checkpoint may be
        intact if the file system refuses access.
        """
        if processes.count() == 1 and fault is not None:
            raise fault
        passes = isinstance(fault, Outage)
        damaged = isinstance(fault, Damaged)
        mine = [isinstance(fault, UserError) and not passes, passes, damaged, str(fault)]
        verdicts = processes.all_gather(mine, "reading of a checkpoint", self._wait_seconds)
        for at, kind in enumerate((UserError, Outage, Damaged)):
            for number, verdict in enumerate(verdicts):
                if verdict[at]:
                    raise kind(f"{verdict[-1]} (says process {number})") from fault

    def _read(
        self, step: int, like: TrainState, more: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Reads this process's part of a checkpoint; also returns the trees that set the shapes."""
        path = self.directory / str(step)
        there = {name: tree for name, tree in more.items() if (path / name).is_dir()}
        likes = {_STATE: like, **there}
        abstract = {
            name: jax.tree.map(ocp.utils.to_shape_dtype_struct, _plain(tree))
            for name, tree in likes.items()
        }
        try:
            for name, tree in abstract.items():
                self._check_fit(step, name, tree)
            read = self._reader.restore(
                path,
                args=ocp.args.Composite(
                    **{name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()},
                    extra=ocp.args.JsonRestore(),
                    fingerprint=ocp.args.JsonRestore(),
                ),
            )
        # Running out of memory does not show that the files are damaged.
        except (UserError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        # For a torn file, the readers of JSON, zarr and OCDBT raise exceptions of many types.
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            if is_passing(error):
                raise (Outage if is_outage(error) else UserError)(
                    f"{path}: the checkpoint could not be read ({reason}); nothing was changed: "
                    "correct the cause, and start the command again"
                ) from error
            raise Damaged(f"cannot be read: {reason}") from error
        return read, likes

    def _check_fit(self, step: int, name: str, abstract: Any) -> None:
        """Compares the names, shapes and dtypes of the arrays, without reading the arrays."""
        there = _leaves(ocp.StandardCheckpointHandler().metadata(self.directory / str(step) / name))
        here = _leaves(abstract)
        for key in sorted(there.keys() | here.keys()):
            old, new = there.get(key, "nothing"), here.get(key, "nothing")
            if old != new:
                raise UserError(
                    f"{self.directory}: checkpoint {step} does not fit this configuration ({name}."
                    f"{key} is {old} there and {new} here); use the configuration that it was "
                    "written with, or another workdir"
                )

    def close(self) -> None:
        """Waits for the last checkpoint and releases the directory."""
        self.wait()
        self._reader.close()
        self._manager.close()


def _reader_alone() -> ocp.Checkpointer:
    """Creates a reader that does not wait for other processes.

    When a read ends, the manager's own reader waits for all processes. A process whose part is
    damaged would therefore leave the other processes waiting.
    """
    me = jax.process_index()
    options = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=options)
    )
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _plain(tree: Any) -> Any:
    """Returns the saved part of a tree, without frozen parameters, which the model's files hold."""
    if not hasattr(tree, "_asdict"):
        return tree
    return {name: part for name, part in tree._asdict().items() if name != "frozen"}


def _leaves(tree: Any) -> dict[str, str]:
    """Maps the dotted name of each leaf to a text with its dtype and shape."""
    tree = getattr(tree, "tree", tree)
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name(path): f"{jnp.dtype(leaf.dtype)}{list(leaf.shape)}" for path, leaf in leaves}
