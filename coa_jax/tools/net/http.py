"""Sends HTTP requests with deadlines, limits on size and redirects, and retries with back-off.

Each request opens a connection of its own, because a connection belongs to one event loop, and a
tool may be used in several event loops.
"""

from __future__ import annotations

import asyncio
import dataclasses
import email.utils
import functools
import json
import random
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from coa_jax.tools.net.address import AddressGuard, parse_url, port_of
from coa_jax.tools.net.errors import REFUSED, FetchError, speaks_of_account
from coa_jax.tools.net.secrets import quieten
from coa_jax.tools.net.text import media_type

if TYPE_CHECKING:
    import httpx2

T = TypeVar("T")

USER_AGENT = "coa_jax/0.1 (research; tool of a language model)"

# openai 2 uses the packages without the 2.
quieten("httpcore", "httpcore2", "httpx", "httpx2")

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_LONGEST_WAIT_S = 60.0


@dataclasses.dataclass(frozen=True)
class RequestLimits:
    """Limits on a request with all its redirects and attempts.

    Attributes:
        total_s: time limit of the request in seconds.
        connect_s: time limit for resolving the host name and opening a connection, in seconds.
        read_s: maximum time in seconds without receiving a byte.
        attempts: maximum number of attempts. Another attempt is made only after a failure that may
            be temporary.
        backoff_s: maximum wait before the second attempt, in seconds. The maximum doubles for each
            further attempt, up to a minute. The wait is random, between half the maximum and the
            maximum.
        max_bytes: maximum size of a body in bytes, after decompression.
        redirects: maximum number of redirects.
    """

    total_s: float = 30.0
    connect_s: float = 10.0
    read_s: float = 20.0
    attempts: int = 3
    backoff_s: float = 0.5
    max_bytes: int = 8 << 20
    redirects: int = 5

    def within(self, seconds: float) -> RequestLimits:
        """Returns these limits with ``total_s`` reduced to at most ``seconds``."""
        return dataclasses.replace(self, total_s=max(min(seconds, self.total_s), 0.001))


@dataclasses.dataclass(frozen=True)
class HttpRequest:
    """An HTTP request.

    Attributes:
        url: absolute URL.
        method: HTTP method.
        headers: additional headers. They may contain secrets, so `repr` does not show them.
        body: body of the request.
        types: prefixes of accepted media types, such as ``text/html`` or ``text/``; () accepts all
            media types.
    """

    url: str
    method: str = "GET"
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    body: bytes = dataclasses.field(default=b"", repr=False)
    types: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Response:
    """An HTTP response.

    Attributes:
        status: HTTP status, which is below 400.
        url: URL after redirects.
        headers: headers, with names in lower case.
        body: body after decompression.
    """

    status: int
    url: str
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Parses the body as JSON.

        Raises:
            FetchError: the body is not JSON.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise FetchError("malformed", "the answer is not JSON") from error


async def fetch(request: HttpRequest, limits: RequestLimits, guard: AddressGuard) -> Response:
    """Sends a request and returns the response. Redirects are followed, and failures are retried.

    Args:
        request: what to send, and to which address.
        limits: limits on the request.
        guard: allowed and blocked addresses.

    Raises:
        FetchError: within the limits, there is no answer with a status below 400.
    """
    return await retry(lambda: _fetch_once(request, limits, guard), limits)


async def fetch_json(request: HttpRequest, limits: RequestLimits, guard: AddressGuard) -> Any:
    """Sends a request and returns the JSON value of the answer.

    The request is repeated if it fails, or if the answer is not JSON.

    Args:
        request: what to send, and to which address.
        limits: limits on the request.
        guard: allowed and blocked addresses.

    Raises:
        FetchError: within the limits, there is no JSON answer with a status below 400.
    """

    async def attempt() -> Any:
        return (await _fetch_once(request, limits, guard)).json()

    return await retry(attempt, limits)


async def retry(
    attempt: Callable[[], Awaitable[T]],
    limits: RequestLimits,
    may_retry: Callable[[], bool] = lambda: True,
) -> T:
    """Calls a function until it succeeds, and returns its result.

    The function is called again only after a failure that may be temporary. The waits between two
    calls grow.

    Args:
        attempt: function to call. It raises `FetchError` if it fails.
        limits: maximum number of calls, waits, and time limit.
        may_retry: function that returns whether another call may follow after a failure.

    Raises:
        FetchError: the error of the last call, or an error of the kind ``timeout`` if the time
            limit passes before any call has ended.
    """
    import tenacity  # takes a tenth of a second, and this module is imported by every command

    last: FetchError | None = None

    async def once() -> T:  # tenacity requires a function that is defined with async
        return await attempt()

    def again(error: BaseException) -> bool:
        return isinstance(error, FetchError) and error.transient and may_retry()

    def wait(state: tenacity.RetryCallState) -> float:
        nonlocal last
        assert state.outcome is not None
        last = cast(FetchError, state.outcome.exception())
        longest = min(_LONGEST_WAIT_S, limits.backoff_s * 2 ** (state.attempt_number - 1))
        return max(longest * random.uniform(0.5, 1.0), last.retry_after or 0.0)

    retrying = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception(again),
        stop=tenacity.stop_after_attempt(limits.attempts)
        | tenacity.stop_before_delay(limits.total_s),
        wait=wait,
        reraise=True,
    )
    late = FetchError("timeout", f"no answer within {limits.total_s:g} seconds")
    try:
        async with asyncio.timeout(limits.total_s):
            return await retrying(once)
    except TimeoutError:
        raise last or late from None


async def _fetch_once(request: HttpRequest, limits: RequestLimits, guard: AddressGuard) -> Response:
    url = parse_url(request.url)
    headers = {
        "User-Agent": USER_AGENT,
        "Accept": "*/*",
        "Accept-Encoding": "gzip, deflate",
        "Connection": "close",
    }
    sent = dataclasses.replace(request, headers={**headers, **request.headers})
    for _ in range(limits.redirects + 1):
        if guard.blocks(url):
            raise FetchError("refused", "the address is on the list of those that are not opened")
        answer = await _exchange(url, sent, limits, guard)
        target = answer.headers.get("location", "")
        if answer.status not in _REDIRECTS or not target:
            return answer
        url = _follow(url, target)
        # Headers of the request, such as an API key, are not sent to the host of a redirect.
        sent = dataclasses.replace(
            sent, headers={k: v for k, v in headers.items() if k not in request.headers}
        )
        if answer.status == 303 or (answer.status in (301, 302) and sent.method == "POST"):
            sent = dataclasses.replace(sent, method="GET", body=b"")
    raise FetchError("redirects", f"more than {limits.redirects} redirects")


def _follow(url: httpx2.URL, target: str) -> httpx2.URL:
    import httpx2

    try:
        joined = url.join(target.strip().replace(" ", "%20"))
    except (httpx2.InvalidURL, ValueError) as error:
        raise FetchError("malformed", "a redirect to an address that cannot be read") from error
    return parse_url(str(joined))


async def _exchange(
    url: httpx2.URL, sent: HttpRequest, limits: RequestLimits, guard: AddressGuard
) -> Response:
    """Sends a request to a URL without following redirects.

    A redirect is returned without a body.
    """
    import httpcore2

    from coa_jax.tools.net.connect import GuardedBackend

    target = httpcore2.URL(
        scheme=url.raw_scheme, host=url.raw_host, port=port_of(url), target=url.raw_path
    )
    raw = [(b"Host", url.netloc)]
    raw += [(k.encode("ascii"), v.encode("latin-1", "replace")) for k, v in sent.headers.items()]
    if sent.body:
        raw.append((b"Content-Length", str(len(sent.body)).encode()))
    more: dict[str, Any] = {
        "headers": raw,
        "content": sent.body or None,
        "extensions": {
            "timeout": dict.fromkeys(("connect", "pool"), limits.connect_s)
            | dict.fromkeys(("read", "write"), limits.read_s)
        },
    }
    pool = httpcore2.AsyncConnectionPool(
        ssl_context=tls(), network_backend=GuardedBackend(guard), max_connections=1
    )
    try:
        async with pool, pool.stream(sent.method, target, **more) as answer:
            headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in answer.headers}
            if answer.status in _REDIRECTS and "location" in headers:
                return Response(answer.status, str(url), headers, b"")
            if answer.status >= 400:
                words = b""
                if answer.status in REFUSED:
                    words = await _read(answer.aiter_stream(), headers, limits.max_bytes)
                raise error_status(answer.status, headers, words)
            _check_head(headers, sent.types, limits)
            content = await _read(answer.aiter_stream(), headers, limits.max_bytes)
    except httpcore2.TimeoutException as error:
        raise FetchError("timeout", "the server took too long") from error
    except httpcore2.ProtocolError as error:
        raise FetchError("unreachable", "the server broke off or did not speak HTTP") from error
    except (httpcore2.NetworkError, ssl.SSLError, OSError) as error:
        raise FetchError("unreachable", "the server cannot be reached") from error
    return Response(answer.status, str(url), headers, content)


def error_status(
    status: int,
    headers: Mapping[str, str],
    words: bytes,
    said: str = "",
    longest_s: float = 3600.0,
) -> FetchError:
    """Returns the error for an answer with an error status.

    Args:
        status: HTTP status of the answer.
        headers: HTTP headers of the answer.
        words: body of the answer; shows whether the error concerns the user's account.
        said: error message of the server, without the API key, see `FetchError.said`.
        longest_s: maximum wait before another attempt, in seconds. If the server asks for a longer
            wait, the error contains this maximum.
    """
    why, wait = f"the server answered with status {status}", _seconds_of(headers)
    account = status in REFUSED and speaks_of_account(words)
    wait = None if wait is None else min(wait, longest_s)
    return FetchError("status", why, status, wait, account, said)


def _check_head(headers: Mapping[str, str], types: tuple[str, ...], limits: RequestLimits) -> None:
    kind = media_type(headers)
    if types and kind and not kind.startswith(types):
        raise FetchError("type", f"content of the type {kind[:60]} cannot be read")
    size = headers.get("content-length", "")
    if size.isdecimal() and int(size[:18]) > limits.max_bytes:
        raise too_large(limits.max_bytes)


def _seconds_of(headers: Mapping[str, str]) -> float | None:
    """Converts the value of a Retry-After header, which is a number or a date, to seconds.

    The result is None for any other value, and if there is no such header.
    """
    text = headers.get("retry-after", "").strip()
    try:
        parse = email.utils.parsedate_to_datetime
        seconds = float(text[:9]) if text.isdecimal() else parse(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return None
    return max(seconds, 0.0)


def too_large(limit: int) -> FetchError:
    """Returns the error for a body that has more than ``limit`` bytes."""
    size = f"{limit / 2**20:.3g} MiB" if limit >= 2**20 else f"{limit} bytes"
    return FetchError("too_large", f"the content is larger than {size}")


async def _read(chunks: AsyncIterator[bytes], headers: Mapping[str, str], limit: int) -> bytes:
    """Reads and decompresses a body in pieces, so that a decompression bomb stops at the limit.

    Bytes after the end of the compressed data are ignored, such as more members of a gzip file.
    """
    coding = headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity", "gzip", "x-gzip", "deflate"):
        raise FetchError("malformed", "the content is compressed in an unknown way")
    decoder: zlib._Decompress | None = None
    content = bytearray()
    async for chunk in chunks:
        if chunk and coding not in ("", "identity"):
            if decoder is None:
                # 47 detects a header. Some servers send deflate without its header (0x?8).
                bare = coding == "deflate" and chunk[0] & 15 != 8
                decoder = zlib.decompressobj(-15 if bare else 47)
            try:
                chunk = b"" if decoder.eof else decoder.decompress(chunk, limit + 1 - len(content))
            except zlib.error as error:
                raise FetchError("malformed", "the compressed content is damaged") from error
        content += chunk
        if len(content) > limit:
            raise too_large(limit)
    if content and decoder is not None and not decoder.eof:
        raise FetchError("malformed", "the compressed content is cut off")
    return bytes(content)


@functools.cache
def tls() -> ssl.SSLContext:
    """Returns a TLS context that checks certificates, for connections by https.

    The context is loaded once per process, because loading takes long.
    """
    import httpx2

    return httpx2.create_ssl_context()
