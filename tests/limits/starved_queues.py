"""What ends of queues do in the subjects and the peers of ``starving.py``.

See ``starved_kinds.py``.
"""

from __future__ import annotations

import asyncio
import functools
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from members import Member, meet
from scenes import MESSAGES, THREADS, in_thread, new_writer
from starving import Subject, hear

import aioshm.blocking
from aioshm import AioshmError, Handle, LimitReached, MessageQueue, Options

SOON_S = 1.0
LATER_S = 10.0
LARGE = MESSAGES[1]


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


class Threaded:
    """A blocking queue for coroutines: its calls run in a thread."""

    def __init__(self, queue: aioshm.blocking.MessageQueue) -> None:
        self._queue = queue

    def export_handle(self) -> Handle:
        return self._queue.export_handle()

    def __getattr__(self, name: str) -> Any:
        return functools.partial(in_thread, getattr(self._queue, name))

    async def aclose(self) -> None:
        await in_thread(self._queue.close)

    async def __aenter__(self) -> Threaded:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Starved:
    """One end of a queue, blocking or not."""

    def __init__(self, *, remote: bool = False, overflow: str = "segments", blocking: bool = False) -> None:
        self.remote = remote
        self.overflow = overflow
        self.blocking = blocking

    async def subject(self, subject: Subject) -> None:
        if self.blocking:
            await in_thread(list)  # so that the thread is there before
        await self.work(subject)
        THREADS.shutdown()

    async def new(self, make: Callable[[Any], Any]) -> Any:
        if self.blocking:
            return Threaded(await in_thread(make, aioshm.blocking.MessageQueue))
        return make(MessageQueue)

    def new_writer(self, api: Any = MessageQueue) -> Any:
        return new_writer(api, self.remote, self.overflow)

    async def work(self, subject: Subject) -> None:
        raise NotImplementedError


class Writing(Starved):
    """A writer whose reader, in the peer, attaches; if that fails, another one does once there is room."""

    async def work(self, subject: Subject) -> None:
        writer, told = None, False
        with subject.starving():
            writer = await self.new(self.new_writer)
            subject.pipe.send(writer.export_handle())
            told = True
            await writer.wait_until_ready(SOON_S)
            await writer.enqueue("small", SOON_S)
            await writer.enqueue(LARGE, SOON_S)
        if writer is None:
            writer = await self.new(self.new_writer)
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


class Reading(Starved):
    """A reader whose writer, in the peer, sends; if that fails, another one of the same rank is made."""

    async def work(self, subject: Subject) -> None:
        handle = await subject.hear()

        def new_reader(api: Any) -> Any:
            # One that spins for its message needs no descriptor to sleep.
            return api.create_from_handle(handle, 0, options=Options(wait="park"))

        reader = None
        with subject.starving():
            reader = await self.new(new_reader)
            await reader.wait_until_ready(SOON_S)
            await self.receive(subject, reader, SOON_S)
            subject.done = True
        if reader is not None and subject.received:  # there was no room for the large one only
            subject.done = True
            assert await reader.dequeue(LATER_S) == LARGE
        if reader is not None:
            await reader.aclose()
        if not subject.done:
            async with await self.new(new_reader) as reader:
                await self.receive(subject, reader, LATER_S)

    async def receive(self, subject: Subject, reader: Any, within_s: float) -> None:
        assert await reader.dequeue(within_s) == "small"
        subject.received = True
        assert await reader.dequeue(within_s) == LARGE
        subject.received = False

    async def peer(self, pipe: Connection) -> None:
        async with self.new_writer() as writer:
            pipe.send(writer.export_handle())
            await writer.wait_until_ready(LATER_S)
            await writer.enqueue("small", LATER_S)
            await writer.enqueue(LARGE, LATER_S)
            with suppress(EOFError):
                await hear(pipe)


async def keep_identity(_within_s: float) -> None:
    """Be two writers of one identity, one after the other."""
    where = Path(tempfile.gettempdir(), f"identity-{os.getpid()}")
    try:
        for _ in range(2):
            async with MessageQueue(1, 0, max_chunk_bytes=4096, connect_ip="127.0.0.1", identity=where):
                pass
    finally:
        where.unlink(missing_ok=True)


async def meet_in_group(within_s: float) -> None:
    """Be both ranks of a group with a queue."""

    async def be(member: Member) -> None:
        async with await MessageQueue.create_from_process_group(member, 4096, 4, blocking=False) as queue:
            await queue.wait_until_ready(within_s)

    done = await asyncio.gather(*map(be, meet(2, timeout=within_s)), return_exceptions=True)
    for error in sorted(filter(None, done), key=lambda error: not isinstance(error, LimitReached)):
        raise error
