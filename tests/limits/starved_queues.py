"""What ends of queues do in the subjects and the peers of ``starving.py``: write, read, merge, join a group, come back.

See ``starved_kinds.py``.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from starving import Subject, hear

import aioshm.blocking
import aioshm.queue.groups.factory
import aioshm.queue.local.overflow_sockets
import aioshm.queue.remote.readers
import aioshm.queue.remote.source  # not when there is no descriptor left to read the file
from aioshm import AioshmError, HandleError, MessageQueue, Options, OutOfDescriptors, QueueRestarted, merge

SOON_S = 1.0
LATER_S = 10.0
LARGE = bytes(300_000)  # sent over the network without a copy, and through a segment of its own to local readers


def writer_of(remote: bool, face: Any = MessageQueue, overflow: Any = "segments") -> Any:
    options = Options(remote_timeout=4.0, overflow=overflow)
    return face(
        1, 0 if remote else 1, max_chunk_bytes=4096, max_chunks=4, slots=4, connect_ip="127.0.0.1", options=options
    )


async def read_all(handle: Any, pipe: Connection) -> None:
    """Read what a writer sends until its last message; be refused as often as the writer lacks something."""
    while True:
        try:
            async with MessageQueue.create_from_handle(handle, 0) as reader:
                received = [await reader.dequeue(LATER_S)]
                while received[-1] != "last":
                    received.append(await reader.dequeue(LATER_S))
                assert received[-3:] == ["small", LARGE, "last"]
                assert received.count("small") == received.count(LARGE) + (len(received) == 4)
                pipe.send("read")
                with suppress(EOFError):
                    await hear(pipe)
                return
        except AioshmError as error:
            if "RLIMIT_NOFILE" not in str(error):
                raise
            await asyncio.sleep(0.02)


class Writing:
    """A writer whose reader, in the peer, attaches; if that fails, another one does once there is room."""

    def __init__(self, *, remote: bool = False, overflow: str = "segments") -> None:
        self.remote = remote
        self.overflow = overflow

    async def subject(self, subject: Subject) -> None:
        writer, told = None, False
        with subject.starving():
            writer = writer_of(self.remote, overflow=self.overflow)
            subject.pipe.send(writer.export_handle())
            told = True
            await writer.wait_until_ready(SOON_S)
            await writer.enqueue("small", SOON_S)
            await writer.enqueue(LARGE, SOON_S)
        if writer is None:
            writer = writer_of(self.remote, overflow=self.overflow)
        async with writer:
            if not told:
                subject.pipe.send(writer.export_handle())
            if subject.errors:
                await writer.wait_until_ready(LATER_S)
                await writer.enqueue("small", LATER_S)
                await writer.enqueue(LARGE, LATER_S)
            await writer.enqueue("last", LATER_S)
            assert await subject.hear() == "read"

    async def peer(self, pipe: Connection) -> None:
        await read_all(await hear(pipe), pipe)


class Reading:
    """A reader whose writer, in the peer, sends; if that fails, another one of the same rank is made."""

    def __init__(self, *, remote: bool = False, overflow: str = "segments") -> None:
        self.remote = remote
        self.overflow = overflow

    async def subject(self, subject: Subject) -> None:
        handle = await subject.hear()
        reader = None
        with subject.starving():
            reader = MessageQueue.create_from_handle(handle, 0)
            await reader.wait_until_ready(SOON_S)
            await self.receive(subject, reader, SOON_S)
            subject.done = True
        if reader is not None and subject.received:  # there was no room for the large one only
            subject.done = True
            assert await reader.dequeue(LATER_S) == LARGE
        if reader is not None:
            await reader.aclose()
        if not subject.done:
            async with MessageQueue.create_from_handle(handle, 0) as reader:
                await self.receive(subject, reader, LATER_S)

    async def receive(self, subject: Subject, reader: MessageQueue, within_s: float) -> None:
        assert await reader.dequeue(within_s) == "small"
        subject.received = True
        assert await reader.dequeue(within_s) == LARGE
        subject.received = False

    async def peer(self, pipe: Connection) -> None:
        async with writer_of(self.remote, overflow=self.overflow) as writer:
            pipe.send(writer.export_handle())
            await writer.wait_until_ready(LATER_S)
            await writer.enqueue("small", LATER_S)
            await writer.enqueue(LARGE, LATER_S)
            with suppress(EOFError):
                await hear(pipe)


class Blocking:
    """The faces for threads, in a thread that was there before."""

    def __init__(self, work: Callable[[Subject], None], beside: Reading | Writing) -> None:
        self.work = work
        self.peer = beside.peer

    async def subject(self, subject: Subject) -> None:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                self.work(subject)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        while thread.is_alive():
            await asyncio.sleep(0.002)
        thread.join()
        if errors:
            raise errors[0]


def write_blocking(subject: Subject, remote: bool) -> None:
    writer, told = None, False
    with subject.starving():
        writer = writer_of(remote, aioshm.blocking.MessageQueue)
        subject.pipe.send(writer.export_handle())
        told = True
        writer.wait_until_ready(SOON_S)
        writer.enqueue("small", SOON_S)
        writer.enqueue(LARGE, SOON_S)
    if writer is None:
        writer = writer_of(remote, aioshm.blocking.MessageQueue)
    with writer:
        if not told:
            subject.pipe.send(writer.export_handle())
        if subject.errors:
            writer.wait_until_ready(LATER_S)
            writer.enqueue("small", LATER_S)
            writer.enqueue(LARGE, LATER_S)
        writer.enqueue("last", LATER_S)
        assert subject.pipe.recv() == "read"


def read_blocking(subject: Subject) -> None:
    handle = subject.pipe.recv()
    reader = None
    with subject.starving():
        reader = aioshm.blocking.MessageQueue.create_from_handle(handle, 0)
        assert reader.dequeue(SOON_S) == "small"
        subject.received = True
        assert reader.dequeue(SOON_S) == LARGE
        subject.done = True
    if reader is not None and subject.received and not subject.done:
        subject.done = True
        assert reader.dequeue(LATER_S) == LARGE
    if reader is not None:
        reader.close()
    if not subject.done:
        with aioshm.blocking.MessageQueue.create_from_handle(handle, 0) as reader:
            assert reader.dequeue(LATER_S) == "small"
            assert reader.dequeue(LATER_S) == LARGE


class Merging:
    """Two local readers and a remote one, read together."""

    async def subject(self, subject: Subject) -> None:
        handles = await subject.hear()
        readers: dict[int, MessageQueue] = {}
        with subject.starving():
            for number, handle in enumerate(handles):
                # After that time a remote one tells why it has no connection.
                readers[number] = MessageQueue.create_from_handle(handle, 0, options=Options(remote_timeout=SOON_S))
            await self.receive(readers, 3 * SOON_S)
        for reader in readers.values():
            await reader.aclose()
        if subject.errors:
            subject.pipe.send("again")
            again = await subject.hear()
            readers = {number: MessageQueue.create_from_handle(handle, 0) for number, handle in enumerate(again)}
            await self.receive(readers, LATER_S)
            for reader in readers.values():
                await reader.aclose()

    async def receive(self, readers: dict[int, MessageQueue], within_s: float) -> None:
        received = []
        async with merge(readers) as merged, asyncio.timeout(within_s):
            async for rank, message in merged:
                if isinstance(message, Exception):
                    raise message
                received.append((rank, message))
                if len(received) == 2 * len(readers):
                    break
        assert sorted(received) == [(rank, message) for rank in sorted(readers) for message in (0, 1)]

    async def peer(self, pipe: Connection) -> None:
        while True:
            writers = [writer_of(remote) for remote in (False, False, True)]
            pipe.send([writer.export_handle() for writer in writers])
            sending = [asyncio.ensure_future(self.send(writer)) for writer in writers]
            try:
                await hear(pipe)
            except EOFError:
                return
            finally:
                for each in sending:
                    each.cancel()
                await asyncio.gather(*sending, return_exceptions=True)
                for writer in writers:
                    await writer.aclose()

    async def send(self, writer: MessageQueue) -> None:
        for number in range(2):
            await writer.enqueue(number)


class PipeGroup:
    """A process group of a subject, rank 0, and its peer, rank 1."""

    world_size = 2

    def __init__(self, pipe: Connection, rank: int) -> None:
        self.pipe, self.rank = pipe, rank
        self.begun_again = False

    def all_gather_obj(self, obj: Any) -> list[Any]:
        self.pipe.send(obj)
        deadline = time.monotonic() + LATER_S
        while not self.pipe.poll():  # without a descriptor
            assert time.monotonic() < deadline
            time.sleep(0.002)
        other = self.pipe.recv()
        if isinstance(other, str) and other == "again":
            self.begun_again = True
            raise ConnectionResetError("the other rank has given up")
        return [obj, other] if self.rank == 0 else [other, obj]

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        return self.all_gather_obj(obj)[src]


class Grouping:
    """A queue made from a process group."""

    def __init__(self, writer_rank: int) -> None:
        self.writer_rank = writer_rank

    async def make(self, group: PipeGroup) -> None:
        rank = group.rank
        queue = await MessageQueue.create_from_process_group(group, 4096, 4, self.writer_rank, blocking=False)
        try:
            await queue.wait_until_ready(SOON_S)
            if rank == self.writer_rank:
                await queue.enqueue("text", SOON_S)
            else:
                assert await queue.dequeue(SOON_S) == "text"
        finally:
            await queue.aclose()

    async def subject(self, subject: Subject) -> None:
        from aioshm.queue.groups import factory  # noqa: F401  -- else it would be read before the first collective

        with subject.starving():
            await self.make(PipeGroup(subject.pipe, 0))
        if subject.errors:
            subject.pipe.send("again")
            while (await subject.hear()) != "again":
                pass  # what the first attempt has left in the pipe
            await self.make(PipeGroup(subject.pipe, 0))

    async def peer(self, pipe: Connection) -> None:
        group = PipeGroup(pipe, 1)
        with suppress(AioshmError, TimeoutError, AssertionError, ConnectionError):
            await self.make(group)
        with suppress(EOFError):
            while not group.begun_again and (await hear(pipe)) != "again":
                pass
            pipe.send("again")
            await self.make(PipeGroup(pipe, 1))


async def come_back(within_s: float, *, remote: bool) -> None:
    """Be two writers of one name, or of one identity, one after the other, and the reader that goes on."""
    where = str(Path(tempfile.gettempdir(), f"identity-{os.getpid()}"))
    name = f"steps-{os.getpid()}"  # others of these tests may run beside this one
    identity = {"identity": where} if remote else {"name": name}
    options = Options.from_env()

    def new_writer() -> MessageQueue:
        return MessageQueue(
            1, 0 if remote else 1, max_chunk_bytes=4096, connect_ip="127.0.0.1", options=options, **identity
        )

    try:
        async with new_writer() as first:
            if remote:
                reader = MessageQueue.create_from_handle(first.export_handle(), 0, reconnect=True)
            else:
                reader = MessageQueue.attach(name, 0, reconnect=True)
            sending = asyncio.ensure_future(first.enqueue("first", within_s))
            try:
                assert await reader.dequeue(within_s) == "first"
                await sending
            except BaseException as error:
                sending.cancel()
                await reader.aclose()
                if "RLIMIT_NOFILE" in str(error):  # the writer, which lacks something, has refused the reader
                    raise OutOfDescriptors(str(error)) from error
                raise
        async with reader, new_writer() as second:
            sending = asyncio.ensure_future(second.enqueue("second", within_s))
            try:
                try:
                    raise AssertionError(await reader.dequeue(within_s))
                except QueueRestarted:
                    pass
                except HandleError as error:
                    if "RLIMIT_NOFILE" in str(error):  # as above
                        raise OutOfDescriptors(str(error)) from error
                    raise
                assert await reader.dequeue(within_s) == "second"
                await sending
            finally:
                sending.cancel()
                await asyncio.wait([sending])
    finally:
        Path(where).unlink(missing_ok=True)
