"""The life of a server: loading, listening, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
from collections.abc import Iterator

import uvicorn

from coa_jax.engine.engine import Engine
from coa_jax.engine.group import make_engines
from coa_jax.engine.memory import engine_memory
from coa_jax.errors import UserError
from coa_jax.model.api import load_model
from coa_jax.model.tokenizer import eos_ids
from coa_jax.protocol import at_level, get_protocol
from coa_jax.rollout.constrain import constraint_for
from coa_jax.serve.app import make_app
from coa_jax.serve.config import ServeConfig
from coa_jax.serve.service import Service
from coa_jax.tasks.prompts import load_prompt, protocol_of_model
from coa_jax.tools.make import ToolsConfig, make_tools


def listen(config: ServeConfig) -> socket.socket:
    """The socket that clients connect to.

    Raises:
        UserError: the address is not ours, or somebody else has it.
    """
    try:
        family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
        return socket.create_server((config.host, config.port), family=family, backlog=1024)
    except OSError as error:
        raise UserError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; "
            "give another --config.port or --config.host"
        ) from error


def make_service(config: ServeConfig, tools: ToolsConfig) -> Service:
    """Loads the policy, and compiles what it will need."""
    prompt = load_prompt(config.rollout.prompt_style, config.model)
    named = config.protocol or protocol_of_model(config.model) or "generalist"
    config = dataclasses.replace(config, protocol=at_level(named, config.rollout.level))
    rules = get_protocol(config.protocol)
    model = load_model(config.model)
    print(f"engine: {engine_memory(model.config, config.engine)}", flush=True)
    size = model.config.vocab_size
    constraint = constraint_for(config.rollout, model.tokenizer, size, [config.protocol])
    stop = eos_ids(model.tokenizer)
    engines: list[Engine] = make_engines(
        model.params, model.config, config.engine, stop, constraint
    )
    for engine in engines:
        engine.warm_up()
    wanted = tuple(name for name in tools.names if name in rules.tools)
    used = make_tools(dataclasses.replace(tools, names=wanted))
    return Service(model, engines, used, config, prompt)


async def serve(
    service: Service, listener: socket.socket, api_key: str | None, asked: asyncio.Event
) -> None:
    """Serves until the end is asked for, and then until the requests in progress have finished.

    Args:
        service: not entered yet.
        listener: where clients connect.
        api_key: that they have to send; None to serve anybody.
        asked: set by whoever asks for the end.

    Raises:
        Exception: what broke the agent loop down, once the requests in progress have been told.
    """
    config = service.config
    async with service:
        server = _Server(
            uvicorn.Config(
                make_app(service, api_key),
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=30,
                timeout_graceful_shutdown=5,
            )
        )
        running = asyncio.create_task(server.serve([listener]))
        where = "http://{}:{}".format(*listener.getsockname()[:2])
        print(f"serving {config.name} at {where} (OpenAI clients: {where}/v1)", flush=True)
        waiting = asyncio.create_task(asked.wait())
        ends = {running, waiting, service.loop}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if service.busy:
            print(f"finishing requests, for at most {config.shutdown_seconds:g} s", flush=True)
        await service.drain(config.shutdown_seconds)
    # What was in progress has been told that it was cancelled.
    server.should_exit = True
    await running
    await service.loop  # raises, where it broke down


async def serve_until_signal(
    service: Service, listener: socket.socket, api_key: str | None
) -> None:
    """Serves until SIGINT or SIGTERM; the second one ends it at once."""
    asked, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _ask, asked, number)
    await serve(service, listener, api_key, asked)


def _ask(asked: asyncio.Event, number: int) -> None:
    """The first signal asks for the end, the second one takes it."""
    if asked.is_set():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    asked.set()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: `serve` has handlers of its own."""
        yield
