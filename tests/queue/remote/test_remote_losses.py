"""Messages whose way to a remote reader is slow, or never ends: they arrive in the end, or are named."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from proxy import Proxy, proxied
from remotes import wide_writer
from support import until

from aioshm import MessageQueue, MessagesLost, QueueClosed

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
