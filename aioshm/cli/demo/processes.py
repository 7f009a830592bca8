"""The demo's processes: a `WorkerGroup` of the writer, which is rank 0, and the readers."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from aioshm.cli.demo.blocks import Arrays, Blocks
from aioshm.cli.demo.ends import Figures, receive, send
from aioshm.cli.demo.script import MAX_TENSOR_BYTES, Phase, make_script, split_lines
from aioshm.cli.demo.source import printable
from aioshm.cli.outcome import UNUSABLE, CommandFailed, loop_factory
from aioshm.engine import WorkerGroup
from aioshm.errors import AioshmError, RemoteFailure, WorkerDied, WorkerError
from aioshm.queue import MessageQueue

START_TIMEOUT_S = 60.0
ATTACH_TIMEOUT_S = 10.0
"""How long the readers may take to attach: all processes have done what takes long by then."""
GRACE_S = 0.25
"""How long processes may take to end by themselves before they are stopped."""
LOOPBACK = "127.0.0.1"  # where remote readers connect: they are all on this machine

_WRITER = 0
_NAME = "demo"
_SMALL = 1 << 14, 4  # the chunks of the queues beside the one that is measured: their bytes, and how many there are
_CONSEQUENCES = (*(f"aioshm.errors.{name}" for name in ("PeerDied", "PeerClosed", "EndClosed")), "TimeoutError")
"""Of another process' failure."""
_PROGRESS_S = 0.1


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to do; every process gets the same.

    Attributes:
        input: The absolute path of the text file; bytes, because a path need not be text.
        repeat: How often its lines are sent.
        readers: How many read the ring.
        remote: How many more read over TCP; they have the ranks behind.
        arrays: What the large messages are made of.
    """

    input: bytes
    repeat: int
    readers: int
    remote: int = 0
    arrays: Arrays


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has done.

    Attributes:
        messages: Sent; or received and found right.
        overflows: How many of them did not fit the ring.
        phases: One after the other.
    """

    messages: int
    overflows: int
    phases: list[Figures]


class CannotStart(Exception):
    """The surroundings do not allow it; the text says what is missing."""


class Part:
    """What one process does, see `WorkerGroup`.

    Args:
        job: What to do.
        rank: Which process it is.

    Raises:
        CannotStart: The text cannot be read, or what the tensors need cannot be imported.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self._job = job
        self._rank = rank
        self._script = _prepare(job)
        self._queue: MessageQueue | None = None
        self._progress: MessageQueue | None = None

    def open(self) -> tuple[str, str] | None:
        """Make the queue; return its handle, and that of the queue for progress. Only the writer does.

        Raises:
            CannotStart: A queue cannot be made here.
        """
        if self._rank != _WRITER:
            return None
        try:
            self._queue = MessageQueue(self._job.readers + self._job.remote, self._job.readers, connect_ip=LOOPBACK)
            self._progress = MessageQueue(1, 1, None, *_SMALL)
        except (AioshmError, OSError, ValueError) as error:
            raise CannotStart(str(error)) from None
        return self._queue.export_handle().to_json(), self._progress.export_handle().to_json()

    async def run(self, handle: str) -> Result:
        """Send the script, or attach to the queue, receive it and check it.

        Raises:
            Mismatch: A message is not what it must be.
            AioshmError, TimeoutError: Another process is not there, or has gone.
        """
        if self._queue is None:
            self._queue = MessageQueue.create_from_handle(handle, self._rank - 1)
        async with self._queue as queue:
            await queue.wait_until_ready(timeout=ATTACH_TIMEOUT_S)
            figures = await (self._send(queue) if self._rank == _WRITER else receive(queue, self._script))
            messages = sum(phase.messages for phase in figures)
            return Result(messages=messages, overflows=queue.stats().overflows, phases=figures)

    async def _send(self, queue: MessageQueue) -> list[Figures]:
        telling = asyncio.create_task(self._tell_progress(queue))
        try:
            return await send(queue, self._script)
        finally:
            telling.cancel()

    async def _tell_progress(self, queue: MessageQueue) -> None:
        assert self._progress is not None
        while True:
            stats = queue.stats()
            await self._progress.enqueue(stats.messages - stats.backlog)
            await asyncio.sleep(_PROGRESS_S)

    async def close(self) -> None:
        """Close both queues, if they are open."""
        for queue in (self._queue, self._progress):
            if queue is not None:
                await queue.aclose()


async def run_processes(job: Job, loop: str, progressed: Callable[[int], None]) -> tuple[Result, list[Result]]:
    """Do the job; when this returns, raises or is cancelled, no process is left.

    Args:
        job: What to do.
        loop: The name of the processes' event loop.
        progressed: Called with the number of messages that every reader has read.

    Returns:
        The writer's result, and the readers'.

    Raises:
        CommandFailed: A process failed; the text is about the one that the others failed for.
    """
    try:
        async with WorkerGroup(
            Part,
            1 + job.readers + job.remote,
            args=(job,),
            name=_NAME,
            ready_timeout=START_TIMEOUT_S,
            shutdown_timeout=GRACE_S,
            capture_stderr=False,
            loop_factory=loop_factory(loop),
            max_chunk_bytes=_SMALL[0],
            max_chunks=_SMALL[1],
        ) as group:
            queue, progress = await group.collective_rpc("open", unique_reply_rank=_WRITER)
            async with _following(progress, progressed):
                writer, *readers = await group.collective_rpc("run", (queue,))
        return writer, readers
    except WorkerDied as error:
        raise CommandFailed(re.sub(rf"\b{_NAME}_(\d+)", lambda found: _name(int(found[1])), str(error))) from None
    except WorkerError as error:
        failure = _failure(error.errors)
        if failure is None:
            raise
        raise failure from None
    except (AioshmError, OSError) as error:
        raise CommandFailed(str(error), UNUSABLE) from None


@asynccontextmanager
async def _following(handle: str, progressed: Callable[[int], None]) -> AsyncIterator[None]:
    """Pass on what the writer tells of its progress while the block runs."""

    async def follow() -> None:
        async for done in queue:
            progressed(done)

    async with MessageQueue.create_from_handle(handle, 0) as queue:
        following = asyncio.create_task(follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)  # a writer that died is told by the group


def _prepare(job: Job) -> list[Phase]:
    try:
        lines = split_lines(Path(os.fsdecode(job.input)).read_bytes())
    except OSError as error:
        raise CannotStart(f"cannot read {printable(job.input)}: {error.strerror}") from None
    try:
        blocks = Blocks(job.arrays, MAX_TENSOR_BYTES)
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries cannot be loaded
        raise CannotStart(f"cannot import {job.arrays}: {error}") from None
    return make_script(lines, job.repeat, blocks)


def _failure(errors: Mapping[int, RemoteFailure]) -> CommandFailed | None:
    """Return what to say of the failures of some processes; None if one of them is a bug, with a traceback to show."""
    if any(not each.kind.startswith(("aioshm.", "TimeoutError")) for each in errors.values()):
        return None
    rank, cause = min(errors.items(), key=lambda each: each[1].kind in _CONSEQUENCES)
    if cause.kind.endswith(".CannotStart"):
        return CommandFailed(cause.text, UNUSABLE)
    return CommandFailed(f"{_name(rank)}: {cause.text}")


def _name(rank: int) -> str:
    return "the writer" if rank == _WRITER else f"reader {rank - 1}"
