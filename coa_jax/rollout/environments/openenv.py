"""Connects to environments on OpenEnv servers (https://github.com/meta-pytorch/OpenEnv).

Each trajectory has its own WebSocket connection to the server, that is, its own session and
environment. Each whole turn of the policy is an action. This module does not need the package
openenv.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from absl import logging

from coa_jax.config.installed import missing
from coa_jax.config.preflight import Needs, declares
from coa_jax.errors import UserError
from coa_jax.rollout.environments.base import Step, Turn
from coa_jax.rollout.environments.openenv_text import Actions, UnreadableError, read_observation
from coa_jax.tasks import Task

_LARGEST = 100 << 20  # maximum bytes of a message; observations may hold images
_CONNECT_S = 10.0
_PAUSE_S = 0.2
_URL = "environment.options.url"
_HERE = ("localhost", "127.0.0.1", "::1")
_reached: set[str] = set()
"""Servers that have answered before. If such a server is gone, the trajectory has a fault."""


@declares(Needs(("openenv",)))
def load(split: str, n: int | None, seed: int, question: str = "") -> list[Task]:
    """Creates tasks for an environment on an OpenEnv server.

    The tasks differ only in their ids. In a run, each task has a seed of its own for its episodes,
    which the environment sends to the server.

    Args:
        split: name of the split, which becomes part of the task ids.
        n: number of tasks; None for 100.
        seed: number that becomes part of the task ids, and has no other effect.
        question: text that precedes the first observation of each episode; "" for no text.
    """
    return [
        Task(f"{split}-{seed}-{i}", question, "turns", (), "openenv")
        for i in range(100 if n is None else n)
    ]


class ServerError(Exception):
    """Raised if the server refuses a message.

    Attributes:
        code: the server's code for the reason, such as ``VALIDATION_ERROR``.
    """

    def __init__(self, data: Mapping[str, Any]):
        self.code = str(data.get("code", ""))
        details = [
            f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg', '')}"
            for each in data.get("errors") or ()
        ]
        super().__init__("; ".join(details) or str(data.get("message") or self.code))


class OpenEnv:
    """An environment on an OpenEnv server; each trajectory has a session of its own."""

    needs = Needs(("openenv",))

    def __init__(
        self,
        seed: int,
        url: str,
        action: str = "",
        observation: str = "",
        reset: Mapping[str, Any] | None = None,
    ):
        """Prepares the session; `reset` connects to the server.

        Args:
            seed: seed of the episode, which is sent to the server with the reset.
            url: address of the server, such as ``http://127.0.0.1:8000``.
            action: name of the field of an action that receives the text of a turn. "" for the only
                field, or the only required field; if there is no such field, a turn must be a JSON
                object with the fields of an action.
            observation: names of the fields of an observation that the policy reads, joined by
                ``+``; "" for all fields that are not empty.
            reset: further arguments of the reset; None for none. ``metadata["reset"]`` of a task
                adds to these arguments or replaces them.

        Raises:
            UserError: the package websockets is not installed, or the address is not a URL.
        """
        try:
            self._client = importlib.import_module("websockets.sync.client")
            self._closed_error = importlib.import_module("websockets.exceptions").ConnectionClosed
        except ImportError:
            raise missing("the environment openenv", "websockets", "openenv") from None
        address = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if address.scheme not in ("http", "https", "ws", "wss") or not address.hostname:
            raise UserError(f"{_URL} is {url!r}; give an address such as http://127.0.0.1:8000")
        self._safe = address.scheme in ("https", "wss")
        self._address = address.netloc + address.path.rstrip("/")
        self._here = address.hostname in _HERE
        self._action, self._fields = action, tuple(filter(None, observation.split("+")))
        self._arguments = {"seed": seed, **(reset or {})}
        self._socket: Any = None
        self._closed = False
        self._before: Mapping[str, Any] = {}

    def reset(self, task: Task) -> str:
        """Opens a session on the server, and starts an episode.

        Returns:
            The first observation as text, with instructions on how to act.
        """
        schema = self._schema()
        data = self._open({**self._arguments, **task.metadata.get("reset", {})})
        tools = ()
        if Actions.are_calls(schema):
            tools = self._ask("step", {"type": "list_tools"})["observation"]["tools"]
        try:
            self._actions = Actions.of(schema, self._action, tools)
        except KeyError as error:
            raise UserError(f"environment.options.action: {error.args[0]}") from None
        parts = (task.question, self._read(data), self._actions.instructions())
        return "\n\n".join(filter(None, parts))

    def step(self, turn: Turn) -> Step:
        """Sends an action to the server.

        If the action causes an error, the policy reads the error as the observation.
        """
        try:
            data = self._ask("step", self._actions.read(turn.text))
        except UnreadableError as error:
            return Step(f"Error: {error}")
        except ServerError as error:
            if error.code not in ("VALIDATION_ERROR", "EXECUTION_ERROR"):
                raise
            if error.code == "EXECUTION_ERROR":
                logging.log_first_n(
                    logging.WARNING,
                    "the OpenEnv server failed at an action: %s; the policy reads this error", 1,
                    error,
                )  # fmt: skip
            return Step(f"Error: {error}")
        return Step(self._read(data), data.get("reward"), bool(data.get("done")))

    async def close(self) -> None:
        """Ends the session, even while a step is still waiting for the server."""
        self._closed = True
        if self._socket is not None:
            await asyncio.to_thread(self._socket.close)

    def _read(self, data: Mapping[str, Any]) -> str:
        fields = data.get("observation") or {}
        try:
            text = read_observation(fields, self._fields, self._before)
        except KeyError as error:
            raise UserError(f"environment.options.observation: {error.args[0]}") from None
        self._before = fields
        return text

    def _schema(self) -> Mapping[str, Any]:
        """Returns the JSON schema of actions."""
        proxies = urllib.request.ProxyHandler({} if self._here else None)
        opener = urllib.request.build_opener(proxies)
        try:
            with opener.open(self._at("http", "schema"), timeout=_CONNECT_S) as reply:
                schema: Mapping[str, Any] = json.load(reply)["action"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._refused(error) from None
        _reached.add(self._address)
        return schema

    def _at(self, protocol: str, path: str) -> str:
        return f"{protocol}{'s' if self._safe else ''}://{self._address}/{path}"

    def _refused(self, error: Exception) -> Exception:
        if self._address in _reached:
            return error
        return UserError(
            f"{_URL}: no OpenEnv server answers at {self._address} ({error}); start it, for "
            "example by uvicorn, and see whether the address has /schema"
        )

    def _open(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Opens a session; if all sessions of the server are in use, waits for a free one."""
        while True:
            try:
                self._socket = self._client.connect(
                    self._at("ws", "ws"),
                    max_size=_LARGEST,
                    open_timeout=_CONNECT_S,
                    close_timeout=2.0,
                    proxy=None if self._here else True,
                )
                if self._closed:
                    self._socket.close()
                    raise ConnectionError("the trajectory has ended")
                return self._ask("reset", arguments)
            except ServerError as error:
                if error.code != "CAPACITY_REACHED" or self._closed:
                    raise
                logging.log_first_n(
                    logging.WARNING,
                    "the OpenEnv server has no free session: %s; further trajectories wait for a "
                    "session, up to environment.deadline_s seconds. The server's "
                    "max_concurrent_envs is the number of sessions", 1, error,
                )  # fmt: skip
            self._socket.close()
            time.sleep(_PAUSE_S)

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        with contextlib.suppress(self._closed_error):  # the server may have said why it closes
            self._socket.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(self._socket.recv())
        if answer["type"] == "error":
            raise ServerError(answer["data"])
        return dict(answer["data"])
