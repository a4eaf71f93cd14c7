"""Samples a policy behind an OpenAI-compatible endpoint, with the tools on this machine.

As in the evaluation of the AFM release, the whole chain of agents is a single assistant message.
Each request sends the message so far, and asks the server to continue it until the policy closes
the tag of a tool call or of the answer. Then the tool runs on this machine, and its observation is
appended to the message. vLLM, SGLang and ``coa_jax.serve`` can continue a partial assistant
message.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from coa_jax.config.fields import Count, Prose, Seconds, Times
from coa_jax.data.trajectory import StopReason, ToolCall, Trajectory
from coa_jax.errors import UserError
from coa_jax.model.encode import observation_text
from coa_jax.protocol import TAGS, get_protocol, quote_tool_text
from coa_jax.rollout.chain import Chain, text_trajectory
from coa_jax.rollout.environments.session import ToolLoop
from coa_jax.rollout.request import Request, RolloutConfig, described, tool_context
from coa_jax.tools.base import Tool
from coa_jax.tools.net.budget import Spent, counts_of
from coa_jax.tools.net.chat import ChatConfig, Client, ServedModel
from coa_jax.tools.net.errors import FetchError

_TOO_LONG = re.compile(
    r"context[ _-](?:length|size|window)|context has room|leaves room for|maximum model length"
    r"|prompt is too long"
    r"|tokens\W[^.]{0,60}(?:too large|exceed|must be (?:<=|at most|less))",
    re.IGNORECASE,
)
"""Matches servers' error texts for a full context, the only error that the policy causes.
"""
_BYTES = 3  # assumed bytes per token of text whose tokens the server has not counted
_MARK = re.compile(r"<(?=[|\uff5c][^<>\n]{1,60}[|\uff5c]>|/?s>|(?:start|end)_of_turn>)")
"""Matches the first character of the marks that chat templates write between messages."""


@dataclasses.dataclass(frozen=True)
class PolicyEndpoint(ServedModel):
    """The endpoint of a policy, and how it is sampled.

    If ``url`` (see `ServedModel`) is "", the policy runs on this machine.

    Attributes:
        concurrency: number of samples that run at the same time.
        opening: text with which each turn of the policy begins; "" for none. The evaluation code of
            the Chain-of-Agents paper uses ``<think>``. This suits the protocols ``web`` and
            ``mhqa``, in which the policy thinks before every action, but not ``code``.
        observation_chars: maximum number of characters of an observation; longer observations are
            truncated. This setting takes the place of ``rollout.max_observation_tokens``, because
            only the server can count tokens.
    """

    timeout_s: Seconds = 600.0
    attempts: Times = 6
    concurrency: Times = 32
    opening: Prose = ""
    observation_chars: Count = 16_000

    async def probe(self, seconds: float) -> tuple[bool, str]:
        """Checks whether the endpoint answers, see `ChatConfig.probe`."""
        return await self.chat.probe(seconds)

    @property
    def chat(self) -> ChatConfig:
        """The endpoint as a `ChatConfig`, for a check whether the server answers."""
        return ChatConfig(self.url, self.model, self.key_env)


@dataclasses.dataclass
class _Usage(Spent):
    """Numbers of tokens by the server's count, length of the context, and number of cuts."""

    length: int = 0
    cuts: int = 0


class EndpointSampler:
    """A `sampler.Sampler` that asks a policy behind an endpoint, and runs its tools here.

    The server returns text. The trajectories therefore have no token ids and no log-probabilities,
    and cannot be trained on.

    Attributes:
        tokenizer: None, because the server encodes the messages of a request.
    """

    tokenizer = None

    def __init__(self, endpoint: PolicyEndpoint, tools: Sequence[Tool], config: RolloutConfig):
        """Checks whether the endpoint can be called; sends no request.

        Args:
            endpoint: the endpoint of the policy.
            tools: live tools.
            config: budgets of a trajectory. The number of tokens that the server counts is compared
                with ``max_tokens``.

        Raises:
            UserError: the package openai is not installed, or the API key is not in the
                environment.
        """
        self._endpoint, self._config, self._client = endpoint, config, Client(endpoint)
        self._tools = {tool.name: tool for tool in tools}
        self._places = asyncio.Semaphore(endpoint.concurrency)
        self._running: dict[asyncio.Task[Trajectory], tuple[Request, int]] = {}
        self._ended: asyncio.Queue[asyncio.Task[Trajectory]] = asyncio.Queue()
        self._tokens = 0

    def submit(self, request: Request) -> None:
        """Adds a request, see `Sampler.submit`."""
        for sample in request.samples:
            task = asyncio.create_task(self._run(request, sample))
            task.add_done_callback(self._ended.put_nowait)
            self._running[task] = request, sample

    def cancel(self, request: Request) -> None:
        """Ends all samples of a request that have not finished, see `Sampler.cancel`."""
        for task, (other, _) in self._running.items():
            if other is request:
                task.cancel()

    def publish(self, weights: Any, version: int) -> None:
        """Raises UserError, because the weights of the policy are on the server."""
        raise UserError(
            f"{self._endpoint.url}: a policy behind an endpoint gives neither token ids nor "
            "log-probabilities and takes no weights, so it can be evaluated but not trained"
        )

    def oldest(self, request: Request) -> None:
        """Returns None, because a policy behind an endpoint has no versions of its weights."""

    def figures(self) -> dict[str, float]:
        """Returns the number of sampled tokens, and the number of samples at the same time."""
        return {"decoded_tokens": self._tokens, "slots": self._endpoint.concurrency}

    async def finished(self) -> AsyncGenerator[Trajectory, None]:
        """Yields each trajectory when it ends, see `Sampler.finished`.

        If a sample raises an error, the trajectories that have ended are yielded before the error
        is raised.
        """
        try:
            while True:
                ended = [await self._ended.get()]
                while not self._ended.empty():
                    ended.append(self._ended.get_nowait())
                ended.sort(key=lambda task: not task.cancelled() and task.exception() is not None)
                for task in ended:
                    request, sample = self._running.pop(task)
                    if task.cancelled():
                        about, reason = described(request, self._config, 0.0), StopReason.CANCELLED
                        yield text_trajectory(request.task, sample, (), reason, metadata=about)
                    else:
                        yield task.result()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._client.close()

    async def _run(self, request: Request, sample: int) -> Trajectory:
        async with self._places:
            tools = ToolLoop(self._tools)
            episode = _Episode(self._client, self._endpoint, self._config, tools, request, sample)
            trajectory = await episode.run()
        self._tokens += episode.usage.completion
        return trajectory


@dataclasses.dataclass
class _Episode:
    """The process that produces one sample."""

    client: Client
    endpoint: PolicyEndpoint
    config: RolloutConfig
    tools: ToolLoop
    request: Request
    sample: int

    def __post_init__(self) -> None:
        assert self.request.messages is not None, "the request was not made by make_request"
        self.turns = self.request.messages.turns
        self.protocol = get_protocol(self.request.task.protocol)
        if self.protocol.format is not None:
            raise UserError(f"a policy behind an endpoint writes {TAGS}; give a task in tags")
        self.chain = Chain(self.protocol)
        self.usage = _Usage()
        self._question = "".join(text for _, text in self.turns)
        self._prompt = len(self._question.encode()) // _BYTES  # tokens, estimated
        self.began = time.monotonic()
        self.tool_seconds = 0.0

    async def run(self) -> Trajectory:
        """Runs the sample from beginning to end; returns its trajectory."""
        if self.endpoint.opening:
            self.chain.write(self.endpoint.opening)
        reason = None
        try:
            while reason is None:
                reason = await self._turn()
        finally:
            await self.tools.close()
        about = described(self.request, self.config, time.monotonic() - self.began)
        about["usage"] = dataclasses.asdict(self.usage)
        return self.chain.finish(reason, self.request.task, self.sample, about)

    async def _turn(self) -> StopReason | None:
        """Lets the policy continue, and runs the tool that the policy calls.

        Returns the stop reason, or None if the sample is not over.
        """
        config = self.config
        if config.max_seconds and time.monotonic() - self.began > config.max_seconds:
            return StopReason.DEADLINE
        budget = config.max_tokens - self.usage.length
        if budget <= 0:
            return StopReason.LENGTH
        left = self.began + config.max_seconds - time.monotonic() if config.max_seconds else None
        try:
            async with asyncio.timeout(left):
                reply = await self._ask(budget)
        except TimeoutError:
            return StopReason.DEADLINE
        if reply is None:
            return StopReason.LENGTH
        text, finish, limited = reply
        segment = self.chain.write(text)
        if segment is None:
            if finish == "length":
                limited = limited and 0 < config.max_turn_tokens < budget
                return StopReason.TURN_LENGTH if limited else StopReason.LENGTH
            # A closing tag inside the body of another tag closes nothing, so the policy continues.
            return None if text.endswith(self.protocol.stops) else StopReason.EOS
        if segment.role == self.protocol.answer:
            return StopReason.ANSWER
        if len(self.chain.calls) >= config.max_tool_calls:
            return StopReason.TURNS
        await self._call(str(segment.role), segment.body)
        late = config.max_tool_seconds and self.tool_seconds >= config.max_tool_seconds
        return StopReason.TOOL_TIME if late else None

    async def _ask(self, budget: int) -> tuple[str, str, bool] | None:
        """Requests text of the policy.

        Returns:
            The text with the closing tag that ended it, the finish reason, and whether the limit of
            this sample, not the context of the server, ended the text. None if the context is
            full.

        Raises:
            UserError: the endpoint rejects the request or cannot be reached.
        """
        messages = [{"role": role, "content": text} for role, text in self.turns]
        body: dict[str, Any] = {
            "messages": messages,
            "temperature": self.request.sampling.temperature,
            "top_p": self.request.sampling.top_p,
            "seed": self._seed(),
            "stop": list(self.protocol.stops),
        }
        if self.request.sampling.top_k:
            body["top_k"] = self.request.sampling.top_k
        if self.chain.text:
            messages.append({"role": "assistant", "content": self.chain.text})
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        url = self.endpoint.url
        for more in ({"max_tokens": min(filter(None, (self.config.max_turn_tokens, budget)))}, {}):
            # The length of the prompt is unknown at first, and the length of an observation is
            # estimated. So the server may reject the requested number of tokens although it has
            # room for fewer. The request is then repeated without a limit, and the server uses all
            # the room that is left.
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
        request = self.request
        name = f"{request.seed}/{request.prompt_id}/{self.sample}/{self.usage.calls}"
        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) >> 1

    def _read(self, answer: dict[str, Any]) -> tuple[str, str]:
        choice, counts = answer["choices"][0], counts_of(answer.get("usage"))
        text, finish = choice["message"]["content"] or "", str(choice.get("finish_reason"))
        self.usage.add(counts, self.endpoint.price)
        if counts["prompt"] is None or counts["completion"] is None:
            new = text if self.usage.calls > 1 else self._question + text
            self.usage.length += len(new.encode()) // _BYTES
        else:
            self.usage.length = counts["prompt"] + counts["completion"]
            if self.usage.calls == 1:
                self._prompt = counts["prompt"]
        stop = choice.get("stop_reason", choice.get("matched_stop"))  # names in vLLM and SGLang
        if finish == "stop" and not choice.keys() & {"stop_reason", "matched_stop"}:
            stop = self.chain.missing_stop(text)  # the server does not report the closing tag
        if isinstance(stop, str) and stop in self.protocol.stops and not text.endswith(stop):
            text += stop
        return text, finish

    async def _call(self, name: str, arguments: str) -> None:
        start = time.monotonic()
        context = tool_context(
            self.config,
            f"{self.request.task.id}/{self.sample}",
            self.chain.calls,
            question=self.request.task.question,
            think=self.chain.last_think,
            seconds=start - self.began,
            tool_seconds=self.tool_seconds,
        )
        result = await self.tools.act(name, arguments, context)
        end = time.monotonic()
        self.tool_seconds += end - start
        # The server parses the whole text as a chat, so the text of a tool must not contain marks
        # of the chat template.
        body = _MARK.sub("< ", quote_tool_text(self.protocol, result.text))
        body = body[: self.endpoint.observation_chars]
        times = start - self.began, end - self.began
        record = ToolCall(name, arguments, body, result.outcome, result.ok, *times, result.detail)
        self.chain.observe(observation_text(self.protocol, body), record)
        self.usage.length += len(body.encode()) // _BYTES  # estimated until the server counts
        if self.config.cut_context:
            self._cut()
        if self.endpoint.opening:
            self.chain.write(self.endpoint.opening)

    def _cut(self) -> None:
        """Removes the oldest steps if the context has no room for another turn."""
        most = self.config.max_tokens - self.config.max_turn_tokens
        if self.usage.length <= most:
            return
        self.usage.cuts += 1
        before = len(self.chain.text)
        self.chain.cut((most - self._prompt) / (self.usage.length - self._prompt))
        left = len(self.chain.text) / before * (self.usage.length - self._prompt)
        self.usage.length = self._prompt + int(left)
