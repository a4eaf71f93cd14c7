"""A policy behind an OpenAI-compatible endpoint, with the tools on this side.

As the release evaluates: the whole chain of agents is one turn of the assistant.  Each request
sends what is written of it so far and asks the server to write on until a tool's tag, or that of
the answer, is closed; then the tool runs here and its observation is appended.  Servers that go on
from a prefix are vLLM, SGLang and ``coa_jax.serve``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from coa_jax.bounds import Count, Prose, Seconds, Times
from coa_jax.engine.config import SamplingParams
from coa_jax.environments.session import ToolLoop
from coa_jax.errors import UserError
from coa_jax.evaluate.chain import Chain
from coa_jax.evaluate.policy import Policy, Wanted, attempt_seed
from coa_jax.protocol import TAGS, get_protocol, quote_tool_text
from coa_jax.rollout.observation import observation_text
from coa_jax.rollout.request import RolloutConfig, tool_context
from coa_jax.tools.base import Tool
from coa_jax.tools.net.budget import Spent, counts_of
from coa_jax.tools.net.chat import ChatConfig, Client, ServedModel, check_client
from coa_jax.tools.net.errors import FetchError
from coa_jax.tools.net.secrets import Secret
from coa_jax.trajectory import StopReason, ToolCall, Trajectory

_TOO_LONG = re.compile(
    r"context[ _-](?:length|size|window)|context has room|leaves room for|maximum model length"
    r"|prompt is too long"
    r"|tokens\W[^.]{0,60}(?:too large|exceed|must be (?:<=|at most|less))",
    re.IGNORECASE,
)
"""How servers say that a context is full; that, and no other refusal, is the policy's own doing."""
_BYTES = 3  # for a token that no server has counted, about
_MARK = re.compile(r"<(?=[|\uff5c][^<>\n]{1,60}[|\uff5c]>|/?s>|(?:start|end)_of_turn>)")
"""Beginnings of what chat templates write between turns, in several spellings."""


@dataclasses.dataclass(frozen=True)
class PolicyEndpoint(ServedModel):
    """Where a policy is served, and how it is asked; without ``url`` it is on this machine.

    Attributes:
        concurrency: samples at a time.
        opening: what each turn of the policy is begun with; the release writes ``<think>``, which
            suits protocols that think before every action (web, mhqa) and not the code agent's.
        observation_chars: an observation is cut to so many characters; here tokens are counted by
            the server only.
    """

    timeout_s: Seconds = 600.0
    attempts: Times = 6
    concurrency: Times = 32
    opening: Prose = ""
    observation_chars: Count = 16_000

    @property
    def chat(self) -> ChatConfig:
        """The same as any chat endpoint, to find out whether it answers."""
        return ChatConfig(self.url, self.model, self.key_env)


@dataclasses.dataclass
class _Usage(Spent):
    """Tokens as the server counts them; those of the context, and how often it was cut."""

    length: int = 0
    cuts: int = 0


def endpoint_policy(
    endpoint: PolicyEndpoint,
    sampling: SamplingParams,
    seed: int,
    config: RolloutConfig,
    tools: Sequence[Tool],
) -> Policy:
    """A policy that is asked over the network, many samples at a time.

    Args:
        endpoint: where it is.
        sampling: how tokens are drawn.
        seed: each request gets a seed that follows from it, the sample and the turn.
        config: budgets; ``max_tokens`` of a trajectory as the server counts them.
        tools: live tools.

    Raises:
        UserError: openai is not installed, the key is not in the environment, or ``config`` asks
            for what only a policy on this machine can do.
    """
    for name in ("constrain", "strict"):
        if getattr(config, name):
            raise UserError(
                f"config.rollout.{name}: a policy behind an endpoint cannot be watched token by "
                "token; leave it False"
            )
    if config.format not in ("", TAGS):
        raise UserError(
            f"config.rollout.format: a policy behind an endpoint is asked in {TAGS}, not in "
            f"{config.format}"
        )
    check_client()
    if endpoint.key_env:
        Secret(endpoint.key_env).reveal()

    async def run(
        wanted: Sequence[Wanted], about: Mapping[str, Any], written: Callable[[int], None]
    ) -> AsyncGenerator[Trajectory, None]:
        left = iter([(one, number) for one in wanted for number in one.numbers])
        client = Client(endpoint)

        def start() -> asyncio.Task[Trajectory] | None:
            pair = next(left, None)
            if pair is None:
                return None
            one, number = pair
            episode = _Episode(client, endpoint, sampling, seed, config, tools, one, number)
            return asyncio.create_task(episode.run(about, written))

        first = (start() for _ in range(endpoint.concurrency))
        running = {task for task in first if task is not None}
        try:
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for _ in done:
                    if (following := start()) is not None:
                        running.add(following)
                # What is finished is kept, whatever becomes of the others.
                for task in sorted(done, key=lambda task: task.exception() is not None):
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await client.close()

    return run


class _Episode:
    """One sample."""

    def __init__(
        self,
        client: Client,
        endpoint: PolicyEndpoint,
        sampling: SamplingParams,
        seed: int,
        config: RolloutConfig,
        tools: Sequence[Tool],
        wanted: Wanted,
        number: int,
    ):
        self.client, self.endpoint, self.sampling = client, endpoint, sampling
        self.seed, self.config, self.wanted, self.number = seed, config, wanted, number
        self.tools = ToolLoop({tool.name: tool for tool in tools})
        self.protocol = get_protocol(wanted.task.protocol)
        if self.protocol.format is not None:
            raise UserError(f"a policy behind an endpoint is asked in {TAGS}; give a task of tags")
        self.chain = Chain(self.protocol)
        self.usage = _Usage()
        asked = "".join(said for _, said in wanted.messages.turns)
        self._prompt = len(asked.encode()) // _BYTES  # tokens, until the server counts
        self.began = time.monotonic()
        self.tool_seconds = 0.0

    async def run(self, about: Mapping[str, Any], written: Callable[[int], None]) -> Trajectory:
        """The sample from its beginning to its end."""
        task = self.wanted.task
        if self.endpoint.opening:
            self.chain.write(self.endpoint.opening)
        reason = None
        try:
            while reason is None:
                before = self.usage.completion
                reason = await self._turn()
                written(self.usage.completion - before)
        finally:
            await self.tools.close()
        metadata = {
            **task.metadata,
            **about,
            "source": task.source,
            "prompt_id": self.wanted.index,
            "seconds": round(time.monotonic() - self.began, 3),
            "sampling": {"seed": self.seed, **dataclasses.asdict(self.sampling)},
            "rollout": dataclasses.asdict(self.config),
            "usage": dataclasses.asdict(self.usage),
        }
        gold = () if task.metadata.get("grader") == "code" else task.gold
        return self.chain.finish(reason, task.id, self.number, task.question, gold, metadata)

    async def _turn(self) -> StopReason | None:
        """Lets the policy write on, and runs the tool that it calls; why it is over, or None."""
        config = self.config
        if config.max_seconds and time.monotonic() - self.began > config.max_seconds:
            return StopReason.DEADLINE
        room = config.max_tokens - self.usage.length
        if room <= 0:
            return StopReason.LENGTH
        left = self.began + config.max_seconds - time.monotonic() if config.max_seconds else None
        try:
            async with asyncio.timeout(left):
                reply = await self._ask(room)
        except TimeoutError:
            return StopReason.DEADLINE
        if reply is None:
            return StopReason.LENGTH
        text, finish, limited = reply
        segment = self.chain.write(text)
        if segment is None:
            if finish == "length":
                limited = limited and 0 < config.max_turn_tokens < room
                return StopReason.TURN_LENGTH if limited else StopReason.LENGTH
            # A stop string inside of another body closes nothing: the policy writes on.
            return None if text.endswith(self.protocol.stops) else StopReason.EOS
        if segment.role == self.protocol.answer:
            return StopReason.ANSWER
        if len(self.chain.calls) >= config.max_tool_calls:
            return StopReason.TURNS
        await self._call(str(segment.role), segment.body)
        late = config.max_tool_seconds and self.tool_seconds >= config.max_tool_seconds
        return StopReason.TOOL_TIME if late else None

    async def _ask(self, room: int) -> tuple[str, str, bool] | None:
        """What the policy writes; None if the context is full.

        Returns:
            (text with the tag that ended it, finish reason, whether the limit was ours and not the
            end of the server's context).

        Raises:
            UserError: the endpoint refuses or cannot be reached.
        """
        turns = self.wanted.messages.turns
        messages = [{"role": role, "content": text} for role, text in turns]
        body: dict[str, Any] = {
            "messages": messages,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "seed": self._seed(),
            "stop": list(self.protocol.stops),
        }
        if self.sampling.top_k:
            body["top_k"] = self.sampling.top_k
        if self.chain.text:
            messages.append({"role": "assistant", "content": self.chain.text})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        url = self.endpoint.url
        for more in ({"max_tokens": min(filter(None, (self.config.max_turn_tokens, room)))}, {}):
            # What the prompt takes is unknown at first, and what an observation takes is estimated:
            # the server may have room where it has none for as many tokens as were asked for.  Of
            # what it has, which is less than any limit of ours, it then takes all.
            try:
                return *await self.client.ask(body | more, self._read), bool(more)
            except FetchError as error:
                if error.status == 400 and _TOO_LONG.search(error.said):
                    continue
                if error.status and not error.transient:
                    raise UserError(f"{url} refuses: {error.status}: {error.said}") from error
                raise UserError(
                    f"{url} gives no answer ({error.message}); what is finished is kept: run the "
                    "same command again to continue"
                ) from error
        return None

    def _seed(self) -> int:
        seed = attempt_seed(self.seed, self.wanted.attempt)
        name = f"{seed}/{self.wanted.index}/{self.number}/{self.usage.calls}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) >> 1

    def _read(self, answer: dict[str, Any]) -> tuple[str, str]:
        choice, counts = answer["choices"][0], counts_of(answer.get("usage"))
        text, finish = choice["message"]["content"] or "", str(choice.get("finish_reason"))
        self.usage.add(counts, self.endpoint.price)
        if counts["prompt"] is None or counts["completion"] is None:
            asked = "".join(said for _, said in self.wanted.messages.turns)
            told = text if self.usage.calls > 1 else asked + text
            self.usage.length += len(told.encode()) // _BYTES
        else:
            self.usage.length = counts["prompt"] + counts["completion"]
            if self.usage.calls == 1:
                self._prompt = counts["prompt"]
        stop = choice.get("stop_reason", choice.get("matched_stop"))  # vLLM's word, and SGLang's
        if finish == "stop" and not choice.keys() & {"stop_reason", "matched_stop"}:
            stop = self.chain.missing_stop(text)  # a server that does not say what ended the text
        if isinstance(stop, str) and stop in self.protocol.stops and not text.endswith(stop):
            text += stop
        return text, finish

    async def _call(self, name: str, arguments: str) -> None:
        start = time.monotonic()
        context = tool_context(
            self.config,
            f"{self.wanted.task.id}/{self.number}",
            self.chain.calls,
            question=self.wanted.task.question,
            think=self.chain.last_think,
            seconds=start - self.began,
            tool_seconds=self.tool_seconds,
        )
        seen = await self.tools.act(name, arguments, context)
        end = time.monotonic()
        self.tool_seconds += end - start
        # The server reads the whole text as a chat: what looks like its marks must not be one.
        body = _MARK.sub("< ", quote_tool_text(self.protocol, seen.text))
        body = body[: self.endpoint.observation_chars]
        begun, ended = start - self.began, end - self.began
        record = ToolCall(name, arguments, body, seen.outcome, seen.ok, begun, ended, seen.detail)
        self.chain.observe(observation_text(self.protocol, body), record)
        self.usage.length += len(body.encode()) // _BYTES  # until the server counts
        if self.config.cut_context:
            self._cut()
        if self.endpoint.opening:
            self.chain.write(self.endpoint.opening)

    def _cut(self) -> None:
        """Takes old steps out of a context that has no room for another turn."""
        most = self.config.max_tokens - self.config.max_turn_tokens
        if self.usage.length <= most:
            return
        self.usage.cuts += 1
        before = len(self.chain.text)
        self.chain.cut((most - self._prompt) / (self.usage.length - self._prompt))
        left = len(self.chain.text) / before * (self.usage.length - self._prompt)
        self.usage.length = self._prompt + int(left)
