"""Runs coroutines concurrently; their failures look like that of a single coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from coa_jax.errors import UserError

T = TypeVar("T")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns the results in order; if one coroutine fails, cancels the others and waits for them.

    Raises:
        UserError: a coroutine raised one. Several at once usually have the same cause, such as a
            spent budget, so one line is enough.
        ExceptionGroup: other exceptions.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as stopped:
        told = next((e for e in _leaves(stopped) if isinstance(e, UserError)), None)
        if told is None:
            raise
        raise told from None
    return [task.result() for task in tasks]
