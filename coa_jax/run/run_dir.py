"""Writes the directory of a run.

A run writes everything except its checkpoints through `RunDir`: `config.json`, `metrics.jsonl`,
`traces.jsonl`, `summary.json` and other files. The files survive `kill -9`, a full disk and a
resume: a row is appended completely or not at all, other files are replaced atomically, and a lock
prevents a second run in the same directory. `RunDir` does not interpret the rows. For a directory
in a bucket, `coa_jax.storage` provides a local mirror, and a lease takes the place of the lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import logging

from coa_jax import storage
from coa_jax.config.renamed import with_present_keys
from coa_jax.data import trace_shards
from coa_jax.errors import UserError
from coa_jax.files import durable, jsonl
from coa_jax.protocol import write_protocols
from coa_jax.run.event_file import EventFile
from coa_jax.run.settings import Change, build_config, changes_of, line_of, matches, plain
from coa_jax.run.wandb_run import WandbRun
from coa_jax.storage.checkpoint_folders import checkpoints_of

CONFIG_CHANGES = "config_changes.jsonl"

# File descriptors of the locks of this process. A forked worker closes its copies, so that a lock
# ends with the process that took it. A killed run can therefore be resumed while its workers still
# exist.
_held_locks: set[int] = set()


def _drop_inherited_locks() -> None:
    for descriptor in _held_locks:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held_locks.clear()


os.register_at_fork(after_in_child=_drop_inherited_locks)


class RunDir:
    """Writes the files of a run (config, metrics, traces, summary) to its directory.

    An object of this class is a context manager, which holds the lock of the directory.

    Attributes:
        path: path of the directory; for a URL, the path of the local mirror.
        active: whether this process writes. In a run of several processes only the first process is
            active, and the methods that write do nothing in the other processes.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, active: bool = True, wandb_project: str = ""
    ) -> None:
        """Creates the directory and locks it.

        Args:
            path: the directory, a local path or a URL.
            active: whether this process writes to the directory.
            wandb_project: Weights & Biases project that also receives the metrics; "" for none.

        Raises:
            UserError: the directory cannot be written, or another run uses the directory.
        """
        self.path = storage.run_folder(path)
        self._mirror = storage.mirror_of(self.path)
        self.active = active
        self._events: dict[str, EventFile] = {}
        self._purge_from: dict[str, int] = {}
        self._wandb_project = wandb_project
        self._wandb: WandbRun | None = None
        self._lock: int | None = None
        self._kept: tuple[Any, list[Change]] | None = None  # config that is not written yet
        # If the run is in a subfolder of the mirror, the run of the whole directory opens and
        # closes the mirror.
        self._is_whole = self._mirror is not None and self._mirror.path == self.path
        if self._mirror is not None and self._is_whole:
            self._mirror.open(active=active)
        # Whether the directory existed; None if it contains files of an earlier run.
        self._existed = None if _has_files(self.path) else self.path.exists()
        self._new_parents = [folder for folder in self.path.parents if not folder.exists()]
        if active:
            self._lock = _open_locked(self.path)
            for name in ("metrics.jsonl", "traces.jsonl"):
                durable.cut_torn_line(self.path / name)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints; an `epath.Path` if the run is in a bucket."""
        return checkpoints_of(self.path)

    def sync(self) -> None:
        """Uploads everything that was written, if the directory is in a bucket.

        Raises:
            UserError: the bucket cannot be written, or another run has taken over the directory
                (see `coa_jax.storage.lease`).
        """
        if self._mirror is not None:
            self._mirror.sync()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files and releases the lock, so that other runs can use the directory.

        If neither `begin` nor `write_config` was called, the files of a new run are removed. They
        stay if the run has already made calls that count against a budget (folder ``spent``).
        """
        if self._wandb is not None:
            self._wandb.close()
            self._wandb = None
        if self.active and self._lock is not None:
            new = self._existed is not None and not (self.path / "spent").exists()
            if new and (self._kept or not _has_files(self.path)):
                _remove(self.path, bool(self._existed))
                for folder in self._new_parents:
                    with contextlib.suppress(OSError):  # another program has put something there
                        folder.rmdir()
            elif self._kept is None:
                write_protocols(self.path)
        if self._lock is not None:
            _held_locks.discard(self._lock)
            os.close(self._lock)
            self._lock = None
        if self._mirror is not None and self._is_whole:
            self._mirror.close()

    def keep_config(self, config: Any, changeable: Sequence[str] = ()) -> None:
        """Checks that a run with this config may use the directory: it is new, or had this config.

        `begin` or `write_config` writes the config. Until then, files of an earlier run stay. If
        neither is called, `close` removes a directory that this object created.

        Args:
            config: settings of the run, see `write_config`.
            changeable: patterns (`fnmatch`) of the settings that may differ from those of an
                earlier run in the directory. The name of a group, such as ``engine``, also stands
                for all its settings, such as ``engine.slots``.

        Raises:
            UserError: as in `check_config`.
        """
        self._kept = config, self.check_config(config, changeable)
        # Now, so that a missing key ends the run before its model is loaded.
        self._open_wandb(plain(config))

    def check_config(self, config: Any, changeable: Sequence[str] = ()) -> list[Change]:
        """Checks that an earlier run in the directory had this config; writes nothing.

        Args:
            config, changeable: as in `keep_config`.

        Returns:
            The settings that differ, all of which may change.

        Raises:
            UserError: the directory holds a run in which a setting that may not change differs.
        """
        path, changes = self.path / "config.json", list[Change]()
        if path.exists():
            before = with_present_keys(durable.read_json_object(path))
            changes = changes_of(_complete(before, config), plain(config))
            if others := sorted(before.keys() - plain(config).keys()):
                raise UserError(
                    f"{self.path} has a run of another command, with the setting {others[0]}: give "
                    "another --workdir"
                )
        fixed = [change for change in changes if not matches(change[0], changeable)]
        if fixed:
            more = f" and {len(fixed) - 1} further settings" if fixed[1:] else ""
            rule = "; docs/runs.md lists the settings that may change" if changeable else ""
            raise UserError(
                f"{self.path} has a run with other settings ({line_of(fixed[0])}{more}): give the "
                f"same settings to continue it, or another --workdir{rule}"
            )
        return changes

    def begin(self, phase: str, step: int, total: int) -> None:
        """Begins a phase of the run, or continues the phase after a step.

        The method writes the config that was passed to `keep_config`, and removes what the run
        wrote after ``step`` (see `rewind`). Settings that differ from the earlier ones are appended
        to ``config_changes.jsonl``, with the first step for which they hold.

        Args:
            phase: name of the phase, such as ``rl``.
            step: number of finished steps.
            total: number of steps of the whole phase.

        Raises:
            UserError: the run has more than ``total`` finished steps.
        """
        if step > total:
            raise UserError(
                f"{self.path}: the run has finished {step} steps, and the settings ask for {total} "
                "(optimizer.total_steps): raise the setting, or give another --workdir"
            )
        if self._kept is not None and self.active:
            config, changes = self._kept
            rows = read_config_changes(self.path)
            # After a damaged checkpoint, a run repeats steps with the newest settings.
            changed_rows = [{**row, "step": min(row["step"], step + 1)} for row in rows]
            for name, old, new in changes:
                logging.warning("from step %d on: %s", step + 1, line_of((name, old, new)))
                changed_rows.append({"step": step + 1, "setting": name, "old": old, "new": new})
            if changed_rows != rows:
                jsonl.write_lines(self.path / CONFIG_CHANGES, changed_rows)
            self.write_config(config)
        self.rewind(phase, step)

    def write_config(self, config: Any) -> None:
        """Writes the resolved config to `config.json`.

        Args:
            config: a ConfigDict, a dataclass or a mapping.
        """
        self._kept = None
        if not self.active:
            return
        durable.write_json(self.path / "config.json", plain(config))
        write_protocols(self.path)
        self._open_wandb(plain(config))

    def keep_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes a JSON file to the directory, and replaces an earlier file of the same name."""
        if self.active:
            durable.write_json(self.path / name, dict(value))

    def metrics(self, step: int, phase: str, **scalars: Any) -> None:
        """Appends a row of metrics to `metrics.jsonl`, to the TensorBoard events and to W&B.

        Args:
            step: step of the phase that the row describes.
            phase: name of the phase, such as `sft` or `rl`.
            **scalars: metrics by name, each a number or an array of one element. NaN and infinity,
                which JSON lacks, are written to `metrics.jsonl` as null.
        """
        if not self.active:
            return
        self._log(int(step), phase, {}, scalars)

    def _log(
        self, step: int, phase: str, metadata: Mapping[str, Any], scalars: Mapping[str, Any]
    ) -> None:
        """Appends a row with ``metadata`` and ``scalars``, and sends ``scalars`` to the loggers."""
        values = {name: _number(name, value) for name, value in scalars.items()}
        finite = {name: v if math.isfinite(v) else None for name, v in values.items()}
        row = {"step": step, "phase": phase, **metadata, **finite}
        durable.append(self.path / "metrics.jsonl", (json.dumps(row) + "\n").encode())
        if phase not in self._events:
            directory = self.path / "tensorboard" / phase
            self._events[phase] = EventFile(directory, self._purge_from.pop(phase, None))
        self._events[phase].scalars(step, values)
        self._open_wandb(_read_object(self.path / "config.json"))
        if self._wandb is not None:
            self._wandb.scalars(phase, step, values)

    def add_metrics(self, step: int, phase: str, **scalars: Any) -> None:
        """Adds metrics to the row of a step, which must be the newest row of its phase.

        Args:
            step: step of the row.
            phase: phase of the row.
            **scalars: further metrics, see `metrics`.
        """
        if not self.active or not scalars:
            return
        rows = [row for row in self.rows(phase) if row["step"] == step]
        self._log(step, phase, rows[-1] if rows else {}, scalars)
        newer: list[Mapping[str, Any]] = []

        def goes(row: Mapping[str, Any]) -> bool | None:
            if row.get("phase") != phase:
                return False
            newer.append(row)
            return len(newer) > 1 if row["step"] == step else None

        # The complete row is appended first, so that a kill in between loses nothing.
        durable.drop_last_rows(self.path / "metrics.jsonl", goes)

    def _open_wandb(self, config: Mapping[str, Any]) -> None:
        if self.active and self._wandb_project and self._wandb is None:
            self._wandb = WandbRun(self.path, self._wandb_project, config)

    def rows(self, phase: str) -> list[dict[str, Any]]:
        """Reads the rows of metrics of a phase, such as ``rl``, from `metrics.jsonl`."""
        rows = jsonl.read_objects(self.path / "metrics.jsonl")
        return [row for row in rows if row.get("phase") == phase]

    def traces(
        self, step: int, phase: str, rows: Iterable[Mapping[str, Any] | str], form: str = "jsonl"
    ) -> None:
        """Appends trajectories to `traces.jsonl`, or writes them as a shard to `traces/`.

        Args:
            step: step to which the trajectories belong.
            phase: phase of the step.
            rows: trajectories as JSON objects, each a mapping or a string. The step and phase are
                added to the `metadata` of each object.
            form: "jsonl" to append to `traces.jsonl`, or one of `trace_shards.SHARD_FORMATS` to
                write a shard.
        """
        if not self.active:
            return

        def lines() -> Iterator[bytes]:
            for row in rows:
                row = dict(json.loads(row) if isinstance(row, str) else row)
                row["metadata"] = {**row.get("metadata", {}), "step": int(step), "phase": phase}
                yield jsonl.dumps(row).encode()

        write_protocols(self.path)
        if form == "jsonl":
            durable.append(self.path / "traces.jsonl", b"".join(line + b"\n" for line in lines()))
        else:
            trace_shards.write_shard(self.path / "traces", form, phase, int(step), lines())

    def rewind(self, phase: str, step: int) -> None:
        """Removes the metrics and traces of `phase` that were written after `step`.

        A killed run may have written rows after its last checkpoint. The run resumes from the step
        of this checkpoint, and writes the rows of the later steps again. Traces may have many
        gigabytes. Therefore rows are read from the end of the file, and only up to the first row
        that stays; this is possible because the steps of a phase ascend.

        Args:
            phase: phase of the rows.
            step: last step to keep; rows of later steps are removed.
        """
        if not self.active:
            return

        def goes(row: Mapping[str, Any]) -> bool | None:
            if row.get("phase") != phase:
                return False
            return True if row["step"] > step else None

        durable.drop_last_rows(self.path / "metrics.jsonl", goes)
        durable.drop_last_rows(
            self.path / "traces.jsonl", lambda row: goes(row.get("metadata", {}))
        )
        trace_shards.rewind_shards(self.path / "traces", phase, step)
        self._events.pop(phase, None)
        self._purge_from[phase] = step + 1

    def summary(self, blocks: Mapping[str, Any], *, anew: bool = False) -> None:
        """Merges blocks (top-level entries) into `summary.json`, and replaces the file atomically.

        If a block is a mapping, its entries are added to the existing block of the same name, so
        that each stage can add its own entries. Any other value replaces the existing block.

        Args:
            blocks: JSON values by name.
            anew: True if mappings replace the existing blocks, instead of being merged with them.
        """
        if not self.active:
            return
        merged = self.blocks()
        for name, block in plain(blocks).items():
            earlier = merged.get(name)
            if not anew and isinstance(block, dict) and isinstance(earlier, dict):
                block = {**earlier, **block}
            merged[name] = block
        self.keep_json("summary.json", merged)

    def blocks(self) -> dict[str, Any]:
        """Returns the content of `summary.json`, whose top-level entries are called blocks.

        The result is {} if there is no file.
        """
        return _read_object(self.path / "summary.json")


def _read_object(path: Path) -> dict[str, Any]:
    return durable.read_json_object(path) if path.exists() else {}


def _open_locked(path: Path) -> int:
    """Creates a directory and locks it; returns the file descriptor of the lock."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "checkpoints").mkdir(exist_ok=True)
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        target = error.filename or path
        raise UserError(f"workdir {path}: cannot write {target}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        advice = "wait for it, stop it or choose another --workdir"
        raise UserError(f"workdir {path}: in use by {holder}; {advice}") from error
    except OSError as error:
        # Some network file systems have no locks. There the user must prevent a second run.
        logging.warning("workdir %s: cannot lock it (%s)", path, error.strerror)
    # The name of the lock's holder only helps the user. If the disk is full, a later write reports
    # it.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _held_locks.add(descriptor)
    return descriptor


def _number(name: str, value: Any) -> float | int:
    """Converts a Python, NumPy or JAX scalar to a number."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"metric {name!r} is a {type(value).__name__}, not a number")
    return value


def _complete(values: dict[str, Any], config: Any) -> dict[str, Any]:
    """Adds the default values of settings that are missing, if ``config`` is a dataclass."""
    if not dataclasses.is_dataclass(config):
        return values
    try:
        return plain(build_config(type(config), values))
    except UserError:  # from a version of the program with other settings
        return values


def read_config_changes(run: Path) -> list[dict[str, Any]]:
    """Reads the changes of settings during a run, from ``config_changes.jsonl``.

    Returns:
        The changes in their order, each with the ``setting``, its ``old`` and ``new`` value and the
        first ``step`` of the new value; [] if no setting changed.
    """
    path = run / CONFIG_CHANGES
    return jsonl.read_objects(path) if path.exists() else []


def _has_files(path: Path) -> bool:
    return path.is_dir() and any(
        child.is_file() and child.name != ".lock" for child in path.rglob("*")
    )


def _remove(path: Path, keep: bool) -> None:
    """Removes what is in a directory, and the directory itself unless ``keep`` is True."""
    for child in path.iterdir():
        if child.is_dir():
            shutil.rmtree(child)
        else:
            child.unlink()
    if not keep:
        path.rmdir()
