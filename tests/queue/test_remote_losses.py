"""Messages whose way to a remote reader is slow, or never ends: they arrive in the end, or are named."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from faces import Thread
from proxy import Proxy, proxied
from remotes import wide_writer
from support import until

from aioshm import MessageQueue, MessagesLost, QueueClosed, blocking

TIMEOUT_S = 0.5

Ends = tuple[MessageQueue, MessageQueue, Proxy, Proxy]


@asynccontextmanager
async def ends_apart() -> AsyncIterator[Ends]:
    """Give a writer, its only reader, and the proxies between them, for data and for control, to the block."""
    async with wide_writer(0, 1, remote_timeout=TIMEOUT_S, stall_warning_s=0.2) as writer:
        async with proxied(writer.export_handle()) as (handle, data, control):
            async with MessageQueue.create_from_handle(handle, 0) as reader:
                await asyncio.gather(writer.wait_until_ready(10), reader.wait_until_ready(10))
                yield writer, reader, data, control


@pytest.mark.slow_on_uvloop
async def test_a_writer_that_closes_waits_for_a_slow_network(caplog: pytest.LogCaptureFixture) -> None:
    async with ends_apart() as (writer, reader, data, _):
        data.stall()
        await writer.enqueue_many(range(10))
        closing = asyncio.ensure_future(writer.aclose())
        await asyncio.sleep(2.5 * TIMEOUT_S)
        assert not closing.done()
        assert "rank 0 (pid " in caplog.text
        assert "answers, but has not received everything" in caplog.text
        data.resume()
        assert [number async for number in reader] == list(range(10))
        await asyncio.wait_for(closing, 10)
    assert " died" not in caplog.text


@pytest.mark.slow_on_uvloop
async def test_what_a_closed_writer_cannot_deliver_is_named() -> None:
    async with ends_apart() as (writer, reader, data, control):
        await writer.enqueue_many(range(5))
        data.stall()  # what has arrived in the proxy already may or may not pass
        await writer.enqueue_many(range(5, 10))
        closing = asyncio.ensure_future(writer.aclose())
        await until(lambda: reader.end.source.link.window.end == 10)  # type: ignore[attr-defined]
        for proxy in (data, control):
            proxy.refusing = True
            proxy.cut()
        received = []
        with pytest.raises(MessagesLost) as caught:
            async for number in reader:
                received.append(number)
        assert received == list(range(caught.value.first))
        assert (caught.value.first in range(11), caught.value.last) == (True, 9)
        with pytest.raises(QueueClosed, match="the writer has closed the queue"):
            await reader.dequeue(10)
        await asyncio.wait_for(closing, 10)


async def test_what_the_writer_has_no_more_is_named_once_and_the_rest_arrives() -> None:
    async with ends_apart() as (writer, reader, data, _):
        await writer.enqueue("first")
        assert await reader.dequeue(10) == "first"
        data.stall()
        await writer.enqueue_many(range(10))
        writer.end.network.flow.window.acknowledged(0, 11)  # type: ignore[attr-defined]
        data.cut()
        data.resume()
        with pytest.raises(MessagesLost) as caught:
            await reader.dequeue(10)
        assert (caught.value.first, caught.value.last) == (1, 10)
        await writer.enqueue("last")
        assert await reader.dequeue(10) == "last"
        await writer.aclose()
        assert [message async for message in reader] == []


async def test_a_blocking_reader_is_told_the_same() -> None:
    async with wide_writer(0, 1) as writer, proxied(writer.export_handle()) as (handle, data, _):
        started, go = threading.Event(), threading.Event()

        def read() -> None:
            with blocking.MessageQueue.create_from_handle(handle, 0) as reader:
                assert reader.dequeue(10) == "first"
                started.set()
                assert go.wait(10)
                with pytest.raises(MessagesLost, match="1 to 10"):
                    reader.dequeue(10)
                assert reader.dequeue(10) == "last"

        thread = Thread(read)
        await writer.wait_until_ready(10)
        await writer.enqueue("first")
        await until(started.is_set, "the first one's arrival")
        data.stall()
        await writer.enqueue_many(range(10))
        writer.end.network.flow.window.acknowledged(0, 11)  # type: ignore[attr-defined]
        data.cut()
        data.resume()
        await writer.enqueue("last")
        go.set()
        await until(lambda: not thread.running, "the reader's end")
        thread.result()


async def test_losing_the_end_of_a_closed_queue_ends_it() -> None:
    async with ends_apart() as (writer, reader, data, _):
        data.stall()
        await writer.enqueue_many(range(10))
        closing = asyncio.ensure_future(writer.aclose())
        await until(lambda: reader.end.source.link.window.end == 10)  # type: ignore[attr-defined]
        writer.end.network.flow.window.acknowledged(0, 10)  # type: ignore[attr-defined]
        data.cut()
        data.resume()
        with pytest.raises(MessagesLost, match="0"):
            await reader.dequeue(10)
        with pytest.raises(QueueClosed):
            await reader.dequeue(10)
        await asyncio.wait_for(closing, 10)


@pytest.mark.slow_on_uvloop
async def test_a_data_port_that_lets_nothing_through_is_no_readiness() -> None:
    async with wide_writer(0, 1) as writer, proxied(writer.export_handle()) as (handle, data, _):
        data.stall()
        async with MessageQueue.create_from_handle(handle, 0) as reader:
            attaching = asyncio.ensure_future(reader.wait_until_ready(10))
            with pytest.raises(TimeoutError, match=r"not attached yet: rank 0$"):
                await writer.wait_until_ready(0.5)
            with pytest.raises(TimeoutError, match=r"nothing comes from tcp://.*: is the port open"):
                await reader.wait_until_ready(0.1)
            data.resume()
            await asyncio.gather(attaching, writer.wait_until_ready(10))
