"""Checks everything that a command needs, without running the command: the flag ``--check``.

    coa-jax rl --config=configs/rl/web.py:7b --workdir=... --check

Each host of the run checks the settings, installed packages, API keys, model, data, tools, judge,
work directory, disk and memory. It prints one line for each check, and continues after a check that
fails. ``--check=compile`` also compiles the programs of the run. The exit code is 2 if a check
fails on any host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from absl import flags

from coa_jax import storage
from coa_jax.cli.needs import needs_of, settings_of, worst_case
from coa_jax.config.installed import has_extra, install_hint
from coa_jax.config.preflight import (
    SECONDS,
    Check,
    Needs,
    preflight,
    settings_probes,
    used_settings,
)
from coa_jax.data.records import iterate_records
from coa_jax.engine.memory import free_memory
from coa_jax.errors import UserError
from coa_jax.evaluation.config import EvaluateRun
from coa_jax.evaluation.run import load
from coa_jax.files.untrusted import made_by
from coa_jax.model.api import describe_model, download_once
from coa_jax.model.architectures import architecture_of
from coa_jax.model.config import ModelConfig
from coa_jax.parallel import processes
from coa_jax.parallel.chips import CHIPS, KINDS, Chip
from coa_jax.parallel.slices import TPUS, Slice, default_fraction, devices_of, parse_slice
from coa_jax.rollout.environments.base import EnvironmentConfig, tags_of
from coa_jax.run.settings import plain
from coa_jax.tasks import Graders
from coa_jax.tasks.checks import check_tools
from coa_jax.tools.make import make_tools
from coa_jax.train import arrays
from coa_jax.train.config import DPOConfig, FitConfig, RFTConfig, SFTConfig
from coa_jax.train.defaults import completed_for
from coa_jax.train.rl_config import RLConfig, RLRun
from coa_jax.train.training_tasks import load_training_tasks

_RECORDS = 1000
"""Number of records that the check reads from each file of training data."""

_RESERVE = 0.1
"""Share of a chip's memory that must stay free, as in `coa-jax aot`."""

_WAIT_S = 60.0


def check(command: str) -> int:
    """Checks whether everything that a command needs with the given flags is available.

    Args:
        command: name of the command: ``sft``, ``rl``, ``rft`` (rejection-sampling fine-tuning),
            ``dpo`` or ``evaluate``.

    Returns:
        The exit code: 0 if every check passes on every host, otherwise 2.
    """
    values = flags.FLAGS
    failures = 0
    if values.topology:  # before anything uses JAX; the check of the mesh reports an error
        with contextlib.suppress(UserError):
            devices_of(parse_slice(values.topology))
    for each in _checks(command, values.config.to_dict(), values.workdir or ""):
        failures += not each.ok
        host = f"{socket.gethostname()} ({processes.index()}): " if processes.count() > 1 else ""
        print(f"{host}{'ok  ' if each.ok else 'FAIL'} {each.name}: {each.text}", flush=True)
    counts = processes.all_gather(failures, "the check of the other hosts", _WAIT_S)
    if not any(counts):
        print("ready", flush=True)
        return 0
    faults = [f"{count} on host {number}" for number, count in enumerate(counts) if count]
    listed = f": {', '.join(faults)}" if processes.count() > 1 else ""
    print(f"error: {sum(counts)} checks failed{listed}; see the lines with FAIL", file=sys.stderr)
    return 2


def _checks(command: str, values: dict[str, Any], workdir: str) -> Iterator[Check]:
    """Yields the result of each check and continues after a failed check."""
    config, result = _run_check("settings", lambda: (settings_of(command, values), "can be read"))
    yield result
    # A group that is wrong, such as a missing judge, must hide no other fault.
    groups = iter(values if config is None else ())
    while config is None and (left_out := next(groups, None)) is not None:
        with contextlib.suppress(UserError):
            rest = {name: value for name, value in values.items() if name != left_out}
            config = settings_of(command, rest)
    if config is not None:
        wandb = bool(getattr(flags.FLAGS, "wandb_project", ""))  # `evaluate` has no such flag
        yield from _check_host(needs_of(config, wandb, workdir))
        yield from _run(config)
    yield from _places(workdir, config)
    if config is not None:
        yield Check("cost", True, worst_case(config))


def _run_check(
    name: str, function: Callable[[], tuple[Any, str]], together: bool = False
) -> tuple[Any, Check]:
    """Runs a check; returns the object that the check opened (None if it fails) and the result.

    A check may fail on one host only. The process therefore acts alone unless ``together`` is True:
    processes that loaded a data set together would wait for the failed one.
    """
    try:
        with contextlib.nullcontext() if together else processes.as_single_process():
            opened, text = function()
        return opened, Check(name, True, text)
    except Exception as error:  # a defect in one check must not hide the other checks
        return None, Check.failed(name, error)


def _check_host(needs: Needs) -> Iterator[Check]:
    """Checks the installed packages, the keys and the addresses of servers."""
    for extra in needs.extras:
        there = has_extra(extra)
        text = "installed" if there else f"not installed; run: {install_hint(extra)}"
        yield Check(f"packages of {extra}", there, text)
    for name in needs.variables:
        there = bool(os.environ.get(name, "").strip())
        yield Check(f"key {name}", there, "is set" if there else f"is not set: --secret-env {name}")
    for setting, url in needs.servers.items():
        if processes.count() > 1 and urllib.parse.urlsplit(url).hostname in _LOCAL:
            count = processes.count()
            text = f"{url} is a different server on each of the {count} hosts"
            yield Check(f"config.{setting}", False, f"{text}: name a server that all can reach")


_LOCAL = ("localhost", "127.0.0.1", "0.0.0.0", "::1")
"""Host names that refer to the machine itself, and so to a different machine on each host."""


# --- the run -------------------------------------------------------------------------------


def _run(config: Any) -> Iterator[Check]:
    """Checks the model, data, tools and judge by opening each of them as the run would."""
    used = used_settings(config)
    if not used.get("endpoint"):
        yield _run_check("model", lambda: (None, _model(config.model)), together=True)[1]
    for name in ("data", "validation"):
        for path in filter(None, used.get(name, "").split(",")):
            yield _run_check(name, functools.partial(_records, path, config.protocol))[1]
    if isinstance(config, RFTConfig | DPOConfig) and config.traces:
        yield _run_check("traces", lambda: (None, _traces(config.traces)))[1]
    tools, environment = used.get("tools"), used.get("environment", EnvironmentConfig())
    tags = _run_check("tools", lambda: (tags_of(environment), ""))[0] or {}
    made = Check("tools", True, "")
    if tools:  # before the tasks, which may name a protocol that the tools create
        made = _run_check("tools", lambda: (make_tools(tools, tags), ""))[1]
    tasks, result = _run_check("tasks", lambda: _tasks(config))
    if result.text:
        yield result

    def ask() -> tuple[list[Check], str]:
        probes = settings_probes(used, tasks=tasks or (), made=False)
        if tools:
            both = {*tools.tags, *tags}
            probes["tools.names"] = lambda _: check_tools(tasks or (), tools.names, both)
        return preflight(probes, getattr(config, "probe_s", 0.0) or SECONDS), ""

    checks, result = _run_check("servers", ask)
    yield from checks or ()
    if not result.ok:
        yield result
    if not made.ok and all(each.ok for each in checks or ()):
        yield made


def _model(path: str) -> str:
    download_once(path)
    model = describe_model(path)
    layers, width = model.config.num_layers, model.config.hidden_size
    return f"{path}: {model.config.architecture}, {layers} layers of {width}"


def _records(path: str, protocol: str) -> tuple[None, str]:
    read = list(itertools.islice(iterate_records(path, protocol), _RECORDS))
    fit = sum(hasattr(each, "record") for each in read)
    if not fit:
        raise UserError(f"{path}: none of the first {len(read)} records can be read")
    return None, f"{path}: {fit} of the first {len(read)} records can be read"


def _traces(address: str) -> str:
    there = storage.exists(address) if storage.is_url(address) else Path(address).exists()
    if not there:
        raise UserError(f"{address} does not exist{made_by(address)}")
    return address


def _tasks(config: Any) -> tuple[Any, str]:
    """Loads the tasks of the run, and checks that they can be graded on this host."""
    if isinstance(config, RLRun):
        parts, *_ = load_training_tasks(config)
        tasks = [task for each in parts.values() for task in each]
    elif isinstance(config, EvaluateRun):
        tasks = load(config)
        Graders(config.graders).check(tasks)
    else:
        return None, ""
    return tasks, f"{len(tasks)} can be read and graded"


# --- the machines --------------------------------------------------------------------------


def _places(workdir: str, config: Any) -> Iterator[Check]:
    """Checks work directory, disk and memory."""
    yield _run_check("workdir", lambda: (None, _writable(workdir)), together=True)[1]
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    # JAX also writes to stores that this package does not open.
    if cache and ("://" not in cache or cache.partition("://")[0] in storage.SCHEMES):
        yield _run_check("compiled programs", lambda: (None, _written(cache)))[1]
    if not isinstance(config, FitConfig | RLRun):
        return
    setup, result = _run_check("mesh", lambda: _setup(config))
    yield result
    if setup is None:
        return
    yield _run_check("memory", lambda: (None, _memory(setup)))[1]
    if isinstance(setup.config, RLConfig):
        yield _run_check("rollouts", lambda: (None, _rollouts(setup)))[1]
    if not storage.is_url(workdir):
        yield _run_check("disk", lambda: (None, _disk(Path(workdir), setup)))[1]
    if flags.FLAGS.check == "compile" and processes.index() == 0:
        yield _run_check("programs", lambda: (None, _compiled(setup)))[1]


def _written(address: str) -> str:
    """Checks that a folder or bucket can be written: writes and removes a file."""
    if storage.is_url(address):
        storage.check_writable(address)
        return f"{address} can be written"
    folder = Path(address)
    probe = folder / f".check-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from error
    return f"{folder} can be written"


def _writable(address: str) -> str:
    """Checks that the work directory can be written, and that all hosts share it."""
    if storage.is_url(address):
        return _written(address)
    text, fault, workdir = "", None, Path(address)
    mine = workdir / f".check-of-{processes.index()}"
    try:
        text = _written(address)
        mine.write_bytes(b"")
    except (UserError, OSError) as error:
        fault = error
    processes.barrier("the check of the work directory", _WAIT_S)
    others = [n for n in range(processes.count()) if not (workdir / f".check-of-{n}").exists()]
    processes.barrier("the end of the check of the work directory", _WAIT_S)
    with contextlib.suppress(OSError):
        mine.unlink()
    if fault is not None:
        raise fault
    if others:
        raise UserError(
            f"{workdir} is not shared: host {processes.index()} does not see what host {others[0]} "
            "writes there; name a directory that all hosts mount"
        )
    return text


def _slice_here() -> tuple[Slice, list[Any]]:
    """Returns the devices of this run as a slice, with the memory that the run may allocate."""
    devices, local = jax.devices(), jax.local_devices()
    kind = KINDS.get(devices[0].device_kind, "")
    listed = CHIPS.get(kind, Chip(1.0, 0, 1.0, 1.0))
    stats = None if local[0].platform == "cpu" else local[0].memory_stats()
    memory = (stats or {}).get("bytes_limit") or listed.hbm_bytes // listed.devices
    if local[0].platform == "cpu":  # all CPU devices share the memory of the host
        every = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory = (free_memory(local[0]) or every) // len(local)
    chip = dataclasses.replace(
        listed, hbm_bytes=memory * listed.devices, host=max(1, len(local) // listed.devices)
    )
    shape: tuple[int, ...] = (len(devices) // listed.devices,)
    name = f"gpu:{shape[0] // chip.host}x{chip.host}x{kind}" if kind else devices[0].device_kind
    if kind in TPUS:
        places = [device.coords for device in devices]
        shape = tuple(max(axis) - min(axis) + 1 for axis in zip(*places, strict=True))
        shape = shape if kind in ("v4", "v5p", "v7x") else shape[:2]
        name = f"{kind}:{'x'.join(map(str, shape))}"
    return Slice(name, kind, shape, chip), devices


def _setup(config: FitConfig | RLRun) -> tuple[arrays.Setup, str]:
    """Places the run on its devices or on those of ``--topology``; also describes them in words."""
    if topology := flags.FLAGS.topology:
        chips = parse_slice(topology)
        devices = devices_of(chips)
    else:
        chips, devices = _slice_here()
    try:
        model: ModelConfig = describe_model(config.model).config
    except UserError:  # the check "model" reports the error; here an architecture suffices
        _, model = architecture_of(config.model)
    config = completed_for(config, model, chips, len(devices))
    setup = arrays.set_up(config, model, chips, devices)
    shape = " x ".join(f"{name} {size}" for name, size in setup.mesh.shape.items())
    return setup, f"{len(devices)} devices of {chips.name}: {shape}"


def _rollouts(setup: arrays.Setup) -> str:
    """Describes the waves of a step, with half of the memory that no persistent array needs."""
    most = (1 - _RESERVE) * _usable(setup)
    return arrays.rollout_waves(setup, int(most - _persistent(setup)) // 2)


def _usable(setup: arrays.Setup) -> int:
    """Returns the bytes of a device that JAX lets the run use."""
    share = default_fraction(setup.where) if flags.FLAGS.topology else 1.0  # else already counted
    return int(share * setup.where.chip.hbm_bytes)


def _persistent(setup: arrays.Setup) -> int:
    """Returns the bytes per chip of the persistent arrays and the gradients of an update."""
    gradients = arrays.chip_bytes(arrays.policy(setup).params)
    return max(arrays.kept_bytes(setup) + gradients, arrays.decoding_bytes(setup))


def _memory(setup: arrays.Setup) -> str:
    """Checks that the persistent arrays and the gradients of an update fit into memory.

    Running programs need additional memory, which only the compiler knows.
    """
    persistent, most = _persistent(setup), _usable(setup)
    text = f"at least {persistent / 1e9:.1f} of {most / 1e9:.1f} GB per device that JAX may use"
    if persistent > (1 - _RESERVE) * most:
        adapters = "" if setup.model.lora.rank else "train adapters (lora.rank=32), "
        raise UserError(
            f"{text}, of which {_RESERVE:.0%} must stay free: {adapters}take more chips, raise "
            "mesh.fsdp or mesh.tensor, or lower engine.slots"
        )
    return f"{text}; --check=compile shows what programs need in addition"


def _disk(workdir: Path, setup: arrays.Setup) -> str:
    """Checks that the disk of the work directory has space for the checkpoints and the model."""
    state, config = arrays.policy(setup), setup.config
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    model = sum(math.prod(x.shape) * 2 for x in jax.tree.leaves(arrays.parameters(setup)))
    count = config.keep_last + 1 + bool(config.keep_best)
    needed = count * size + model
    target = workdir.absolute()
    folder = next(path for path in (target, *target.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    text = f"{needed / 1e9:.1f} GB for {count} checkpoints and the model, {free / 1e9:.1f} GB free"
    if free < needed:
        raise UserError(f"{text} in {folder}: free some space, or lower keep_last")
    return text


def _compiled(setup: arrays.Setup) -> str:
    """Compiles the programs with `perf.aot` in a process without a chip; returns its result."""
    chips = setup.where
    if not isinstance(setup.config, SFTConfig | RLRun):
        return "not compiled: coa-jax aot compiles the programs of sft and rl only"
    if not chips.kind:
        return f"not compiled: coa-jax aot does not know the device {chips.name!r}"
    values = plain(setup.config)  # with what the run has chosen
    program = "import json\nfrom ml_collections import ConfigDict\n\n\ndef get_config():\n"
    program += f"    return ConfigDict(json.loads({json.dumps(values)!r}))\n"
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("COA_JAX_")
    }
    # Modules beside the user's config file must be found there, too.
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "settings.py"
        file.write_text(program, encoding="utf-8")
        command = [sys.executable, "-m", "coa_jax.perf.aot", f"--topology={chips.name}"]
        command.append(f"--config={file}")
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode:
        raise UserError(last.removeprefix("error: "))
    result = json.loads(done.stdout.strip().splitlines()[-1])
    peak = result["peak_bytes_per_chip"] / 1e9
    return f"compile for {chips.name}; peak {peak:.1f} GB per chip, {result['free_share']:.0%} free"
