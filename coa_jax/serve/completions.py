"""POST /v1/completions: one or several texts that the policy goes on with."""

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
    check_model,
    gather,
    head,
    make_visit,
    open_stream,
    while_connected,
)
from coa_jax.serve.samples import Event, Visit
from coa_jax.serve.schema import TextRequest
from coa_jax.serve.score import Scored
from coa_jax.serve.service import Refused, Service


async def text_completion(service: Service, body: TextRequest, request: Request) -> Response:
    """Answers a request for completions.

    Raises:
        Refused: with the status that says why.
    """
    check_model(service, body.model, agents=False)
    prompts = [_ids(service, prompt) for prompt in body.prompts]
    # A request for no tokens is checked as one for a single one, which it leaves room for.
    limit = 1 if body.max_tokens == 0 else body.max_tokens
    visits = [make_visit(service, body, ids, limit) for ids in prompts]
    if len(visits) * len(visits[0].samples) > service.config.max_samples:
        most = service.config.max_samples
        raise Refused(400, f"{len(visits)} prompts; this server allows {most} completions")
    if body.stream:
        if len(visits) > 1:
            raise Refused(400, "a stream has one prompt", "prompt")
        visit = visits[0]
        return await open_stream(
            service, visit, request, lambda events: _stream(service, body, visit, events)
        )
    with service.scoring(body.logprobs is not None or body.prompt_logprobs is not None):
        return await while_connected(request, _answer(service, body, visits, request))


def _ids(service: Service, prompt: str | Sequence[int]) -> list[int]:
    if isinstance(prompt, str):
        return encode_plain(service.model.tokenizer, prompt)
    size = service.engines[0].model.vocab_size
    if wrong := [token for token in prompt if token >= size]:
        raise Refused(400, f"the prompt has the id {wrong[0]}; the model has {size}", "prompt")
    return list(prompt)


async def _answer(
    service: Service, body: TextRequest, visits: Sequence[Visit], request: Request
) -> Response:
    if body.max_tokens == 0:
        groups = [[Choice()] for _ in visits]
    else:
        groups = await asyncio.gather(*(gather(service, visit, request) for visit in visits))
    choices: list[dict[str, Any]] = []
    prompt_tokens, generated = 0, 0
    for visit, group in zip(visits, groups, strict=True):
        counted = answers.usage(len(visit.prompt), group)
        prompt_tokens += counted["prompt_tokens"]
        generated += counted["completion_tokens"]
        for choice in group:
            choices.append(await _choice(service, body, visit, len(choices), choice))
    return JSONResponse(
        {
            **head("text_completion", service, body.model),
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": generated,
                "total_tokens": prompt_tokens + generated,
            },
        }
    )


async def _choice(
    service: Service, body: TextRequest, visit: Visit, index: int, choice: Choice
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
    if body.logprobs is None and body.prompt_logprobs is None:
        return answer
    ids = [*visit.prompt, *(token.id for token in choice.tokens)]
    scored = await service.score(ids)
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
    """The completion's part, with the probabilities under which it was sampled."""
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
