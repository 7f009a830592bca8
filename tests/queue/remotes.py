"""A writer with local and remote readers in one process, attached and ready; readers that join, leave or are killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from children import child
from support import until

from aioshm import Handle, MessageQueue, Options

REMOTE_TIMEOUT_S = 1.0
"""How soon the writer of `bereaved` notices the death of a remote reader."""


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


@asynccontextmanager
async def joined(
    writer: MessageQueue, rank: int | None = None, *, far: bool = False, **arguments: Any
) -> AsyncIterator[MessageQueue]:
    """Give a reader that has just attached to the block; ``far``: as on another host."""
    handle = elsewhere(writer.export_handle()) if far else writer.export_handle()
    async with MessageQueue.create_from_handle(handle, rank, **arguments) as reader:
        await reader.wait_until_ready(20)
        yield reader


def elsewhere(handle: Handle) -> Handle:
    """Return the handle as on another host, where its readers are remote readers."""
    return msgspec.structs.replace(handle, host="another one")


def state(writer: MessageQueue, rank: int) -> str:
    return next((str(info.state) for info in writer.readers if info.rank == rank), "absent")


async def becomes(writer: MessageQueue, rank: int, wanted: str) -> None:
    await until(lambda: state(writer, rank) == wanted, wanted)


async def received(reader: MessageQueue, amount: int) -> list[Any]:
    return [await reader.dequeue(20) for _ in range(amount)]


@asynccontextmanager
async def bereaved(
    n_local: int, n_remote: int, **options: Any
) -> AsyncIterator[tuple[MessageQueue, MessageQueue, int]]:
    """Give a writer to the block, its reader of rank 0, and the pid of its reader of rank 1, which was killed."""
    async with wide_writer(2 * n_local, 2 * n_remote, remote_timeout=REMOTE_TIMEOUT_S, **options) as writer:
        handle = writer.export_handle()
        async with MessageQueue.create_from_handle(handle, 0) as patient:
            async with child("idle", handle.to_json(), "1") as doomed:
                await writer.wait_until_ready(20)
                doomed.signal(signal.SIGKILL)
                await doomed.end()
            yield writer, patient, doomed.pid
