"""A language model behind an OpenAI-compatible endpoint, with a budget, and paid for once.

Every exchange is appended to a file before its reply is used.  A killed run that is started again
finds the replies there, so that nothing recorded is asked for twice, not even inside an unfinished
task; calls that were under way when the process was killed are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import random
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from coa_jax import jsonl
from coa_jax.bounds import (
    Address,
    Amount,
    Between,
    Bounded,
    Count,
    NotNegative,
    Place,
    Seconds,
    SecondsOrNone,
    Temperature,
    Variable,
)
from coa_jax.distill.messages import clean
from coa_jax.errors import UserError
from coa_jax.installed import missing
from coa_jax.tools.net.secrets import Secret

T = TypeVar("T")

Chat = Sequence[Mapping[str, str]]
"""Messages ``{"role", "content"}``."""

REFUSED_REQUEST = frozenset({400, 413, 422})
"""Statuses about a request, not about who asks: too long a context, a content filter."""

_PLAIN = 'Which number comes after 1? Reply with a JSON object: {"number": ...}.'
"""What no filter objects to; servers in JSON mode want to see the word."""


@dataclasses.dataclass(frozen=True)
class EndpointConfig(Bounded):
    """Where the model is, how it is asked, and what may be spent.

    Attributes:
        base_url: e.g. ``http://localhost:8000/v1``.
        model: name of the model there.
        key_variable: environment variable with the key; a local server needs none.
        temperature: of sampling.
        max_tokens: longest reply.
        max_tokens_name: what the server calls that limit; OpenAI's reasoning models want
            ``max_completion_tokens`` (and a temperature of 1).
        json_mode: ask the server for replies that are JSON objects; not all servers can.
        timeout_s: seconds for one attempt.
        retries: further attempts after a failure that may pass (no connection, 429, 5xx).
        backoff_s: longest wait before the first of them; doubles with each, up to a minute.
        prices: (model, money per million prompt tokens, per million completion tokens).
        max_calls, max_total_tokens, max_money: the run stops before a call once so much has been
            spent, also by earlier processes; 0 for no limit.  The last two need a server that
            counts tokens.
    """

    base_url: Address = ""
    model: Place = ""
    key_variable: Variable = "OPENAI_API_KEY"
    temperature: Temperature = 0.7
    max_tokens: Count = 1024
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    json_mode: bool = False
    timeout_s: Seconds = 120.0
    retries: Annotated[int, Between(0, 100)] = 6
    backoff_s: SecondsOrNone = 0.5
    prices: tuple[tuple[Place, NotNegative, NotNegative], ...] = ()
    max_calls: Amount = 0
    max_total_tokens: Amount = 0
    max_money: NotNegative = 0.0

    def check(self, where: str = "config.endpoint") -> None:
        """Refuses settings by which no model could be asked, or no budget held.

        Args:
            where: what the error calls the settings.

        Raises:
            UserError: the address, the model or the price that ``max_money`` needs is missing.
        """
        if not self.base_url or not self.model:
            raise UserError(f"give {where}.base_url and {where}.model")
        form = "(model, per million prompt tokens, per million completion tokens)"
        if self.max_money and not any(self.price or ()):
            raise UserError(
                f"{where}.max_money needs the price of {self.model!r}, which is "
                f"{'missing' if self.price is None else '0: it would limit nothing'}; give it in "
                f"{where}.prices as {form}"
            )

    @property
    def price(self) -> tuple[float, float] | None:
        """Money per million tokens of prompts and of completions, if it is known."""
        return next(((p, c) for name, p, c in self.prices if name == self.model), None)

    @property
    def label(self) -> str:
        """The model and how it is asked: what its replies depend on."""
        return f"{self.model}, temperature {self.temperature:g}, max_tokens {self.max_tokens}"


class RequestRefusedError(Exception):
    """The endpoint answers other requests, but not this one; no further attempt would help."""

    def __str__(self) -> str:
        return f"the request is refused: {self.args[0]}"


@dataclasses.dataclass
class Spent:
    """What the calls so far have cost; ``unmetered`` of them came back without token counts."""

    calls: int = 0
    prompt: int = 0
    completion: int = 0
    money: float = 0.0
    unmetered: int = 0

    def to_json(self) -> dict[str, Any]:
        """The totals as JSON values."""
        return dataclasses.asdict(self)

    def add(self, row: Mapping[str, Any], price: tuple[float, float] | None) -> None:
        """Counts an exchange (its ``prompt`` and ``completion``) at a price."""
        prompt, completion = row["prompt"] or 0, row["completion"] or 0
        per_prompt, per_completion = price or (0.0, 0.0)
        self.calls += 1
        self.unmetered += None in (row["prompt"], row["completion"])
        self.prompt += prompt
        self.completion += completion
        self.money += (prompt * per_prompt + completion * per_completion) / 1e6


def check_budget(
    limits: EndpointConfig, spent: Spent, inside: int = 0, where: str = "config.endpoint"
) -> None:
    """Raises UserError if a limit of `where` has been reached, or if nobody can tell.

    Args:
        limits: what may be spent.
        spent: so far.
        inside: calls that are under way.
        where: what the error calls the settings.
    """
    metered = next((n for n in ("max_total_tokens", "max_money") if getattr(limits, n)), None)
    if metered and spent.unmetered:
        raise UserError(
            f"{where}.{metered} cannot be kept: {spent.unmetered} replies came without a count of "
            f"tokens; set {where}.{metered}=0 and limit {where}.max_calls, or have the server "
            "report usage"
        )
    for name, value, limit in (
        ("max_calls", spent.calls + inside, limits.max_calls),
        ("max_total_tokens", spent.prompt + spent.completion, limits.max_total_tokens),
        ("max_money", spent.money, limits.max_money),
    ):
        if limit and value >= limit:
            raise UserError(
                f"the budget {where}.{name}={limit:g} is spent ({value:g}); what is "
                "finished is kept: raise it and run the same command again to continue"
            )


def _exchange(row: Any) -> dict[str, Any]:
    found = {name: row[name] for name in ("key", "reply", "prompt", "completion")}
    counts = (found["prompt"], found["completion"])
    if not all(isinstance(found[name], str) for name in ("key", "reply")):
        raise TypeError("'key' and 'reply' must be texts")
    if not all(count is None or type(count) is int for count in counts):
        raise TypeError("'prompt' and 'completion' must be whole numbers or null")
    return found


class Endpoint:
    """A client of one model; `spent` says what it has cost, earlier processes included."""

    def __init__(
        self,
        config: EndpointConfig,
        record: Path,
        where: str = "config.endpoint",
        beside: Sequence[Path] = (),
    ) -> None:
        """Opens the record of exchanges and the connection.

        Args:
            config: the model, and what may be spent.
            record: file of the exchanges.
            where: what errors call the settings.
            beside: records of other parts of the same run, as far as they exist: what they have
                cost counts against the budget, too.

        Raises:
            UserError: openai is not installed, the settings cannot be used (see
                `EndpointConfig.check`), or the record is malformed.
        """
        try:
            import openai
        except ImportError:
            raise missing("a teacher behind an endpoint", "openai", "endpoint") from None
        config.check(where)
        self.config, self.record, self.spent, self._where = config, record, Spent(), where
        self._openai, self._secret = openai, Secret(config.key_variable)
        self._client = openai.AsyncOpenAI(
            base_url=config.base_url,
            api_key=self._secret.reveal() if self._secret else "none",
            max_retries=0,
            timeout=config.timeout_s,
        )
        jsonl.append_lines(record, [])  # creates it, or cuts off an unfinished last line
        self._inside, self._stopping = 0, False
        self._answered = False  # by this process: an earlier one may have had other settings
        self._trial: asyncio.Future[str] | None = None
        self._replies: dict[str, str] = {}
        self._total = Spent()
        for other in filter(Path.exists, beside):
            rows = {row["key"]: row for row in jsonl.read_lines(other, _exchange, growing=True)}
            for row in rows.values():
                self._total.add(row, config.price)
        for row in jsonl.read_lines(record, _exchange):
            self._account(row)

    async def complete(self, chat: Chat, episode: str, turn: str) -> str:
        """The reply to a chat.

        Args:
            chat: the messages.
            episode: the run that asks; with `turn` it tells equal chats apart.
            turn: which call of the run this is.

        Raises:
            RequestRefusedError: the endpoint answers others and refuses this request.
            UserError: the budget is spent, the endpoint cannot be reached, refuses the caller or
                the model, or refuses every request with these settings.
        """
        key = self._key(chat, episode, turn)
        if key in self._replies:
            return self._replies[key]
        check_budget(self.config, self._total, self._inside, self._where)
        self._inside += 1
        call = asyncio.ensure_future(self._pay(key, chat, episode, turn))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            # The run stops, but this reply will be paid for: wait for it, and ask for no other.
            self._stopping = True
            await asyncio.wait([call])
            if not call.cancelled():
                call.exception()  # looked at: asyncio would report it as never retrieved
            raise

    async def _pay(self, key: str, chat: Chat, episode: str, turn: str) -> str:
        """Asks; what is refused before anything was answered may be the fault of a setting."""
        try:
            return await self._exchange(key, chat, episode, turn)
        except RequestRefusedError:
            if not self._answered and not self._stopping:
                await self._try_settings(chat)  # in the place of this call: the budget holds
            raise
        finally:
            # Not where the call is waited for: until that runs, it would count twice.
            self._inside -= 1

    async def _try_settings(self, chat: Chat) -> None:
        """Asks a plain question, once for all that wait for it.

        Args:
            chat: what was refused.  Its instructions are kept: a limit of tokens that leaves no
                room for them leaves none for any request.

        Raises:
            UserError: that is refused too.
        """
        if self._trial is None:
            plain = [m for m in chat if m["role"] == "system"]
            plain.append({"role": "user", "content": _PLAIN})
            asked = plain, "trial", str(self.spent.calls)  # a number that no earlier trial had
            self._trial = asyncio.ensure_future(self._exchange(self._key(*asked), *asked))
        try:
            await self._trial
        except RequestRefusedError as error:
            raise self._refusal(error.args[0]) from error

    async def _exchange(self, key: str, chat: Chat, episode: str, turn: str) -> str:
        """Asks, and records the exchange."""
        began = time.monotonic()
        reply, prompt, completion = await self._ask(chat)
        self._answered = True
        row = {
            "key": key,
            "episode": episode,
            "turn": turn,
            "model": self.config.model,
            "chat": [dict(message) for message in chat],
            "reply": reply,
            "prompt": prompt,
            "completion": completion,
            "seconds": round(time.monotonic() - began, 3),
        }
        jsonl.append_lines(self.record, [row])
        self._account(row)
        return reply

    async def close(self) -> None:
        """Closes the connection."""
        await self._client.close()

    async def closing(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work returns; the connection is closed after it, in the same event loop."""
        try:
            return await work
        finally:
            await self.close()

    def _key(self, chat: Chat, episode: str, turn: str) -> str:
        asked = [self.config.model, self.config.temperature, self.config.max_tokens, episode, turn]
        text = jsonl.dumps([*asked, [dict(message) for message in chat]])
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def _account(self, row: Mapping[str, Any]) -> None:
        if row["key"] in self._replies:
            return
        self._replies[row["key"]] = row["reply"]
        for spent in (self.spent, self._total):
            spent.add(row, self.config.price)

    async def _ask(self, chat: Chat) -> tuple[str, int | None, int | None]:
        openai, problem = self._openai, ""
        for attempt in range(self.config.retries + 1):
            wait = min(60.0, self.config.backoff_s * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                return await self._once(chat)
            except openai.APIStatusError as error:
                problem = self._secret.redact(f"{error.status_code}: {error.message}")
                self._check_refusal(error, problem)
                asked = error.response.headers.get("retry-after", "")
                wait = max(wait, min(60.0, float(asked)) if asked.isdigit() else 0.0)
            except (openai.APIConnectionError, openai.APIResponseValidationError) as error:
                problem = f"{type(error).__name__}: {error}"
            except (ValueError, TypeError, AttributeError, IndexError) as error:
                problem = f"a response without a reply ({error})"
            if self._stopping:
                break
            if attempt < self.config.retries:
                await asyncio.sleep(wait)
        raise UserError(
            f"{self.config.base_url} gave no reply in {attempt + 1} attempts "
            f"({problem}); what is finished is kept: run the same command again to continue"
        )

    def _check_refusal(self, error: Any, problem: str) -> None:
        """Raises what a status means that further attempts would not change; returns else."""
        if error.status_code in (408, 409, 425, 429) or error.status_code >= 500:
            return
        if error.status_code in REFUSED_REQUEST:
            raise RequestRefusedError(problem) from error
        raise self._refusal(problem) from error

    def _refusal(self, problem: str) -> UserError:
        return UserError(
            f"{self.config.base_url} refuses the model {self.config.model!r}: {problem}; mend the "
            "settings of the endpoint and run the same command again"
        )

    async def _once(self, chat: Chat) -> tuple[str, int | None, int | None]:
        options: dict[str, Any] = {self.config.max_tokens_name: self.config.max_tokens}
        if self.config.json_mode:
            options["response_format"] = {"type": "json_object"}
        response = await self._client.chat.completions.create(
            model=self.config.model,
            # One half of a surrogate pair, from an earlier reply, could not be sent at all.
            messages=[{name: clean(text) for name, text in m.items()} for m in chat],  # type: ignore[misc]
            temperature=self.config.temperature,
            **options,
        )
        content = response.choices[0].message.content
        # Null is a reply that was paid for (all tokens went into thinking, or a refusal).
        reply = self._secret.redact("" if content is None else content)
        if not isinstance(reply, str):
            raise ValueError("its content is not text")
        usage = response.usage
        if usage is None:
            return reply, None, None
        return reply, usage.prompt_tokens, usage.completion_tokens
