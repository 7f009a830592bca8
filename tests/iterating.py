"""The ways in which Python takes items from an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

END = "end"
WITHIN_S = 30


async def by_for(items: AsyncIterable[Any]) -> Any:
    async for item in items:
        return item
    return END


async def by_anext_with_default(items: AsyncIterable[Any]) -> Any:
    return await anext(aiter(items), END)


async def by_aclosing(items: AsyncIterable[Any]) -> Any:
    async with aclosing(aiter(items)) as closing:  # type: ignore[type-var]
        return await anext(closing, END)


async def by_wait_for(items: AsyncIterable[Any]) -> Any:
    return await asyncio.wait_for(anext(aiter(items), END), WITHIN_S)


async def by_ensure_future(items: AsyncIterable[Any]) -> Any:
    try:
        return await asyncio.ensure_future(anext(aiter(items)))
    except StopAsyncIteration:
        return END


Way = Callable[[AsyncIterable[Any]], Coroutine[Any, Any, Any]]

WAYS: list[Way] = [by_for, by_anext_with_default, by_aclosing, by_wait_for, by_ensure_future]
