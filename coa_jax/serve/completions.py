"""Answers POST /v1/completions, in which the policy continues one or several texts."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from coa_jax.model.tokenizer import decode_ids, encode_plain
from coa_jax.serve import answers, client_requests
from coa_jax.serve.answers import Choice
from coa_jax.serve.http.errors import Refused
from coa_jax.serve.http.guard import while_connected
from coa_jax.serve.samples import Event, ServedRequest
from coa_jax.serve.schema import TextRequest
from coa_jax.serve.score import Scored
from coa_jax.serve.service import Service


async def text_completion(services: Sequence[Service], request: Request) -> Response:
    """Answers a request for text completions.

    Args:
        services: the policies of the server; the request names one of them.
        request: the HTTP request of the client.

    Raises:
        Refused: the request is refused; the exception has the HTTP status.
    """
    with services[0].reading():
        body = await client_requests.read_request(services[0], request, TextRequest)
        service = client_requests.policy_of(services, body.model, agents=False)
        total, most = len(body.prompt) * (body.n or 1), service.config.max_samples
        if len(body.prompt) > 1 and total > most:
            message = f"{len(body.prompt)} prompts with n of {body.n or 1} are {total} completions"
            raise Refused(400, f"{message}; this server allows {most}", "prompt")
        if body.stream and len(body.prompt) > 1:
            raise Refused(400, "a stream has one prompt", "prompt")
        # Each prompt is read by a separate call, so that requests of other clients can run in
        # between.
        prompts = [await service.read(_ids, service, prompt) for prompt in body.prompt]
    # The engine needs room for one token even if max_tokens is 0.
    limit = 1 if body.max_tokens == 0 else body.max_tokens
    served_requests = [
        client_requests.make_served_request(service, body, ids, limit) for ids in prompts
    ]
    if body.stream:
        write = functools.partial(_stream, service, body)
        kind = "text_completion"
        return await client_requests.open_stream(
            service, served_requests[0], request, body, kind, write
        )
    with service.scoring(body.logprobs is not None or body.prompt_logprobs is not None):
        return await while_connected(request.receive, _answer(service, body, served_requests))


def _ids(service: Service, prompt: str | list[int]) -> list[int]:
    length, size = service.config.engine.max_length, service.engines[0].model.vocab_size
    if isinstance(prompt, str):
        client_requests.check_length(service.model.tokenizer, [prompt], length, "prompt")
        return encode_plain(service.model.tokenizer, prompt)
    if len(prompt) <= length and max(prompt) >= size:  # longer prompts are refused later
        raise Refused(400, f"prompt: token ids must be less than {size}", "prompt")
    return prompt


async def _answer(
    service: Service, body: TextRequest, served_requests: Sequence[ServedRequest]
) -> Response:
    if body.max_tokens == 0:
        groups = [[Choice(served)] for served in served_requests]
    else:
        tasks = [
            asyncio.ensure_future(client_requests.gather_completions(service, served))
            for served in served_requests
        ]
        try:
            groups = await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one prompt is refused, the others are not sampled in vain
                task.cancel()
    choices = list(itertools.chain(*groups))
    with_logprobs = body.logprobs is not None or body.prompt_logprobs is not None
    scored = [await service.score(choice.ids) if with_logprobs else [] for choice in choices]

    def write() -> dict[str, Any]:
        return {
            **client_requests.head("text_completion", body.model),
            "choices": [
                _choice(service, body, index, choice, scored[index])
                for index, choice in enumerate(choices)
            ],
            "usage": answers.usage(served_requests, choices),
        }

    return await client_requests.respond(service, write, large=with_logprobs or body.echo)


def _choice(
    service: Service, body: TextRequest, index: int, choice: Choice, scored: Sequence[Scored]
) -> dict[str, Any]:
    tokenizer, prompt = service.model.tokenizer, choice.served.prompt
    of_prompt = scored[: len(prompt)]
    echoed = decode_ids(tokenizer, prompt) if body.echo else ""
    answer: dict[str, Any] = {
        "index": index,
        "text": echoed + choice.text,
        "logprobs": None,
        "finish_reason": "length" if choice.last is None else choice.last.finish,
        "stop_reason": None if choice.last is None else choice.last.stop,
    }
    if body.prompt_logprobs is not None:
        most = body.prompt_logprobs
        answer["prompt_logprobs"] = answers.prompt_logprobs(tokenizer, of_prompt, most)
    if body.logprobs is not None:
        shown = [*(of_prompt if body.echo else ()), *choice.scored(scored)]
        answer["logprobs"] = answers.text_logprobs(shown, body.logprobs, service.table)
    return answer


async def _stream(
    service: Service, body: TextRequest, events: AsyncIterator[Event], choices: list[Choice]
) -> AsyncIterator[dict[str, Any]]:
    async for event in events:
        choice = choices[event.sample]
        offset = len(choice.text)
        choice.add(event)
        logprobs = None
        if event.tokens and body.logprobs is not None:
            logprobs = answers.text_logprobs(event.tokens, 0, service.table, offset)
        if event.text or event.finish is not None or logprobs:
            yield {
                "index": event.sample,
                "text": event.text,
                "logprobs": logprobs,
                "finish_reason": event.finish,
                "stop_reason": event.stop,
            }
