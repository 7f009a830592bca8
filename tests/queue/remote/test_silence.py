"""Silent writers in processes of their own, idle, hung or stopped, and the reports of their readers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from children import Child, child
from faces import Thread
from merging import queues
from support import HELPERS, until

from aioshm import MessageQueue, Options, blocking, merge

pytestmark = pytest.mark.slow_on_uvloop

SCRIPT = HELPERS / "silent_child.py"
STALL_S = 0.4

HUNG = "its event loop has not answered for"
AWAY = "whether the program that uses the queue hangs is not known here"
IDLE = "answers: its event loop runs, and there is nothing to read"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "aioshm.queue")
    return caplog


async def test_reader_that_is_made_and_never_awaited_is_named_while_the_writer_waits(
    log: pytest.LogCaptureFixture,
) -> None:
    async with MessageQueue(1, options=Options(stall_warning_s=0.1)) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        with pytest.raises(TimeoutError, match="not attached yet: rank 0"):
            await writer.enqueue("waits", 0.25)
        assert "for readers to attach: rank 0 (a reader attaches by its first call" in log.records[0].getMessage()
        await reader.aclose()


@asynccontextmanager
async def silent(face: str, how: str, n_local: int = 1, n_remote: int = 0) -> AsyncIterator[tuple[Child, str]]:
    """Give a writer that is about to fall silent to the block, and its handle."""
    async with child(face, how, str(n_local), str(n_remote), str(STALL_S), script=SCRIPT) as writer:
        yield writer, await writer.says("{")


async def reports(reader: MessageQueue, log: pytest.LogCaptureFixture, number: int = 2) -> list[tuple[int, str]]:
    """Wait for a message that does not come until so many reports were made; return these."""
    waiting = asyncio.ensure_future(reader.dequeue())
    await until(lambda: len(log.records) >= number or waiting.done(), "the reports", 15)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        pytest.fail(f"there was a message: {await waiting}")
    return [(record.levelno, record.getMessage()) for record in log.records]


@pytest.mark.parametrize("n_remote", [0, 1], ids=["local", "remote"])
@pytest.mark.parametrize(
    ("face", "how", "level", "finding"),
    [
        ("uvloop", "awaits", logging.INFO, IDLE),
        ("asyncio", "sleeps", logging.WARNING, HUNG),
        ("blocking", "sleeps", logging.WARNING, AWAY),
    ],
    ids=lambda value: str(value)[:10],
)
async def test_a_silent_writer_is_reported(
    face: str, how: str, level: int, finding: str, n_remote: int, log: pytest.LogCaptureFixture
) -> None:
    async with silent(face, how, 1 - n_remote, n_remote) as (writer, handle):
        async with MessageQueue.create_from_handle(handle, 0) as reader:
            assert await reader.dequeue(20) == "first"
            await writer.says("silent")
            for reported, text in await reports(reader, log):
                assert reported == level
                assert finding in text
                if n_remote:
                    assert f"the writer (pid {writer.pid} on " in text
                    assert "last heard of" in text
                else:
                    assert f"the writer (pid {writer.pid}) is sleeping" in text
                    assert "rank 0: waited" in text
                    assert "for message 1" in text


@pytest.mark.slow
async def test_an_asyncio_writer_that_goes_on_is_believed(log: pytest.LogCaptureFixture) -> None:
    async with silent("asyncio", "pauses") as (writer, handle):
        async with MessageQueue.create_from_handle(handle, 0) as reader:
            assert await reader.dequeue(20) == "first"
            await writer.says("silent")
            assert await reader.dequeue(20) == "last"
            assert log.records
            assert all(HUNG in record.getMessage() for record in log.records)
            log.clear()
            for level, text in await reports(reader, log):
                assert (level, IDLE in text) == (logging.INFO, True)


async def test_a_writer_that_waits_for_another_reader_names_that_one(log: pytest.LogCaptureFixture) -> None:
    async with silent("asyncio", "is full", 2) as (writer, handle):
        async with (
            MessageQueue.create_from_handle(handle, 0) as reader,
            MessageQueue.create_from_handle(handle, 1) as laggard,
        ):
            await asyncio.gather(reader.wait_until_ready(20), laggard.wait_until_ready(20))
            for expected in ["first", 0, 1, 2]:
                assert await reader.dequeue(20) == expected
            for level, text in await reports(reader, log):
                assert level == logging.WARNING
                assert f"the writer (pid {writer.pid})" in text
                assert "because the writer waits for rank 1 (pid " in text


async def test_a_blocking_reader_reports_too(log: pytest.LogCaptureFixture) -> None:
    async with silent("asyncio", "sleeps") as (writer, handle):

        def read() -> None:
            with blocking.MessageQueue.create_from_handle(handle, 0) as reader:
                assert reader.dequeue(20) == "first"
                while len(log.records) < 2:
                    with pytest.raises(TimeoutError):
                        reader.dequeue(1)

        await asyncio.to_thread(lambda: Thread(read).result(60))
        for record in log.records:
            assert record.levelno == logging.WARNING
            assert f"the writer (pid {writer.pid})" in record.getMessage()
            assert HUNG in record.getMessage()


async def test_a_merged_queue_that_is_silent_is_reported_amid_the_messages_of_others(
    log: pytest.LogCaptureFixture,
) -> None:
    async with queues(2, stall_warning_s=STALL_S) as (writers, readers), silent("asyncio", "sleeps") as (hung, handle):
        async with MessageQueue.create_from_handle(handle, 0) as reader:
            assert await reader.dequeue(20) == "first"
            await hung.says("silent")
            merged = merge({**readers, 7: reader})

            async def read() -> None:
                async for rank, _ in merged:
                    assert rank == 0

            async def write() -> None:
                while True:
                    await writers[0].enqueue("flood")
                    await asyncio.sleep(0)

            tasks = [asyncio.ensure_future(read()), asyncio.ensure_future(write())]

            def texts(level: int) -> list[str]:
                return [record.getMessage() for record in log.records if record.levelno == level]

            await until(lambda: min(len(texts(logging.WARNING)), len(texts(logging.INFO))) >= 2, "the reports", 15)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            blamed = texts(logging.WARNING)
            assert all(f"the writer (pid {hung.pid}) is sleeping, but {HUNG}" in text for text in blamed)
            for text in texts(logging.INFO):
                assert IDLE in text
                assert repr(readers[1]) in text
                assert repr(readers[0]) not in text


@pytest.mark.parametrize("n_remote", [0, 1], ids=["local", "remote"])
async def test_a_writer_that_admits_nobody_is_named(n_remote: int, log: pytest.LogCaptureFixture) -> None:
    async with silent("asyncio", "never runs", 1 - n_remote, n_remote) as (writer, handle):
        async with MessageQueue.create_from_handle(handle, 0) as reader:
            for level, text in await reports(reader, log):
                assert level == logging.WARNING
                assert "does not answer: does its event loop run, in wait_until_ready()?" in text
                assert n_remote or f"(it has pid {writer.pid} and is sleeping)" in text
