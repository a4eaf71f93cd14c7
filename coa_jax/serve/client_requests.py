"""Parses, admits and answers requests: what chat and text completions have in common."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from coa_jax.engine.config import SamplingParams
from coa_jax.model.tokenizer import encode_plain
from coa_jax.serve.answers import Choice, usage
from coa_jax.serve.errors import ShuttingDown, error_body
from coa_jax.serve.http.bodies import parse_json, validated
from coa_jax.serve.http.errors import Refused
from coa_jax.serve.http.guard import body_of, while_connected
from coa_jax.serve.samples import Event, ServedRequest
from coa_jax.serve.schema import Sampling
from coa_jax.serve.service import Service
from coa_jax.tasks import Task

_PIECE = 1 << 14
B = TypeVar("B", bound=Sampling)


async def read_request(service: Service, request: Request, kind: type[B]) -> B:
    """Parses and validates the body of a client's request, in a thread.

    The caller must be inside the context of `Service.reading`.

    Args:
        service: the service that samples completions.
        request: the HTTP request of the client.
        kind: schema of the body.

    Raises:
        Refused: the body does not match the schema.
    """
    length, samples = service.config.engine.max_length, service.config.max_samples
    # Each token id of a prompt is a JSON value. Each message is a JSON object and has at least five
    # tokens.
    values, containers = 1000 + (samples + 1) * length, 1000 + length
    body = body_of(request.scope)
    return await service.read(lambda: validated(kind, parse_json(body, values, containers)))


def check_length(tokenizer: Any, texts: Sequence[str], limit: int, param: str) -> None:
    """Refuses a prompt with far too many tokens before all of its text is tokenised.

    The function tokenises pieces of the text until there are too many tokens. Each cut between two
    pieces may change the tokens of a word, so the count is approximate. Therefore the function
    refuses only prompts with more than twice the limit.

    Args:
        tokenizer: tokenizer of the model.
        texts: parts of the prompt.
        limit: maximum number of tokens of the prompt.
        param: name of the request's field with the prompt, used in the error message.

    Raises:
        Refused: the prompt has more than about twice ``limit`` tokens.
    """
    if sum(map(len, texts)) <= max(_PIECE, 2 * limit) and len(texts) <= limit:
        return
    counted = len(texts)
    for text in texts:
        for start in range(0, len(text), _PIECE):
            if counted > 2 * limit + _PIECE:
                break
            counted += len(encode_plain(tokenizer, text[start : start + _PIECE]))
    if counted > 2 * limit + _PIECE or len(texts) > limit:
        context = f"this model's context has room for {limit}"
        raise Refused(400, f"the prompt has more than {limit} tokens; {context}", param)


def make_served_request(
    service: Service,
    body: Sampling,
    prompt: Sequence[int],
    max_tokens: int | None,
    *,
    question: str | None = None,
    calls: bool = False,
) -> ServedRequest:
    """Converts the body of a client's request into a request for the rollout loop.

    Args:
        service: the service that samples completions.
        body: validated body of the client's request.
        prompt: token ids of the prompt.
        max_tokens: maximum number of tokens of a completion; None for as many tokens as the context
            holds after the prompt.
        question: question of the task if the agent (the policy with the server's tools) answers;
            None for a plain completion.
        calls: whether a completion may call functions of the client.

    Raises:
        Refused: the request exceeds a limit of the server.
    """
    config, agent = service.config, question is not None
    length = config.engine.max_length
    if agent:
        length = min(config.rollout.max_tokens, length)
    free = length - len(prompt)
    if not prompt:
        raise Refused(400, "the prompt is empty")
    if free < 1:
        raise Refused(
            400, f"the prompt has {len(prompt)} tokens; this model's context has room for "
            f"{length}, one of them for the completion"
        )  # fmt: skip
    if max_tokens is not None and max_tokens > free:
        raise Refused(
            400, f"max_tokens is {max_tokens}; the prompt has {len(prompt)} tokens and leaves "
            f"room for {free}", "max_tokens"
        )  # fmt: skip
    samples = body.n or 1
    if samples > config.max_samples:
        raise Refused(400, f"n is {samples}; this server allows {config.max_samples}", "n")
    return ServedRequest(
        task=Task(f"request-{secrets.token_hex(8)}", question or "", config.protocol, (), "serve"),
        prompt=tuple(prompt),
        seed=config.seed if body.seed is None else body.seed,
        # Requests with the same seed are reproducible; requests without a seed differ from each
        # other.
        prompt_id=secrets.randbelow(2**31) if body.seed is None else 0,
        samples=tuple(range(samples)),
        sampling=SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=max(body.top_k or 0, 0),
        ),
        max_tokens=len(prompt) + (free if max_tokens is None else max_tokens),
        agent=agent,
        calls=calls,
        stops=body.stop,
        keep_stop=body.include_stop_str_in_output,
    )


async def gather_completions(service: Service, served: ServedRequest) -> list[Choice]:
    """Runs a request and returns all its completions when they are finished.

    Raises:
        Refused: the server has no room for the request, is shutting down, or has a broken model.
    """
    choices = [Choice(served) for _ in served.samples]
    async for event in service.events(served):
        choices[event.sample].add(event)
    if any(choice.last is None or choice.last.finish == "cancelled" for choice in choices):
        raise ShuttingDown
    return choices


async def respond(service: Service, write: Callable[[], Any], *, large: bool) -> Response:
    """Returns the JSON response to a request.

    Args:
        service: the service that samples completions.
        write: function that returns the body.
        large: whether ``write`` takes long. If True, it runs in a thread, so that the event loop
            can serve other clients.
    """
    if not large:
        return JSONResponse(write())
    # `json.dumps` would hold Python's GIL until the whole body is serialised.
    encoder = json.JSONEncoder()
    text = await service.render(lambda: "".join(encoder.iterencode(write())))
    return Response(text, media_type="application/json")


async def open_stream(
    service: Service,
    served: ServedRequest,
    request: Request,
    body: Sampling,
    kind: str,
    write: Callable[[AsyncIterator[Event], list[Choice]], AsyncIterator[dict[str, Any]]],
) -> StreamingResponse:
    """Runs a request and returns a stream of server-sent events.

    Args:
        service: the service that samples completions.
        served: the request for the rollout loop.
        request: the HTTP request of the client.
        body: validated body of the client's request.
        kind: type of the chunks, see `head`.
        write: function that converts the events of the request's samples to chunks, and yields the
            element of the field ``choices`` for each chunk. It must also add each event to the
            `Choice` of its sample in the given list, from which the token usage is computed.

    Raises:
        Refused: the server has no room for the request, or is shutting down. The client then
            receives an error response instead of a stream.
        ClientGone: the client closed its connection before the first event.
    """
    events = service.events(served)
    first = await while_connected(request.receive, anext(events))
    choices = [Choice(served) for _ in served.samples]
    with_usage = body.stream_options is not None and body.stream_options.include_usage

    async def chunks() -> AsyncGenerator[str, None]:
        begin = head(kind, body.model)
        no_usage = {"usage": None} if with_usage else {}
        try:
            async for choice in write(_chain(first, events), choices):
                yield _server_sent_event({**begin, "choices": [choice], **no_usage})
            if with_usage:
                yield _server_sent_event(
                    {**begin, "choices": [], "usage": usage([served], choices)}
                )
        except Refused as error:  # the engine stopped during the stream
            yield _server_sent_event(error_body(error))
        finally:
            await events.aclose()
        yield "data: [DONE]\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(chunks(), media_type="text/event-stream", headers=headers)


def _server_sent_event(chunk: Mapping[str, Any]) -> str:
    """Formats a chunk as a server-sent event."""
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


async def _chain(first: Event, rest: AsyncIterator[Event]) -> AsyncIterator[Event]:
    yield first
    async for event in rest:
        yield event


def head(kind: str, model: str) -> dict[str, Any]:
    """Returns the fields with which every response begins.

    Args:
        kind: type of the response, such as ``chat.completion``.
        model: name of the model in the request.
    """
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def policy_of(services: Sequence[Service], model: str, *, agents: bool) -> Service:
    """Returns the policy that the name of the model in a request chooses.

    The name is that of the policy or, for the policy with the server's tools, ``NAME-agent``.

    Args:
        services: the policies of the server.
        model: name of the model in the request.
        agents: whether the route supports agents.

    Raises:
        Refused: the server has no model of this name.
    """
    names = {service.config.name: service for service in services}
    if agents:
        names |= {f"{name}-agent": service for name, service in names.items()}
    if (service := names.get(model)) is None:
        message = f"there is no model {model[:200]!r} here, but {' and '.join(names)}"
        raise Refused(404, message, "model", "there is no such model")
    return service
