"""A real server of the tiny policy on a local port, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Sequence

import httpx

from coa_jax.engine.config import EngineConfig
from coa_jax.engine.engine import Engine
from coa_jax.model.api import Model
from coa_jax.model.tokenizer import eos_ids
from coa_jax.rollout.request import RolloutConfig
from coa_jax.serve.config import ServeConfig
from coa_jax.serve.run import open_listener, serve
from coa_jax.serve.service import Service
from tests import tiny_policy

BUDGET = RolloutConfig(max_tokens=192, max_tool_calls=3, max_observation_tokens=48)
SHAPES = EngineConfig(slots=4, max_length=256, chunk=4, extend_buckets=(64,))
CONFIG = ServeConfig(
    model="",
    name="tiny",
    host="127.0.0.1",
    port=0,
    api_key_env="",
    protocol=tiny_policy.PROTOCOL,
    max_waiting=100,
    max_samples=8,
    max_body=100_000,
    shutdown_seconds=5.0,
    seed=0,
    engine=SHAPES,
    rollout=BUDGET,
)


@functools.cache
def engine() -> Engine:
    """One for all servers: they run one after another."""
    model = tiny_policy.policy()
    made = Engine(model.params, model.config, SHAPES, eos_ids(model.tokenizer))
    made.warm_up()
    return made


@contextlib.contextmanager
def server(
    config: ServeConfig = CONFIG,
    api_key: str | None = None,
    policy: Model | None = None,
    on: Sequence[Engine] = (),
    services: Sequence[Service] = (),
) -> Iterator[str]:
    """Its address; it ends with the context.  By default it serves the tiny policy."""
    tools = list(tiny_policy.tools().values())
    if not services:
        policy = policy or tiny_policy.policy()
        services = [Service(policy, on or [engine()], tools, config)]
    engines = [engine for service in services for engine in service.engines]
    listener = open_listener(config, api_key)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    loop, asked = asyncio.new_event_loop(), asyncio.Event()
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            loop.run_until_complete(serve(services, listener, api_key, asked))
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(200):
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{address}/health")
                break
            time.sleep(0.05)
        yield address
    finally:
        loop.call_soon_threadsafe(asked.set)
        thread.join(60)
        assert ended == [None]
        assert not any(engine.any_active for engine in engines)


def meter(address: str, name: str) -> float:
    """The value of a meter, whose labels are part of the name; 0 of labels that have none yet.

    Raises:
        KeyError: there is no such meter.
    """
    text = httpx.get(f"{address}/metrics").text
    found = [line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")]
    family, labels, _ = name.partition("{")
    if not found and not (labels and f"# TYPE {family} " in text):
        raise KeyError(name)
    return float(found[0]) if found else 0.0


def until(address: str, name: str, value: float, seconds: float = 10.0) -> float:
    """Seconds until a meter has a value."""
    began = time.monotonic()
    while meter(address, name) != value:
        assert time.monotonic() - began < seconds, f"{name} is {meter(address, name)}"
        time.sleep(0.02)
    return time.monotonic() - began
