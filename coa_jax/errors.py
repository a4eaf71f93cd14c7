"""The exception for errors that the user can correct."""

from __future__ import annotations


class UserError(Exception):
    """An error that the user can correct, such as a wrong path, a typo in a config or a full disk.

    The message is one line that says what is wrong, where, and what to do. Entry points print the
    message without a traceback and exit with code 2. Every other exception is a bug of coa_jax and
    keeps its traceback.
    """
