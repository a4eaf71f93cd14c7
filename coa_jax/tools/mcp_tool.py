"""Calls tools of Model Context Protocol (MCP) servers.

A policy can call a tool that it has never seen, if its prompt contains the tag, the description and
the schema of the tool (Chain-of-Agents paper §5.2).

The session with a server runs in a thread of its own, so that the session outlives event loops. It
is opened again when it breaks. Each trajectory has its own session, which begins with its first
call. A server that is started as a program gets only the environment variables that the settings
name.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import json
import os
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from coa_jax.config.fields import Address, Bounded, Count, Prose, Seconds, Variable, format_value
from coa_jax.config.installed import missing
from coa_jax.config.preflight import Needs
from coa_jax.errors import UserError
from coa_jax.files import untrusted
from coa_jax.protocol.arguments import arguments_hint
from coa_jax.protocol.bodies import without_fence
from coa_jax.tools.base import Observation, ToolContext, observe, time_for
from coa_jax.tools.net.chat import trusting
from coa_jax.tools.net.secrets import Secret, quieten, redact_variables
from coa_jax.tools.net.text import clip_text

T = TypeVar("T")

_PING_S = 2.0
_STDERR_CHARS = 600


@dataclasses.dataclass(frozen=True)
class McpConfig(Bounded):
    """The settings of a tool of an MCP server. Exactly one of ``command`` and ``url`` must be set.

    Attributes:
        command: program and arguments that start a server on this machine (stdio transport).
        url: URL of a server (HTTP transport).
        tool: name of the tool on the server; "" if this name equals the tag of the tool.
        description: description of the tool for the policy; "" for the server's description.
        schema: JSON schema of the arguments, as text; "" for the server's schema.
        env: names of environment variables that the program of the server gets in addition to PATH
            and HOME. The values of these variables are removed from everything that the server
            returns.
        key_env: environment variable with the bearer token for ``url``; "" for no token.
        timeout_s: time limit of a call in seconds, including the start of the server if necessary.
        max_chars: maximum number of characters of an observation.
        shared: whether all trajectories share one session, which suits servers without state. If
            False, each trajectory that calls the tool has its own session, and its own program if
            ``command`` is set.
    """

    command: tuple[Prose, ...] = ()
    url: Address = ""
    tool: Prose = ""
    description: Prose = ""
    schema: Prose = ""
    env: tuple[Variable, ...] = ()
    key_env: Variable = ""
    timeout_s: Seconds = 30.0
    max_chars: Count = 6000
    shared: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.command) == bool(self.url):
            raise UserError("command and url: give either command or url")
        if self.url:
            trusting(self.url)  # before any setting is written to a file
        try:
            schema = untrusted.parse_json(self.schema or "{}")
        except (ValueError, RecursionError) as error:
            raise UserError(f"schema is {untrusted.reason(error)}") from None
        if not isinstance(schema, dict):
            raise UserError(f'schema is {format_value(self.schema)}; give a JSON object, or ""')

    def needs(self) -> Needs:
        """Returns the package of MCP clients, the server and its key, see `config.preflight`."""
        return Needs(("mcp",)) + Needs.of_server("url", self.url, self.key_env)


class _Session:
    """A session with a server, in an event loop of its own."""

    def __init__(self, config: McpConfig):
        self._config = config
        self._words: LastWords | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: asyncio.Future[Any] | None = None  # accessed only in the event loop
        self._close: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None  # holds the session open
        self._tasks: set[asyncio.Task[None]] = set()  # event loops hold only weak references

    def last_words(self) -> str:
        """Returns the last lines of the server program's stderr; "" if there are none."""
        return self._words.text() if self._words else ""

    async def run(self, call: Any, seconds: float) -> Any:
        """Awaits ``call(client)`` in the event loop of the session, and returns the result."""
        future = asyncio.run_coroutine_threadsafe(self._run(call, seconds), self._running())
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Ends the session and its thread. A later call begins a new session."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None:
            return

        async def end() -> None:
            if self._client is not None:
                self._end_session(self._client)
            tasks, self._tasks = self._tasks, set()
            if tasks:
                await asyncio.wait(tasks)

        try:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(end(), loop))
        finally:
            loop.call_soon_threadsafe(loop.stop)

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                work = functools.partial(_run_loop, self._loop)
                threading.Thread(target=work, name="mcp", daemon=True).start()
            return self._loop

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task for which `close` waits."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, call: Any, seconds: float) -> Any:
        async with asyncio.timeout(seconds):
            if self._client is None:
                self._client = asyncio.get_running_loop().create_future()
                self._close = asyncio.Event()
                self._task = self._start(self._hold_session(self._client, self._close))
            opening = self._client
            try:
                return await call(await asyncio.shield(opening))
            except asyncio.CancelledError:
                self._start(self._check(opening))
                raise
            except Exception as error:
                if not _is_answer(error):
                    self._end_session(opening)
                raise

    async def _check(self, opening: asyncio.Future[Any]) -> None:
        """Closes the session after a call that took too long, unless the server still answers."""
        try:
            async with asyncio.timeout(_PING_S):
                await opening.result().list_tools(cache_mode="bypass")
        except Exception as error:
            if not _is_answer(error):
                self._end_session(opening)

    def _end_session(self, opening: asyncio.Future[Any]) -> None:
        """Closes a session. The next call begins a new session."""
        if self._client is opening and self._close is not None:
            self._close.set()
            self._client, self._close = None, None
            if not opening.done() and self._task is not None:  # the server has not answered yet
                self._task.cancel()

    async def _hold_session(self, client: asyncio.Future[Any], close: asyncio.Event) -> None:
        """Opens the session and keeps it open until ``close`` is set, all in the same task."""
        from mcp import Client

        try:
            async with contextlib.AsyncExitStack() as stack:
                target = await self._target(stack)
                opened = await stack.enter_async_context(Client(target))
                if not client.done():
                    client.set_result(opened)
                await close.wait()
        except BaseException as error:  # noqa: BLE001 - raised again where the client is awaited
            if not client.done():
                client.set_exception(error if isinstance(error, Exception) else OSError("gone"))
                client.exception()  # asyncio logs exceptions that nobody retrieves

    async def _target(self, stack: contextlib.AsyncExitStack) -> Any:
        import httpx2
        from mcp import StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        config = self._config
        if config.command:
            names = ("PATH", "HOME", *config.env)
            environment = {name: os.environ[name] for name in names if name in os.environ}
            program, *arguments = config.command
            parameters = StdioServerParameters(command=program, args=arguments, env=environment)
            self._words = LastWords()
            return stdio_client(parameters, errlog=stack.enter_context(self._words.file))
        quieten("mcp")
        headers = {}
        if config.key_env:
            headers["Authorization"] = f"Bearer {Secret(config.key_env).reveal()}"
        client = httpx2.AsyncClient(headers=headers, timeout=config.timeout_s, trust_env=False)
        await stack.enter_async_context(client)
        return streamable_http_client(config.url, http_client=client)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _is_answer(error: BaseException) -> bool:
    """Returns whether an error is an answer of the server, such as a protocol error."""
    from mcp import MCPError

    return isinstance(error, MCPError) and "closed" not in str(error).lower()


class McpTool:
    """A tool of a Model Context Protocol server.

    Attributes:
        name: tag of the tool.
        deadline: time limit of a call in seconds.
        settings: settings on which the answer to a call depends; part of the key of stored answers.
        remembers: whether answers may depend on earlier calls of the trajectory, because each
            trajectory has its own session.
        schema: JSON schema of the arguments; None until `describe` has read the server's schema.
    """

    def __init__(self, tag: str, config: McpConfig):
        """Creates the tool. The server starts with the first call, or with `describe`.

        Args:
            tag: tag of the tool.
            config: settings of the tool.

        Raises:
            UserError: the package mcp is not installed.
        """
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise missing(f"tools.mcp.{tag}", "mcp", "mcp") from None
        self.schema: dict[str, Any] | None = json.loads(config.schema or "null")
        self.name, self._config, self._remote = tag, config, config.tool or tag
        self._description = config.description
        self._session = _Session(config)
        self.remembers = not config.shared
        self.deadline = config.timeout_s + 1.0
        self.settings = json.dumps([config.command, config.url, self._remote])

    async def probe(self, seconds: float) -> tuple[bool, str]:
        """Checks whether the server has the tool, see `Tool`."""
        # `describe` calls the server only if the settings have no description, so `find` is called.
        try:
            await self.find(seconds)
            return True, await self.describe()
        finally:
            await self.close()

    def begin(self) -> McpTool:
        """Returns a tool for one trajectory, with its own session unless ``shared`` is True."""
        if self._config.shared:
            return self
        copied = copy.copy(self)
        copied._session = _Session(self._config)
        return copied

    async def close(self) -> None:
        """Ends the tool's session with its MCP server."""
        await self._session.close()

    async def describe(self) -> str:
        """Returns the description of the tool and its arguments for the policy.

        A description or schema that the settings do not contain is read from the server.

        Raises:
            UserError: the server cannot be reached, or does not have the tool.
        """
        if not self._description or self.schema is None:
            tool = await self.find(self._config.timeout_s)
            self._description = self._description or (tool.description or tool.name).strip()
            if self.schema is None:
                self.schema = dict(tool.input_schema)
        return f"{' '.join(self._description.split())} {arguments_hint(self.schema)}"

    async def find(self, seconds: float) -> Any:
        """Returns the server's entry about the tool, with its description and schema.

        Args:
            seconds: time limit for the answer of the server.

        Raises:
            UserError: the server does not answer in time, or does not have the tool.
        """
        config, where = self._config, f"tools.mcp.{self.name}"
        try:
            listed = await self._session.run(lambda client: client.list_tools(), seconds)
        except Exception as error:
            setting = f"command={' '.join(config.command)}" if config.command else config.url
            words = await self._last_words()
            stderr = f"; it wrote: {words}" if words else ""
            cause = self._redact(_cause(error))  # the error may quote text of the server
            message = f"{where}: the server ({setting}) does not answer: {cause}{stderr}"
            raise UserError(message) from error
        tools = {tool.name: tool for tool in listed.tools}
        if self._remote not in tools:
            names = ", ".join(tools) or "none"
            raise UserError(
                f"{where}: the server has no tool {self._remote!r}; its tools are {names}"
            )
        return tools[self._remote]

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Calls the tool on the server. The text between the tags contains the arguments."""
        start = time.monotonic()
        seconds = time_for(self._config.timeout_s, context)
        try:
            if self.schema is None:
                await self.describe()
            values = parse_arguments(arguments, self.schema or {})
            if values is None:
                text = f"The call could not be read. {arguments_hint(self.schema or {})}"
                return observe(start, text, "bad_call")
            remaining_s = max(seconds - (time.monotonic() - start), 0.001)
            result = await self._session.run(
                lambda client: client.call_tool(self._remote, values), remaining_s
            )
        except TimeoutError:
            text = f"The {self.name} tool gave no result within {seconds:g} seconds."
            return observe(start, text, "timeout")
        except Exception as error:
            if _is_answer(error):
                return self._observation(f"The call failed: {error}", False, start)
            detail = self._redact({"exception": f"{type(error).__name__}: {error}"})
            if words := await self._last_words():
                detail["stderr"] = words
            text = f"The {self.name} tool is not available at the moment."
            return observe(start, text, "fault", detail)
        parts = [(item.type, getattr(item, "text", None)) for item in result.content or []]
        text = result_text(parts, result.structured_content)
        return self._observation(text, not result.is_error, start)

    async def _last_words(self) -> str:
        """Returns the end of the server's stderr, without API keys."""
        return str(self._redact(await asyncio.to_thread(self._session.last_words)))[-_STDERR_CHARS:]

    def _observation(self, text: str, ok: bool, start: float) -> Observation:
        text = clip_text(self._redact(text), self._config.max_chars)
        return observe(start, text, "ok" if ok else "error")

    def _redact(self, value: Any) -> Any:
        """Removes the API keys that the server got from a text or JSON value of the server."""
        return redact_variables(Secret(self._config.key_env).redact(value), self._config.env)


def _cause(error: BaseException) -> str:
    """Returns type and message of the first error in an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def parse_arguments(body: str, schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Parses the arguments of a call.

    The body must be a JSON object with all required keys, optionally in a Markdown code block. If
    the tool has a single argument and this argument is a string, the body may be the string itself.

    Args:
        body: text that the policy wrote between the tags.
        schema: JSON schema of the arguments.

    Returns:
        Argument -> value; None if the body has another form.
    """
    properties = schema.get("properties") or {}
    value = None
    try:
        with contextlib.suppress(json.JSONDecodeError):
            value = untrusted.parse_json(without_fence(body))
        # A value that cannot be sent is a mistake of the policy, not a failure of the tool.
        json.dumps(body if value is None else value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    required = set(schema.get("required") or ())
    if isinstance(value, dict) and required <= set(value):
        return value
    only = next(iter(properties)) if len(properties) == 1 else None
    plain = only is not None and properties[only].get("type") == "string" and body.strip()
    return {str(only): body.strip()} if plain and not isinstance(value, dict) else None


def result_text(parts: Iterable[tuple[str, str | None]], structured: Any) -> str:
    """Returns the result of a tool as text.

    Args:
        parts: (type, text) of each part of the result. For a part that is not text, such as an
            image, the text is None, and the type is shown in place of the part.
        structured: structured content of the result as a JSON value, which is shown if there are no
            parts; None for no structured content.
    """
    shown = [f"[{kind}]" if text is None else text for kind, text in parts]
    if not shown and structured is not None:
        shown = [json.dumps(structured, ensure_ascii=False)]
    return "\n".join(shown) or "(no content)"


# --- the last lines of stderr -------------------------------------------------------------


_BYTES, _LINES = 8192, 3


class LastWords:
    """Keeps the end of a program's stderr.

    A thread reads stderr from a pipe as long as the program runs, and drops all but the end. A file
    in place of the pipe would grow without limit.

    Attributes:
        file: file object that the program gets as its stderr.
    """

    def __init__(self) -> None:
        """Opens a pipe for stderr, and starts the thread that reads the pipe."""
        reader, writer = os.pipe()
        self.file = open(writer, "w")  # noqa: SIM115 - the caller that starts the program closes it
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(reader,), daemon=True)
        self._thread.start()

    def _read(self, reader: int) -> None:
        with open(reader, "rb", buffering=0) as stream:
            while piece := stream.read(1 << 16):
                self._kept = (self._kept + piece)[-_BYTES:]

    def text(self) -> str:
        """Returns the last lines of stderr, joined into one line.

        If the program has ended, this method first waits for the end of stderr.
        """
        self._thread.join(1.0 if self.file.closed else 0.0)
        tail = self._kept
        if len(tail) == _BYTES:  # the first line may begin in the middle of an API key
            tail = tail.partition(b"\n")[2]
        lines = tail.decode("utf-8", "replace").strip().splitlines()
        return " ".join(" ".join(lines[-_LINES:]).split())
