"""The client of OpenAI-compatible endpoints: every request to a model that is served elsewhere.

Summaries, images, judgements, teachers and policies that are evaluated ask through `Client`.  It
takes a `ServedModel`, tries again where a failure may pass, and pays each attempt from a `Purse`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.util
import json
import math
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import httpx2

from coa_jax.bounds import (
    Address,
    Count,
    Place,
    Seconds,
    SecondsOrNone,
    Temperature,
    Times,
    Variable,
)
from coa_jax.errors import UserError
from coa_jax.installed import missing
from coa_jax.tools.net import budget
from coa_jax.tools.net.address import Guard, parse_url, port_of
from coa_jax.tools.net.budget import Budget, Purse
from coa_jax.tools.net.errors import REFUSED, FetchError, speaks_of_account
from coa_jax.tools.net.http import Limits, attempts, seconds_of, too_large
from coa_jax.tools.net.secrets import Secret, quieten

T = TypeVar("T")

_HIDDEN_PART = re.compile(r"(?<=//)[^/@]*@|[?#].*", re.DOTALL)
_KEY_IN_QUERY = re.compile(r"[?&][\w.-]*(?:key|token|secret|passw|auth)[\w.-]*=", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class ServedModel(Budget):
    """A model behind an OpenAI-compatible endpoint, and what may be spent on it.

    Attributes:
        url: base address, ``http://localhost:8000/v1``; "" for none.
        model: name of the model there.
        key_env: environment variable with the key; "" for an endpoint that asks for none.
        timeout_s: seconds for one attempt.
        attempts: tries, where a failure may pass (no connection, no JSON, 429, 5xx).
        backoff_s: longest wait before the second attempt; doubles with each, up to a minute.
    """

    url: Address = ""
    model: Place = ""
    key_env: Variable = ""
    timeout_s: Seconds = 120.0
    attempts: Times = 3
    backoff_s: SecondsOrNone = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url:
            trusting(self.url)
            self._check_use()

    def _check_use(self) -> None:
        """Refuses settings by which the model could not be asked, or no budget held."""
        if not self.model:
            raise UserError(f"model is missing; name the model at {self.url}")
        self.check_price(self.model, "")

    @property
    def price(self) -> tuple[float, float] | None:
        """Money per million tokens of prompts and of completions, if it is known."""
        return self.price_of(self.model)

    def __bool__(self) -> bool:
        return bool(self.url)


@dataclasses.dataclass(frozen=True)
class ChatConfig(ServedModel):
    """A served model that is asked for texts.

    Attributes:
        temperature: of sampling.
        max_tokens: of an answer.
        max_tokens_name: what the server calls that limit; OpenAI's reasoning models want
            ``max_completion_tokens`` (and a temperature of 1).
        json_mode: ask the server for answers that are JSON objects; not all servers can.
    """

    temperature: Temperature = 0.0
    max_tokens: Count = 1024
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    json_mode: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What a request says beside the model and the messages."""
        form = {"response_format": {"type": "json_object"}} if self.json_mode else {}
        return {"temperature": self.temperature, self.max_tokens_name: self.max_tokens, **form}


def trusting(url: str) -> Guard:
    """A guard that lets a configured service be reached wherever it is, and nothing else of ours.

    Raises:
        UserError: the address is none, or holds a key: settings are written to ``config.json``.
    """
    try:
        parsed = parse_url(url)
    except FetchError as error:
        shown = _HIDDEN_PART.sub("", url)
        raise UserError(f"{shown!r} is no address of a service: {error.message}") from None
    if _KEY_IN_QUERY.search(url):
        raise UserError(
            f"{_HIDDEN_PART.sub('', url)!r}: settings are written to config.json, so an address may"
            " not hold a key; put it into the environment and name the variable in key_env"
        )
    return Guard(allow=(f"{parsed.raw_host.decode().rstrip('.').lower()}:{port_of(parsed)}",))


def purse_of(config: ServedModel) -> Purse:
    """What this process has spent on a model under one budget; see `budget.purse_of`."""
    return budget.purse_of(config, config.url, config.model, f"chat ({config.model})")


def check_client() -> None:
    """Raises UserError if the package that asks served models is not installed."""
    if importlib.util.find_spec("openai") is None:
        raise missing("a model behind an endpoint", "openai", "endpoint")


class Client:
    """Asks a served model, in one event loop; to be used in ``async with``."""

    def __init__(self, config: ServedModel, purse: Purse | None = None, max_bytes: int = 8 << 20):
        """Connects to nothing yet.

        Args:
            config: the model.
            purse: what pays for each attempt; None for that of this process (`purse_of`).
            max_bytes: bytes of an answer, after decompression.

        Raises:
            UserError: openai is not installed, or the key is not in the environment.
        """
        check_client()
        import openai  # here: it takes half a second

        quieten("openai")
        self._config, self._purse, self._max_bytes = config, purse or purse_of(config), max_bytes
        self._openai, self._secret = openai, Secret(config.key_env)
        self._client = openai.AsyncOpenAI(
            base_url=config.url,
            api_key=self._secret.reveal() if config.key_env else "none",
            max_retries=0,
            timeout=config.timeout_s,
            # A redirect would take the messages to a host that nobody has named.
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False, verify=_tls()),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.close()

    async def ask(
        self,
        body: Mapping[str, Any],
        read: Callable[[dict[str, Any]], T],
        seconds: float | None = None,
        go_on: Callable[[], bool] = lambda: True,
    ) -> T:
        """What `read` makes of the answer, a JSON object in which the key is hidden.

        Args:
            body: fields of the request without ``model``: ``messages`` and others for
                ``/chat/completions``, ``prompt`` and others for ``/completions``.
            read: raises FetchError, LookupError or TypeError for an answer that it cannot use; a
                FetchError says whether another attempt may help.
            seconds: for all attempts; None for no limit but that of each.
            go_on: whether another attempt may follow one that has failed.

        Raises:
            FetchError: there is no answer, or none that can be used.
            BudgetSpentError: there is nothing left for an attempt.
        """
        limits = Limits(
            total_s=math.inf if seconds is None else max(seconds, 0.001),
            attempts=self._config.attempts,
            backoff_s=self._config.backoff_s,
        )

        async def attempt() -> T:
            await self._purse.turn()
            self._purse.begin()
            usage, answered = None, False
            try:
                answer = await self._once(body)
                usage = answer.get("usage")
                answered = usage is not None
                found = read(answer)
                answered = True
                return found
            except (LookupError, TypeError):
                raise FetchError("malformed", "the answer is no chat completion") from None
            finally:
                self._purse.end(usage, answered)

        return await attempts(attempt, limits, go_on)

    async def _once(self, body: Mapping[str, Any]) -> dict[str, Any]:
        openai, more = self._openai, dict(body)
        route: Any = self._client.chat.completions
        named = {"messages": more.pop("messages", None)}
        if named["messages"] is None:
            route, named = self._client.completions, {"prompt": more.pop("prompt")}
        content = bytearray()
        try:
            async with (
                asyncio.timeout(self._config.timeout_s),
                route.with_streaming_response.create(
                    model=self._config.model, **named, extra_body=more
                ) as response,
            ):
                async for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > self._max_bytes:
                        raise too_large(self._max_bytes)
        except (openai.APITimeoutError, httpx2.TimeoutException, TimeoutError) as error:
            raise FetchError("timeout", "the server took too long") from error
        except openai.APIStatusError as error:
            raise self._status(error) from error
        except (openai.APIConnectionError, httpx2.TransportError) as error:
            raise FetchError("unreachable", "the server cannot be reached") from error
        except httpx2.DecodingError as error:
            raise FetchError("malformed", "the compressed content is damaged") from error
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise FetchError("malformed", "the answer is not JSON")
        return self._secret.redact(answer)

    def _status(self, error: Any) -> FetchError:
        """What an error status means."""
        status, words = error.status_code, error.response.content
        wait = seconds_of(error.response.headers.get("retry-after", ""))
        return FetchError(
            "status",
            f"the server answered with status {status}",
            status,
            None if wait is None else min(wait, 60.0),
            status in REFUSED and speaks_of_account(words),
            str(self._secret.redact(error.message)),
        )


@functools.cache
def _tls() -> ssl.SSLContext:
    """Certificates are always checked; made once, for it reads a large file."""
    return httpx2.create_ssl_context()


async def chat(
    config: ChatConfig,
    messages: Sequence[Mapping[str, Any]],
    seconds: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The text with which the model continues a conversation.

    Args:
        config: the endpoint.
        messages: with ``role`` and ``content``.
        seconds: for the call with all its attempts; None for no limit but that of each.
        options: further fields of the request.

    Raises:
        FetchError: there is no answer, or none in the form of the interface.
        UserError: the key is not in the environment, or the budget of the model is spent.
    """
    body = {**config.options, "messages": list(messages), **(options or {})}
    async with Client(config) as client:
        return await client.ask(body, _text, seconds)


_NO_TEXT = "the model gave no text"


def _text(answer: dict[str, Any]) -> str:
    content = answer["choices"][0]["message"]["content"]
    if not isinstance(content, str) or not content.strip():
        raise FetchError("malformed", _NO_TEXT)
    return content.strip()


async def reach(config: ChatConfig, seconds: float) -> str:
    """Asks an endpoint for one word: a wrong address, key or model shows now and not in a run.

    Args:
        config: the endpoint.
        seconds: for the answer.

    Returns:
        What is wrong, or "".
    """
    short = dataclasses.replace(config, max_tokens=min(config.max_tokens, 16), attempts=1)
    try:
        await chat(short, [{"role": "user", "content": "Answer with one word: ready?"}], seconds)
    except UserError as error:
        return str(error)
    except FetchError as error:
        if error.message == _NO_TEXT:  # a model that thinks first has written none yet
            return ""
        return error.message + refusal(error.status, config.key_env)
    return ""


def refusal(status: int | None, key_env: str) -> str:
    """What an error status says of the key or the name of the model, as an ending of a clause."""
    if status in (401, 403):
        return f": it refuses the key in {key_env}" if key_env else ": it asks for a key (key_env)"
    return ": the address or the name of the model may be wrong" if status == 404 else ""
