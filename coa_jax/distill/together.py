"""Coroutines that run together and fail as one would."""

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
    """Their results in their order; when one fails, the others are cancelled and waited for.

    Raises:
        UserError: if one of them did.  Several at once say the same, e.g. that the budget is spent,
            and one line is enough.
        ExceptionGroup: of other exceptions.
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
