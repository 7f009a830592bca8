"""A reader that is dismissed while it copies a message, which may be overwritten from then on, never returns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pairs import attached

from aioshm import MessageQueue, QueueEmpty
from aioshm.errors import ReaderEvicted

amid: list[Callable[[], Any]] = []
"""What happens while a message is decoded."""


class Torn(Exception):
    """What decoding a torn message may raise."""


def decoded(broken: bool) -> str:
    for call in amid:
        call()
    if broken:
        raise Torn
    return "a torn message"


class Message:
    """Runs that where it is decoded."""

    def __init__(self, broken: bool) -> None:
        self.broken = broken

    def __reduce__(self) -> tuple[Callable[[bool], str], tuple[bool]]:
        return decoded, (self.broken,)


@pytest.fixture(autouse=True)
def nothing_amid() -> Any:
    yield
    amid.clear()


async def awaited(reader: MessageQueue) -> Any:
    return await reader.dequeue(20)


async def at_once(reader: MessageQueue) -> Any:
    return reader.dequeue_nowait()


async def in_a_batch(reader: MessageQueue) -> Any:
    return await reader.dequeue_many(8, 20)


async def leased(reader: MessageQueue) -> Any:
    async with reader.lease(20) as message:
        return message


@pytest.mark.parametrize("receive", [awaited, at_once, in_a_batch, leased])
@pytest.mark.parametrize("broken", [False, True], ids=["decodes", "does not decode"])
async def test_no_torn_message(receive: Callable[..., Any], broken: bool) -> None:
    for size in (0, 100_000, 300_000):  # in the chunk, in the chunk beside the message, in an overflow segment
        async with attached(2, chunk=200_000) as (writer, (doomed, other)):
            amid.append(lambda writer=writer: writer.dismiss(0))
            await writer.enqueue([Message(broken), bytearray(size)], 20)
            with pytest.raises((ReaderEvicted, QueueEmpty)):
                await receive(doomed)
            with pytest.raises(ReaderEvicted, match="the writer has dismissed this reader"):
                await receive(doomed)
            amid.clear()
            if not broken:
                assert (await other.dequeue(20))[0] == "a torn message"


async def test_what_a_batch_has_already_is_returned() -> None:
    async with attached(2) as (writer, (doomed, other)):
        amid.append(lambda: writer.dismiss(0))
        await writer.enqueue_many([1, 2, Message(False), 4])
        assert await doomed.dequeue_many(8, 20) == [1, 2]
        with pytest.raises(ReaderEvicted):
            await doomed.dequeue_many(8, 20)
        amid.clear()
        assert [await other.dequeue(20) for _ in range(4)] == [1, 2, "a torn message", 4]
