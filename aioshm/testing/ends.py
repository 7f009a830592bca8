"""A writer and its readers in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from aioshm.arguments import check_int
from aioshm.queue.api import MessageQueue

READY_TIMEOUT_S = 30.0


@asynccontextmanager
async def pair(**arguments: Any) -> AsyncIterator[tuple[MessageQueue[Any], MessageQueue[Any]]]:
    """Open a writer and its reader, ready; close both at the end of the block.

    Args:
        arguments: For `MessageQueue`, such as ``codec`` or ``options``; ``type`` holds for the reader, too.
    """
    async with readers(1, **arguments) as (writer, (reader,)):
        yield writer, reader


@asynccontextmanager
async def readers(count: int, **arguments: Any) -> AsyncIterator[tuple[MessageQueue[Any], list[MessageQueue[Any]]]]:
    """Open a writer and several readers, ready; close all at the end of the block.

    Args:
        count: How many readers.
        arguments: For `MessageQueue`, such as ``codec`` or ``options``; ``type`` holds for the readers, too.

    Raises:
        TypeError, ValueError: An argument is wrong; the text names it.
    """
    check_int("count", count, minimum=1)
    for name in ("n_reader", "n_local_reader"):
        if name in arguments:
            raise TypeError(f"{name} must not be given: it is the number of readers, {count}")
    async with AsyncExitStack() as stack:
        writer: MessageQueue[Any] = await stack.enter_async_context(MessageQueue(count, **arguments))
        handle, kind = writer.export_handle(), arguments.get("type")
        ends: list[MessageQueue[Any]] = [
            await stack.enter_async_context(MessageQueue.create_from_handle(handle, rank, type=kind))
            for rank in range(count)
        ]
        await asyncio.gather(*(end.wait_until_ready(READY_TIMEOUT_S) for end in (writer, *ends)))
        yield writer, ends
