"""Whatever takes an asynchronous iterator takes those of a queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable
from typing import Any

import pytest
from iterating import END, WAYS
from pairs import EITHER_PLACE
from remotes import ready_ends

from aioshm import MessageQueue, Options, ReaderJoined, ReaderLeft, merge

NEW: dict[str, Callable[[MessageQueue[Any]], AsyncIterable[Any]]] = {
    "queue": lambda reader: reader,
    "leases": lambda reader: reader.leases(),
    "merge": lambda reader: merge({0: reader}),
}


@EITHER_PLACE
@pytest.mark.parametrize("kind", list(NEW))
async def test_iterator_taken_by_a_builtin_gives_each_message_and_the_end(
    kind: str, n_local: int, n_remote: int
) -> None:
    def item_of(message: str) -> Any:
        return (0, message) if kind == "merge" else message

    async with ready_ends(n_local, n_remote, slots=8) as (writer, [reader]):
        for way in WAYS:
            await writer.enqueue("there")
            assert await way(NEW[kind](reader)) == item_of("there")
            for turns in range(3):
                waiting = asyncio.create_task(way(NEW[kind](reader)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                await writer.enqueue(f"after {turns}")
                assert await waiting == item_of(f"after {turns}")
        ending = asyncio.create_task(WAYS[0](NEW[kind](reader)))
        await asyncio.sleep(0)
        await writer.aclose()
        assert await ending == END
        for way in WAYS:
            assert await way(NEW[kind](reader)) == END


async def test_membership_taken_by_a_builtin_gives_each_change_and_the_end() -> None:
    async with MessageQueue(0, options=Options(max_readers=4)) as writer:
        await writer.wait_until_ready(30)
        changes = writer.membership()
        for way in WAYS:
            joining = asyncio.create_task(way(changes))
            await asyncio.sleep(0)
            async with MessageQueue.create_from_handle(writer.export_handle()) as reader:
                await reader.wait_until_ready(30)
                assert type(await joining) is ReaderJoined
                leaving = asyncio.create_task(way(changes))
                await asyncio.sleep(0)
            assert type(await leaving) is ReaderLeft
        ending = asyncio.create_task(WAYS[0](changes))
        await asyncio.sleep(0)
        await writer.aclose()
        assert await ending == END
        for way in WAYS:
            assert await way(changes) == END
