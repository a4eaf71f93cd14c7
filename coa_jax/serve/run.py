"""Starts a server, lets it serve, and shuts it down gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from coa_jax.engine.config import EngineConfig
from coa_jax.engine.engine import Engine
from coa_jax.engine.group import engines_with_adapters, make_engines
from coa_jax.engine.memory import describe_fit, engine_memory, fit_engine_config, free_memory
from coa_jax.errors import UserError
from coa_jax.model.api import load_model
from coa_jax.model.peft_io import load_adapters
from coa_jax.model.policy import Model
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import at_level
from coa_jax.rollout.constrain import constraint_or_ends
from coa_jax.serve.app import make_app
from coa_jax.serve.config import ServeConfig
from coa_jax.serve.http.guard import check_exposure
from coa_jax.serve.http.refusals import RefusalLog
from coa_jax.serve.http.server import Server, address_of, listen, on_signals
from coa_jax.serve.prometheus import ServerMetrics
from coa_jax.serve.service import Service
from coa_jax.tasks.prompts import load_prompt, protocol_of_model
from coa_jax.tools.make import ToolsConfig, tools_for


def open_listener(config: ServeConfig, api_key: str | None) -> socket.socket:
    """Opens the socket that clients connect to.

    Raises:
        UserError: other machines could connect without a key, or the address cannot be used.
    """
    if not config.allow_no_key:
        key = config.api_key_env or "NAME with --config.api_key_env=NAME"
        mend = f"set the key of clients in the environment variable {key}, listen on 127.0.0.1"
        check_exposure(
            config.host, api_key, f"{mend}, or give --config.allow_no_key=True to serve anybody"
        )
    listener = listen(config.host, config.port, "give another --config.port or --config.host")
    return listener


def make_services(config: ServeConfig, tools: ToolsConfig) -> list[Service]:
    """Loads the policies, compiles the decoding programs, and returns a service for each policy.

    The first service is that of ``config.model``, whose arrays all policies share.

    Args:
        config: settings of the server.
        tools: settings of the tools, which the agents of all policies share.

    Raises:
        UserError: a policy cannot be loaded, an adapter does not fit ``config.model``, or the cards
            of the policies name different protocols.
    """
    # Adapters are small, and an unsuitable one is refused before the base is loaded.
    adapters = {name: load_adapters(at, config.model) for name, at in config.adapters.items()}
    cards = {config.name: config.model} | {name: one.card for name, (one, _) in adapters.items()}
    prompts = {name: load_prompt(config.rollout.prompt_style, of) for name, of in cards.items()}
    protocol = config.protocol or _common_protocol(cards)
    protocol = at_level(protocol, config.rollout.level, config.rollout.format)
    used = tools_for(protocol, tools)  # tools may define the protocol
    base, meters = load_model(config.model), ServerMetrics()
    config = dataclasses.replace(config, engine=_fitted(config.engine, base, len(prompts)))
    services: list[Service] = []
    for name, prompt in prompts.items():
        model, adapter = adapters.get(name, (base, {}))
        about = engine_memory(model.config, config.engine)
        print(f"engine: {about}{', parameters of the base included' * bool(adapter)}", flush=True)
        size, stop = model.config.vocab_size, eos_ids(model.tokenizer)
        constraint = constraint_or_ends(config.rollout, model.tokenizer, size, [protocol])
        engines: list[Engine]
        if adapter:
            params, rest = jax.device_put(adapter), (model.config, stop, constraint)
            engines = engines_with_adapters(services[0].engines, params, *rest)
        else:
            engines = make_engines(base.params, base.config, config.engine, stop, constraint)
            model = base = base.replace(params={})  # the engines have a copy
            gc.collect()  # frees the arrays: a Flax module contains references to itself
        for engine in engines:
            engine.warm_up()
        own = dataclasses.replace(config, name=name, adapters={}, protocol=protocol)
        services.append(Service(model, engines, used, own, prompt, meters=meters))
    return services


def _fitted(engine: EngineConfig, base: Model, policies: int) -> EngineConfig:
    """Fits the slots and pages of each policy's engine to the free memory of the device.

    Args:
        engine: settings of the engine, see `engine.memory.fit_engine_config`.
        base: the loaded model, of which the first engine makes a copy.
        policies: number of policies, which divide the memory equally.
    """
    device = jax.tree.leaves(jax.block_until_ready(base.params))[0].devices().pop()
    free = free_memory(device)
    if free is not None:
        copy = engine_memory(base.config, engine).parameters
        free = copy + max(free - copy, 0) // policies
    # A server does not know how many completions its clients will request at a time.
    samples, longest = sys.maxsize, engine.max_length
    fit = fit_engine_config(engine, base.config, device.platform, samples, longest, free)
    print(f"engine of each policy: {describe_fit(engine, fit)}", flush=True)
    return fit


def _common_protocol(cards: Mapping[str, Any]) -> str:
    """Returns the protocol that the cards of policies name; "generalist" if none does.

    Raises:
        UserError: the cards name different protocols, but the tools of a server have one.
    """
    named = {name: protocol_of_model(card) for name, card in cards.items()}
    protocols = sorted(set(named.values()) - {""})
    if len(protocols) > 1:
        listed = ", ".join(f"{name}: {protocol}" for name, protocol in named.items() if protocol)
        raise UserError(
            f"the policies have different protocols ({listed}), but a server has one: serve the "
            "others apart, or give --config.protocol"
        )
    return protocols[0] if protocols else "generalist"


async def serve(
    services: Sequence[Service],
    listener: socket.socket,
    api_key: str | None,
    asked: asyncio.Event | None = None,
) -> None:
    """Serves until a shutdown is requested, then lets the requests in progress finish.

    Args:
        services: the policies, as services whose contexts have not been entered.
        listener: socket that clients connect to.
        api_key: bearer token that clients must send; None to serve everybody.
        asked: event that requests the shutdown when it is set; None for the event of `on_signals`.

    Raises:
        Exception: the exception that ended a rollout loop. It is raised after the requests in
            progress have been answered.
    """
    config, log = services[0].config, RefusalLog()
    asked = asked or on_signals()
    # The objects that are loaded by now are never freed. Without freezing them, each full garbage
    # collection would traverse them for half a second.
    gc.collect()
    gc.freeze()
    async with contextlib.AsyncExitStack() as entered:
        for service in services:
            await entered.enter_async_context(service)
        server = Server(make_app(services, api_key, log), config.limits, log)
        running = asyncio.create_task(server.serve([listener]))
        url = address_of(listener)
        names = ", ".join(service.config.name for service in services)
        print(f"serving {names} at {url} (OpenAI clients: {url}/v1)", flush=True)
        waiting = asyncio.create_task(asked.wait())
        ends = {running, waiting, *(service.loop for service in services)}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if any(service.busy for service in services):
            print(f"finishing requests, for at most {config.shutdown_seconds:g} s", flush=True)
        await asyncio.gather(*(service.drain(config.shutdown_seconds) for service in services))
    # By now the services have cancelled the requests in progress and told them so.
    server.should_exit = True
    await running
    for service in services:
        await service.loop  # raises the exception that ended the loop
