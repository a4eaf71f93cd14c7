"""The exception for errors that the user can correct."""

from __future__ import annotations


class UserError(Exception):
    """A mistake outside the program: a wrong path, a typo in a config, a full disk.

    The message is one line that says what is wrong, where, and what to do. Entry points print it
    without a traceback and exit with code 2. Every other exception is a bug of ours and keeps its
    traceback.
    """
