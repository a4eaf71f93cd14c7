"""Describes the arrays that a run has on its chips, as shapes and shardings without data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from coa_jax.engine.constraint import ConstraintTables
from coa_jax.engine.layout import (
    abstract_pages,
    decode_mesh,
    groups_of,
    kernels_for,
    paged_case,
    publish_program,
    rollout_mesh,
)
from coa_jax.engine.memory import describe_waves, engine_memory
from coa_jax.errors import UserError
from coa_jax.model.architectures import architecture_of
from coa_jax.model.attention.causal import Unfolded
from coa_jax.model.attention.choice import resolve
from coa_jax.model.cache import LayerPages
from coa_jax.model.compute import Compute, backend_for
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import (
    DecodeParams,
    Params,
    abstract_params,
    decode_shardings,
    unstack,
    without_adapters,
)
from coa_jax.model.tokenizer import load_tokenizer
from coa_jax.parallel.mesh import AXES, make_mesh, sharding_for
from coa_jax.parallel.placement import split_devices
from coa_jax.parallel.slices import Slice, owners_of
from coa_jax.protocol import at_level, get_protocol
from coa_jax.protocol.grammar import compile_protocol
from coa_jax.rollout.constrain import constraint_for
from coa_jax.tasks.mixture import load_parts
from coa_jax.train.batch import Batch
from coa_jax.train.config import DPOConfig, FitConfig
from coa_jax.train.experience import scores_old
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.step import TrainState, run_state
from coa_jax.train.update import critic_run_state


@dataclasses.dataclass(frozen=True)
class Setup:
    """A configuration of a run, placed on a slice (a set of connected chips).

    Attributes:
        config: settings of the run.
        model: architecture of the model, including the adapters to train.
        where: the slice on which the configuration is placed.
        mesh: training mesh, which consists of the chips that train.
        engine_chips: number of chips of one engine; 0 without engines.
        aside: chips that are reserved for rollouts; () if the chips of the mesh also run the
            rollouts.
        rules: shapes of the tables that say which tokens the policy may write, for a run with
            ``rollout.constrain``; None for other runs. See `ConstraintTables`.
        unknown: one line of text that says which sizes of these tables are unknown; "" if none is.
        teacher: architecture of the local teacher of on-policy distillation; None without a local
            teacher.
        hosts: number of hosts of the slice.
        simulated: whether CPU devices stand for GPUs, see `slices.devices_of`.
    """

    config: FitConfig | RLConfig
    model: ModelConfig
    where: Slice
    mesh: Mesh
    engine_chips: int
    aside: tuple[Any, ...] = ()
    rules: ConstraintTables | None = None
    unknown: str = ""
    teacher: ModelConfig | None = None
    hosts: int = 1
    simulated: bool = False

    @property
    def rl(self) -> RLConfig:
        """The settings of the run, which must be a run of RL."""
        assert isinstance(self.config, RLConfig)
        return self.config

    @property
    def platform(self) -> str:
        """Platform for which a real run compiles its programs: ``tpu`` or ``cuda``."""
        return "tpu" if self.where.tpu else "cuda"

    @property
    def rollouts_continue(self) -> bool:
        """Whether rollouts continue during updates on the same chips that train."""
        stale = isinstance(self.config, RLConfig) and self.config.max_staleness > 0
        return stale and not self.aside


def set_up(
    config: FitConfig | RLConfig, model_config: ModelConfig, where: Slice, devices: Sequence[Any]
) -> Setup:
    """Places a configuration on a slice, to compute the memory of a run without starting it.

    On a slice of a single host, the mesh may use only some of the chips. All results then refer to
    the chips of the mesh.

    Args:
        config: settings of the run.
        model_config: architecture of the model, without adapters.
        where: the slice on which the configuration is placed.
        devices: devices of the slice, see `slices.devices_of`.

    Raises:
        UserError: the mesh does not fit the slice, an engine would span hosts, or the protocols of
            the tasks are unknown although ``rollout.constrain`` is set.
    """
    sizes, owners = config.mesh, owners_of(where, devices)
    training, aside = split_devices(devices, sizes.rollout_devices, owners)
    hosts, host = len(set(owners)), owners.count(owners[0])
    simulated = not where.tpu and devices[0].platform == "cpu"
    model_config = dataclasses.replace(model_config, lora=config.lora)
    mesh = make_mesh(sizes.data, sizes.fsdp, sizes.tensor, training, hosts)
    if not isinstance(config, RLConfig):
        if aside:
            raise UserError("mesh.rollout_devices is set, and SFT has no rollouts: give 0")
        return Setup(config, model_config, where, mesh, 0, hosts=hosts, simulated=simulated)
    chips = sizes.decode_tensor or mesh.shape["tensor"]
    decode_mesh(mesh, chips)
    if aside:
        rollout_mesh(aside, chips, host - sizes.rollout_devices, sizes.rollout_devices)
    # Simulated devices do not have a host of their own.
    elif not where.tpu and hosts > 1 and host % chips:
        raise UserError(
            f"{chips} chips that decode together span hosts of --topology={where.name}: set "
            f"mesh.decode_tensor to a divisor of the {host} chips of a host"
        )
    teacher = None
    if config.chosen.opd_coef and not config.teacher.url:
        _, teacher = architecture_of(config.teacher.model)
    tables = abstract_tables(config, model_config)
    return Setup(
        config, model_config, where, mesh, chips, tuple(aside), *tables, teacher, hosts, simulated
    )


def micro_batches(config: FitConfig | RLConfig, whole: bool = True) -> int:
    """Returns the number of micro-batches, if every sequence fills a row.

    Args:
        config: settings of the run.
        whole: True to count the micro-batches of a whole step; False to count those of the largest
            update in a step.
    """
    if not isinstance(config, RLConfig):
        return -(-config.batch_size // config.rows)
    groups = config.groups if whole else config.groups_per_update
    return -(-groups * config.group_size // config.rows)


def attended(config: FitConfig | RLConfig) -> int:
    """Returns the number of positions of a row inside attention.

    A row stores a shared prompt only once, but inside attention the row has one copy of the prompt
    for each sequence.
    """
    unfolded = config.attention_length if isinstance(config, RLConfig) else 0
    return unfolded or config.row_length


def array(
    mesh: Mesh, shape: tuple[int, ...], dtype: Any, *axes: str | None
) -> jax.ShapeDtypeStruct:
    """Returns the shape and sharding of an array that is sharded by the rules for training.

    Args:
        mesh: training mesh.
        shape: shape of the whole array.
        dtype: dtype of the array.
        *axes: logical axes of the array.
    """
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_for(mesh, axes, shape=shape))


def chip_bytes(tree: Any) -> int:
    """Returns the number of bytes that the sharded arrays of a tree take on one chip."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


# --- training ------------------------------------------------------------------------------


def parameters(setup: Setup) -> Params:
    """Returns the shapes and shardings of the model's training parameters, without adapters."""
    return abstract_params(without_adapters(setup.model), setup.mesh)


def policy(setup: Setup) -> TrainState:
    """Returns the shapes and shardings of the policy's parameters and optimiser state."""
    state = _own_policy(setup)
    if not shares_base(setup):
        return state
    model, kernels = without_adapters(setup.model), engine_compute(setup).kernels
    shapes = jax.eval_shape(lambda params: unstack(params, model, kernels), state.frozen)
    return state._replace(frozen=_placed(shapes, decode_shardings(model, setup.mesh, kernels)))


def _own_policy(setup: Setup) -> TrainState:
    """Returns the result of `policy` for a run whose engines have a copy of the parameters."""
    config = setup.config
    return run_state(setup.model, config.optimizer, setup.mesh, config.loaded_dtype)


def shares_base(setup: Setup) -> bool:
    """Returns whether the engines of a run use the frozen arrays of training."""
    if not isinstance(setup.config, RLConfig):
        return False
    platform = "tpu" if setup.where.tpu else "gpu"
    return setup.config.shares_base(setup.model, setup.mesh, platform)


def _placed(shapes: Any, places: Any) -> Any:
    """Adds shardings to a tree of shapes."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        places,
    )


def critic(setup: Setup) -> TrainState | None:
    """Returns the shapes and shardings of the critic's training state; None without a critic."""
    if not isinstance(setup.config, RLConfig):
        return None
    return critic_run_state(setup.config, setup.model, setup.mesh)


def teacher(setup: Setup) -> Params:
    """Returns the shapes and shardings of the local teacher's parameters."""
    assert setup.teacher is not None
    params = abstract_params(setup.teacher, setup.mesh)
    return jax.tree.map(lambda x: x.update(dtype=setup.config.dtype), params)


def training_bytes(setup: Setup) -> int:
    """Returns the number of bytes per chip of all arrays that training keeps between steps."""
    config, kept = setup.config, chip_bytes((policy(setup), critic(setup)))
    if setup.teacher is not None:
        kept += chip_bytes(teacher(setup))
    # The frozen parameters of adapters are the reference of DPO and of a KL penalty.
    compares = isinstance(config, DPOConfig) or (
        isinstance(config, RLConfig) and config.chosen.needs_reference
    )
    if compares and not setup.model.lora.rank:
        kept += chip_bytes(parameters(setup))
    return kept


def resume_bytes(setup: Setup) -> int:
    """Returns the number of bytes per chip that a run takes while it reads its checkpoint.

    The result is `training_bytes` plus a copy of the largest array, because the run computes a
    fingerprint of each array and copies one array at a time for this.
    """
    saved = policy(setup)._replace(frozen={})
    return training_bytes(setup) + max(map(chip_bytes, jax.tree.leaves(saved)))


def export_bytes(setup: Setup) -> int:
    """Returns the number of bytes per chip that a run takes while it exports its model at the end.

    With several hosts, the result includes the largest tensor, because every chip gathers one whole
    tensor at a time. The parameters of stacked layers are gathered layer by layer. If adapters are
    trained, three copies of one layer are included: the layer itself, the layer in float32, and the
    sum of that copy and the adapters. Parameters that the engines share are stacked over layers for
    the export, one array after the other, so the largest array of all layers is included.
    """
    merged = largest = 0
    if setup.model.lora.rank:
        frozen = _own_policy(setup).frozen
        assert isinstance(frozen, dict)
        layers = chip_bytes(frozen["layers"]) // setup.model.num_layers
        if shares_base(setup):
            largest = max(map(chip_bytes, jax.tree.leaves(frozen["layers"])))
        items = [jnp.dtype(x).itemsize for x in (setup.config.loaded_dtype, "float32")]
        merged = layers // items[0] * (items[0] + 2 * items[1])
    if setup.hosts > 1:
        layers = setup.model.num_layers
        for path, x in jax.tree_util.tree_leaves_with_path(parameters(setup)):
            parts = layers if "layers" in jax.tree_util.keystr(path) else 1
            largest = max(largest, x.size // parts * x.dtype.itemsize)
    return kept_bytes(setup) + merged + largest


def sampled_batch(setup: Setup, *stack: int) -> Batch:
    """Returns the shapes of the rows that `train.batch.pack` and `train.objectives.weigh` create.

    Args:
        setup: the configuration on a slice.
        *stack: number of micro-batches in a stack; no argument for a single micro-batch.
    """
    config = setup.config

    def of(kind: str, length: int = config.row_length) -> Any:
        shape = (*stack, config.rows, length)
        return array(setup.mesh, shape, kind, *(None for _ in stack), "batch", None)

    ids, numbers = of("int32"), of("float32")
    batch = Batch(ids, ids, ids, numbers, numbers, numbers)
    if not isinstance(config, RLConfig):
        return batch
    if length := config.attention_length:
        wide = of("int32", length)
        batch = batch._replace(unfolded=Unfolded(wide, wide, ids))
    return batch._replace(
        rule=None if setup.rules is None else ids,
        weight=numbers,
        copies=numbers,
        age=ids if config.max_staleness else None,
    )


def policy_batch(setup: Setup, number: int) -> Batch:
    """Returns the shapes of the stacked micro-batches of the policy's update in `train.update`.

    Args:
        setup: the configuration on a slice.
        number: number of micro-batches in the stack.
    """
    batch, config = sampled_batch(setup, number), setup.config
    if not isinstance(config, RLConfig):
        return batch
    return batch._replace(
        old_logp=batch.logp if scores_old(config.chosen, config.updates_per_step) else None,
        ref_logp=batch.logp if config.chosen.needs_reference else None,
    )


def critic_batch(setup: Setup, number: int) -> Batch:
    """Returns the shapes of ``number`` stacked micro-batches of the critic's update."""
    batch = sampled_batch(setup, number)
    return batch._replace(rule=None, weight=None, age=None, value=batch.logp, returns=batch.logp)


# --- an engine -----------------------------------------------------------------------------


def engine_mesh(setup: Setup) -> Mesh:
    """Returns the mesh of the chips of one engine (the first); all engines have the same shapes."""
    chips = setup.engine_chips
    if setup.aside:
        group = np.array(setup.aside[:chips], object)
    else:
        group = groups_of(decode_mesh(setup.mesh, chips), chips)[0]
    return Mesh(group.reshape(1, 1, -1), AXES, axis_types=(AxisType.Auto,) * 3)


def engine_compute(setup: Setup) -> Compute:
    """Returns the `Compute` settings with which an engine runs the model on its chips.

    The settings are those of `engine.layout.engine_compute`, except that they always select the
    reference implementation of attention (``xla``) for simulated GPUs.
    """
    engine, tpu = setup.rl.engine, setup.where.tpu
    platform = "cpu" if setup.simulated else setup.platform
    case = paged_case(
        setup.model, engine, setup.engine_chips, platform, setup.where.chip.capability
    )
    attention = "xla" if setup.simulated else engine.attention
    return Compute(
        engine.dtype,
        attention=resolve("paged", attention, case, "engine.attention"),
        backend=backend_for(setup.platform),
        mesh=engine_mesh(setup),
        collectives="none",
        kernels=kernels_for("tpu" if tpu else "cuda"),
    )


def decoding_params(setup: Setup) -> DecodeParams:
    """Returns the shapes and shardings of an engine's parameters, in the layout for decoding."""
    model, dtype, kernels = setup.model, setup.rl.engine.dtype, engine_compute(setup).kernels
    places = decode_shardings(model, engine_mesh(setup), kernels)
    program = publish_program(model, dtype, None, kernels)
    shapes = jax.eval_shape(program, abstract_params(model, setup.mesh))
    return _placed(shapes, places)


def pages(setup: Setup) -> tuple[LayerPages, ...]:
    """Returns the shapes and shardings of an engine's KV cache, see `engine.layout.new_pages`."""
    return abstract_pages(setup.model, setup.rl.engine, engine_compute(setup))


def tables(setup: Setup, mesh: Mesh) -> ConstraintTables | None:
    """Returns the shapes of the run's `ConstraintTables`; None without ``rollout.constrain``.

    The tables, which say which tokens the policy may write, are replicated on every chip of a mesh.
    """
    return jax.tree.map(lambda x: array(mesh, x.shape, x.dtype), setup.rules)


def abstract_tables(
    config: RLConfig, model_config: ModelConfig
) -> tuple[ConstraintTables | None, str]:
    """Computes the shapes of the tables that say which tokens the policy of a run may write.

    Args:
        config: settings of the run.
        model_config: architecture of the model.

    Returns:
        The shapes of `ConstraintTables` (None without ``rollout.constrain``), and one line of text
        that says which sizes are unknown because the tokenizer is missing ("" if all are known).

    Raises:
        UserError: the protocols of the tasks are unknown.
    """
    if not config.rollout.constrain:
        return None, ""
    protocols = _protocols(config)
    try:
        tokenizer = load_tokenizer(config.model)
    except UserError as error:
        # All sizes follow from the protocols and the size of the vocabulary, except for the number
        # of kinds of tokens, which depends on the tokenizer's vocabulary.
        automata = (compile_protocol(get_protocol(name)) for name in sorted(protocols))
        states = 1 + sum(len(automaton.transitions) for automaton in automata)
        shapes: Any = (
            jax.ShapeDtypeStruct((states, -(-model_config.vocab_size // 32)), "uint32"),
            jax.ShapeDtypeStruct((states, 1), "int32"),
            jax.ShapeDtypeStruct((model_config.vocab_size,), "int32"),
            jax.ShapeDtypeStruct((states,), "bool"),
        )
        return ConstraintTables(*shapes), (
            f"constraint: its tables need {4 * states} bytes for each kind of token, and are "
            f"counted with one kind, because the tokenizer is missing ({error})"
        )
    made = constraint_for(config.rollout, tokenizer, model_config.vocab_size, protocols)
    assert made is not None
    return jax.eval_shape(lambda: made.tables), ""


def _protocols(config: RLConfig) -> set[str]:
    """Returns the protocols of the tasks.

    If the tasks cannot be loaded, the result is the protocol that the setting ``tasks`` names.
    """
    try:
        parts = load_parts(config, "train", config.num_tasks, config.seed)
    except UserError as error:
        name = config.tasks.partition(":protocol=")[2]
        if not name:
            raise UserError(
                f"rollout.constrain is set, and the protocols of the tasks are not known: {error}; "
                "name one in tasks, as in PATH:protocol=web"
            ) from error
        protocols = {name}
    else:
        protocols = {task.protocol for tasks in parts.values() for task in tasks}
    return {at_level(name, config.rollout.level, config.rollout.format) for name in protocols}


def engine_bytes(setup: Setup) -> int:
    """Returns the number of bytes per chip of an engine's parameters, KV cache and tables.

    Parameters that the engine shares with training are not included.
    """
    if not isinstance(setup.config, RLConfig):
        return 0
    params, rules = decoding_params(setup), tables(setup, engine_mesh(setup))
    own = params.adapters() if shares_base(setup) else params
    return chip_bytes((own, pages(setup), rules))


def kept_bytes(setup: Setup) -> int:
    """Returns the number of bytes per training chip of all arrays that a run keeps in an update.

    To add the memory of a compiled program, first subtract the arrays that are its arguments, which
    the result contains already. Engines on the training chips are included only if rollouts
    continue during updates; otherwise the engines have freed their memory.
    """
    kept = training_bytes(setup)
    return kept + (engine_bytes(setup) if setup.rollouts_continue else 0)


def rollout_waves(setup: Setup, spare: int) -> str:
    """Describes in how many turns (waves) the engines sample the sequences of an RL step.

    In a wave, each slot of the engines samples one sequence. If there are several waves, the result
    names settings with which one wave suffices.

    Args:
        setup: configuration on a slice.
        spare: number of bytes per chip that nothing else needs.
    """
    assert isinstance(setup.config, RLConfig)
    config, engine = setup.config, setup.config.engine
    engines = (len(setup.aside) or setup.mesh.size) // setup.engine_chips
    samples = config.groups * config.group_size
    text = describe_waves(samples, engines * engine.slots, engines)
    page = engine_memory(setup.model, engine, setup.engine_chips).page
    slots, pages = -(-samples // engines), engine.num_pages + max(spare, 0) // page
    if slots > engine.slots and pages < slots * engine.pages_per_slot:
        text += f" with engine.pages={pages}"
    return f"{text}; memory holds {engines * (pages // engine.pages_per_slot):,} of full length"


def decoding_bytes(setup: Setup) -> int:
    """Returns the number of bytes per chip of all arrays that a run keeps while it decodes.

    If rollouts continue during updates, or have chips of their own, the result includes a second
    copy of the engine's trained parameters, which exists while their new values arrive.
    """
    kept = 0 if setup.aside else training_bytes(setup)
    if setup.aside or setup.rollouts_continue:
        changing = decoding_params(setup)
        kept += chip_bytes(changing.adapters() if setup.model.lora.rank else changing)
    return kept + engine_bytes(setup)
