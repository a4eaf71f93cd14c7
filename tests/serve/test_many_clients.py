"""Many clients at a time."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time

import httpx
import psutil
import pytest

from tests import tiny_policy
from tests.serve.live import CONFIG, meter, server, until

CLIENTS = 64


@dataclasses.dataclass
class Client:
    """What one of many clients has seen."""

    finished: int = 0
    slowest: float = 0.0


async def stream(http: httpx.AsyncClient, address: str, number: int, turn: int) -> None:
    """One streamed answer, read to its end; every third is an agent's."""
    agent = number % 3 == 0
    question = tiny_policy.TASKS[(number + turn) % 3].question
    ask = {
        "model": "tiny-agent" if agent else "tiny",
        "messages": [{"role": "user", "content": question}],
        "stream": True,
        "temperature": 1.0,
        **({} if agent else {"max_tokens": 20 + number % 40}),
    }
    ends = []
    async with http.stream("POST", f"{address}/v1/chat/completions", json=ask) as answer:
        assert answer.status_code == 200
        lines = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    for line in lines:
        ends += [choice["finish_reason"] for choice in json.loads(line)["choices"]]
    assert ends[-1] in ("stop", "length")
    assert not any(ends[:-1])


async def crowd(address: str, seconds: float, clients: list[Client]) -> list[int]:
    """Clients that ask one thing after another for a while; resident bytes by the second."""
    end, memory, process = time.monotonic() + seconds, [], psutil.Process()

    async def client(number: int) -> None:
        async with httpx.AsyncClient(timeout=120) as http:
            turn = 0
            while not turn or time.monotonic() < end:
                began = time.monotonic()
                await stream(http, address, number, turn)
                turn += 1
                clients[number].finished = turn
                clients[number].slowest = max(clients[number].slowest, time.monotonic() - began)

    async def watch() -> None:
        while time.monotonic() < end:
            memory.append(process.memory_info().rss)
            await asyncio.sleep(1.0)

    await asyncio.gather(watch(), *(client(number) for number in range(CLIENTS)))
    return memory


def run(seconds: float) -> tuple[list[Client], list[int]]:
    clients = [Client() for _ in range(CLIENTS)]
    with server(dataclasses.replace(CONFIG, max_waiting=CLIENTS)) as address:
        memory = asyncio.run(crowd(address, seconds, clients))
        until(address, "coa_jax_running", 0.0)
        asked = sum(client.finished for client in clients)
        assert meter(address, "coa_jax_request_seconds_count") == asked
    return clients, memory


@pytest.mark.slow
def test_sixty_four_streams_at_a_time_all_come_to_their_ends():
    clients, _ = run(2.0)
    assert min(client.finished for client in clients) >= 1


@pytest.mark.slow
def test_ten_minutes_of_sixty_four_streams_leak_nothing_and_starve_nobody():
    clients, memory = run(600.0)
    finished = sorted(client.finished for client in clients)
    settled = memory[len(memory) // 10]
    print(f"answers {sum(finished)}, by client {finished[0]} to {finished[-1]}, slowest "
          f"{max(c.slowest for c in clients):.1f} s, memory {settled} to {memory[-1]}")  # fmt: skip
    assert max(memory[len(memory) // 10 :]) < 1.05 * settled
    # Whose answers are long gets fewer of them; nobody waits for several rounds of the others.
    assert finished[0] > finished[-1] / 3
