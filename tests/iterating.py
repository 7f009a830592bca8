"""The ways in which Python takes items from an asynchronous iterator."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

END = "end"
WITHIN_S = 30


async def by_for(items: AsyncIterable[Any]) -> Any:
    async for item in items:
        return item
    return END


async def by_anext(items: AsyncIterable[Any]) -> Any:
    try:
        return await anext(aiter(items))
    except StopAsyncIteration:
        return END


async def by_anext_with_default(items: AsyncIterable[Any]) -> Any:
    return await anext(aiter(items), END)


async def by_aclosing(items: AsyncIterable[Any]) -> Any:
    async with aclosing(aiter(items)) as closing:  # type: ignore[type-var]
        return await anext(closing, END)


async def by_wait_for(items: AsyncIterable[Any]) -> Any:
    return await asyncio.wait_for(anext(aiter(items), END), WITHIN_S)


async def by_timeout(items: AsyncIterable[Any]) -> Any:
    async with asyncio.timeout(WITHIN_S):
        return await by_anext(items)


async def by_task_group(items: AsyncIterable[Any]) -> Any:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(by_anext_with_default(items))
    return task.result()


async def by_gather(items: AsyncIterable[Any]) -> Any:
    return (await asyncio.gather(anext(aiter(items), END)))[0]


async def by_ensure_future(items: AsyncIterable[Any]) -> Any:
    try:
        return await asyncio.ensure_future(anext(aiter(items)))
    except StopAsyncIteration:
        return END


async def by_isawaitable(items: AsyncIterable[Any]) -> Any:
    item = anext(aiter(items), END)
    assert inspect.isawaitable(item)
    return await item


Way = Callable[[AsyncIterable[Any]], Coroutine[Any, Any, Any]]

WAYS: list[Way] = [
    by_for,
    by_anext,
    by_anext_with_default,
    by_aclosing,
    by_wait_for,
    by_timeout,
    by_task_group,
    by_gather,
    by_ensure_future,
    by_isawaitable,
]

EACH_WAY = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
