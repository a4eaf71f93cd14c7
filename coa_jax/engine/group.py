"""Creates the engines of a process: one or more for each group of its devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from coa_jax.engine import layout
from coa_jax.engine.config import EngineConfig
from coa_jax.engine.constraint import Constraint
from coa_jax.engine.engine import Engine, check_shapes
from coa_jax.engine.memory import check_room
from coa_jax.model.config import ModelConfig
from coa_jax.model.params import Adapted, DecodeParams, Params, select


def make_engines(
    params: Params | Adapted,
    model_config: ModelConfig,
    config: EngineConfig,
    stop_tokens: Sequence[int] = (),
    constraint: Constraint | None = None,
    tensor: int = 0,
    aside: Sequence[jax.Device] = (),
) -> list[Engine]:
    """Creates engines for each device group of this process, in the order of the groups.

    A device group is a set of devices over which one engine shards the model.

    Args:
        params: training parameters, on one device or a mesh; their base may be shared, see
            `layout.shares_base`.
        model, stop_tokens, constraint: arguments of `Engine`.
        config: settings of all engines of one device group together.
        tensor: number of devices of a device group; 0 for the number of devices over which training
            shards a layer.
        aside: devices of all processes that are reserved for rollouts; () decodes on the devices of
            the parameters.

    Raises:
        UserError: the engines do not fit, or the devices cannot be grouped, see `Engine` and
            `layout.run_groups`.
    """
    platform = jax.default_backend()
    resolved = config.on_platform(platform)
    check_shapes(resolved)
    config = dataclasses.replace(config, dtype=resolved.dtype)
    groups = layout.run_groups(layout.mesh_of(params), tensor, aside)
    places = layout.places_of(model_config, groups) if groups is not None and aside else []
    size = 1 if groups is None else layout.tensor_size(groups)
    check_room(params, model_config, config, size, places)
    devices = jax.tree.leaves(params)[0].sharding.addressable_devices
    # Several CPU devices are simulated and already share the cores.
    count = config.num_engines(platform) if len(devices) == 1 else config.engines or 1
    config = config.share(count)
    parts = layout.publish(params, model_config, config, size)
    parts = layout.copy_to_devices(parts, places) if places else parts
    return [
        Engine(part, model_config, config, stop_tokens, constraint)
        for part in parts
        for _ in range(count)
    ]


def parameter_copies(engines: Sequence[Engine]) -> list[DecodeParams]:
    """Returns the parameters that engines from `make_engines` use, one copy per device group."""
    return list({id(engine.params): engine.params for engine in engines}.values())


def install_copies(engines: Sequence[Engine], parts: Sequence[DecodeParams]) -> None:
    """Replaces the parameters of engines from `make_engines`, given one copy per device group.

    Args:
        engines: engines from `make_engines`.
        parts: copies from `parameter_copies`, `new_copies` or `layout.publish`, in the order of the
        groups.
    """
    count, rest = divmod(len(engines), len(parts))
    if rest:
        raise ValueError(f"{len(parts)} copies for {len(engines)} engines")
    for index, engine in enumerate(engines):
        engine.publish(parts[index // count])


def engines_sharing_parameters(
    engines: Sequence[Engine],
    parts: Sequence[DecodeParams],
    slots: int = 0,
    *,
    whole: bool = False,
) -> list[Engine]:
    """Creates further engines that share parameters with given engines, but not the cache.

    Args:
        engines: engines from `make_engines`; they may be decoding.
        parts: parameters in the layout for decoding, one copy per device group, see
        `install_copies`.
        slots: number of slots of all new engines together; 0 for the number of slots of the given
            engines.
        whole: whether every slot of the new engines has pages of its own. If False, their slots
            share pages if those of the given engines do (`EngineConfig.pages`).

    Raises:
        UserError: there is no memory for another cache.
    """
    each = -(-slots // len(engines)) if slots else 0
    count = len(engines) // len(parts)

    def config(base: EngineConfig) -> EngineConfig:
        pages = 0 if whole else base.pages
        return dataclasses.replace(base, slots=each or base.slots, pages=pages)

    return [
        Engine(
            parts[index // count],
            engine.model,
            config(engine.config),
            engine.stop_tokens,
            engine.constraint,
        )
        for index, engine in enumerate(engines)
    ]


def engines_with_adapters(
    engines: Sequence[Engine],
    adapters: Params,
    model_config: ModelConfig,
    stop_tokens: Sequence[int] = (),
    constraint: Constraint | None = None,
) -> list[Engine]:
    """Creates further engines whose policy is an adapter over the base of given engines.

    The new engines share the arrays of the base, and have the same shapes and a cache of their own.

    Args:
        engines: engines from `make_engines`, of a model without adapters; they may be decoding.
        adapters: training parameters of the adapters, on one device or on the mesh of the base.
        model_config: the architecture, with the adapters.
        stop_tokens, constraint: arguments of `Engine`.

    Raises:
        UserError: there is no memory for another cache.
    """
    first, bases = engines[0], parameter_copies(engines)
    parts = layout.publish(adapters, model_config, first.config, _group_size(first))
    parts = [base.with_adapters(part) for base, part in zip(bases, parts, strict=True)]
    count = len(engines) // len(parts)
    return [
        Engine(parts[index // count], model_config, engine.config, stop_tokens, constraint)
        for index, engine in enumerate(engines)
    ]


def publish_all(engines: Sequence[Engine], params: Params | Adapted) -> None:
    """Gives new training parameters to all engines from `make_engines`.

    - If only adapters are trained, engines keep the other parameters and get new adapters. After
      `free_engine_memory`, they get a new copy of the other parameters, unless these are shared.
    - Otherwise, engines on devices that do not train keep the old parameters until the new copy is
      complete, and may decode until then. On devices that also train, the old copy is deleted
      first, because the two copies might not fit in memory together.
    """
    if on_separate_devices(engines, params) or _keeps_base(engines):
        install_copies(engines, new_copies(engines, params))
        return
    first, tensor = engines[0], _group_size(engines[0])
    for engine in engines:
        engine.params = DecodeParams({}, ())
    install_copies(engines, layout.publish(params, first.model, first.config, tensor))


def free_engine_memory(engines: Sequence[Engine]) -> None:
    """Frees the memory of engines on their devices until the next `publish_all`.

    In the meantime, an update can use this memory. No slot of the engines may be in use.
    """
    places = {
        id(params): jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
        )
        for params in parameter_copies(engines)
    }
    for engine in engines:
        engine.free_memory(places[id(engine.params)])


def on_separate_devices(engines: Sequence[Engine], params: Params | Adapted) -> bool:
    """Returns whether the engines decode on other devices than those that hold ``params``.

    ``params`` are the training parameters.
    """
    decoding, training = (jax.tree.leaves(x)[0].sharding for x in (engines[0].params, params))
    return not decoding.device_set & training.device_set


def new_copies(engines: Sequence[Engine], params: Params | Adapted) -> list[DecodeParams]:
    """Copies new training parameters to the devices of the engines, for `install_copies`.

    The engines keep their old parameters, and may be decoding at the same time. Until
    `install_copies` is called, their devices hold both copies. If only adapters are trained, only
    the adapters are held twice. If the engines run on devices of their own, the function waits
    until the new copies are complete.
    """
    first = engines[0]
    if isinstance(params, Adapted):
        return layout.publish(params, first.model, first.config, _group_size(first))
    old, adapted = parameter_copies(engines), _keeps_base(engines)
    published = select(first.model, params, adapter=True) if adapted else params
    parts = layout.publish(published, first.model, first.config, _group_size(first))
    if on_separate_devices(engines, params):
        replaced = [part.adapters() if adapted else part for part in old]
        places = [jax.tree.map(lambda x: x.sharding, part) for part in replaced]
        parts = jax.block_until_ready(layout.copy_to_devices(parts, places))
    if adapted:
        parts = [one.with_adapters(new) for one, new in zip(old, parts, strict=True)]
    return parts


def _keeps_base(engines: Sequence[Engine]) -> bool:
    """Returns whether the engines hold parameters that no update changes."""
    arrays = all(isinstance(x, jax.Array) for x in jax.tree.leaves(parameter_copies(engines)))
    return arrays and engines[0].model.lora.rank > 0


def _group_size(engine: Engine) -> int:
    return len(jax.tree.leaves(engine.params)[0].sharding.device_set)
