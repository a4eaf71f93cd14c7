"""The exceptions for errors that the user can correct, and the causes of exceptions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_SHOWN = 5
"""Number of errors that the message of `UserErrors` shows."""


class UserError(Exception):
    """An error that the user can correct, such as a wrong path, a typo in a config or a full disk.

    The message is one line that says what is wrong, where, and what to do. Entry points print the
    message without a traceback and exit with code 2. Every other exception is a bug of coa_jax and
    keeps its traceback.
    """


class UserErrors(UserError):
    """Several errors that the user can correct, in one message.

    Attributes:
        errors: the errors, in the order in which they were found.
    """

    def __init__(self, errors: Iterable[UserError]) -> None:
        """Takes the errors; those of a `UserErrors` are taken out of it."""
        self.errors = [each for error in errors for each in getattr(error, "errors", [error])]
        shown = [str(error) for error in self.errors[:_SHOWN]]
        more = len(self.errors) - _SHOWN
        super().__init__(" | ".join([*shown, *([f"and {more} more"] if more > 0 else [])]))

    def within(self, where: str) -> UserErrors:
        """Returns the errors with the name of the group of settings in front of each."""
        return UserErrors([UserError(f"{where}.{error}") for error in self.errors])


class Outage(UserError):
    """An error that probably passes without a correction, such as a store that does not answer.

    The exit code is 2, as for every `UserError`, unless ``$COA_JAX_STOP_CODE`` contains another
    number. Launch scripts set this variable, and repeat a command that exits with its value.
    """


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception, its causes, their causes, and so on.

    If one of these is an `ExceptionGroup`, the exceptions in the group and their causes are
    included.
    """
    visited: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        following = todo.pop(0)
        if following is None or id(following) in visited:
            continue
        visited.add(id(following))
        yield following
        todo += following.exceptions if isinstance(following, BaseExceptionGroup) else ()
        hidden = None if following.__suppress_context__ else following.__context__
        todo.append(following.__cause__ or hidden)
