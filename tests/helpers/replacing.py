"""Readers that join a queue late, leave it or are killed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from children import child
from remotes import wide_writer
from support import until

from aioshm import Handle, MessageQueue

REMOTE_TIMEOUT_S = 1.0
"""How soon the writer of `bereaved` notices the death of a remote reader."""


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


async def lose_reader(writer: MessageQueue, rank: int = 0, unread: Sequence[Any] = ()) -> int:
    """Let a reader in a process of its own attach, be sent messages and be killed; return its pid."""
    async with child("idle", writer.export_handle().to_json(), str(rank)) as doomed:
        await writer.wait_until_ready(20)
        await becomes(writer, rank, "attached")
        await writer.enqueue_many(unread, 20)
        await doomed.kill()
    return doomed.pid


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
                await doomed.kill()
            yield writer, patient, doomed.pid
