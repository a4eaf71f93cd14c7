"""Answers POST /v1/chat/completions, for plain conversations and for chains of agents."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from coa_jax.model.encode import prompt_ids
from coa_jax.serve import answers, client_requests, functions
from coa_jax.serve.answers import Choice
from coa_jax.serve.http.errors import Refused
from coa_jax.serve.http.guard import while_connected
from coa_jax.serve.samples import Event, ServedRequest
from coa_jax.serve.schema import ChatRequest
from coa_jax.serve.score import Scored
from coa_jax.serve.service import Service
from coa_jax.tasks import Task


async def chat_completion(
    services: Sequence[Service],
    request: Request,
    prepare: Callable[[Service, ChatRequest], ServedRequest] | None = None,
) -> Response:
    """Answers a chat request.

    Args:
        services: the policies of the server. If ``prepare`` is None, the body of the request names
            the policy that answers; otherwise the first policy answers.
        request: the HTTP request of the client.
        prepare: function that converts the body into a request for the rollout loop, and is called
            in a thread; None for the default function.

    Raises:
        Refused: the request is refused; the exception has the HTTP status.
    """
    service = services[0]
    with service.reading():
        body = await client_requests.read_request(service, request, ChatRequest)
        if prepare is None:
            service = client_requests.policy_of(services, body.model, agents=True)
        served = await service.read(prepare or _served_request, service, body)
    if body.stream:
        write = functools.partial(_stream, service, body)
        kind = "chat.completion.chunk"
        return await client_requests.open_stream(service, served, request, body, kind, write)
    with service.scoring(bool(body.top_logprobs) or body.prompt_logprobs is not None):
        return await while_connected(request.receive, _answer(service, body, served))


async def _answer(service: Service, body: ChatRequest, served: ServedRequest) -> Response:
    choices, top = await client_requests.gather_completions(service, served), body.top_logprobs or 0
    scored = [
        await service.score(choice.ids) if top and choice.tokens else [] for choice in choices
    ]
    of_prompt = None
    if body.prompt_logprobs is not None:
        of_prompt = await service.score(served.prompt)

    def write() -> dict[str, Any]:
        answer = {
            **client_requests.head("chat.completion", body.model),
            "choices": [
                _choice(service, body, index, choice, scored[index])
                for index, choice in enumerate(choices)
            ],
            "usage": answers.usage([served], choices),
        }
        if of_prompt is not None:
            answer["prompt_logprobs"] = answers.prompt_logprobs(
                service.model.tokenizer, of_prompt, body.prompt_logprobs or 0
            )
        return answer

    large = bool(body.logprobs) or of_prompt is not None
    return await client_requests.respond(service, write, large=large)


def read_messages(body: ChatRequest) -> list[functions.Message]:
    """Returns the pair (role, text) of each message of a chat request.

    If the request has tools, an additional first message contains them.

    Raises:
        Refused: the arguments of a tool call are not a JSON object.
    """
    messages: list[functions.Message] = []
    if body.tools:
        tools = [tool.model_dump() for tool in body.tools]
        messages.append((functions.TOOLS, json.dumps(tools, ensure_ascii=False)))
    for index, message in enumerate(body.messages):
        text, calls = message.content, message.tool_calls or ()
        try:
            if calls:
                function_calls = [
                    functions.FunctionCall(**call.function.model_dump()) for call in calls
                ]
                text = functions.join(text, function_calls)
        except ValueError as error:
            field = f"messages[{index}].tool_calls"
            raise Refused(400, f"{field}: the arguments are no JSON object", field) from error
        messages.append(("system" if message.role == "developer" else message.role, text))
    return messages


def _served_request(service: Service, body: ChatRequest) -> ServedRequest:
    """Makes the request for the rollout loop.

    The function tokenises the conversation, so callers run it in a thread.
    """
    tokenizer, length = service.model.tokenizer, service.config.engine.max_length
    turns = read_messages(body)
    texts = [text for _, text in turns]
    if body.model == service.config.name:
        if 5 * len(texts) > length:  # a message has five tokens or more
            message = f"there are {len(texts)} messages; this model's context has {length} tokens"
            raise Refused(400, message, "messages")
        client_requests.check_length(tokenizer, texts, length, "messages")
        prefix: str | None = "" if body.add_generation_prompt else None
        # If the last message is the assistant's, the policy continues it, unless the client asks
        # for a new turn.
        new_turn = "add_generation_prompt" in body.model_fields_set and body.add_generation_prompt
        if turns[-1][0] == "assistant" and not new_turn:
            prefix = turns.pop()[1]
        if prefix is None and body.tools:
            raise Refused(400, "tools need a generation prompt", "add_generation_prompt")
        ids = functions.chat_prompt_ids(tokenizer, turns, prefix)
        return client_requests.make_served_request(service, body, ids, body.limit, calls=body.calls)
    last = body.messages[-1]
    if last.role != "user":
        raise Refused(400, "the agent answers a last message of the user", "messages")
    if any(message.role != "user" for message in body.messages) or len(body.messages) > 1:
        raise Refused(400, "the agent answers one question: send one message", "messages")
    if body.tools:
        raise Refused(400, "the agent has tools of its own: send none", "tools")
    if body.stop:
        raise Refused(400, "the agent stops at its answer: send no stop strings", "stop")
    if body.logprobs:
        raise Refused(400, "the agent's log-probabilities are not available", "logprobs")
    client_requests.check_length(tokenizer, texts, length, "messages")
    (question,) = texts
    task = Task("", question, service.config.protocol, (), "serve")
    prompt = prompt_ids(tokenizer, task, service.prompt)
    return client_requests.make_served_request(service, body, prompt, body.limit, question=question)


def _choice(
    service: Service, body: ChatRequest, index: int, choice: Choice, scored: Sequence[Scored]
) -> dict[str, Any]:
    assert choice.last is not None
    message, finish = _message(index, choice)
    answer: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": choice.last.stop,
    }
    if choice.served.agent:
        answer["agent"] = _agent(choice.last)
    if body.logprobs:
        tokens = choice.scored(scored) if scored else choice.tokens
        answer["logprobs"] = answers.chat_logprobs(tokens, body.top_logprobs or 0, service.table)
    return answer


def _message(index: int, choice: Choice) -> tuple[dict[str, Any], str | None]:
    """Returns the message of a completion, with calls of functions, and the finish reason."""
    assert choice.last is not None
    served, finish = choice.served, choice.last.finish
    if not served.calls or finish != "stop":
        return {"role": "assistant", "content": choice.text, "refusal": None}, finish
    message = functions.message_of(choice.text, f"{served.name}_{index}")
    return message, "tool_calls" if "tool_calls" in message else finish


def _agent(last: Event) -> dict[str, Any]:
    """Returns the answer, the stop reason and the tool calls of a chain of agents."""
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
    service: Service, body: ChatRequest, events: AsyncIterator[Event], choices: list[Choice]
) -> AsyncIterator[dict[str, Any]]:
    served = choices[0].served

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    for index in range(len(choices)):
        yield chunk(index, {"role": "assistant", "content": ""})
    async for event in events:
        choice = choices[event.sample]
        choice.add(event)
        more: dict[str, Any] = {}
        if event.tokens and body.logprobs:
            more["logprobs"] = answers.chat_logprobs(event.tokens, 0, service.table)
        if served.agent and event.text:
            more["agent"] = answers.part(event)
        # If the text may contain calls, it is sent only when it is complete.
        if more or (event.text and not served.calls):
            yield chunk(event.sample, {"content": "" if served.calls else event.text}, **more)
        if event.finish is not None:
            message, finish = _message(event.sample, choice)
            if served.calls:
                for position, call in enumerate(message.get("tool_calls", ())):
                    call["index"] = position
                yield chunk(event.sample, message)
            ended: dict[str, Any] = {"finish_reason": finish, "stop_reason": event.stop}
            if served.agent:
                ended["agent"] = _agent(event)
            yield chunk(event.sample, {}, **ended)
