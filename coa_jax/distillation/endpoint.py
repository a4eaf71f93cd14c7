"""Calls a language model behind an OpenAI-compatible endpoint, with a budget and a record of calls.

Every request is appended to a file together with its reply, before the reply is used. If a killed
run is started again, it finds the replies in the file. So a recorded request is never sent twice,
not even within an unfinished task. Only requests that were in flight when the process was killed
are sent again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from coa_jax.config.fields import Temperature, Times, Variable
from coa_jax.distillation.messages import clean
from coa_jax.errors import UserError
from coa_jax.files import jsonl
from coa_jax.tools.net.budget import BudgetTracker, Spent, counts_of
from coa_jax.tools.net.chat import ChatConfig, Client
from coa_jax.tools.net.errors import FetchError
from coa_jax.tools.net.secrets import Secret

T = TypeVar("T")

Chat = Sequence[Mapping[str, str]]
"""Chat messages ``{"role", "content"}``."""

REFUSED_REQUEST = frozenset({400, 413, 422})
"""HTTP statuses that concern a single request: its context is too long, or a filter refused it."""

_PLAIN = 'Which number comes after 1? Reply with a JSON object: {"number": ...}.'
"""A question that no content filter rejects.

It contains the word JSON because servers in JSON mode demand this.
"""


@dataclasses.dataclass(frozen=True)
class EndpointConfig(ChatConfig):
    """The settings of the language model that decides for the teacher's agents.

    The limits on the calls, such as ``max_money``, also cover the calls of earlier processes of the
    same distillation.

    Attributes:
        key_env: name of the environment variable with the API key. If the variable is not set, no
            key is sent; local servers need none.
    """

    key_env: Variable = "OPENAI_API_KEY"
    temperature: Temperature = 0.7
    attempts: Times = 7

    def __bool__(self) -> bool:
        return True  # settings that are given always count; `check` validates them

    def _check_use(self) -> None:
        """Does nothing: `check` validates instead, because it knows the name of the settings."""

    def check(self, where: str = "config.endpoint") -> None:
        """Checks that the settings suffice to call a model and to stay within the budget.

        Args:
            where: name of the settings in error messages.

        Raises:
            UserError: the URL or the name of the model is missing, or ``max_money`` is set without
                a price.
        """
        if not self.url or not self.model:
            raise UserError(f"give {where}.url and {where}.model")
        self.check_price(self.model, f"{where}.")

    @property
    def label(self) -> str:
        """Text for records, which names the model and the settings that affect its replies."""
        return f"{self.model}, temperature {self.temperature:g}, max_tokens {self.max_tokens}"


class RequestRefusedError(Exception):
    """Raised if the endpoint refuses one request but answers others, so a retry would not help."""

    def __str__(self) -> str:
        return f"the request is refused: {self.args[0]}"


@dataclasses.dataclass(frozen=True)
class _Exchange:
    """The fields of a recorded call from which a later process continues."""

    key: str
    reply: str
    prompt: int | None
    completion: int | None


_exchange = functools.partial(jsonl.fields, _Exchange)


class Endpoint:
    """A client of one language model, which records every call in a file.

    `spent` is the total cost of all calls, including those of earlier processes.
    """

    def __init__(
        self,
        config: EndpointConfig,
        record: Path,
        where: str = "config.endpoint",
        beside: Sequence[Path] = (),
    ) -> None:
        """Opens the record of exchanges and the connection.

        Args:
            config: the model, and the limits of its budget.
            record: file in which requests and replies are recorded.
            where: name of the settings, used in error messages.
            beside: record files of other parts of the same run, which need not exist. Their costs
                count against the same budget.

        Raises:
            UserError: the package openai is not installed, the settings are invalid (see
                `EndpointConfig.check`), or a record is malformed.
        """
        config.check(where)
        self.config, self.record, self.spent = config, record, Spent()
        self._tracker = BudgetTracker(config, config.model, where)
        chat = config if Secret(config.key_env) else dataclasses.replace(config, key_env="")
        self._client = Client(chat, self._tracker)
        jsonl.append_lines(record, [])  # creates the file, or removes a partial last line
        self._stopping = False
        self._answered = False  # in this process; earlier processes may have had other settings
        self._trial: asyncio.Future[str] | None = None
        self._replies: dict[str, str] = {}
        for other in filter(Path.exists, beside):
            rows = {row["key"]: row for row in jsonl.read_lines(other, _exchange, growing=True)}
            for row in rows.values():
                self._tracker.spent.add(row, self._tracker.price)
        for row in jsonl.read_lines(record, _exchange):
            if row["key"] not in self._replies:
                self._tracker.spent.add(row, self._tracker.price)
            self._add_cost(row)

    async def complete(self, chat: Chat, episode: str, turn: str) -> str:
        """Returns the model's reply to a chat; a recorded reply is returned without a new request.

        Args:
            chat: messages of the chat.
            episode: id of the run to which the call belongs.
            turn: name of this call within the run. The model is asked again if an equal chat
                belongs to another run or another call.

        Raises:
            RequestRefusedError: the endpoint refuses this request but answers others.
            UserError: the budget is spent, or the endpoint cannot be reached, refuses the caller or
                the model, or refuses every request with these settings.
        """
        key = self._key(chat, episode, turn)
        if key in self._replies:
            return self._replies[key]
        call = asyncio.ensure_future(self._request(key, chat, episode, turn))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            # The run stops, but this reply will be paid for. So wait for the reply, and send no
            # other request.
            self._stopping = True
            await asyncio.wait([call])
            if not call.cancelled():
                call.exception()  # otherwise asyncio would log the exception
            raise

    async def _request(self, key: str, chat: Chat, episode: str, turn: str) -> str:
        """Sends a request; if the first request of this process is refused, checks the settings."""
        try:
            return await self._exchange(key, chat, episode, turn)
        except RequestRefusedError:
            if not self._answered and not self._stopping:
                await self._try_settings(chat)
            raise

    async def _try_settings(self, chat: Chat) -> None:
        """Checks the settings by sending a plain question, once for all requests that wait.

        Args:
            chat: the refused request. The question is sent with its instructions, because settings
                whose token limit has no room for them fit no request.

        Raises:
            UserError: the plain question is refused, too.
        """
        if self._trial is None:
            plain = [m for m in chat if m["role"] == "system"]
            plain.append({"role": "user", "content": _PLAIN})
            request = plain, "trial", str(self.spent.calls)  # a number not used before
            self._trial = asyncio.ensure_future(self._exchange(self._key(*request), *request))
        try:
            await self._trial
        except RequestRefusedError as error:
            raise self._refusal(error.args[0]) from error

    async def _exchange(self, key: str, chat: Chat, episode: str, turn: str) -> str:
        """Sends a request, and records the request and its reply."""
        began = time.monotonic()
        # Half of a surrogate pair, which an earlier reply may contain, cannot be encoded.
        messages = [{name: clean(text) for name, text in message.items()} for message in chat]
        try:
            reply, counts = await self._client.ask(
                {**self.config.options, "messages": messages},
                _reply,
                may_retry=lambda: not self._stopping,
            )
        except FetchError as error:
            raise self._error_of(error) from error
        self._answered = True
        seconds = round(time.monotonic() - began, 3)
        row: dict[str, Any] = {"key": key, "episode": episode, "turn": turn}
        row |= {"model": self.config.model, "chat": list(map(dict, chat))}
        row |= {"reply": reply, **counts, "seconds": seconds}
        jsonl.append_lines(self.record, [row])
        self._add_cost(row)
        return reply

    async def close(self) -> None:
        """Closes the connection to the endpoint."""
        await self._client.close()

    async def closing(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of a coroutine that uses this endpoint, and closes the connection.

        Both happen in the same event loop.
        """
        try:
            return await work
        finally:
            await self.close()

    def _key(self, chat: Chat, episode: str, turn: str) -> str:
        key = [self.config.model, self.config.temperature, self.config.max_tokens, episode, turn]
        text = jsonl.dumps([*key, list(map(dict, chat))])
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def _add_cost(self, row: Mapping[str, Any]) -> None:
        if row["key"] not in self._replies:
            self._replies[row["key"]] = row["reply"]
            self.spent.add(row, self._tracker.price)

    def _error_of(self, error: FetchError) -> Exception:
        """Converts a failed request to an exception about this request or about the endpoint."""
        problem = f"{error.status}: {error.said}" if error.status else error.message
        if error.status is None or error.transient:
            return UserError(
                f"{self.config.url} gave no reply in {self.config.attempts} attempts ({problem}); "
                "what is finished is kept: run the same command again to continue"
            )
        if error.status in REFUSED_REQUEST:
            return RequestRefusedError(problem)
        return self._refusal(problem)

    def _refusal(self, problem: str) -> UserError:
        return UserError(
            f"{self.config.url} refuses the model {self.config.model!r}: {problem}; correct the "
            "settings of the endpoint and run the same command again"
        )


def _reply(answer: dict[str, Any]) -> tuple[str, dict[str, int | None]]:
    """Returns the text and the token counts of a response.

    If the text is null, because all tokens went into thinking or the model refused, it becomes "",
    because this response was paid for, too.
    """
    content = answer["choices"][0]["message"]["content"]
    if not isinstance(content, str | None):
        raise TypeError("its content is not text")
    return content or "", counts_of(answer.get("usage"))
