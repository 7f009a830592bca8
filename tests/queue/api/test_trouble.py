"""Damaged slots, wrong handles, strangers, torn messages: a typed error, and no harm to anybody else."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from pairs import attached
from receiving import Decoded, dequeue, dequeue_many, dequeue_nowait, lease, while_decoding
from slots import slot_of

from aioshm import CorruptSlot, Handle, HandleError, MessageQueue, QueueEmpty, ReaderEvicted
from aioshm.codec.frames import HEADER, pack_header


async def test_another_sequence_number_is_reported_with_both_numbers() -> None:
    async with attached() as (writer, (reader,)):
        await writer.enqueue("damaged")
        await writer.enqueue("next")
        header = list(HEADER.unpack_from(slot_of(writer, 0)))
        header[4] = 77
        pack_header(slot_of(writer, 0), 0, *header)
        with pytest.raises(CorruptSlot) as caught:
            await reader.dequeue(5)
        assert (caught.value.found, caught.value.expected) == (77, 0)
        assert await reader.dequeue(5) == "next"


async def test_an_acquired_read_of_a_damaged_slot() -> None:
    async with attached() as (writer, (reader,)):
        for kind in (200, 2):  # no kind at all, and one that says that the payload is elsewhere
            await writer.enqueue("damaged")
            slot_of(writer, writer.stats().messages - 1)[0] = kind
            with pytest.raises(CorruptSlot):
                async with reader.acquire_read(5):
                    pytest.fail("damaged bytes were handed out")
        await writer.enqueue(b"next")
        assert await reader.dequeue(5) == b"next"


# Handles


async def test_handles_travel_as_pickle_and_as_json() -> None:
    async with MessageQueue(1, 1, max_chunk_bytes=4096) as writer:
        handle = writer.export_handle()
        assert pickle.loads(pickle.dumps(handle)) == handle
        assert Handle.from_json(handle.to_json()) == handle
        assert handle.token.hex() not in repr(handle)
        assert "secrets hidden" in f"{handle}"
        async with MessageQueue.create_from_handle(handle.to_json(), 0) as reader:
            await asyncio.gather(writer.enqueue("x"), reader.wait_until_ready(5))
            assert await reader.dequeue(5) == "x"


@pytest.mark.parametrize("garbage", [None, 5, {}, "", "{", "[]", '{"type": "aioshm"}', b"\x80\x05", "null"])
def test_what_is_no_handle_is_refused(garbage: Any) -> None:
    with pytest.raises(HandleError):
        MessageQueue.create_from_handle(garbage, 0)


async def test_stale_and_foreign_handles_are_refused() -> None:
    async with MessageQueue(1, 1, max_chunk_bytes=4096) as writer:
        handle = writer.export_handle()
        for change, why in [
            ({"version": 99}, "version 99"),
            ({"host": "elsewhere"}, "another host"),
            ({"uid": os.geteuid() + 1}, "uid"),
            ({"codec": "zip"}, "codec is 'zip', known are msgpack, pickle, raw"),
            ({"lifeline": "@aioshm-nobody"}, "writer is gone"),
            ({"lifeline": "/nonexistent/path"}, "writer is gone"),
        ]:
            with pytest.raises(HandleError, match=why):
                MessageQueue.create_from_handle(msgspec.structs.replace(handle, **change), 0)
        for rank in (1, -1):
            with pytest.raises(ValueError, match="rank"):
                MessageQueue.create_from_handle(handle, rank)
    with pytest.raises(HandleError, match="writer is gone"):
        MessageQueue.create_from_handle(handle, 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"token": bytes(32)}, "token is wrong"),
        ({"queue_id": bytes(16)}, "another queue"),
        ({"max_chunk_bytes": 8192}, "bytes"),
        ({"max_chunks": 7}, "bytes|max_chunks"),
        ({"slots": 7}, "bytes|slots"),
        ({"inline_bytes": 7}, "bytes|inline_bytes"),
        ({"n_reader": 3, "local_reader_ranks": (0, 1, 2)}, "bytes|n_reader|no local reader"),
    ],
)
async def test_a_handle_that_was_tampered_with_is_refused_by_the_writer_or_the_segment(
    change: dict[str, Any], why: str
) -> None:
    async with MessageQueue(2, 2, max_chunk_bytes=4096) as writer:
        answering = asyncio.ensure_future(writer.wait_until_ready())
        handle = msgspec.structs.replace(writer.export_handle(), **change)
        async with MessageQueue.create_from_handle(handle, 1) as reader:
            with pytest.raises(HandleError, match=why):
                await reader.wait_until_ready(5)
            with pytest.raises(HandleError):
                await reader.dequeue(5)
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)


# A reader that is dismissed while it copies a message, which may be overwritten from then on


@pytest.mark.parametrize("receive", [dequeue, dequeue_nowait, dequeue_many, lease])
@pytest.mark.parametrize("broken", [False, True], ids=["decodes", "does not decode"])
async def test_torn_message_is_not_returned(receive: Callable[..., Any], broken: bool) -> None:
    for size in (0, 100_000, 300_000):  # in the chunk, in the chunk beside the message, in an overflow segment
        async with attached(2, chunk=200_000) as (writer, (doomed, other)):
            await writer.enqueue([Decoded(fails=broken), bytearray(size)], 20)
            with while_decoding(partial(writer.dismiss, 0)):
                with pytest.raises((ReaderEvicted, QueueEmpty)):
                    await receive(doomed, timeout=20)
                with pytest.raises(ReaderEvicted, match="the writer has dismissed this reader"):
                    await receive(doomed, timeout=20)
            if not broken:
                assert (await other.dequeue(20))[0] == "decoded"


async def test_messages_of_a_batch_before_a_torn_one_are_returned() -> None:
    async with attached(2) as (writer, (doomed, other)):
        await writer.enqueue_many([1, 2, Decoded(), 4])
        with while_decoding(partial(writer.dismiss, 0)):
            assert await doomed.dequeue_many(8, 20) == [1, 2]
            with pytest.raises(ReaderEvicted):
                await doomed.dequeue_many(8, 20)
        assert [await other.dequeue(20) for _ in range(4)] == [1, 2, "decoded", 4]
