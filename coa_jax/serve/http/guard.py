"""Checks every request: its host and origin, its key, its size and its time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coa_jax.errors import UserError
from coa_jax.serve.http.errors import ClientGone, Refused
from coa_jax.serve.http.limits import ConnectionLimits
from coa_jax.serve.http.refusals import RefusalLog

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_PORT = re.compile(r":[0-9]*$")
_REASON, _BODY = "coa_jax.reason", "coa_jax.body"
_BUFFERED = 256 << 20
_DRAINED, _DRAIN_S = 64 << 20, 2.0


def is_local(name: str) -> bool:
    """Returns whether a host name or address always means this machine, such as ``localhost``."""
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, key: str | None, mend: str) -> None:
    """Checks that no other machine can reach the server without a key.

    Args:
        host: address to listen on.
        key: key that clients must send; None or "" if clients need no key.
        mend: advice for the user, with which the error message ends.

    Raises:
        UserError: other machines can reach the address, and there is no key.
    """
    if not key and not is_local(host):
        raise UserError(f"{host or 'every address'} is open to other machines: {mend}")


@dataclasses.dataclass(frozen=True)
class GuardRules:
    """The rules that a server's guard enforces.

    Attributes:
        api_key: key that clients must send as a bearer token, or a function that returns whether a
            key is valid; None to serve everybody.
        local: whether requests must name this machine as their host and must not come from a page
            of another site. Without this rule, a web site could attack the server by making its own
            name resolve to this machine (DNS rebinding).
        max_body: maximum size of a body in bytes.
        routes: paths that the server answers; requests for other paths are logged and counted as
            "other".
        open: paths that clients may request without a key.
        limits: maximum number of connections, and maximum seconds for each phase of a connection.
    """

    api_key: str | Callable[[str], bool] | None
    local: bool
    max_body: int
    routes: tuple[str, ...]
    open: tuple[str, ...]
    limits: ConnectionLimits


class Guard:
    """ASGI middleware that refuses invalid requests at low cost, and logs each refusal.

    The application receives a POST request only after its whole body has arrived, see `body_of`.
    """

    def __init__(
        self,
        app: ASGIApp,
        rules: GuardRules,
        answer: Callable[[Refused], Response],
        log: RefusalLog,
        count: Callable[[str, int], None] = lambda path, status: None,
    ):
        """Puts a guard in front of an application.

        Args:
            app: the application.
            rules: rules that requests must obey.
            answer: function that makes the response to a refused request.
            log: log that receives a line for each refused request.
            count: function that is called with the path and the status of every response.
        """
        self._app, self._rules, self._answer = app, rules, answer
        self._log, self._count = log, count
        self._reading: dict[object, tuple[asyncio.Timeout, bytearray]] = {}
        self._most = max(_BUFFERED, 8 * rules.max_body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request, as ASGI defines."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, reasons = 0, scope.setdefault(_REASON, [])

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                self._check(scope)
                if scope["method"] == "POST":
                    scope[_BODY] = await self._read(receive)
            except Refused as error:
                reasons.append(error.reason)
                answer = self._answer(error)
                if scope["method"] == "POST" and not await _drained(scope, receive, error.status):
                    answer.headers["Connection"] = "close"
                await answer(scope, receive, watched)
            except ClientGone:
                status = 499
            else:
                await self._app(scope, receive, watched)
        except asyncio.CancelledError:  # raised by uvicorn for requests that outlast the server
            if not status:
                ending = Refused(503, "the server is shutting down")
                reasons.append(ending.reason)
                await self._answer(ending)(scope, receive, watched)
        except Exception:
            status = status or 500  # an outer layer sends the response
            raise
        finally:
            path = scope["path"] if scope["path"] in self._rules.routes else "other"
            self._count(path, status)
            # A client that disconnected (status 499) was not refused, and an exception of the
            # server has a traceback.
            if 400 <= status < 499 or status == 503 or (status == 500 and reasons):
                method = scope["method"] if scope["method"] in _METHODS else "-"
                client = scope["client"][0] if scope.get("client") else "-"
                reason = reasons[-1] if reasons else STATUS_WORDS.get(status, "")
                self._log.note(status, f"{method} {path}", client, reason)

    def _check(self, scope: Scope) -> None:
        rules, headers = self._rules, dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if rules.local and host and not is_local(_PORT.sub("", host)):
            message = (
                f"this server is for its own machine, as localhost or 127.0.0.1, not {host!r}; "
                "under other names it answers with an API key"
            )
            raise Refused(403, message, reason="the request names another host")
        if rules.local and origin and origin.partition("://")[2] != host:
            message = (
                f"the page at {origin!r} is of another site; this server answers only its own page "
                "and programs"
            )
            raise Refused(403, message, reason="the request comes from the page of another site")
        if rules.api_key and scope["path"] not in rules.open:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            if isinstance(rules.api_key, str):
                valid = hmac.compare_digest(token.strip(), rules.api_key.encode())
            else:
                valid = rules.api_key(token.strip().decode("latin-1"))
            if scheme.lower() != b"bearer" or not valid:
                raise Refused(401, "send the API key as 'Authorization: Bearer KEY'")
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":
                raise Refused(415, "send the body with 'Content-Type: application/json'")
            declared = headers.get(b"content-length", b"0")
            if int(declared[:18]) > rules.max_body:
                raise _too_large(rules.max_body)

    async def _read(self, receive: Receive) -> bytearray:
        """Reads a whole body. If all bodies together need too much memory, the oldest is dropped.

        Raises:
            Refused: the body is too large or too slow.
            ClientGone: the client closed its connection.
        """
        body, me, seconds = bytearray(), object(), self._rules.limits.body_seconds
        try:
            async with asyncio.timeout(seconds) as limit:
                self._reading[me] = limit, body
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    if len(body) > self._rules.max_body:
                        raise _too_large(self._rules.max_body)
                    if not message.get("more_body", False):
                        break
                    self._make_room()
        except TimeoutError:
            if me not in self._reading:
                raise Refused(503, "too many large bodies at a time; try again later") from None
            raise Refused(408, f"the body was not complete after {seconds:g} s") from None
        finally:
            self._reading.pop(me, None)
        return body

    def _make_room(self) -> None:
        """Stops reading the oldest body if all bodies together need too much memory."""
        if sum(len(body) for _, body in self._reading.values()) > self._most:
            oldest, (limit, _) = next(iter(self._reading.items()))
            self._reading.pop(oldest)
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())


async def _drained(scope: Scope, receive: Receive, status: int) -> bool:
    """Reads and drops the rest of a body for a limited time; returns whether the body has ended.

    This is necessary because many clients read no response before they have sent the whole body.
    """
    waits = any(name == b"expect" for name, _ in scope["headers"])
    remaining = 0 if waits or status == 408 else _DRAINED
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while remaining > 0:
                message = await receive()
                if not message.get("more_body", False):
                    return True
                remaining -= len(message["body"])
    return False


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body is too large; the limit is {limit:,} bytes")


STATUS_WORDS = {
    404: "there is no such path",
    405: "the path does not take this method",
}
"""Messages for the client and the log if the router refuses a request, by HTTP status."""


def body_of(scope: Scope) -> bytearray:
    """Returns the body of a POST request, in an application behind a `Guard`.

    Args:
        scope: ASGI scope of the request.
    """
    return scope[_BODY]


def give_reason(scope: Scope, reason: str) -> None:
    """Tells the guard why the application refuses a request, for the line in the log.

    Args:
        scope: ASGI scope of the request.
        reason: reason in a few words, without text of the client.
    """
    scope.setdefault(_REASON, []).append(reason)


async def while_connected(receive: Receive, work: Awaitable[Any]) -> Any:
    """Awaits work for a client; cancels the work if the client closes its connection.

    Args:
        receive: ASGI receive function of a request whose body has been read.
        work: coroutine or future to await, whose result is returned.

    Raises:
        ClientGone: the client closed its connection before the work was done.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
