"""Reads API keys from environment variables, and keeps the keys out of all output.

Settings name the environment variable of a key, never the key itself. Each client removes its own
key from the answers of its service. In addition, `redact_all` removes keys from the observations of
all tools, including custom tools, and from the messages of exceptions.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Iterable
from typing import Any

from coa_jax.errors import UserError

_SHORTEST, _SHORTEST_UNNAMED = 6, 12
"""Minimum length of a value that is hidden, because hiding short values would remove ordinary text.
The second number is for environment variables that no setting names as a key.
"""

HIDDEN = "[secret]"

_SPEAKING = re.compile(
    r"(?:^|_)(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$", re.IGNORECASE
)
"""Pattern of names of environment variables that probably contain a key."""


def quieten(*libraries: str) -> None:
    """Silences the loggers of libraries that log requests, because requests contain API keys."""
    for name in libraries:
        logging.getLogger(name).setLevel(logging.CRITICAL)


@dataclasses.dataclass(frozen=True)
class Secret:
    """An API key in an environment variable; only `reveal` returns its value.

    The value is not part of the result of `repr`, `str` or pickling.

    Attributes:
        name: name of the environment variable. The variable is read when its value is needed.
    """

    name: str

    def reveal(self) -> str:
        """Returns the value of the environment variable.

        Raises:
            UserError: the environment variable is not set.
        """
        value = os.environ.get(self.name, "").strip()
        if not value:
            raise UserError(f"the environment variable {self.name} is not set; put the key there")
        return value

    def __bool__(self) -> bool:
        return bool(self.name and os.environ.get(self.name, "").strip())

    def redact(self, value: Any) -> Any:
        """Replaces the secret by "[secret]" in a text, or in all texts of a JSON value."""
        return _redacted(value, _values([self.name]))


def redact_all(value: Any) -> Any:
    """Replaces all probable secrets by "[secret]" in a text, or in all texts of a JSON value.

    Secrets are the values of environment variables whose names end in KEY, TOKEN, SECRET, PASSWORD
    or CREDENTIALS.
    """
    return _redacted(value, _values(filter(_SPEAKING.search, os.environ), _SHORTEST_UNNAMED))


def redact_variables(value: Any, names: Iterable[str]) -> Any:
    """Replaces the values of environment variables in a text or JSON value by "[secret]".

    Args:
        value: the text or JSON value.
        names: names of the environment variables. Values that are absolute paths are not replaced,
            because they are no secrets, and a text about files needs them.
    """
    secret_names = [name for name in names if not os.environ.get(name, "").startswith("/")]
    return _redacted(value, _values(secret_names))


def _values(names: Iterable[str], shortest: int = _SHORTEST) -> list[str]:
    """Returns the values to hide. The longest come first, because a key may contain another key."""
    values = {os.environ.get(name, "").strip() for name in names if name}
    return sorted((value for value in values if len(value) >= shortest), key=len, reverse=True)


def _redacted(value: Any, keys: list[str]) -> Any:
    if isinstance(value, str):
        for key in keys:
            value = value.replace(key, HIDDEN)
        return value
    if not keys:
        return value
    if isinstance(value, dict):
        return {_redacted(k, keys): _redacted(v, keys) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(item, keys) for item in value]
    return value


def with_key(ok: bool, text: str, key_env: str) -> tuple[bool, str]:
    """Adds to the result of a check (``ok``, ``text``) whether the API key is set.

    The check fails if the key is not set; ``key_env`` is "" if no key is needed. The text contains
    only the name of the variable, and not the key itself.
    """
    if not key_env:
        return ok, text
    there = bool(Secret(key_env))
    return ok and there, f"{text}, key {key_env} {'is set' if there else 'is NOT set'}"
