"""The client for OpenAI-compatible endpoints, used for every request to a model served elsewhere.

Summaries, image descriptions, judges, teachers and evaluated policies use `Client`. It takes a
`ServedModel`, retries failures that may be temporary, and counts each attempt in a `Purse`.
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
    """A model behind an OpenAI-compatible endpoint, and the limits on its use.

    Attributes:
        url: base address, e.g. ``http://localhost:8000/v1``; "" for none.
        model: name of the model at the endpoint.
        key_env: environment variable with the key; "" for an endpoint without a key.
        timeout_s: seconds for one attempt.
        attempts: maximum number of attempts, if a failure may be temporary (no connection, no JSON,
            429, 5xx).
        backoff_s: maximum wait before the second attempt in seconds; doubles with each attempt, up
            to a minute.
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
        """Rejects settings with which the model could not be called, or the budget not be kept."""
        if not self.model:
            raise UserError(f"model is missing; name the model at {self.url}")
        self.check_price(self.model, "")

    @property
    def price(self) -> tuple[float, float] | None:
        """Money per million prompt and completion tokens, if known."""
        return self.price_of(self.model)

    def __bool__(self) -> bool:
        return bool(self.url)


@dataclasses.dataclass(frozen=True)
class ChatConfig(ServedModel):
    """A served model that writes texts.

    Attributes:
        temperature: sampling temperature.
        max_tokens: maximum length of an answer in tokens.
        max_tokens_name: the server's name of that limit; OpenAI's reasoning models need
            ``max_completion_tokens`` (and a temperature of 1).
        json_mode: whether the server is asked for answers that are JSON objects; not all servers
            can.
    """

    temperature: Temperature = 0.0
    max_tokens: Count = 1024
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    json_mode: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Returns the fields of a request besides the model and the messages."""
        form = {"response_format": {"type": "json_object"}} if self.json_mode else {}
        return {"temperature": self.temperature, self.max_tokens_name: self.max_tokens, **form}


def trusting(url: str) -> Guard:
    """Returns a guard that allows a configured service at any address, and no other private
    address.

    Raises:
        UserError: the URL is invalid, or contains a key: settings are written to ``config.json``.
    """
    try:
        parsed = parse_url(url)
    except FetchError as error:
        shown = _HIDDEN_PART.sub("", url)
        raise UserError(f"{shown!r} is not the address of a service: {error.message}") from None
    if _KEY_IN_QUERY.search(url):
        raise UserError(
            f"{_HIDDEN_PART.sub('', url)!r}: settings go into config.json, so an address must"
            " not hold a key; put it into the environment and name the variable in key_env"
        )
    return Guard(allow=(f"{parsed.raw_host.decode().rstrip('.').lower()}:{port_of(parsed)}",))


def purse_of(config: ServedModel) -> Purse:
    """Returns the purse of this process for a model with its budget; see `budget.purse_of`."""
    return budget.purse_of(config, config.url, config.model, f"chat ({config.model})")


def check_client() -> None:
    """Raises UserError if the package openai is not installed."""
    if importlib.util.find_spec("openai") is None:
        raise missing("a model behind an endpoint", "openai", "endpoint")


class Client:
    """Calls a served model, in one event loop; to be used in ``async with``."""

    def __init__(self, config: ServedModel, purse: Purse | None = None, max_bytes: int = 8 << 20):
        """Creates a client; connects to nothing yet.

        Args:
            config: the model.
            purse: counts each attempt; None for the purse of this process (`purse_of`).
            max_bytes: maximum size of an answer in bytes, after decompression.

        Raises:
            UserError: openai is not installed, or the key is not in the environment.
        """
        check_client()
        import openai  # imported here: it takes half a second

        quieten("openai")
        self._config, self._purse, self._max_bytes = config, purse or purse_of(config), max_bytes
        self._openai, self._secret = openai, Secret(config.key_env)
        self._client = openai.AsyncOpenAI(
            base_url=config.url,
            api_key=self._secret.reveal() if config.key_env else "none",
            max_retries=0,
            timeout=config.timeout_s,
            # A redirect would send the messages to a host that no setting names.
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
        """Sends a request.

        Returns the result of `read` for the answer, a JSON object without the key.

        Args:
            body: fields of the request without ``model``: ``messages`` and others for
                ``/chat/completions``, ``prompt`` and others for ``/completions``.
            read: converts the answer. It raises FetchError, LookupError or TypeError for an
                unusable answer; a FetchError says whether another attempt may help.
            seconds: time limit for all attempts together; None to limit each attempt only.
            go_on: returns whether another attempt may follow a failed one.

        Raises:
            FetchError: there is no answer, or no usable one.
            BudgetSpentError: a limit of the budget is reached.
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
                raise FetchError("malformed", "the answer is not a chat completion") from None
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
        """Converts an error status to an exception."""
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
    """Returns a TLS context that checks certificates; cached, since it reads a large file."""
    return httpx2.create_ssl_context()


async def chat(
    config: ChatConfig,
    messages: Sequence[Mapping[str, Any]],
    seconds: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Returns the model's continuation of a conversation.

    Args:
        config: the endpoint.
        messages: messages with ``role`` and ``content``.
        seconds: time limit for all attempts together; None to limit each attempt only.
        options: further fields of the request.

    Raises:
        FetchError: there is no answer, or it does not have the form of the API.
        UserError: the key is not in the environment, or a limit of the budget is reached.
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
    """Asks an endpoint for one word, to detect a wrong address, key or model before a run.

    Args:
        config: the endpoint.
        seconds: time limit of the answer.

    Returns:
        The problem, or "".
    """
    short = dataclasses.replace(config, max_tokens=min(config.max_tokens, 16), attempts=1)
    try:
        await chat(short, [{"role": "user", "content": "Answer with one word: ready?"}], seconds)
    except UserError as error:
        return str(error)
    except FetchError as error:
        if error.message == _NO_TEXT:  # a thinking model has written no answer yet
            return ""
        return error.message + refusal(error.status, config.key_env)
    return ""


def refusal(status: int | None, key_env: str) -> str:
    """Explains an error status by the key or the model's name, as the end of a clause."""
    if status in (401, 403):
        return f": it refuses the key in {key_env}" if key_env else ": it asks for a key (key_env)"
    return ": the address or the name of the model may be wrong" if status == 404 else ""
