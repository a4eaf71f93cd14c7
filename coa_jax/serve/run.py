"""Starts a server, lets it serve, and shuts it down gracefully."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import socket

from coa_jax.engine.engine import Engine
from coa_jax.engine.group import make_engines
from coa_jax.engine.memory import engine_memory
from coa_jax.model.api import load_model
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import at_level
from coa_jax.rollout.constrain import constraint_or_ends
from coa_jax.serve.app import make_app
from coa_jax.serve.config import ServeConfig
from coa_jax.serve.http.guard import check_exposure
from coa_jax.serve.http.refusals import RefusalLog
from coa_jax.serve.http.server import Server, address_of, listen, on_signals
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


def make_service(config: ServeConfig, tools: ToolsConfig) -> Service:
    """Loads the policy, compiles the decoding programs, and returns the service that uses them.

    Args:
        config: settings of the server.
        tools: settings of the agent's tools.
    """
    prompt = load_prompt(config.rollout.prompt_style, config.model)
    named = config.protocol or protocol_of_model(config.model) or "generalist"
    named = at_level(named, config.rollout.level, config.rollout.format)
    config = dataclasses.replace(config, protocol=named)
    used = tools_for(config.protocol, tools)  # tools may define the protocol
    model = load_model(config.model)
    print(f"engine: {engine_memory(model.config, config.engine)}", flush=True)
    size = model.config.vocab_size
    constraint = constraint_or_ends(config.rollout, model.tokenizer, size, [config.protocol])
    stop = eos_ids(model.tokenizer)
    engines: list[Engine] = make_engines(
        model.params, model.config, config.engine, stop, constraint
    )
    for engine in engines:
        engine.warm_up()
    return Service(model, engines, used, config, prompt)


async def serve(
    service: Service,
    listener: socket.socket,
    api_key: str | None,
    asked: asyncio.Event | None = None,
) -> None:
    """Serves until a shutdown is requested, then lets the requests in progress finish.

    Args:
        service: a service whose context has not been entered.
        listener: socket that clients connect to.
        api_key: bearer token that clients must send; None to serve everybody.
        asked: event that requests the shutdown when it is set; None for the event of `on_signals`.

    Raises:
        Exception: the exception that ended the rollout loop. It is raised after the requests in
            progress have been answered.
    """
    config, log = service.config, RefusalLog()
    asked = asked or on_signals()
    # The objects that are loaded by now are never freed. Without freezing them, each full garbage
    # collection would traverse them for half a second.
    gc.collect()
    gc.freeze()
    async with service:
        server = Server(make_app(service, api_key, log), config.limits, log)
        running = asyncio.create_task(server.serve([listener]))
        url = address_of(listener)
        print(f"serving {config.name} at {url} (OpenAI clients: {url}/v1)", flush=True)
        waiting = asyncio.create_task(asked.wait())
        ends = {running, waiting, service.loop}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if service.busy:
            print(f"finishing requests, for at most {config.shutdown_seconds:g} s", flush=True)
        await service.drain(config.shutdown_seconds)
    # By now the service has cancelled the requests in progress and told them so.
    server.should_exit = True
    await running
    await service.loop  # raises the exception that ended the loop
