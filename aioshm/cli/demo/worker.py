"""One process of the demo: ``python -m aioshm.cli.demo.worker (writer | reader-RANK) LOOP``.

Its orders come over stdin and its reports go over what was stdout. The end of stdin means that whoever started it has
had enough, or is dead, and ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from aioshm.cli.demo.blocks import make_blocks
from aioshm.cli.demo.ends import receive, send
from aioshm.cli.demo.loops import loop_factory
from aioshm.cli.demo.orders import Failed, Job, Opened, Progress, Report, Result
from aioshm.cli.demo.script import MAX_TENSOR_BYTES, Mismatch, Phase, make_script, split_lines
from aioshm.cli.demo.source import printable
from aioshm.errors import AioshmError, PeerDied, QueueClosed
from aioshm.process.background import in_thread
from aioshm.queue.base import MessageQueue

READY_TIMEOUT_S = 60.0
LOOPBACK = "127.0.0.1"  # where remote readers connect: they are all on this machine
_PROGRESS_S = 0.1

_Orders = asyncio.Queue[bytes]


class _CannotStart(Exception):
    """The surroundings do not allow it; the text says what is missing."""


class Reporter:
    """Writes reports to what was stdout, where nothing else can get in between."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.dup2(2, 1)

    def __call__(self, report: Report) -> None:
        line = msgspec.json.encode(report) + b"\n"
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except BrokenPipeError:
            pass  # nobody listens any more, and the end of stdin says so too


def main() -> NoReturn:
    """Run one process of the demo."""
    logging.basicConfig(format="%(message)s")
    role, loop_name = sys.argv[1:]
    report = Reporter()
    try:
        with asyncio.Runner(loop_factory=loop_factory(loop_name)) as runner:
            code = runner.run(_run(role, report))
    except asyncio.CancelledError:
        os._exit(1)  # without the interpreter's own end, which an import that still runs in its thread would disturb
    sys.exit(code)


async def _run(role: str, report: Reporter) -> int:
    me = asyncio.current_task()
    assert me is not None
    orders: _Orders = asyncio.Queue()
    following = asyncio.create_task(_follow(orders, me.cancel))
    try:
        report(await _work(role, report, orders))
    except Mismatch as error:
        report(Failed("mismatch", f"{_name(role)}: {error}"))
    except _CannotStart as error:
        report(Failed("setup", str(error)))
    except (PeerDied, QueueClosed) as error:
        report(Failed("peer", f"{_name(role)}: {error}"))
    except (AioshmError, TimeoutError) as error:
        report(Failed("error", f"{_name(role)}: {error}"))
    else:
        return 0
    finally:
        following.cancel()
    return 1


async def _follow(orders: _Orders, ended: Callable[[], object]) -> None:
    """Pass the lines of stdin on, until it ends."""
    stream = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), sys.stdin.buffer)
    while line := await stream.readline():
        orders.put_nowait(line)
    ended()


async def _work(role: str, report: Reporter, orders: _Orders) -> Result:
    job = msgspec.json.decode(await orders.get(), type=Job)
    script = await in_thread(lambda: _prepare(job))
    if role == "writer":
        return await _write(job, script, report)
    return await _read(script, (await orders.get()).decode(), int(role.removeprefix("reader-")))


def _prepare(job: Job) -> list[Phase]:
    try:
        lines = split_lines(Path(os.fsdecode(job.input)).read_bytes())
    except OSError as error:
        raise _CannotStart(f"cannot read {printable(job.input)}: {error.strerror}") from None
    try:
        blocks = make_blocks(job.arrays, MAX_TENSOR_BYTES)
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries cannot be loaded
        raise _CannotStart(f"cannot import {job.arrays}: {error}") from None
    return make_script(lines, job.repeat, blocks)


async def _write(job: Job, script: list[Phase], report: Reporter) -> Result:
    try:
        queue = MessageQueue(job.readers + job.remote, job.readers, connect_ip=LOOPBACK)
    except (AioshmError, OSError, ValueError) as error:
        raise _CannotStart(str(error)) from None
    async with queue:
        report(Opened(queue.export_handle().to_json()))
        await queue.wait_until_ready(timeout=READY_TIMEOUT_S)
        telling = asyncio.create_task(_tell_progress(queue, report))
        try:
            figures = await send(queue, script)
        finally:
            telling.cancel()
        stats = queue.stats()
        return Result(messages=stats.messages, overflows=stats.overflows, phases=figures)


async def _read(script: list[Phase], handle: str, rank: int) -> Result:
    async with MessageQueue.create_from_handle(handle, rank) as queue:
        await queue.wait_until_ready(timeout=READY_TIMEOUT_S)
        figures = await receive(queue, script)
        messages = sum(phase.messages for phase in figures)
        return Result(messages=messages, overflows=queue.stats().overflows, phases=figures)


async def _tell_progress(queue: MessageQueue, report: Reporter) -> None:
    while True:
        stats = queue.stats()
        report(Progress(stats.messages - stats.backlog))
        await asyncio.sleep(_PROGRESS_S)


def _name(role: str) -> str:
    return "the writer" if role == "writer" else role.replace("-", " ")


if __name__ == "__main__":
    main()
