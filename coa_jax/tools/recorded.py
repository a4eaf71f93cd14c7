"""Stores answers of tools, as a cache that saves calls or as a recording that can be replayed.

The key of a stored answer consists of the tool, the arguments, and whether the trajectory has
already made the same call, because tools answer repeated calls differently. In the mode ``cache``
the key also includes the settings of the tool. If the answers of a tool depend on earlier calls or
on other texts of the trajectory, the key also includes these calls or texts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from coa_jax import storage
from coa_jax.config.fields import Bounded, Natural, NotNegative, Place
from coa_jax.errors import UserError
from coa_jax.tools.base import (
    Observation,
    Tool,
    ToolContext,
    Wrapper,
    call_tool,
    is_repeat,
    observe,
    own_calls,
)
from coa_jax.tools.net.store import Store, key_of

_log = logging.getLogger(__name__)

Mode = Literal["cache", "record", "replay"]
"""Mode of a store.

* ``cache``: uses a stored answer if it succeeded completely and is recent enough; else the tool is
  called.
* ``record``: always calls the tool, and stores every answer, including failures.
* ``replay``: never calls the tool. If no answer is stored, the outcome of the call is a fault.
"""

_MARGIN_S = 1.0


@dataclasses.dataclass(frozen=True)
class StoreConfig(Bounded):
    """The settings for storing answers of tools on disk.

    Attributes:
        path: path of an SQLite file, which several processes may share, or URL of a folder in a
            bucket, which several machines may share; "" stores no answers.
        mode: ``cache`` uses a stored answer if it succeeded completely and is recent enough, and
            otherwise calls the tool. ``record`` always calls the tool, and stores every answer.
            ``replay`` never calls the tool; a call without a stored answer is a fault.
        tools: tools whose answers are stored. () means all tools, but in the mode ``cache`` only
            ``web_search`` and ``crawl_page``.
        max_age_s: age in seconds after which a cached answer is not used; 0 for no limit.
        max_entries: maximum number of stored answers, beyond which the oldest are deleted; 0 for no
            limit.
    """

    path: Place = ""
    mode: Mode = "cache"
    tools: tuple[Place, ...] = ()
    max_age_s: NotNegative = 0.0
    max_entries: Natural = 0

    @property
    def replays(self) -> bool:
        """Whether stored answers take the place of all calls."""
        return bool(self.path) and self.mode == "replay"

    def probe(self, seconds: float) -> tuple[bool, str]:
        """Checks whether the store can be read, see `config.preflight`."""
        entries = len(Store(self.path, writes=False))
        return True, f"{self.mode} of {entries} answers in {self.path}"

    def keeps(self, name: str) -> bool:
        """Returns whether the answers of the tool with this name are stored."""
        if not self.tools:
            return self.mode != "cache" or name in ("web_search", "crawl_page")
        return name in self.tools


def open_store(config: StoreConfig, names: Sequence[str]) -> Store:
    """Opens the store of a run; ``config.path`` must not be "".

    Args:
        config: settings of the store.
        names: names of the tools of the run.

    Raises:
        UserError: the store cannot be opened, or its answers must be replayed and it has none.
    """
    replays = config.replays and any(map(config.keeps, names))
    # Opening a store creates its file. A file that is missing is not created only to be empty.
    there = storage.is_url(config.path) or Path(config.path).expanduser().exists()
    store = None
    if there or not replays:
        store = Store(config.path, config.max_entries, writes=config.mode != "replay")
    if store is None or (replays and not len(store)):
        raise UserError(
            f"config.tools.store.path={config.path} has no answers to replay; give the path of a "
            "store that a run with config.tools.store.mode=record has filled"
        )
    return store


class Recorded(Wrapper):
    """A tool that stores the answers of another tool (the wrapped tool), and uses stored ones.

    The mode of the store (`Mode`) says when a stored answer takes the place of a call.

    Attributes:
        name: name of the wrapped tool.
        deadline: deadline of the wrapped tool plus the time for storing an answer, in seconds.
    """

    def __init__(
        self,
        tool: Tool,
        store: Store,
        mode: Mode,
        max_age_s: float | None = None,
        source: str = "",
    ):
        """Wraps a tool.

        Args:
            tool: the tool. It may have these attributes: ``settings`` (text with the settings on
                which answers depend; part of the key in the mode ``cache``), ``remembers`` (whether
                answers depend on earlier calls), ``tailored`` (whether answers depend on texts of
                the trajectory) and ``depends_on(context)`` (returns these texts).
            store: store of the answers.
            mode: mode of the store, see `Mode`.
            max_age_s: age in seconds after which a cached answer is not used; None for no limit.
            source: text that identifies the corpus that the tool searches, if ``settings`` does not
                contain it.
        """
        super().__init__(tool)
        self.store, self.mode = store, mode
        # The deadline of the tool passes earlier, so that timeouts are recorded too.
        self.deadline = tool.deadline + _MARGIN_S
        self._max_age_s = max_age_s if mode == "cache" else None
        self._settings = f"{getattr(tool, 'settings', '')}{source}" if mode == "cache" else ""
        self._warned = False

    def key(self, arguments: str, context: ToolContext) -> str:
        """Returns the key under which the result of a tool call is stored.

        Args:
            arguments: text that the policy wrote between the tags of the tool.
            context: the trajectory so far; the result may depend on its earlier calls.
        """
        return self._key(arguments, context, getattr(self.tool, "tailored", False))

    def _key(self, arguments: str, context: ToolContext, tailored: bool) -> str:
        if getattr(self.tool, "remembers", False):
            earlier = [[body.strip(), outcome] for body, outcome in own_calls(self.name, context)]
            return key_of(self.name, self._settings, arguments.strip(), earlier)
        repeated = is_repeat(self.name, arguments, context)
        parts = self.tool.depends_on(context) if tailored else []  # type: ignore[attr-defined]
        return key_of(self.name, self._settings, arguments.strip(), repeated, *parts)

    async def __call__(self, arguments: str, context: ToolContext) -> Observation:
        """Answers a call from the store, or by calling the tool, as the mode says."""
        start = time.monotonic()
        key = self.key(arguments, context)
        if self.mode != "record":
            stored = await self._get(key)
            if stored is None and self.mode == "replay" and hasattr(self.tool, "tailored"):
                # The recording may come from a configuration in which the tool was tailored
                # differently, so the other key is tried too.
                stored = await self._get(self._key(arguments, context, not self.tool.tailored))
            if stored is not None:
                detail = {**stored.detail, "stored": True}
                seconds = stored.seconds if self.mode == "replay" else time.monotonic() - start
                return dataclasses.replace(stored, seconds=seconds, detail=detail)
            if self.mode == "replay":
                text = f"The {self.name} tool is not available at the moment."
                detail = {"exception": f"the call is not in the recording {self.store.place}"}
                return observe(start, text, "fault", detail)
        observation = await call_tool(self.tool, arguments, context)
        complete = observation.ok and not observation.detail.get("incomplete")
        if self.mode == "record" or complete:
            await self._put(key, arguments, observation)
        return observation

    async def _get(self, key: str) -> Observation | None:
        try:
            return await asyncio.to_thread(self.store.get, key, self._max_age_s)
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._warn(error)
            return None

    async def _put(self, key: str, arguments: str, observation: Observation) -> None:
        try:
            await asyncio.to_thread(self.store.put, key, self.name, arguments, observation)
        except (sqlite3.Error, OSError) as error:
            if self.mode == "record":
                raise  # an incomplete recording cannot be replayed
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            _log.warning("stored answers of %s cannot be used: %s", self.name, error)
            self._warned = True
