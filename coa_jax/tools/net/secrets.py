"""API keys: named in a configuration, read from the environment, shown nowhere.

Each client removes its own key from the answers of its service. In addition, `redact_all` removes
keys from the observations of all tools, including custom tools and exceptions.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from typing import Any

from coa_jax.errors import UserError

_SHORTEST, _SHORTEST_UNNAMED = 6, 12
"""Shorter values are not secrets: hiding them would blank out ordinary text. The second number is
for variables that no configuration names as a key.
"""

HIDDEN = "[secret]"

_SPEAKING = re.compile(
    r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$", re.IGNORECASE
)
"""Names of environment variables that indicate a key."""


def quieten(*libraries: str) -> None:
    """Silences loggers of libraries that log requests and answers, including keys."""
    for name in libraries:
        logging.getLogger(name).setLevel(logging.CRITICAL)


class Secret:
    """A value that neither `repr` nor `str` nor pickling shows; only `reveal` returns it."""

    __slots__ = ("_name",)

    def __init__(self, name: str):
        """Names a secret by its environment variable, which is read when it is needed."""
        self._name = name

    @property
    def name(self) -> str:
        """The name of the environment variable."""
        return self._name

    def reveal(self) -> str:
        """Returns the value.

        Raises:
            UserError: the variable is not set.
        """
        value = os.environ.get(self._name, "").strip()
        if not value:
            raise UserError(f"the environment variable {self._name} is not set; put the key there")
        return value

    def __bool__(self) -> bool:
        return bool(self._name and os.environ.get(self._name, "").strip())

    def __repr__(self) -> str:
        return f"Secret({self._name!r})"

    def redact(self, value: Any) -> Any:
        """Removes the value from text, or from JSON with text in it."""
        return _without(value, _values([self._name]))


def redact_all(value: Any) -> Any:
    """Removes the values of environment variables that look secret from text or JSON.

    A name looks secret if it ends in KEY, TOKEN, SECRET, PASSWORD or CREDENTIALS.
    """
    return _without(value, _values(filter(_SPEAKING.search, os.environ), _SHORTEST_UNNAMED))


def redact_variables(value: Any, names: Iterable[str]) -> Any:
    """Removes the values of environment variables from text or JSON; values that are paths stay."""
    given = [name for name in names if not os.environ.get(name, "").startswith("/")]
    return _without(value, _values(given))


def _values(names: Iterable[str], shortest: int = _SHORTEST) -> list[str]:
    """Returns the values to hide, the longest first, since one key may begin with another."""
    values = {os.environ.get(name, "").strip() for name in names if name}
    return sorted((value for value in values if len(value) >= shortest), key=len, reverse=True)


def _without(value: Any, keys: list[str]) -> Any:
    if isinstance(value, str):
        for key in keys:
            value = value.replace(key, HIDDEN)
        return value
    if not keys:
        return value
    if isinstance(value, dict):
        return {_without(k, keys): _without(v, keys) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without(item, keys) for item in value]
    return value
