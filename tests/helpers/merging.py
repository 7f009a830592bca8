"""Writers with one reader each, to be merged, and a wait to look into."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

from faces import Thread
from remotes import wide_writer
from support import eventually, until

from aioshm import AioshmError, MessageQueue, blocking
from aioshm.queue.merge import Merged

BIG = 50_000
"""More than a chunk of the queues below."""


@asynccontextmanager
async def queues(
    n_local: int = 3, n_remote: int = 0, *, ready: bool = True, **arguments: Any
) -> AsyncIterator[tuple[list[MessageQueue], dict[int, MessageQueue]]]:
    """Give writers to the block and, by numbers from 0 on, the one reader of each; the last ones are remote."""
    places = [(1, 0)] * n_local + [(0, 1)] * n_remote
    writers = [wide_writer(*place, **arguments) for place in places]
    readers = {n: MessageQueue.create_from_handle(each.export_handle(), 0) for n, each in enumerate(writers)}
    try:
        if ready:
            await asyncio.gather(*(end.wait_until_ready(10) for end in [*writers, *readers.values()]))
        yield writers, readers
    finally:
        for end in [*readers.values(), *writers]:
            await end.aclose()


def poller_of(merged: Merged) -> Any:
    assert merged._shared.poller is not None
    return merged._shared.poller


async def asleep(merged: Merged) -> asyncio.Task[tuple[int, Any]]:
    """Begin to wait for a message, and return once that sleeps."""
    waiting = asyncio.ensure_future(anext(merged))
    await until(lambda: merged._shared.poller is not None and merged._shared.poller._sleeper is not None)
    return waiting


async def outcome(item: Awaitable[tuple[int, Any]]) -> tuple[int | None, Any]:
    """Return an item of a merge; an error with its rank, whether the merge raises errors or returns them."""
    try:
        return await asyncio.wait_for(item, 20)
    except AioshmError as raised:
        error = raised
    assert error.__notes__ == [f"this is about the queue that the merge has as rank {error.rank}"]
    assert pickle.loads(pickle.dumps(error)).rank == error.rank
    return error.rank, error


@contextmanager
def blocking_queues(
    n_local: int = 3, n_remote: int = 0, *, ready: bool = True, **arguments: Any
) -> Iterator[tuple[list[blocking.MessageQueue], dict[int, blocking.MessageQueue]]]:
    """Give writers to the block and, by numbers from 0 on, the one reader of each; the last ones are remote."""
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                blocking.MessageQueue(
                    1, n_local, connect_ip="127.0.0.1", max_chunk_bytes=4096, max_chunks=8, slots=8, **arguments
                )
            )
            for n_local in [1] * n_local + [0] * n_remote
        ]
        readers = {
            number: stack.enter_context(blocking.MessageQueue.create_from_handle(writer.export_handle(), 0))
            for number, writer in enumerate(writers)
        }
        if ready:
            waiting = [Thread(end.wait_until_ready, 20) for end in [*writers, *readers.values()]]
            for thread in waiting:
                thread.result()
        yield writers, readers


def take(merged: blocking.Merged, count: int) -> list[tuple[int, Any]]:
    return [next(merged) for _ in range(count)]


def all_asleep(readers: dict[int, blocking.MessageQueue]) -> None:
    """Return once all of them are waited for."""
    eventually(lambda: all(reader.held.lock.owner for reader in readers.values()), "a sleep")
