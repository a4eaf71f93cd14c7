"""POST /v1/chat/completions: conversations, and the whole chain of agents."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from coa_jax.model.tokenizer import conversation_ids
from coa_jax.rollout.request import prompt_ids
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
from coa_jax.serve.schema import ChatRequest
from coa_jax.serve.service import Refused, Service
from coa_jax.tasks import Task


async def chat_completion(service: Service, body: ChatRequest, request: Request) -> Response:
    """Answers a chat request.

    Raises:
        Refused: with the status that says why.
    """
    visit = _visit(service, body)
    if body.stream:
        return await open_stream(
            service, visit, request, lambda events: _stream(service, body, visit, events)
        )
    with service.scoring(bool(body.top_logprobs) or body.prompt_logprobs is not None):
        choices = await gather(service, visit, request)
        answer = await while_connected(request, _answer(service, body, visit, choices))
    return JSONResponse(answer)


async def _answer(
    service: Service, body: ChatRequest, visit: Visit, choices: Sequence[Choice]
) -> dict[str, Any]:
    answer = {
        **head("chat.completion", service, body.model),
        "choices": [
            await _choice(service, body, visit, index, choice)
            for index, choice in enumerate(choices)
        ],
        "usage": answers.usage(len(visit.prompt), choices),
    }
    if body.prompt_logprobs is not None:
        scored = await service.score(visit.prompt)
        answer["prompt_logprobs"] = answers.prompt_logprobs(
            service.model.tokenizer, scored, body.prompt_logprobs
        )
    return answer


def _visit(service: Service, body: ChatRequest) -> Visit:
    tokenizer = service.model.tokenizer
    if not check_model(service, body.model, agents=True):
        turns = [("system" if m.role == "developer" else m.role, m.text) for m in body.messages]
        prefix: str | None = "" if body.add_generation_prompt else None
        # A turn that the client has begun for the assistant is gone on with, unless a new one is
        # asked for in as many words.
        asked = "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt
        if turns[-1][0] == "assistant" and not asked:
            prefix = turns.pop()[1]
        return make_visit(
            service, body, conversation_ids(tokenizer, turns, prefix=prefix), body.limit
        )
    last = body.messages[-1]
    if last.role != "user":
        raise Refused(400, "the agent answers a last message of the user", "messages")
    if any(message.role != "user" for message in body.messages) or len(body.messages) > 1:
        raise Refused(400, "the agent answers one question: send one message", "messages")
    if body.stops:
        raise Refused(400, "the agent stops at its answer: send no stop strings", "stop")
    if body.logprobs:
        raise Refused(400, "the agent's log-probabilities are not available", "logprobs")
    task = Task("", last.text, service.config.protocol, (), "serve")
    prompt = prompt_ids(tokenizer, task, service.prompt)
    return make_visit(service, body, prompt, body.limit, question=last.text, agent=True)


async def _choice(
    service: Service, body: ChatRequest, visit: Visit, index: int, choice: Choice
) -> dict[str, Any]:
    assert choice.last is not None
    answer: dict[str, Any] = {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": None,
        "finish_reason": choice.last.finish,
        "stop_reason": choice.last.stop,
    }
    if visit.agent:
        answer["agent"] = _agent(choice.last)
    if body.logprobs:
        scored = None
        if body.top_logprobs and choice.tokens:
            ids = [*visit.prompt, *(token.id for token in choice.tokens)]
            scored = (await service.score(ids))[len(visit.prompt) :]
        answer["logprobs"] = answers.chat_logprobs(
            choice.tokens, scored, body.top_logprobs or 0, service.table
        )
    return answer


def _agent(last: Event) -> dict[str, Any]:
    """What the chain of agents came to."""
    assert last.trajectory is not None
    trajectory = last.trajectory
    calls = [
        {
            "tool": call.tool,
            "arguments": call.arguments,
            "outcome": call.outcome,
            "seconds": round(call.end - call.start, 3),
        }
        for call in trajectory.tool_calls
    ]
    stop = str(trajectory.stop_reason)
    return {"answer": trajectory.answer, "stop_reason": stop, "tool_calls": calls}


async def _stream(
    service: Service, body: ChatRequest, visit: Visit, events: AsyncIterator[Event]
) -> AsyncIterator[dict[str, Any]]:
    begin = head("chat.completion.chunk", service, body.model)
    with_usage = body.stream_options is not None and body.stream_options.include_usage
    choices = [Choice() for _ in visit.samples]

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        fields = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return {**begin, "choices": [fields], **({"usage": None} if with_usage else {})}

    for index in range(len(choices)):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for event in events:
        choice = choices[event.sample]
        choice.add(event)
        more: dict[str, Any] = {}
        if event.tokens and body.logprobs:
            more["logprobs"] = answers.chat_logprobs(event.tokens, None, 0, service.table)
        if visit.agent and event.text:
            more["agent"] = answers.part(event)
        if event.text or more:
            yield chunk(event.sample, {"content": event.text}, **more)
        if event.finish is not None:
            ended: dict[str, Any] = {"finish_reason": event.finish, "stop_reason": event.stop}
            if visit.agent:
                ended["agent"] = _agent(event)
            yield chunk(event.sample, {}, **ended)
    if with_usage:
        yield {**begin, "choices": [], "usage": answers.usage(len(visit.prompt), choices)}
