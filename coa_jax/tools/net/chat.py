"""A client of OpenAI-compatible chat endpoints, for summaries, images and judgements."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from coa_jax.bounds import Address, Count, Place, Seconds, Temperature, Times, Variable
from coa_jax.errors import UserError
from coa_jax.tools.net.address import Guard, parse_url, port_of
from coa_jax.tools.net.budget import Budget, Purse
from coa_jax.tools.net.errors import FetchError
from coa_jax.tools.net.http import Limits, Request, attempts, fetch_json
from coa_jax.tools.net.secrets import Secret

_HIDDEN_PART = re.compile(r"(?<=//)[^/@]*@|[?#].*", re.DOTALL)
_KEY_IN_QUERY = re.compile(r"[?&][\w.-]*(?:key|token|secret|passw|auth)[\w.-]*=", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class ChatConfig(Budget):
    """Which model behind an OpenAI-compatible endpoint answers, how it is asked, and at what cost.

    Attributes:
        url: base address, ``http://localhost:8000/v1``; "" for none.
        model: name of the model there.
        key_env: environment variable with the key; "" for an endpoint that asks for none.
        temperature: of sampling.
        max_tokens: of an answer.
        timeout_s: seconds for an answer, with all attempts.
        attempts: tries, where a failure may pass (no connection, 429, 5xx).
        max_tokens_name: what the server calls that limit; OpenAI's reasoning models want
            ``max_completion_tokens`` (and a temperature of 1).
        json_mode: ask the server for answers that are JSON objects; not all servers can.
    """

    url: Address = ""
    model: Place = ""
    key_env: Variable = ""
    temperature: Temperature = 0.0
    max_tokens: Count = 1024
    timeout_s: Seconds = 120.0
    attempts: Times = 3
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    json_mode: bool = False

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

    @property
    def options(self) -> dict[str, Any]:
        """What a request says beside its messages."""
        form = {"response_format": {"type": "json_object"}} if self.json_mode else {}
        asked = {"model": self.model, "temperature": self.temperature}
        return {**asked, self.max_tokens_name: self.max_tokens, **form}

    def __bool__(self) -> bool:
        return bool(self.url)


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


_purses: dict[tuple[Any, ...], Purse] = {}
_purses_lock = threading.Lock()


def purse_of(config: ChatConfig) -> Purse:
    """What this process has spent on a model under one budget."""
    limits = (config.prices, config.max_calls, config.max_total_tokens, config.max_money)
    with _purses_lock:
        where = f"chat ({config.model})"
        key = (config.url, config.model, *limits)
        return _purses.setdefault(key, Purse(config, config.model, where))


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
        seconds: for the call, if that is less than the endpoint's own limit.
        options: further fields of the request.

    Raises:
        FetchError: there is no answer, or none in the form of the interface.
        UserError: the key is not in the environment, or the budget of the model is spent.
    """
    secret = Secret(config.key_env)
    headers = {"Content-Type": "application/json"}
    if config.key_env:
        headers["Authorization"] = f"Bearer {secret.reveal()}"
    body = {**config.options, "messages": list(messages), **(options or {})}
    purse = purse_of(config)
    request = Request(
        f"{config.url.rstrip('/')}/chat/completions", "POST", headers, json.dumps(body).encode()
    )
    limits = Limits(
        total_s=config.timeout_s,
        read_s=config.timeout_s,
        attempts=config.attempts,
        backoff_s=1.0,
        redirects=0,
    ).within(seconds)
    once = dataclasses.replace(limits, attempts=1)

    async def attempt() -> str:
        purse.begin()
        usage, answered = None, False
        try:
            answer = await fetch_json(request, once, trusting(config.url))
            answered, usage = True, answer.get("usage") if isinstance(answer, dict) else None
        finally:
            purse.end(usage if isinstance(usage, dict) else None, answered)
        return _content(answer)

    return str(secret.redact(await attempts(attempt, limits)))


_NO_TEXT = "the model gave no text"


def _content(answer: Any) -> str:
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise FetchError("malformed", "the answer is no chat completion") from None
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
