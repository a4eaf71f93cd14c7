"""The compiled programs of a configuration, with shapes and shardings instead of arrays.

The programs are the functions of `train.step`, `train.experience` and `engine.programs` themselves,
and their arguments have the same shapes as in `train.update`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from coa_jax.engine import programs
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.layout import decode_mesh, publish_program
from coa_jax.engine.memory import engine_memory
from coa_jax.model.attention.causal import STAND_IN
from coa_jax.model.attention.choice import Case, resolve
from coa_jax.model.compute import Compute, backend_for, collectives_for
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import without_adapters
from coa_jax.train import arrays, experience
from coa_jax.train.arrays import Setup, chip_bytes
from coa_jax.train.batch import Batch
from coa_jax.train.logps import chunked
from coa_jax.train.losses import Loss, PolicyLoss, SFTLoss, ValueLoss
from coa_jax.train.optimizer import make_optimizer, schedule_of
from coa_jax.train.rl_config import RLConfig
from coa_jax.train.step import TrainState, train_program
from coa_jax.train.update import critic_optimizer


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a run that is to be compiled.

    Attributes:
        name: name of the program, such as ``train``.
        lower: function that lowers the program for XLA.
        runs: number of times that the program runs in a step; 0 if the number depends on the data.
        lying: number of bytes of arrays that the program does not use, but that are on a chip while
            the program runs.
        devices: chips that run the program, in the order in which the program numbers its devices.
        data_trips: trip counts of loops whose end depends on data, see `costs.count`.
        kernel_flops: number of FLOPs per chip of GPU attention kernels that the compiled program
            lacks, because the CPU compiler replaces the compiler for GPUs and has no such kernels.
        kernel_bytes: number of bytes per chip of the temporary arrays of these kernels.
        scratch: number of bytes per chip of temporary arrays on the real machine, if the compiler
            cannot report it, because the CPU compiler replaces the compiler for GPUs; None to take
            the reported number.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    runs: float
    lying: int
    devices: Sequence[Any]
    data_trips: tuple[float, ...] = ()
    kernel_flops: float = 0.0
    kernel_bytes: int = 0
    scratch: int | None = None


def all_programs(setup: Setup) -> list[Program]:
    """Returns all programs that a step of the run compiles, with the shapes of their arguments."""
    training = _training(setup)
    if not isinstance(setup.config, RLConfig):
        return training
    decoding = _decoding(setup, setup.config.engine)
    return [*_scoring(setup), *training, *_publish(setup), *decoding]


# --- training ------------------------------------------------------------------------------


def _training(setup: Setup) -> list[Program]:
    """Returns the programs of a step's updates."""
    config, mesh = setup.config, setup.mesh
    number, updates, passes = arrays.micro_batches(config, whole=False), 1, 1
    if isinstance(config, RLConfig):
        updates, passes = config.updates_per_step, config.epochs
    each = passes * arrays.micro_batches(config) / updates
    count, tokens = arrays.array(mesh, (), "int32"), arrays.array(mesh, (), "float32")

    def program(
        name: str, state: TrainState, batch: Batch, allowed: Any, loss: Loss, optimizer: Any
    ) -> Program:
        return Program(
            name,
            functools.partial(
                train_program.lower, state._replace(frozen={}), state.frozen,
                batch, count, tokens, allowed,
                loss=loss, model_config=setup.model, compute=_compute(setup),
                optimizer=make_optimizer(optimizer), learning_rate=schedule_of(optimizer),
            ),
            updates,
            arrays.kept_bytes(setup) - chip_bytes(state),
            tuple(mesh.devices.flat),
            (each, _head_turns(setup)),
            each * _attention_flops(setup),
            _kernel_bytes(setup),
        )  # fmt: skip

    sampled, loss = arrays.policy_batch(setup, number), _loss(setup)
    policy, critic = arrays.policy(setup), arrays.critic(setup)
    step_programs = [program("train", policy, sampled, _allowed(setup), loss, config.optimizer)]
    if critic is not None:
        batch, optimizer = arrays.critic_batch(setup, number), critic_optimizer(setup.rl)
        clip = setup.rl.chosen.value_clip
        step_programs.append(program("critic", critic, batch, None, ValueLoss(clip), optimizer))
    return step_programs


def _scoring(setup: Setup) -> list[Program]:
    """Returns the programs that `train.experience` runs on each micro-batch before the updates."""
    config, policy, critic = setup.rl, arrays.policy(setup), arrays.critic(setup)
    batch, compute = experience.inputs(arrays.sampled_batch(setup)), _compute(setup)

    def program(
        name: str, lower: Callable[[], Any], times: int, params: Any, *turns: float
    ) -> Program:
        return Program(
            name,
            lower,
            times * arrays.micro_batches(config),
            arrays.kept_bytes(setup) - chip_bytes(params),
            tuple(setup.mesh.devices.flat),
            turns,
            _attention_flops(setup, backward=False),
            _kernel_bytes(setup, backward=False),
        )

    def score(name: str, times: int, params: Any, shared: Any, shape: ModelConfig) -> Program:
        lower = functools.partial(
            experience.score.lower, params, batch, _allowed(setup),
            model_config=shape, compute=compute, temperature=config.temperature,
        )  # fmt: skip
        return program(name, lower, times, shared, _head_turns(setup))

    step_programs = []
    if setup.teacher is not None:
        shapes = arrays.teacher(setup)
        step_programs.append(score("score_teacher", 1, shapes, shapes, setup.teacher))
    old = experience.scores_old(config.chosen, config.updates_per_step)
    if policy.frozen and old:
        step_programs.append(
            score("score_adapters", 1, policy.all_params, policy.frozen, setup.model)
        )
        old = False
    if times := old + config.chosen.needs_reference:
        params: Any = policy.base_params if policy.frozen else policy.params
        base = without_adapters(setup.model)
        step_programs.append(score("score", times, params, params, base))
    if critic is not None:
        values = functools.partial(
            experience.score_values.lower,
            critic.params,
            batch,
            model_config=setup.model,
            compute=compute,
        )
        step_programs.append(program("values", values, 1, critic.params))
    return step_programs


def _allowed(setup: Setup) -> Any:
    """Returns the shape of the constraint's table for losses and scores, or None.

    The result is None without a constraint.
    """
    rules = arrays.tables(setup, setup.mesh)
    return None if rules is None else rules.allowed


def _head_turns(setup: Setup) -> int:
    """Returns the number of chunks of the output head.

    The end of the loop over these chunks depends on data (`train.logps`).
    """
    _, positions, chunk = chunked(setup.config.rows, setup.config.row_length, _compute(setup))
    return -(-positions // chunk)


def _loss(setup: Setup) -> Loss:
    config = setup.config
    if isinstance(config, RLConfig):
        return PolicyLoss(config.chosen, config.temperature)
    return SFTLoss()


def _compute(setup: Setup) -> Compute:
    """Returns the dtype, operations and sharding of training."""
    config = setup.config
    return Compute(
        config.dtype,
        config.remat,
        STAND_IN if _stands_in(setup) else _kernel(setup),
        backend_for(setup.platform),
        setup.mesh,
        collectives_for(setup.platform, config.mesh.collectives),
    )


def _stands_in(setup: Setup) -> bool:
    """Returns whether a stand-in replaces the run's attention, which cannot be compiled here.

    The CPU compiler, which compiles for simulated GPUs, has no kernels for GPUs. For models with
    windows there is no such kernel, and the reference is compiled.
    """
    return setup.simulated and setup.model.local is None


def _kernel(setup: Setup) -> str:
    """Returns the name of the attention implementation that the run uses on the slice."""
    config, model = setup.config, setup.model
    case = Case(
        platform=setup.platform,
        dtype=config.dtype,
        num_kv_heads=model.num_kv_heads,
        num_groups=model.num_groups,
        head_dim=model.head_dim,
        capability=setup.where.chip.capability,
        windowed=model.local is not None,
    )
    return resolve("causal", config.attention, case, "config.attention")


def _kernel_bytes(setup: Setup, backward: bool = True) -> int:
    """Returns the bytes per chip of the arrays that a stand-in for a GPU's attention kernel lacks.

    These are arrays that the kernel needs beside its operands. T includes the padding of the
    kernel. See `attention.causal`:

    - ``cudnn`` reads a mask and a bias ``[rows, 1, T, T]``. The backward pass writes a gradient of
      the bias, which JAX always requests.
    - ``pallas_gpu`` reads keys and values ``[rows, T, N * G, K]``, repeated for each query head.
      The backward pass writes gradients of the same shape.
    - ``tokamax`` writes gradients of this shape, and repeats nothing.
    """
    if not _stands_in(setup):
        return 0
    config, model, kernel = setup.config, setup.model, _kernel(setup)
    rows, length = config.rows, arrays.attended(config)
    shape: tuple[int, ...]
    if kernel in ("pallas_gpu", "tokamax"):
        repeated = 2 if kernel == "pallas_gpu" else 0
        length += -length % 128
        shape = (rows, length, model.num_kv_heads, model.num_groups, model.head_dim)
        dtypes = [config.dtype] * (repeated + 2 * backward)
    elif kernel == "cudnn":
        length += length % 2
        shape = (rows, length, length)
        dtypes = ["bool", config.dtype, *[config.dtype] * backward]
    else:
        return 0
    axes = ("batch", None, None if kernel == "cudnn" else "kv_heads")
    return chip_bytes([arrays.array(setup.mesh, shape, dtype, *axes) for dtype in dtypes])


def _attention_flops(setup: Setup, backward: bool = True) -> float:
    """Returns the FLOPs of attention per chip and micro-batch that the compiled program lacks.

    The compiled program lacks them if another implementation replaces the attention kernel. The
    forward pass has 2 matmuls and the backward pass 7, each with half of ``[T, T]``, as in `costs`.
    With rematerialisation the backward pass repeats the forward pass. T includes the copies of
    shared prompts.
    """
    config, model = setup.config, setup.model
    if not _stands_in(setup):
        return 0.0
    products = 2
    if backward:
        products += 7 if config.remat == "none" else 2 + 7
    square = config.rows * float(arrays.attended(config)) ** 2
    heads = model.num_layers * model.num_heads * model.head_dim
    return products * square * heads / setup.mesh.size


# --- publishing and decoding ---------------------------------------------------------------


def _publish(setup: Setup) -> list[Program]:
    """Returns the programs that copy parameters from the training layout to the decoding layout.

    If the engines have separate chips, the copies are then transferred within each host. If
    adapters are trained, the engines keep the other parameters while rollouts go on, or on chips of
    their own, or if they share these parameters with training: then only the adapters are copied.
    """
    mesh = decode_mesh(setup.mesh, setup.engine_chips)
    model, dtype, policy = setup.model, setup.rl.engine.dtype, arrays.policy(setup)
    keeps = bool(setup.aside) or setup.rollouts_continue or arrays.shares_base(setup)
    alone = bool(policy.frozen) and keeps
    params = policy.params if alone else policy.all_params
    program = publish_program(model, dtype, mesh, arrays.engine_compute(setup).kernels, alone)
    lower = functools.partial(program.lower, params)
    lying = arrays.kept_bytes(setup) - chip_bytes(params)
    return [Program("publish", lower, 1, lying, tuple(mesh.devices.flat))]


def _decoding(setup: Setup, engine: EngineConfig) -> list[Program]:
    """Returns the largest programs of one engine."""
    engine = engine.on_platform("tpu" if setup.where.tpu else "gpu")
    mesh, compute = arrays.engine_mesh(setup), arrays.engine_compute(setup)
    params, layers = arrays.decoding_params(setup), arrays.pages(setup)
    options = {"config": setup.model, "compute": compute}
    kept = arrays.decoding_bytes(setup)
    rules = arrays.tables(setup, mesh)
    lying = kept - chip_bytes((params, layers))

    def of(*shape: int, dtype: str = "int32") -> Any:
        return arrays.array(mesh, shape, dtype)

    rows, blocks = engine.row_sizes[-1], engine.extend_buckets[-1] // engine.extend_block
    state = programs.DecodeState(
        token=of(rows),
        length=of(rows),
        limit=of(rows),
        active=of(rows, dtype="bool"),
        key=of(rows, 3),
        temperature=of(rows, dtype="float32"),
        top_p=of(rows, dtype="float32"),
        top_k=of(rows),
        rule=None if rules is None else of(rows),
    )
    block, copies = of(blocks, engine.extend_block), of(min(engine.slots, 8))
    devices, pages = tuple(mesh.devices.flat), engine.pages_per_slot
    # For simulated GPUs the memory is computed here, because the CPU compiler would copy a bfloat16
    # cache to float32 for every write.
    memory = engine_memory(setup.model, engine, setup.engine_chips)
    scratch = memory.scratch if setup.simulated else None
    extend, decode, fork = (
        functools.partial(
            programs.extend.lower, params, layers, of(blocks, pages), block, block, **options
        ),
        functools.partial(
            programs.decode_chunk.lower,
            params, layers, of(rows, pages), state, of(1), of(), rules,
            capacity=max(engine.chunk, 32), **options,
        ),
        functools.partial(programs.copy_pages.lower, layers, copies, copies, compute=compute),
    )  # fmt: skip
    trips = (float(engine.chunk), float(pages))
    engine_programs = [
        Program("extend", extend, 0, lying, devices, trips[1:]),
        Program("decode", decode, 0, lying - chip_bytes(rules), devices, trips),
        Program("fork", fork, 0, kept - chip_bytes(layers), devices),
    ]
    return [dataclasses.replace(program, scratch=scratch) for program in engine_programs]
