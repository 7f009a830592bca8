"""A writer and its readers in one process, attached and ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aioshm import MessageQueue, Options


@asynccontextmanager
async def attached(
    n_reader: int = 1, *, codec: str = "pickle", chunk: int = 4096, chunks: int = 4, **options: Any
) -> AsyncIterator[tuple[MessageQueue, list[MessageQueue]]]:
    """Give a ready writer and its ready readers to the block."""
    writer = MessageQueue(
        n_reader, n_reader, max_chunk_bytes=chunk, max_chunks=chunks, codec=codec, options=Options(**options)
    )
    handle = writer.export_handle()
    readers = [MessageQueue.create_from_handle(handle, rank) for rank in range(n_reader)]
    try:
        await asyncio.gather(*(end.wait_until_ready(10) for end in [writer, *readers]))
        yield writer, readers
    finally:
        for end in [*readers, writer]:
            await end.aclose()
