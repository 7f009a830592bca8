"""The calls that are made for every message are the end's own, and coroutines to everybody that has them."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from pairs import attached

from aioshm import MessageQueue, RoleError


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


async def test_a_task_that_is_cancelled_before_it_runs_loses_nothing() -> None:
    async with attached() as (writer, [reader]):
        sent, received = asyncio.create_task(writer.enqueue("lost")), asyncio.create_task(reader.dequeue())
        sent.cancel()
        received.cancel()
        await asyncio.wait([sent, received])
        assert sent.cancelled()
        assert received.cancelled()
        await asyncio.wait_for(writer.enqueue("kept"), 30)
        assert await asyncio.wait_for(reader.dequeue(), 30) == "kept"


async def test_a_call_that_nobody_awaits_does_nothing_and_is_told_of() -> None:
    async with attached() as (writer, [reader]):
        with pytest.warns(RuntimeWarning, match="enqueue' was never awaited"):
            writer.enqueue("forgotten")
        await writer.enqueue("awaited")
        assert await reader.dequeue(timeout=30) == "awaited"


async def test_they_are_documented_and_the_wrong_end_has_none() -> None:
    async with attached() as (writer, [reader]):
        assert str(inspect.signature(writer.enqueue)).startswith("(obj")
        assert inspect.signature(reader.dequeue).parameters["cancel"].default is None
        for own, call in ((writer.enqueue, MessageQueue.enqueue), (reader.dequeue, MessageQueue.dequeue)):
            assert "Raises:" in (inspect.getdoc(own) or "")
            assert inspect.getdoc(own) == inspect.getdoc(call)
        with pytest.raises(RoleError):
            await reader.enqueue("x")
        with pytest.raises(RoleError):
            await writer.dequeue()


# Iterating


async def test_iterating_receives_what_dequeue_leaves_and_ends_when_the_writer_closes() -> None:
    async with attached(slots=128) as (writer, [reader]):
        await writer.enqueue_many(range(100))
        messages = aiter(reader)
        for number in range(0, 50, 2):
            assert [await reader.dequeue(), await anext(messages)] == [number, number + 1]
        closing = asyncio.create_task(writer.aclose())
        assert [number async for number in messages] == list(range(50, 100))
        assert [number async for number in reader] == []
        with pytest.raises(StopAsyncIteration):
            await anext(reader)
        await closing


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
