"""Queues of one type of messages: what arrives is of it where the codec can tell."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import typed_ends
from faces import Thread
from members import each, meet
from typed_ends import Other, Step

from aioshm import CodecError, MessageQueue, MsgpackCodec, blocking
from aioshm.codec import PickleCodec


@asynccontextmanager
async def pair(name: str, **reading: Any) -> AsyncIterator[tuple[MessageQueue, MessageQueue]]:
    """Give a writer and its reader to the block, ready; the arguments are the reader's."""
    async with MessageQueue(1, 1, max_chunk_bytes=4096, codec=name) as writer:
        async with MessageQueue.create_from_handle(writer.export_handle(), 0, **reading) as reader:
            await asyncio.gather(writer.wait_until_ready(10), reader.wait_until_ready(10))
            yield writer, reader


async def test_ends_of_each_type() -> None:
    await typed_ends.writers()
    await asyncio.to_thread(typed_ends.blocking_writers)
    async with MessageQueue(1, 1, max_chunk_bytes=4096, codec="msgpack") as writer:
        for reader in typed_ends.readers(writer.export_handle()):
            await reader.aclose()


async def test_every_way_to_receive_gives_the_type() -> None:
    async with pair("msgpack", type=Step) as (writer, reader):
        await writer.enqueue_many(map(Step, range(4)))
        receiving = asyncio.create_task(typed_ends.receive(reader))
        await writer.enqueue_many(map(Step, range(4, 8)), 10)
        assert await receiving == list(map(Step, range(8)))


def test_every_way_to_receive_gives_the_type_to_threads() -> None:
    with blocking.MessageQueue(1, codec="msgpack", type=Step) as writer:
        with blocking.MessageQueue.create_from_handle(writer.export_handle(), 0, type=Step) as reader:
            sending = Thread(writer.enqueue_many, map(Step, range(7)), 20)
            reader.wait_until_ready(10)
            sending.result()
            assert typed_ends.receive_blocking(reader) == list(map(Step, range(7)))


def test_every_rank_of_a_group_gets_the_type() -> None:
    assert each(meet(2), lambda member: asyncio.run(typed_ends.in_group(member))) == [2, 1]


async def test_what_is_of_another_type_is_refused_and_the_next_one_comes() -> None:
    async with pair("msgpack", type=Step) as (writer, reader):
        await writer.enqueue(Other("no step"))
        await writer.enqueue({"number": 3})
        with pytest.raises(CodecError, match="number"):
            await reader.dequeue(5)
        assert await reader.dequeue(5) == Step(3)


async def test_a_codec_of_no_type_takes_the_queues_with_its_hooks() -> None:
    class Celsius:
        def __init__(self, degrees: float) -> None:
            self.degrees = degrees

    codec = MsgpackCodec(dec_hook=lambda kind, plain: kind(plain))
    async with pair("msgpack", codec=codec, type=Celsius) as (writer, reader):
        await writer.enqueue(36.6)
        received = await reader.dequeue(5)
        assert (type(received), received.degrees) == (Celsius, 36.6)


class Checking(PickleCodec):
    """A codec of one's own that knows types."""

    def __init__(self, kind: Any = object) -> None:
        super().__init__()
        self.kind = kind

    def of_type(self, kind: Any) -> Checking:
        return Checking(kind)

    @property
    def loads(self) -> Any:
        def loads(data: bytes) -> Any:
            obj = PickleCodec.loads(data)
            if not isinstance(obj, self.kind):
                raise TypeError(f"{obj!r} is no {self.kind.__name__}")
            return obj

        return loads


async def test_codecs_of_ones_own_are_told_the_type() -> None:
    async with pair("pickle", codec=Checking(), type=int) as (writer, reader):
        await writer.enqueue("1")
        await writer.enqueue(1)
        with pytest.raises(CodecError, match="'1' is no int"):
            await reader.dequeue(5)
        assert await reader.dequeue(5) == 1


REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    ("pickle", 5, TypeError, "type must be the type of the messages or None, not 5"),
    ("pickle", "Step", TypeError, "type must be the type of the messages or None, not 'Step'"),
    ("msgpack", Step(1), TypeError, "type must be the type of the messages or None, not Step"),
    ("msgpack", list[5], TypeError, r"type is list\[5\], which the codec 'msgpack' cannot decode"),
    ("raw", Step, ValueError, "type must be bytes with the codec 'raw', not <class 'typed_ends.Step'>"),
    (MsgpackCodec(type=Other), Step, ValueError, "type is .*Step.*, and the codec's is .*Other.*: give one of the two"),
]


@pytest.mark.parametrize(("codec", "kind", "error", "text"), REFUSED)
async def test_what_is_no_type_or_cannot_be_decoded_is_refused(
    codec: Any, kind: Any, error: type[Exception], text: str
) -> None:
    for face in (MessageQueue, blocking.MessageQueue):
        with pytest.raises(error, match=text):
            face(1, 1, codec=codec, type=kind)
    async with MessageQueue(1, 1, max_chunk_bytes=4096, codec=codec) as writer:
        own = None if isinstance(codec, str) else codec
        with pytest.raises(error, match=text):
            MessageQueue.create_from_handle(writer.export_handle(), 0, codec=own, type=kind)


async def test_what_type_checkers_take_for_a_type_is_one() -> None:
    kinds: list[Any] = [Step, list[Step], Step | None, Any, msgspec.UNSET.__class__, object]
    for kind in kinds:
        async with MessageQueue(0, 0, type=kind):
            pass
