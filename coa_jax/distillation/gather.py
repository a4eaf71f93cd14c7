"""Runs coroutines concurrently and raises one exception if some of them fail."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from coa_jax.errors import UserError

T = TypeVar("T")


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs coroutines concurrently; returns their results in the order of the coroutines.

    If a coroutine raises an exception, the other coroutines are cancelled and awaited.

    Raises:
        UserError: at least one coroutine raised UserError. Only one such error is raised, because
            several usually have the same cause, such as a spent budget.
        ExceptionGroup: a coroutine raised another exception, and none raised UserError.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as stopped:
        error: BaseException | None = stopped.subgroup(UserError)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is None:
            raise
        raise error from None
    return [task.result() for task in tasks]
