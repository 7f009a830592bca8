from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from aioshm import MessageQueue, QueueClosed
from aioshm.cli.demo.ends import receive, send
from aioshm.cli.demo.script import Mismatch, Phase

LINES = [b"a\n", b"\n", b"c"]


@asynccontextmanager
async def queue_pair():
    async with MessageQueue(1, 1, max_chunk_bytes=4096) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        async with reader:
            await asyncio.gather(writer.wait_until_ready(), reader.wait_until_ready())
            yield writer, reader


async def sent(writer, messages):
    for message in messages:
        await writer.enqueue(message)
    await writer.aclose()


async def test_what_is_sent_checks_and_is_measured(monkeypatch):
    monkeypatch.setattr("aioshm.cli.demo.ends.PACE_S", 0.0004)
    script = [Phase("lines", 0, LINES, 300), Phase("paced", 300, LINES, 500, paced=True)]

    async def write(writer):
        figures = await send(writer, script)
        await writer.aclose()
        return figures

    async with queue_pair() as (writer, reader):
        written, read = await asyncio.gather(write(writer), receive(reader, script))
    for figures in (written, read):
        assert [phase.messages for phase in figures] == [300, 500]
        assert [phase.bytes for phase in figures] == [400, 667]
        assert all(phase.messages_per_s and phase.cpu_share for phase in figures)
    lines, paced = read
    assert lines.p50_us is None
    assert 0 < paced.p50_us <= paced.p99_us
    assert paced.seconds > 0.19


async def test_single_message_leaves_no_rate():
    script = [Phase("lines", 0, LINES[:1], 1)]
    async with queue_pair() as (writer, reader):
        _, (figures,) = await asyncio.gather(sent(writer, [(0, 0, b"a\n")]), receive(reader, script))
    assert (figures.messages, figures.messages_per_s, figures.cpu_share) == (1, None, None)


async def test_wrong_message_is_found():
    script = [Phase("lines", 0, LINES, 6)]
    messages = [script[0].make(index, 0) for index in range(6)]
    messages[4] = (4, 0, b"?\n")
    async with queue_pair() as (writer, reader):
        with pytest.raises(Mismatch, match=r"message 4 \(lines\) is b'\?\\n', not b'\\n'"):
            await asyncio.gather(sent(writer, messages), receive(reader, script))


async def test_message_too_many_is_found():
    script = [Phase("lines", 0, LINES, 3)]
    messages = [(0, 0, b"a\n"), (1, 0, b"\n"), (2, 0, b"c"), (3, 0, b"a\n")]
    async with queue_pair() as (writer, reader):
        with pytest.raises(Mismatch, match="message 3"):
            await asyncio.gather(sent(writer, messages), receive(reader, script))


async def test_message_too_few_is_found():
    script = [Phase("lines", 0, LINES, 3)]
    async with queue_pair() as (writer, reader):
        with pytest.raises(QueueClosed):
            await asyncio.gather(sent(writer, [(0, 0, b"a\n")]), receive(reader, script))
