"""What chat and text completions have in common: admission, collection and streams."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse

from coa_jax.engine.config import SamplingParams
from coa_jax.serve.answers import Choice
from coa_jax.serve.errors import error_body
from coa_jax.serve.samples import Event, Visit
from coa_jax.serve.schema import Sampling
from coa_jax.serve.service import Refused, Service
from coa_jax.tasks import Task

T = TypeVar("T")


def make_visit(
    service: Service,
    body: Sampling,
    prompt: Sequence[int],
    max_tokens: int | None,
    *,
    question: str = "",
    agent: bool = False,
) -> Visit:
    """The request of a client, as the agent loop has it.

    Raises:
        Refused: it asks for more than the server has.
    """
    config = service.config
    room = config.engine.max_length - len(prompt)
    if agent:
        room = min(config.rollout.max_tokens, config.engine.max_length) - len(prompt)
    if not prompt:
        raise Refused(400, "the prompt is empty")
    if room < 1:
        raise Refused(
            400, f"the prompt has {len(prompt)} tokens; this model's context has room for "
            f"{len(prompt) + room}, one of them for the completion"
        )  # fmt: skip
    if max_tokens is not None and max_tokens > room:
        raise Refused(
            400, f"max_tokens is {max_tokens}; the prompt has {len(prompt)} tokens and leaves "
            f"room for {room}", "max_tokens"
        )  # fmt: skip
    samples = body.n or 1
    if samples > config.max_samples:
        raise Refused(400, f"n is {samples}; this server allows {config.max_samples}", "n")
    top_k = body.top_k or 0
    return Visit(
        task=Task(f"request-{secrets.token_hex(8)}", question, config.protocol, (), "serve"),
        prompt=tuple(prompt),
        seed=config.seed if body.seed is None else body.seed,
        # Requests with a seed come out the same again; others differ from each other.
        prompt_id=secrets.randbelow(2**31) if body.seed is None else 0,
        samples=tuple(range(samples)),
        sampling=SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(top_k, 0),
        ),
        max_tokens=len(prompt) + (room if max_tokens is None else max_tokens),
        agent=agent,
        stops=body.stops,
        keep_stop=body.include_stop_str_in_output,
    )


async def gather(service: Service, visit: Visit, request: Request) -> list[Choice]:
    """All samples of a request, unless its client goes away before.

    Raises:
        Refused: the server is full, or about to end.
        ClientGone: nobody is there to read the answer.
    """
    choices = [Choice() for _ in visit.samples]

    async def collect() -> list[Choice]:
        async for event in service.events(visit):
            choices[event.sample].add(event)
        if any(choice.last is None or choice.last.finish == "cancelled" for choice in choices):
            raise Refused(503, "the server is shutting down")
        return choices

    return await while_connected(request, collect())


class ClientGone(Exception):
    """The client has closed its connection."""


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of some work, which is cancelled once the client goes away."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.1)


async def open_stream(
    service: Service,
    visit: Visit,
    request: Request,
    write: Callable[[AsyncIterator[Event]], AsyncIterator[Any]],
) -> StreamingResponse:
    """Server-sent events of a request; what refuses it is still an ordinary answer.

    Args:
        service: the server.
        visit: the request, as the agent loop has it.
        request: the request, as the client has sent it.
        write: makes the chunks out of the events.

    Raises:
        Refused: the server is full, or about to end.
        ClientGone: nobody has waited for the first event.
    """
    events = service.events(visit)
    first = await while_connected(request, anext(events))

    async def chunks() -> AsyncGenerator[str, None]:
        try:
            async for chunk in write(_chain(first, events)):
                yield f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"
        except Refused as error:  # the engine ended meanwhile
            yield f"data: {json.dumps(error_body(error.status, error.message))}\n\n"
        finally:
            await events.aclose()
        yield "data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(chunks(), media_type="text/event-stream", headers=headers)


async def _chain(first: Event, rest: AsyncIterator[Event]) -> AsyncIterator[Event]:
    yield first
    async for event in rest:
        yield event


def head(kind: str, service: Service, model: str) -> dict[str, Any]:
    """The fields that every answer begins with."""
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def check_model(service: Service, model: str, *, agents: bool) -> bool:
    """Whether a request asks for the agent.

    Raises:
        Refused: there is no such model.
    """
    name = service.config.name
    if model == name:
        return False
    if agents and model == f"{name}-agent":
        return True
    known = f"{name} and {name}-agent" if agents else name
    raise Refused(404, f"there is no model {model!r} here, but {known}", "model")
