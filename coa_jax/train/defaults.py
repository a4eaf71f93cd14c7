"""Chooses the settings that a run leaves to its model, its data and its machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ml_collections import ConfigDict

from coa_jax.config.preflight import used_settings
from coa_jax.engine.config import EngineConfig
from coa_jax.evaluation.config import EvaluateRun
from coa_jax.files import durable
from coa_jax.model.config import ModelConfig, cpu_dtype
from coa_jax.parallel import processes
from coa_jax.rollout.request import RolloutConfig
from coa_jax.run.settings import changes_of, default_values, merged, plain
from coa_jax.tools.make import ToolsConfig
from coa_jax.train.config import DPOConfig, SFTConfig, TrainingConfig
from coa_jax.train.rl_config import RLConfig

if TYPE_CHECKING:
    from coa_jax.parallel.slices import Slice

C = TypeVar("C", bound=TrainingConfig)

_STEPS, _PASSES = 100, 3
"""Number of steps of RL, and of passes over the examples of other runs, without total_steps."""
_RATES = {
    ("rl", False): (1e-6, 1.6e-4),
    ("rl", True): (5e-5, 1e-3),
    ("fit", False): (1e-5, 1e-3),
    ("fit", True): (2e-4, 2e-3),
}
"""Learning rates by (stage, whether adapters are trained), for large models and for the smallest.

Published runs used the rates for the smallest models (docs/experiments.md): with a model of 2
million parameters, and with adapters of a model of 135 million.
"""
_SHARE = {"cpu": 0.7}
"""Share of the free memory that the arrays counted here may take, if it is not 0.85."""
_TOKENS = {"cpu": 4096}
"""Number of tokens of a micro-batch on one device, if it is not 16,384. More are hardly faster."""
_RANK = 32
"""Rank of the adapters that are chosen if memory is too small to train the whole model."""
_KEPT = ("row_length", "rows", "dtype", "remat")
"""Settings that a run which goes on keeps as it chose them when it began."""
_TRAINING = {"mesh": {"fsdp": -1}, "lora": {"rank": -1}}
_OPEN_LENGTH = 2**20
"""Value of ``engine.max_length`` that leaves the length to the longest sample."""
_ROLLOUT = {"prompt_style": "model", "max_tokens": 2048}
"""For a model without ``agent.json``, the prompt has all rules, up to about 1,000 tokens."""
_ENGINE = {"engine": {"slots": 0, "max_length": _OPEN_LENGTH, "dtype": "auto"}}
"""Settings of a config that leaves the sizes to the machine."""
_KINDS = {"sft": SFTConfig, "rl": RLConfig, "evaluate": EvaluateRun}


class Machine(NamedTuple):
    """The devices of a run.

    Attributes:
        platform: ``cpu``, ``tpu`` or ``gpu``.
        devices: number of devices of all processes.
        free: free memory of a device in bytes; the devices of a CPU share the memory of their host.
        local: number of devices of a process; 0 for all devices.
    """

    platform: str
    devices: int
    free: int
    local: int = 0

    @classmethod
    def here(cls) -> Machine:
        """Returns the devices of this process, and of the processes that it trains with.

        All processes of a run must call this method, because they must choose the same settings.
        """
        import jax

        from coa_jax.engine.memory import free_memory

        local = jax.local_devices()
        free = free_memory(local[0]) or 16 * 10**9
        platform = jax.default_backend()
        free //= len(local) if platform == "cpu" else 1
        free = min(processes.all_gather(free, "free memory", 600.0))
        return cls(platform, jax.device_count(), free, len(local))


def with_defaults(stage: str, config: ConfigDict | Mapping[str, Any]) -> ConfigDict:
    """Adds all settings that a config lacks, with their defaults.

    Args:
        stage: ``sft``, ``rl`` or ``evaluate``.
        config: settings of the stage; ``model``, and ``data`` or ``tasks``, have no default.
    """
    values = config.to_dict() if isinstance(config, ConfigDict) else dict(config)
    base = {"model": "", "tools": default_values(ToolsConfig), **default_values(_KINDS[stage])}
    if stage != "sft":
        base |= {"rollout": {**default_values(RolloutConfig), **_ROLLOUT}}
    if stage == "evaluate":
        base |= {"stage": "policy", "engine": default_values(EngineConfig)}
    else:
        base = merged({"data" if stage == "sft" else "tasks": "", **base}, _TRAINING)
    return ConfigDict(merged(merged(base, _ENGINE), values))


def with_adapters(
    config: C, model_config: ModelConfig | None = None, machine: Machine | None = None
) -> C:
    """Chooses ``lora.rank`` if a config leaves it open (-1), and prints a choice of adapters.

    The rank is 32 if memory is too small for the training state of the whole model, otherwise 0.

    Args:
        config: settings of the run.
        model_config: architecture of the model; None to read it from the model's files.
        machine: devices of the run; None for those of this process.
    """
    from coa_jax.model.api import describe_model, download_once  # here, because they load JAX
    from coa_jax.model.params import without_adapters

    if config.lora.rank >= 0:
        return config
    if model_config is None:
        download_once(config.model)
        model_config = describe_model(config.model).config
    machine = machine or Machine.here()
    full = dataclasses.replace(config, lora=dataclasses.replace(config.lora, rank=0))
    _, fsdp, tensor = _axes(config, machine.devices)
    state = _state_bytes(full, without_adapters(model_config)) // (fsdp * tensor)
    usable = _usable(machine)
    if state <= usable:
        return full
    if processes.index() == 0:
        print(
            f"chosen: lora.rank {_RANK}, because the training state of the whole model needs "
            f"{state / 1e9:.1f} GB per device, and {usable / 1e9:.1f} GB are available "
            "(--config.lora.rank=0 trains the whole model)",
            flush=True,
        )
    return dataclasses.replace(config, lora=dataclasses.replace(config.lora, rank=_RANK))


def completed(
    config: C,
    model_config: ModelConfig,
    longest: int,
    examples: int = 0,
    machine: Machine | None = None,
    run: Path | None = None,
    note: bool = True,
) -> C:
    """Replaces the settings that a config leaves open, and prints what was chosen.

    - ``row_length`` becomes ``longest``, rounded up to a multiple of 128 (of 32 on a CPU).
    - ``dtype`` is bfloat16 where the processor multiplies bfloat16. In RL on a CPU, it is float32,
      as ``engine.dtype``.
    - ``remat`` is the fastest of none, dots and full with which a row fits into memory. ``rows`` is
      the number of rows that fit, with at most 4,096 tokens on a CPU and 16,384 on an accelerator.
    - ``mesh.decode_tensor`` is the number of chips that hold a copy of the model for decoding.
    - ``engine.slots`` is the number of samples of a step for each engine, up to 64 on CPUs and 256
      on accelerators. If memory is too small for this many sequences of full length, the slots
      share ``engine.pages``: as many pages as fit. An engine that decodes during updates, or beside
      SFT, takes at most a third of the memory that the training state and the engine's copy of the
      parameters leave.
    - Sizes that the config gives in ``engine`` are upper bounds. They stay unchanged if the config
      gives both ``rows`` and ``engine.slots``; on accelerators, the slots then share pages if
      memory is too small.
    - The learning rate is 1e-6 in RL and 1e-5 otherwise; with adapters 5e-5 and 2e-4. For models
      with less than a billion parameters, it is higher in SFT and RL, see `_learning_rate`.
    - A run of RL has 100 steps; other runs make three passes over their examples.

    Args:
        config: settings of the run.
        model_config: architecture of the model, with the adapters to train (see `with_adapters`).
        longest: number of tokens of the longest sequence.
        examples: number of training examples; 0 in RL, or if it is unknown.
        machine: devices of the run; None for those of this process.
        run: directory of the run. A run that goes on has the sizes and the dtype with which it
            began, because the last bits of an update depend on them.
        note: whether to note in ``run`` what a new run chooses; False in a replay.
    """
    machine = machine or Machine.here()
    rl, optimizer = isinstance(config, RLConfig), config.optimizer
    if optimizer.learning_rate < 0:
        rate = _learning_rate(config, model_config)
        optimizer = dataclasses.replace(optimizer, learning_rate=rate)
    if not optimizer.total_steps:
        steps = (
            _STEPS * config.updates_per_step
            if isinstance(config, RLConfig)
            else -(-_PASSES * examples // config.batch_size)  # type: ignore[attr-defined]
        )
        optimizer = dataclasses.replace(optimizer, total_steps=max(1, steps))
    dtype = config.dtype
    if dtype == "auto":
        dtype = cpu_dtype() if machine.platform == "cpu" else "bfloat16"
        if rl and machine.platform == "cpu":
            dtype = "float32"  # as the engine, so that sampler and trainer hardly differ
    tile = 32 if machine.platform == "cpu" else 128
    chosen = dataclasses.replace(
        config,
        optimizer=optimizer,
        dtype=dtype,
        row_length=config.row_length or -(-longest // tile) * tile,
    )
    chosen = _with_sizes(chosen, model_config, longest, machine)
    if run is not None:
        chosen = _as_begun(chosen, config, machine, run, note)
    used = used_settings(config)
    changes = changes_of(plain(config), plain(chosen))
    changes = [change for change in changes if change[0].split(".")[0] in used]
    if not (rl or examples):
        changes = [change for change in changes if change[0] != "optimizer.total_steps"]
    if changes and processes.index() == 0:
        values = ", ".join(f"{name} {new}" for name, _, new in changes)
        assumed = not (rl or examples or config.row_length)
        data = f" for examples of up to {longest:,} tokens (a run counts them)" if assumed else ""
        print(f"chosen{data}: {values} (--config.NAME=VALUE changes a setting)", flush=True)
    return chosen


def open_sizes(config: SFTConfig, longest: int, examples: int) -> SFTConfig:
    """Replaces the settings that an SFT run leaves open, if it trains a user's own module.

    Args:
        config: settings of the run.
        longest: number of tokens of the longest example.
        examples: number of examples.
    """
    optimizer, length = config.optimizer, config.row_length or -(-longest // 128) * 128
    steps = optimizer.total_steps or max(1, -(-_PASSES * examples // config.batch_size))
    rate = optimizer.learning_rate if optimizer.learning_rate >= 0 else _RATES["fit", False][0]
    return dataclasses.replace(
        config,
        row_length=length,
        rows=config.rows or max(1, min(config.batch_size, _TOKENS["cpu"] // length)),
        optimizer=dataclasses.replace(optimizer, total_steps=steps, learning_rate=rate),
    )


def completed_for(config: C, model_config: ModelConfig, where: Slice, devices: int) -> C:
    """Chooses the open settings of a run for given chips, as `completed` does, without its data.

    Except in RL, the longest example is assumed to have 2,048 tokens.

    Args:
        config: settings of the run.
        model_config: architecture of the model, without adapters.
        where: the chips: a TPU slice, a group of GPUs, or a CPU.
        devices: number of JAX devices of these chips.
    """
    from coa_jax.parallel.slices import default_fraction  # here, because it loads JAX

    longest = config.longest if isinstance(config, RLConfig) else 2048
    platform = "tpu" if where.tpu else "gpu" if where.kind else "cpu"
    free = int(default_fraction(where) * where.chip.hbm_bytes)
    machine = Machine(platform, devices, free, min(devices, where.chip.host))
    config = with_adapters(config, model_config, machine)
    model_config = dataclasses.replace(model_config, lora=config.lora)
    return completed(config, model_config, longest, machine=machine)


def _learning_rate(config: TrainingConfig, model_config: ModelConfig) -> float:
    """Returns the learning rate of a run that gives none.

    In SFT and RL, the rate of a model with less than a billion parameters is inversely proportional
    to their number, up to a maximum: a rate for large models would hardly change a small one.
    """
    from coa_jax.model.params import num_params, without_adapters

    rl = isinstance(config, RLConfig)
    large, most = _RATES["rl" if rl else "fit", model_config.lora.rank > 0]
    if not (rl or isinstance(config, SFTConfig)):
        return large
    rate = min(most, large * max(1.0, 1e9 / num_params(without_adapters(model_config))))
    return float(f"{rate:.1e}")


def _with_sizes(config: C, model_config: ModelConfig, longest: int, machine: Machine) -> C:
    """Chooses engine, rows and rematerialisation by the memory that they need on a device."""
    platform, cpu = machine.platform, machine.platform == "cpu"
    data, fsdp, tensor = _axes(config, machine.devices)
    left = _usable(machine) - _state_bytes(config, model_config) // (fsdp * tensor)
    changes: dict[str, Any] = {}
    if hasattr(config, "engine"):
        changes, reserved = _engine(config, model_config, longest, machine, left)
        left -= reserved
    parts = data * fsdp  # the rows of a micro-batch are split over them
    samples = config.groups * config.group_size if isinstance(config, RLConfig) else 0
    samples = samples or getattr(config, "batch_size", 1)
    policies = ("none", "dots", "full") if config.remat == "auto" else (config.remat,)
    sizes = [(policy, _row_bytes(model_config, config, policy, cpu)) for policy in policies]
    rows = max(1, -(-config.rows // parts))
    changes["remat"], row = next((each for each in sizes if rows * each[1] <= left), sizes[-1])
    if not config.rows:
        most = max(1, _TOKENS.get(platform, 16_384) // config.row_length)
        rows = max(1, min(most, left // row, -(-samples // parts)))
        changes["rows"] = parts << (rows.bit_length() - 1)
    return dataclasses.replace(config, **changes)


def _as_begun(chosen: C, config: C, machine: Machine, run: Path, note: bool) -> C:
    """Keeps what a run chose when it began on as many devices; else notes what it chooses now."""
    rl = isinstance(config, RLConfig)
    stage = "rl" if rl else type(config).__name__.removesuffix("Config").lower()
    where = {"platform": machine.platform, "devices": machine.devices}
    path = run / f"chosen-{stage}.json"
    noted = durable.read_json_object(path) if path.exists() else {}
    if noted.get("machine") != where:
        noted = {"machine": where, "settings": {name: getattr(chosen, name) for name in _KEPT}}
        if note and processes.index() == 0:
            durable.write_json(path, noted)
    began = {name: noted["settings"][name] for name in _KEPT}
    left_open = {name for name in _KEPT if getattr(config, name) != getattr(chosen, name)}
    return dataclasses.replace(chosen, **{name: began[name] for name in left_open})


def _state_bytes(config: TrainingConfig, model_config: ModelConfig) -> int:
    """Returns the bytes of the training state of a run, with the gradients of an update."""
    from coa_jax.model.params import num_params, without_adapters

    bare = num_params(without_adapters(model_config))
    trained = num_params(model_config) - bare if model_config.lora.rank else bare
    # All parameters; gradients and two moments of those that are trained.
    state = (2 if config.loaded_dtype == "bfloat16" else 4) * bare + 12 * trained
    compares = isinstance(config, DPOConfig)
    if isinstance(config, RLConfig):  # a critic is trained like the policy, a reference only read
        compares = config.chosen.needs_reference
        state += 16 * bare * config.chosen.needs_critic
    return state + 4 * bare * (compares and not model_config.lora.rank)


def _usable(machine: Machine) -> int:
    """Returns the bytes of a device that the arrays counted here may take."""
    return int(_SHARE.get(machine.platform, 0.85) * machine.free)


def _engine(
    config: Any, model_config: ModelConfig, longest: int, machine: Machine, left: int
) -> tuple[dict[str, Any], int]:
    """Chooses an engine for the samples of a run and the memory of its devices.

    Args:
        config: settings of a run that has engines.
        model, longest, machine: arguments of `completed`.
        left: bytes on a device that the parameters and their moments leave.

    Returns:
        The settings that are chosen, and the bytes on a device that the engine keeps during
        updates.
    """
    from coa_jax.engine.memory import fit_engine_config
    from coa_jax.model.params import num_params, without_adapters

    platform, mesh = machine.platform, config.mesh
    engine = dataclasses.replace(config.engine, dtype=config.engine.on_platform(platform).dtype)
    if engine.max_length == _OPEN_LENGTH:
        engine = dataclasses.replace(engine, max_length=longest)
    sizes_given = config.rows and engine.slots
    if sizes_given and (engine.pages or platform == "cpu"):
        return {"engine": engine}, 0
    copy = num_params(without_adapters(model_config)) * (2 if engine.dtype == "bfloat16" else 4)
    shared = 0  # bytes of the engine's parameters that are among those of training
    if isinstance(config, RLConfig) and machine.devices == 1:
        shares = dataclasses.replace(config, engine=engine).shares_base(
            model_config, None, platform
        )
        shared = copy if shares else 0
        left += shared
    chips = mesh.decode_tensor
    if not config.rows and not chips and mesh.tensor == 1:
        chips = 1  # as few chips of a process as hold the model beside the rest
        most = math.gcd(machine.local or machine.devices, mesh.rollout_devices)
        while most % (2 * chips) == 0 and 2 * copy // chips > left:
            chips *= 2
        mesh = dataclasses.replace(mesh, decode_tensor=chips if chips > 1 else 0)
    chips = max(chips or mesh.tensor, 1)
    rl, reserved, samples = isinstance(config, RLConfig), 0, 64
    if mesh.rollout_devices:  # they hold two copies while new parameters arrive
        memory = _usable(machine) - copy // chips
    elif rl and not config.max_staleness:  # the engine frees its memory before an update
        memory = left
    else:
        memory = copy // chips + max(left - copy // chips, 0) // 3
        reserved = memory - shared if rl else 0
    if rl:
        engines = max(1, (mesh.rollout_devices or machine.devices) // chips)
        samples = -(-config.groups * config.group_size // engines)
    longest = engine.max_length if sizes_given else longest
    fit = fit_engine_config(engine, model_config, platform, samples, longest, memory, chips)
    fit = dataclasses.replace(engine, pages=fit.pages) if sizes_given else fit
    return {"engine": fit, "mesh": mesh}, reserved


def _axes(config: TrainingConfig, devices: int) -> tuple[int, int, int]:
    """Returns the sizes of the axes data, fsdp and tensor of the mesh of the training devices."""
    mesh = config.mesh
    sizes = [mesh.data, mesh.fsdp, mesh.tensor]
    if -1 in sizes:  # this axis takes the remaining devices
        known = math.prod(size for size in sizes if size > 0)
        sizes[sizes.index(-1)] = max(1, (devices - mesh.rollout_devices) // known)
    data, fsdp, tensor = (max(1, size) for size in sizes)
    return data, fsdp, tensor


def _row_bytes(model_config: ModelConfig, config: TrainingConfig, policy: str, cpu: bool) -> int:
    """Estimates the bytes that a row adds to an update under a rematerialisation policy.

    Each layer keeps what the policy names for the backward pass, and one layer at a time has all of
    its activations and their gradients. XLA on CPUs also keeps the weights of attention. XLA on
    accelerators keeps most results in float32, and those of adapters too: for 7B with adapters, its
    compiler for an H100 takes 28 GB for one row of 1,024 tokens and 43 GB for two, this formula 23
    GB and 47 GB.
    """
    hidden, wide = model_config.hidden_size, model_config.intermediate_size
    heads = (model_config.num_heads + 2 * model_config.num_kv_heads) * model_config.head_dim
    matmuls = (heads + 3 * hidden + 2 * wide) * (2 if model_config.lora.rank else 1)
    whole = matmuls + heads + 2 * hidden + 3 * wide
    whole += model_config.num_heads * config.row_length if cpu else 0
    kept = {"none": whole, "dots": matmuls}.get(policy, hidden)
    item = 2 if cpu and config.dtype != "float32" else 4
    logits = 16 * min(config.row_length, 512) * model_config.vocab_size
    return config.row_length * item * (model_config.num_layers * kept + 3 * whole) + logits
