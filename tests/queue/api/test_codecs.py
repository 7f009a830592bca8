"""Codecs over a real queue: by name, as instances, third-party ones, here and in other processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from pairs import attached

from aioshm import CodecError, HandleError, MessageQueue
from aioshm.codec import MsgpackCodec, register_codec, registry
from aioshm.errors import RoleError


class Reversed:
    """A codec of somebody else's: bytes, backwards."""

    name = "reversed"
    code = 77

    def encode(self, obj: Any) -> bytes:
        if not isinstance(obj, bytes):
            raise CodecError(f"not bytes but {type(obj).__name__}")
        return obj[::-1]

    def decode(self, main: Any, buffers: Any) -> bytes:
        return bytes(main)[::-1]


@pytest.fixture
def reversed_codec() -> Iterator[None]:
    register_codec("reversed", Reversed)
    yield
    del registry._factories["reversed"], registry._codes["reversed"]


async def test_wrong_codecs_at_the_reader() -> None:
    async with MessageQueue(1, 1, max_chunk_bytes=4096, codec="msgpack") as writer:
        for codec in ("pickle", "raw"):
            with pytest.raises(ValueError, match=f"codec must be 'msgpack', as the handle says, not '{codec}'"):
                MessageQueue.create_from_handle(writer.export_handle(), 0, codec=codec)
        with pytest.raises(TypeError, match="class MsgpackCodec, not an instance"):
            MessageQueue.create_from_handle(writer.export_handle(), 0, codec=MsgpackCodec)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="known are"):
            MessageQueue.create_from_handle(writer.export_handle(), 0, codec="zip")
    with pytest.raises(RoleError):
        await writer.dequeue()


async def test_a_codec_that_nobody_registered_here() -> None:
    async with MessageQueue(1, 1, max_chunk_bytes=4096, codec=Reversed()) as writer:
        with pytest.raises(HandleError, match="must be registered with register_codec in every process"):
            MessageQueue.create_from_handle(writer.export_handle(), 0)
        async with MessageQueue.create_from_handle(writer.export_handle(), 0, codec=Reversed()) as reader:
            _, got = await asyncio.gather(writer.enqueue(b"abc"), reader.dequeue(10))
            assert got == b"abc"


async def test_a_registered_codec(reversed_codec: None) -> None:
    async with attached(2, codec="reversed", chunks=8) as (writer, readers):
        sent = [b"", b"one", b"L" * 9000 + b"!", b"x" * 4000]
        await writer.enqueue_many(sent)
        with pytest.raises(CodecError, match="not bytes but int"):
            await writer.enqueue(5)
        first, second = readers
        received: list[Any] = []
        while len(received) < 4:
            received += await first.dequeue_many(9, 5)
        assert received == sent
        for obj in sent:
            async with second.lease(5) as got:
                assert got == obj
