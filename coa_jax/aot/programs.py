"""The programs of a configuration, with shapes and shardings in place of arrays.

What is compiled are the functions of `learn.step` and `engine.programs` themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from coa_jax.aot import arrays
from coa_jax.aot.arrays import Setup, chip_bytes
from coa_jax.engine import programs
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.layout import decode_mesh, publish_program
from coa_jax.learn.batch import Batch
from coa_jax.learn.logps import CHUNK
from coa_jax.learn.losses import bind, policy_loss, sft_loss, value_loss
from coa_jax.learn.rl_config import RLConfig
from coa_jax.learn.sft import SFTConfig
from coa_jax.learn.step import TrainState, train_program
from coa_jax.learn.update import critic_optimizer
from coa_jax.model.attention.causal import STAND_IN
from coa_jax.model.attention.choice import Attention, Case, resolve
from coa_jax.model.lora import LoraBase, merge_program


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile.

    Attributes:
        name: such as ``train``.
        lower: makes what XLA compiles.
        runs: how often a step runs it; 0 for programs whose number depends on the data.
        lying: bytes of a chip that other arrays take meanwhile.
        devices: chips that run it together, in its order.
        data_trips: see `costs.count`.
        kernel_flops: of one chip, in kernels for which something stands in.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    runs: float
    lying: int
    devices: Sequence[Any]
    data_trips: tuple[float, ...] = ()
    kernel_flops: float = 0.0


def all_programs(setup: Setup) -> list[Program]:
    """The programs of a step, and those that it may run."""
    training = _training(setup)
    if not isinstance(setup.config, RLConfig):
        return training
    return [*training, *_publish(setup), *_decoding(setup, setup.config.engine)]


# --- training ------------------------------------------------------------------------------


def _training(setup: Setup) -> list[Program]:
    config, mesh = setup.config, setup.mesh
    number = arrays.micro_batches(config)
    updates = 1 if isinstance(config, SFTConfig) else config.updates
    batch = arrays.step_batch(setup, number)
    count, tokens = arrays.array(mesh, (), "int32"), arrays.array(mesh, (), "float32")
    (policy, base), critic = arrays.policy(setup), arrays.critic(setup)

    def program(
        name: str,
        state: TrainState,
        base: LoraBase | None,
        batch: Batch,
        loss_fn: Any,
        optimizer: Any,
    ) -> Program:
        return Program(
            name,
            lambda: train_program.lower(
                state, batch, count, tokens, (), base,
                loss_fn=loss_fn, model=setup.model, optimizer=optimizer,
            ),
            updates,
            arrays.kept_bytes(setup) - chip_bytes((state, base)),
            tuple(mesh.devices.flat),
            (number / updates, -(-config.row_length // _HEAD_POSITIONS)),
            0.0 if setup.where.tpu else number / updates * _attention_flops(setup),
        )  # fmt: skip

    found = [program("train", policy, base, batch, _loss(setup), config.optimizer)]
    if critic is not None:
        assert isinstance(config, RLConfig)
        values = batch._replace(value=batch.logp, returns=batch.logp)
        loss_fn = bind(value_loss, bound=config.chosen.value_clip, **_options(setup))
        found.append(program("critic", critic, None, values, loss_fn, critic_optimizer(config)))
    return found


_HEAD_POSITIONS = CHUNK
"""Positions of a row of which logits exist at a time, in a loop that ends by data."""


def _loss(setup: Setup) -> Any:
    config, options = setup.config, _options(setup)
    if isinstance(config, SFTConfig):
        return bind(sft_loss, **options)
    return bind(policy_loss, algorithm=config.chosen, temperature=config.temperature, **options)


def _options(setup: Setup) -> dict[str, Any]:
    """Of the forward pass."""
    config, model = setup.config, setup.model
    if setup.where.tpu:
        case = Case("tpu", config.dtype, model.num_kv_heads, model.num_groups, model.head_dim)
        name = resolve("causal", config.attention, case, "config.attention")
    else:
        name = STAND_IN
    attention = Attention(name, setup.mesh)
    return {"dtype": config.dtype, "remat": config.remat, "attention": attention}


def _attention_flops(setup: Setup) -> float:
    """Of one chip and micro-batch: forward, again for a backward pass that keeps nothing, backward.

    See `costs` for the kernels: 2 products forward, 7 backward, each of half of ``[T, T]``.
    """
    config, model = setup.config, setup.model
    products = (0 if config.remat == "none" else 2) + 2 + 7
    square = config.rows * float(config.row_length) ** 2
    heads = model.num_layers * model.num_heads * model.head_dim
    return products * square * heads / setup.where.count


# --- publishing and decoding ---------------------------------------------------------------


def _publish(setup: Setup) -> list[Program]:
    """From the training layout to the decoding layout: one engine for each group of chips.

    Adapters are added to a copy of their model before.
    """
    assert isinstance(setup.config, RLConfig)
    params = arrays.parameters(setup)
    mesh = decode_mesh(setup.mesh, setup.engine_chips)
    program = publish_program(setup.model, setup.config.engine.dtype, mesh)
    devices = tuple(mesh.devices.flat)
    policy, base = arrays.policy(setup)
    # Engines have their old parameters until the new ones of all of them are there.
    kept = arrays.kept_bytes(setup)
    if base is None:
        lying = kept - chip_bytes(policy.params)
        return [Program("publish", lambda: program.lower(params), 1, lying, devices)]
    beside = kept - chip_bytes((policy.params, base))
    return [
        Program("merge", lambda: merge_program.lower(base, policy.params), 1, beside, devices),
        Program("publish", lambda: program.lower(params), 1, kept, devices),
    ]


def _decoding(setup: Setup, engine: EngineConfig) -> list[Program]:
    """The largest programs of an engine, on the chips of one."""
    mesh, attention = arrays.engine_mesh(setup), arrays.paged_attention(setup)
    params, layers = arrays.decoding_params(setup), arrays.pages(setup)
    options = {"config": setup.model, "dtype": engine.dtype, "attention": attention}
    kept = arrays.kept_bytes(setup)
    lying = kept - chip_bytes((params, layers))

    def of(*shape: int, dtype: str = "int32") -> Any:
        return arrays.array(mesh, shape, dtype)

    rows, blocks = engine.row_sizes[-1], engine.extend_buckets[-1] // engine.extend_block
    state = programs.DecodeState(
        token=of(rows),
        length=of(rows),
        limit=of(rows),
        active=of(rows, dtype="bool"),
        key=of(rows, 2, dtype="uint32"),
        temperature=of(rows, dtype="float32"),
        top_p=of(rows, dtype="float32"),
        top_k=of(rows),
    )
    block, copies = of(blocks, engine.extend_block), of(min(engine.slots, 8))
    devices, pages = tuple(mesh.devices.flat), engine.pages_per_slot
    return [
        Program(
            "extend",
            lambda: programs.extend.lower(
                params, layers, of(blocks, pages), block, block, **options
            ),
            0,
            lying,
            devices,
            (float(pages),),
        ),
        Program(
            "decode",
            lambda: programs.decode_chunk.lower(
                params, layers, of(rows, pages), state, of(1), of(),
                capacity=max(engine.chunk, 32), **options,
            ),
            0,
            lying,
            devices,
            (float(engine.chunk), float(pages)),
        ),
        Program(
            "fork",
            lambda: programs.copy_pages.lower(layers, copies, copies, attention=attention),
            0,
            kept - chip_bytes(layers),
            devices,
        ),
    ]  # fmt: skip
