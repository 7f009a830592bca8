"""A writer with local and remote readers in one process, attached and ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aioshm import MessageQueue, Options


def wide_writer(
    n_local: int,
    n_remote: int,
    *,
    codec: Any = "pickle",
    chunk: int = 4096,
    chunks: int = 4,
    slots: int | None = None,
    connect_ip: str | None = None,
    **options: Any,
) -> MessageQueue:
    return MessageQueue(
        n_local + n_remote,
        n_local,
        max_chunk_bytes=chunk,
        max_chunks=chunks,
        slots=slots or chunks,
        connect_ip=connect_ip or ("127.0.0.1" if n_remote else None),
        codec=codec,
        options=Options(**options),
    )


@asynccontextmanager
async def ready_ends(
    n_local: int, n_remote: int, *, codec: Any = "pickle", **arguments: Any
) -> AsyncIterator[tuple[MessageQueue, list[MessageQueue]]]:
    """Give a ready writer and its ready readers, the local ones first, to the block."""
    writer = wide_writer(n_local, n_remote, codec=codec, **arguments)
    handle = writer.export_handle()
    own = None if isinstance(codec, str) else codec
    readers = [MessageQueue.create_from_handle(handle, rank, codec=own) for rank in range(n_local + n_remote)]
    try:
        await asyncio.gather(*(end.wait_until_ready(10) for end in [writer, *readers]))
        yield writer, readers
    finally:
        for end in [*readers, writer]:
            await end.aclose()
