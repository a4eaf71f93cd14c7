"""Answers POST /v1/completions, in which the policy continues one or several texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from coa_jax.model.tokenizer import decode_ids, encode_plain
from coa_jax.serve import answers
from coa_jax.serve.answers import Choice
from coa_jax.serve.exchange import (
    check_length,
    check_model,
    gather,
    head,
    make_visit,
    open_stream,
    read_request,
)
from coa_jax.serve.samples import Event, Visit
from coa_jax.serve.schema import TextRequest
from coa_jax.serve.score import Scored
from coa_jax.serve.service import Service
from coa_jax.web.errors import Refused
from coa_jax.web.guard import while_connected
from coa_jax.web.json_app import dumps


async def text_completion(service: Service, request: Request) -> Response:
    """Answers a request for text completions.

    Raises:
        Refused: the request is refused; the exception has the HTTP status.
    """
    with service.reading():
        body = await read_request(service, request, TextRequest)
        check_model(service, body.model, agents=False)
        asked, most = len(body.prompt) * (body.n or 1), service.config.max_samples
        if len(body.prompt) > 1 and asked > most:
            message = f"{len(body.prompt)} prompts with n of {body.n or 1} are {asked} completions"
            raise Refused(400, f"{message}; this server allows {most}", "prompt")
        if body.stream and len(body.prompt) > 1:
            raise Refused(400, "a stream has one prompt", "prompt")
        # Each prompt is read by a separate call, so that requests of other clients can run in
        # between.
        prompts = [await service.read(_ids, service, prompt) for prompt in body.prompt]
    # The engine needs room for one token even if max_tokens is 0.
    limit = 1 if body.max_tokens == 0 else body.max_tokens
    visits = [make_visit(service, body, ids, limit) for ids in prompts]
    if body.stream:
        visit = visits[0]
        return await open_stream(
            service, visit, request, lambda events: _stream(service, body, visit, events)
        )
    with service.scoring(body.logprobs is not None or body.prompt_logprobs is not None):
        return await while_connected(request.receive, _answer(service, body, visits, request))


def _ids(service: Service, prompt: str | list[int]) -> list[int]:
    length, size = service.config.engine.max_length, service.engines[0].model.vocab_size
    if isinstance(prompt, str):
        check_length(service.model.tokenizer, [prompt], length, "prompt")
        return encode_plain(service.model.tokenizer, prompt)
    if len(prompt) <= length and max(prompt) >= size:  # longer prompts are refused later
        raise Refused(400, f"prompt: token ids must be less than {size}", "prompt")
    return prompt


async def _answer(
    service: Service, body: TextRequest, visits: Sequence[Visit], request: Request
) -> Response:
    if body.max_tokens == 0:
        groups = [[Choice()] for _ in visits]
    else:
        groups = await asyncio.gather(*(gather(service, visit, request) for visit in visits))
    pairs = [(v, c) for v, group in zip(visits, groups, strict=True) for c in group]
    wanted = body.logprobs is not None or body.prompt_logprobs is not None
    scored: list[Sequence[Scored]] = []
    for visit, choice in pairs:
        ids = [*visit.prompt, *(token.id for token in choice.tokens)]
        scored.append(await service.score(ids) if wanted else ())
    counts = [answers.usage(len(v.prompt), g) for v, g in zip(visits, groups, strict=True)]
    usage = {name: sum(count[name] for count in counts) for name in counts[0]}

    def written() -> dict[str, Any]:
        choices = [
            _choice(service, body, visit, index, choice, scored[index])
            for index, (visit, choice) in enumerate(pairs)
        ]
        begin = head("text_completion", service, body.model)
        return {**begin, "choices": choices, "usage": usage}

    if not wanted and not body.echo:
        return JSONResponse(written())
    text = await service.render(lambda: dumps(written()))
    return Response(text, media_type="application/json")


def _choice(
    service: Service,
    body: TextRequest,
    visit: Visit,
    index: int,
    choice: Choice,
    scored: Sequence[Scored],
) -> dict[str, Any]:
    tokenizer = service.model.tokenizer
    echoed = decode_ids(tokenizer, visit.prompt) if body.echo else ""
    answer: dict[str, Any] = {
        "index": index,
        "text": echoed + choice.text,
        "logprobs": None,
        "finish_reason": "length" if choice.last is None else choice.last.finish,
        "stop_reason": None if choice.last is None else choice.last.stop,
    }
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = answers.prompt_logprobs(
            tokenizer, scored[: len(visit.prompt)], body.prompt_logprobs
        )
    if body.logprobs is not None:
        own = _as_sampled(scored[len(visit.prompt) :], choice)
        shown = [*scored[: len(visit.prompt)], *own] if body.echo else own
        answer["logprobs"] = answers.text_logprobs(shown, body.logprobs, service.table, 0)
    return answer


def _as_sampled(scored: Sequence[Scored], choice: Choice) -> list[Scored]:
    """Returns the scores of a completion, with the log-probabilities at which it was sampled."""
    pairs = zip(scored, choice.tokens, strict=True)
    return [Scored(one.id, token.logp, one.rank, one.top) for one, token in pairs]


async def _stream(
    service: Service, body: TextRequest, visit: Visit, events: AsyncIterator[Event]
) -> AsyncIterator[dict[str, Any]]:
    begin = head("text_completion", service, body.model)
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    choices = [Choice() for _ in visit.samples]
    async for event in events:
        choice = choices[event.sample]
        offset = len(choice.text)
        choice.add(event)
        fields: dict[str, Any] = {
            "index": event.sample,
            "text": event.text,
            "logprobs": None,
            "finish_reason": event.finish,
            "stop_reason": event.stop,
        }
        if event.tokens and body.logprobs is not None:
            scored = [Scored(token.id, token.logp, 0, ()) for token in event.tokens]
            fields["logprobs"] = answers.text_logprobs(scored, 0, service.table, offset)
        if event.text or event.finish is not None or fields["logprobs"]:
            usage = {"usage": None} if with_usage else {}
            yield {**begin, "choices": [fields], **usage}
    if with_usage:
        yield {**begin, "choices": [], "usage": answers.usage(len(visit.prompt), choices)}
