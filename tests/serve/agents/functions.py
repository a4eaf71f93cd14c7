"""Agents as async functions, which tests name by their import paths."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import openai


def client(base_url: str, api_key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)


async def conversation(
    base_url: str, api_key: str, question: str, turns: int = 10, tokens: int = 6
) -> dict[str, Any]:
    """Talks to the policy; answers with the log-probabilities of what it was told, turn by turn."""
    messages, logps = [{"role": "user", "content": question}], []
    async with client(base_url, api_key) as policy:
        for turn in range(turns):
            reply = await policy.chat.completions.create(
                model="any", messages=messages, max_tokens=tokens, logprobs=True
            )
            (choice,) = reply.choices
            logps.append([token.logprob for token in choice.logprobs.content])
            messages.append({"role": "assistant", "content": choice.message.content})
            messages.append({"role": "user", "content": f"Go on, {turn}."})
    return {"answer": json.dumps(logps)}


async def team(base_url: str, api_key: str, question: str) -> dict[str, Any]:
    """A manager, two helpers that are asked at the same time, and a second try of the manager."""
    asked = {"role": "user", "content": question}
    async with client(base_url, api_key) as policy:

        async def ask(*messages: dict[str, str], **options: Any) -> list[dict[str, str]]:
            reply = await policy.chat.completions.create(
                model="any", messages=list(messages), max_tokens=4, **options
            )
            texts = [choice.message.content for choice in reply.choices]
            return [{"role": "assistant", "content": text} for text in texts]

        (plan,) = await ask(asked)
        roles = [{"role": "system", "content": f"You are {name}."} for name in ("A", "B")]
        found = await asyncio.gather(*(ask(role, asked) for role in roles))
        told = {"role": "user", "content": " ".join(one["content"] for (one,) in found)}
        both = await ask(asked, plan, told, n=2)
        end = {"role": "user", "content": "End."}
        (last,) = await ask(asked, plan, told, both[0], end)
    return {"answer": last["content"], "reward": 0.25}


async def rewarded_team(base_url: str, api_key: str, question: str) -> dict[str, Any]:
    """The same, with a reward that differs between samples."""
    found = await team(base_url, api_key, question)
    return {**found, "reward": 1 / (1 + len(found["answer"]))}


async def rewarded_by_call(base_url: str, api_key: str, question: str) -> None:
    """Tells the reward over HTTP."""
    headers = {"Authorization": f"Bearer {api_key}"}
    url = base_url.removesuffix("/v1") + "/reward"
    async with client(base_url, api_key) as policy, httpx.AsyncClient() as http:
        messages: list[Any] = [{"role": "user", "content": question}]
        await policy.chat.completions.create(model="any", messages=messages, max_tokens=4)
        refused = await http.post(url, json={"reward": "much"}, headers=headers)
        assert refused.status_code == 400
        assert "not a finite number" in refused.json()["error"]["message"]
        unknown = await http.post(url, json={"reward": 1}, headers={"Authorization": "Bearer no"})
        assert unknown.status_code == 401
        told = await http.post(url, json={"reward": 0.5}, headers=headers)
        assert told.status_code == 200


async def to_the_end(base_url: str, api_key: str, question: str, tokens: int = 40) -> str:
    """Talks until the endpoint refuses, which it does not expect."""
    messages = [{"role": "user", "content": question}]
    async with client(base_url, api_key) as policy:
        while True:
            reply = await policy.chat.completions.create(
                model="any", messages=messages, max_tokens=tokens
            )
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": "More."})


async def streamed(base_url: str, api_key: str, question: str, stop: str = "</think>") -> str:
    """Streams up to a stop string, writes that string itself, as frameworks do, and goes on."""
    asked = {"role": "user", "content": question}
    async with client(base_url, api_key) as policy:
        stream = await policy.chat.completions.create(
            model="any", messages=[asked], max_tokens=30, stop=[stop], stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        said = {"role": "assistant", "content": text + stop}
        again = {"role": "user", "content": "Go on."}
        await policy.chat.completions.create(
            model="any", messages=[asked, said, again], max_tokens=4
        )
    return text


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def caller(
    base_url: str, api_key: str, question: str, stream: bool = False
) -> dict[str, Any]:
    """Calls a function of its own for the policy, twice, and writes the JSON in its own way."""
    messages: list[Any] = [{"role": "user", "content": question}]
    ends, ids = [], set()
    async with client(base_url, api_key) as policy:
        for turn in range(2):
            asked: dict[str, Any] = {"model": "any", "messages": messages, "stop": ["!"]}
            asked |= {"tools": [LOOK], "tool_choice": "required", "max_tokens": 4}
            if stream:
                chunks = [
                    c async for c in await policy.chat.completions.create(**asked, stream=True)
                ]
                (calls,) = [c.choices[0].delta.tool_calls for c in chunks
                            if c.choices[0].delta.tool_calls]  # fmt: skip
                content, end = None, chunks[-1].choices[0].finish_reason
            else:
                choice = (await policy.chat.completions.create(**asked)).choices[0]
                calls, content, end = (
                    choice.message.tool_calls, choice.message.content, choice.finish_reason
                )  # fmt: skip
            ends.append(end)
            ids.add(calls[0].id)
            said = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": json.dumps(json.loads(call.function.arguments), indent=1),
                    },
                }
                for call in calls
            ]
            messages.append({"role": "assistant", "content": content, "tool_calls": said})
            messages.append(
                {"role": "tool", "tool_call_id": said[0]["id"], "content": f"Seen, {turn}."}
            )
    assert len(ids) == 2  # a program may find the results of calls by these ids
    return {"answer": json.dumps([ends, said])}


async def silent(base_url: str, api_key: str) -> dict[str, Any]:
    """Gives itself a reward without the policy, after a request that no policy can answer."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as http:
        refused = await http.post(f"{base_url}/chat/completions", json={"messages": "?"})
        assert refused.status_code == 400
    return {"reward": 1.0}


async def forgiving(base_url: str, api_key: str, question: str) -> dict[str, Any]:
    """Gives itself a reward although its request fails."""
    async with client(base_url, api_key) as policy:
        with contextlib.suppress(openai.InternalServerError):
            messages: list[Any] = [{"role": "user", "content": question}]
            await policy.chat.completions.create(model="any", messages=messages)
    return {"reward": 1.0}


async def elsewhere(base_url: str) -> str:
    """Answers without the policy."""
    return "42"


async def verbose(base_url: str, api_key: str) -> dict[str, Any]:
    """Begins with more than the context holds, and takes the refusal as an end."""
    messages: list[Any] = [{"role": "user", "content": "word " * 400}]
    async with client(base_url, api_key) as policy:
        with contextlib.suppress(openai.BadRequestError):
            await policy.chat.completions.create(model="any", messages=messages)
    return {"reward": 0.0}


async def broken(base_url: str, question: str) -> None:
    """Fails."""
    raise ValueError(f"no luck with {question}")


async def quits(base_url: str) -> None:
    """Ends as a command does that refuses its arguments."""
    raise SystemExit(2)


async def given_up(base_url: str) -> None:
    """Waits for work of its own that is cancelled."""
    work = asyncio.create_task(asyncio.sleep(1000))
    work.cancel()
    await work


async def asleep(base_url: str, api_key: str, question: str) -> None:
    """Asks for more than it waits for, and sleeps."""
    async with client(base_url, api_key) as policy:
        asking = policy.chat.completions.create(
            model="any", messages=[{"role": "user", "content": question}]
        )
        await asyncio.gather(asking, asyncio.sleep(1000))


async def brevity(base_url: str, api_key: str, question: str) -> dict[str, Any]:
    """Two turns; the shorter the second reply, the better."""
    messages = [{"role": "user", "content": question}]
    async with client(base_url, api_key) as policy:
        for _ in range(2):
            reply = await policy.chat.completions.create(
                model="any", messages=messages, max_tokens=12
            )
            text = reply.choices[0].message.content
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": "Shorter."})
    return {"answer": text, "reward": 1 / (1 + len(text))}


def blocking(base_url: str) -> None:
    """Not async."""
