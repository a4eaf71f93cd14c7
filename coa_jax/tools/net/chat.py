"""Sends requests to language models behind OpenAI-compatible endpoints.

Summarisers, vision models, judges, teachers and evaluated policies all use `Client`. A client
repeats requests after failures that may be temporary, and counts each attempt in a `BudgetTracker`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.util
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from coa_jax.config.fields import (
    Address,
    Count,
    Place,
    Seconds,
    Temperature,
    Times,
    Variable,
)
from coa_jax.config.installed import missing
from coa_jax.config.preflight import Needs
from coa_jax.errors import UserError
from coa_jax.tools.net import budget
from coa_jax.tools.net.address import AddressGuard, parse_url, port_of
from coa_jax.tools.net.budget import Budget, BudgetTracker
from coa_jax.tools.net.errors import FetchError
from coa_jax.tools.net.http import (
    HttpRequest,
    RequestLimits,
    error_status,
    fetch_json,
    retry,
    tls,
    too_large,
)
from coa_jax.tools.net.secrets import Secret, quieten

T = TypeVar("T")

_BACKOFF_S = 1.0
"""Maximum wait before the second attempt in seconds; doubles with each attempt, up to a minute."""

_HIDDEN_PART = re.compile(r"(?<=//)[^/@]*@|[?#].*", re.DOTALL)
_KEY_IN_QUERY = re.compile(r"[?&][\w.-]*(?:key|token|secret|passw|auth)[\w.-]*=", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class ServedModel(Budget):
    """A model behind an OpenAI-compatible endpoint, and the limits on its use.

    Attributes:
        url: base URL of the endpoint, such as ``http://localhost:8000/v1``; "" for no endpoint.
        model: name of the model at the endpoint.
        key_env: environment variable with the API key; "" for an endpoint that needs no key.
        timeout_s: time limit of each attempt in seconds.
        attempts: maximum number of attempts. Another attempt is made only after a failure that may
            be temporary (no connection, an answer that is not JSON, status 429 or 5xx).
    """

    url: Address = ""
    model: Place = ""
    key_env: Variable = ""
    timeout_s: Seconds = 120.0
    attempts: Times = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.url:
            trusting(self.url)
            self._check_use()

    def _check_use(self) -> None:
        """Checks that the model has a name, and a price if its budget needs a price."""
        if not self.model:
            raise UserError(f"model is missing; name the model at {self.url}")
        self.check_price(self.model, "")

    @property
    def price(self) -> tuple[float, float] | None:
        """Prices of a million prompt tokens and of a million completion tokens; None if unknown."""
        return self.price_of(self.model)

    def __bool__(self) -> bool:
        return bool(self.url)

    def needs(self) -> Needs:
        """Returns the client's package, the server and its key, see `config.preflight`."""
        return Needs.of_server("url", self.url, self.key_env, "endpoint")


@dataclasses.dataclass(frozen=True)
class ChatConfig(ServedModel):
    """The settings of a chat model behind an OpenAI-compatible endpoint.

    Attributes:
        temperature: sampling temperature.
        max_tokens: maximum number of tokens of a reply, without the prompt.
        request: further fields of each request, such as ``top_p``; a field with the value None is
            left out. For OpenAI's reasoning models, give ``{"max_tokens": None,
            "max_completion_tokens": 1024}`` and set ``temperature`` to 1.
    """

    temperature: Temperature = 0.0
    max_tokens: Count = 1024
    request: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def options(self) -> dict[str, Any]:
        """Fields of a chat request that these settings determine, such as ``temperature``.

        The model and the messages are not included.
        """
        fields = {"temperature": self.temperature, "max_tokens": self.max_tokens, **self.request}
        return {name: value for name, value in fields.items() if value is not None}

    def money(self, chars: float) -> float:
        """Returns the highest cost of a request about an English text of ``chars`` characters.

        The result is 0 if no price is known. It assumes 3 characters per token; English has more,
        but other languages may have fewer. Besides the text, a request contains instructions and a
        question, at most 3,000 characters.
        """
        prompt, completion = self.price or (0.0, 0.0)
        limits = [self.options.get(name) for name in ("max_tokens", "max_completion_tokens")]
        tokens = max((n for n in limits if isinstance(n, int)), default=self.max_tokens)
        return ((chars + 3000) / 3.0 * prompt + tokens * completion) / 1e6

    async def probe(self, seconds: float) -> tuple[bool, str]:
        """Checks the endpoint with a short request, to find a wrong URL, key or model before a run.

        Args:
            seconds: time limit for the answer.

        Returns:
            (whether the endpoint answers, text that describes the endpoint and the problem if there
            is one).
        """
        short = dataclasses.replace(self, max_tokens=min(self.max_tokens, 16), attempts=1)
        where, wrong = f"{self.model} at {self.url}", ""
        question = {"role": "user", "content": "Answer with one word: ready?"}
        try:
            await chat(short, [question], seconds)
        except UserError as error:
            wrong = str(error)
        except FetchError as error:
            if error.message != _NO_TEXT:  # a reasoning model may need more tokens than this
                wrong = error.message + refusal(error.status, self.key_env)
        return not wrong, f"{where}: {wrong}" if wrong else f"{where} answers"


def trusting(url: str) -> AddressGuard:
    """Returns a guard (check of addresses) for requests to a service that the settings name.

    The guard allows the service even if its address is private, but no other private address.

    Args:
        url: URL of the service.

    Raises:
        UserError: the URL is invalid or contains an API key. A key is refused because settings are
            written to ``config.json``.
    """
    try:
        parsed = parse_url(url)
    except FetchError as error:
        shown = _HIDDEN_PART.sub("", url)
        raise UserError(f"{shown!r} is not the address of a service: {error.message}") from None
    if _KEY_IN_QUERY.search(url):
        raise UserError(
            f"{_HIDDEN_PART.sub('', url)!r}: settings are written to config.json, so an address"
            " must not contain a key; put the key into an environment variable, and name the"
            " variable in key_env"
        )
    return AddressGuard(
        allow=(f"{parsed.raw_host.decode().rstrip('.').lower()}:{port_of(parsed)}",)
    )


def budget_tracker_of(config: ServedModel) -> BudgetTracker:
    """Returns the tracker of a model's cost in this process, see `budget.budget_tracker`."""
    return budget.budget_tracker(config, config.url, config.model, f"chat ({config.model})")


def check_client() -> None:
    """Checks that the package openai is installed.

    Raises:
        UserError: the package is not installed.
    """
    if importlib.util.find_spec("openai") is None:
        raise missing("a model behind an endpoint", "openai", "endpoint")


class Client:
    """Sends requests to a model behind an endpoint. Use a client in ``async with``.

    A client belongs to one event loop.
    """

    def __init__(
        self, config: ServedModel, tracker: BudgetTracker | None = None, max_bytes: int = 8 << 20
    ):
        """Creates a client, without opening a connection.

        Args:
            config: the model and its endpoint.
            tracker: tracker that counts each attempt; None for the tracker of this process
                (`budget_tracker_of`).
            max_bytes: maximum size of an answer in bytes, after decompression.

        Raises:
            UserError: the package openai is not installed, or the environment variable with the API
                key is not set.
        """
        check_client()
        import openai  # a local import, because importing openai takes half a second

        quieten("openai")
        self._config, self._tracker, self._max_bytes = (
            config,
            tracker or budget_tracker_of(config),
            max_bytes,
        )
        self._openai, self._secret = openai, Secret(config.key_env)
        # The package that sends the requests: httpx2 with openai 3, httpx with openai 2.
        sender = openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]
        self._http = importlib.import_module(sender)
        self._client = openai.AsyncOpenAI(
            base_url=config.url,
            api_key=self._secret.reveal() if config.key_env else "none",
            max_retries=0,
            timeout=config.timeout_s,
            # Redirects are not followed, because they could send the messages to another host.
            http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False, verify=tls()),
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
        may_retry: Callable[[], bool] = lambda: True,
    ) -> T:
        """Sends a request, and returns the answer after conversion by ``read``.

        Args:
            body: fields of the request, except ``model``. A request with ``messages`` goes to
                ``/chat/completions``, and a request with ``prompt`` goes to ``/completions``.
            read: function that converts the answer, a JSON object from which the API key has been
                removed. It raises FetchError, LookupError or TypeError if the answer cannot be
                used.
            seconds: time limit for all attempts together; None to limit only each attempt.
            may_retry: function that returns whether another attempt may follow after a failure.

        Raises:
            FetchError: there is no answer, or ``read`` cannot use the answer.
            BudgetSpentError: a limit of the budget is reached.
        """
        limits = RequestLimits(
            total_s=math.inf if seconds is None else max(seconds, 0.001),
            attempts=self._config.attempts,
            backoff_s=_BACKOFF_S,
        )

        async def attempt() -> T:
            await self._tracker.wait_for_rate_limit()
            self._tracker.begin()
            usage, answered = None, False
            try:
                answer = await self._send(body)
                usage = answer.get("usage")
                answered = usage is not None
                value = read(answer)
                answered = True
                return value
            except (LookupError, TypeError):
                raise FetchError("malformed", "the answer is not a chat completion") from None
            finally:
                self._tracker.end(usage, answered)

        return await retry(attempt, limits, may_retry)

    async def _send(self, body: Mapping[str, Any]) -> dict[str, Any]:
        openai, http, more = self._openai, self._http, dict(body)
        route: Any = self._client.chat.completions
        content_field = {"messages": more.pop("messages", None)}
        if content_field["messages"] is None:
            route, content_field = self._client.completions, {"prompt": more.pop("prompt")}
        content = bytearray()
        try:
            async with (
                asyncio.timeout(self._config.timeout_s),
                route.with_streaming_response.create(
                    model=self._config.model, **content_field, extra_body=more
                ) as response,
            ):
                async for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > self._max_bytes:
                        raise too_large(self._max_bytes)
        except (openai.APITimeoutError, http.TimeoutException, TimeoutError) as error:
            raise FetchError("timeout", "the server took too long") from error
        except openai.APIStatusError as error:
            answered, message = error.response, str(self._secret.redact(error.message))
            raise error_status(
                error.status_code, answered.headers, answered.content, message, longest_s=60.0
            ) from error
        except (openai.APIConnectionError, http.TransportError) as error:
            raise FetchError("unreachable", "the server cannot be reached") from error
        except http.DecodingError as error:
            raise FetchError("malformed", "the compressed content is damaged") from error
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise FetchError("malformed", "the answer is not JSON")
        return self._secret.redact(answer)


async def chat(
    config: ChatConfig, messages: Sequence[Mapping[str, Any]], seconds: float | None = None
) -> str:
    """Sends a conversation to a chat model, and returns the text of the model's reply.

    Args:
        config: the model and its endpoint.
        messages: messages of the conversation, each with ``role`` and ``content``.
        seconds: time limit for all attempts together; None to limit only each attempt.

    Raises:
        FetchError: there is no answer, or the answer does not have the format of the API.
        UserError: the environment variable with the API key is not set.
        BudgetSpentError: a limit of the budget is reached.
    """
    body = {**config.options, "messages": list(messages)}
    async with Client(config) as client:
        return await client.ask(body, _text, seconds)


_NO_TEXT = "the model gave no text"


def _text(answer: dict[str, Any]) -> str:
    content = answer["choices"][0]["message"]["content"]
    if not isinstance(content, str) or not content.strip():
        raise FetchError("malformed", _NO_TEXT)
    return content.strip()


def refusal(status: int | None, key_env: str) -> str:
    """Returns a text to append to an error message: the probable cause of an HTTP error.

    The result is "" if the cause is unknown.

    Args:
        status: HTTP status of a model's endpoint; None if there is none.
        key_env: environment variable with the API key; "" for no key.
    """
    if status in (401, 403):
        return f": it refuses the key in {key_env}" if key_env else ": it asks for a key (key_env)"
    return ": the address or the name of the model may be wrong" if status == 404 else ""


async def post_json(url: str, body: Mapping[str, Any], limits: RequestLimits, key_env: str) -> Any:
    """Posts a JSON object to a server that the settings name, and returns the JSON answer.

    Args:
        url: URL of the server.
        body: the object.
        limits: limits on the request.
        key_env: environment variable with a bearer token; "" for no token. The token is removed
            from the answer.

    Raises:
        FetchError: the server gives no usable answer.
    """
    headers = {"Content-Type": "application/json"}
    if key_env:
        headers["Authorization"] = f"Bearer {Secret(key_env).reveal()}"
    request = HttpRequest(url, "POST", headers, json.dumps(body).encode())
    return Secret(key_env).redact(await fetch_json(request, limits, trusting(url)))
