"""The calls that are made for every message are the end's own, and coroutines to everybody that has them."""

from __future__ import annotations

import asyncio
from typing import Any

from pairs import attached

from aioshm import MessageQueue


class Shouting(MessageQueue[Any]):
    """Has calls of its own."""

    async def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        await super().enqueue(obj.upper(), timeout)

    async def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        return await super().dequeue(*args, **kwargs) + "!"


async def test_what_a_subclass_has_to_say() -> None:
    writer = Shouting(1, 1)
    reader = Shouting.create_from_handle(writer.export_handle(), 0)
    async with writer, reader:
        await asyncio.gather(writer.wait_until_ready(30), reader.wait_until_ready(30))
        await writer.enqueue("ha")
        assert await reader.dequeue(timeout=30) == "HA!"
        await writer.broadcast_object("oh")
        assert await reader.broadcast_object() == "OH!"


# Iterating


async def test_iterating_over_what_a_subclass_or_an_observer_receives() -> None:
    async with MessageQueue(1, 1) as writer, Shouting.create_from_handle(writer.export_handle(), 0) as reader:
        await asyncio.gather(writer.wait_until_ready(30), reader.wait_until_ready(30))
        await writer.enqueue_many("abc")
        assert [await anext(aiter(reader)) for _ in "abc"] == ["a!", "b!", "c!"]
    async with attached() as (writer, [observed]):
        await writer.enqueue_many("ab")
        dequeue, seen = observed.dequeue, []

        async def watched() -> Any:
            seen.append(obj := await dequeue())
            return obj

        observed.dequeue = watched  # type: ignore[method-assign,assignment]
        assert [await anext(aiter(observed)) for _ in "ab"] == seen == ["a", "b"]
