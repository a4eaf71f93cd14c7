"""Keys of services: named in a configuration, read from the environment, shown nowhere."""

from __future__ import annotations

import logging
import os
from typing import Any

from coa_jax.errors import UserError

_SHORTEST = 6
"""Values below this many characters are no secrets: hiding them would blot out ordinary text."""

HIDDEN = "[secret]"


def quieten(*libraries: str) -> None:
    """Keeps loggers silent that write down what was sent and answered, keys and all."""
    for name in libraries:
        logging.getLogger(name).setLevel(logging.CRITICAL)


class Secret:
    """A value that neither `repr` nor `str` nor pickling gives away; only `reveal` does."""

    __slots__ = ("_name",)

    def __init__(self, name: str):
        """Names a secret by its environment variable; it is read when it is needed."""
        self._name = name

    @property
    def name(self) -> str:
        """The environment variable."""
        return self._name

    def reveal(self) -> str:
        """The value.

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
        """Text, or JSON with text in it, without the value, should a server repeat it."""
        key = os.environ.get(self._name, "").strip() if self._name else ""
        return redact(value, key) if len(key) >= _SHORTEST else value


def redact(value: Any, key: str) -> Any:
    """Text or JSON without a string."""
    if isinstance(value, str):
        return value.replace(key, HIDDEN)
    if isinstance(value, dict):
        return {redact(k, key): redact(v, key) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, key) for item in value]
    return value
