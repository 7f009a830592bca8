"""The inbox of a socket: every message in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq
from support import until

from aioshm.zeromq.pump import Inbox
from aioshm.zeromq.sockets import BURST, Socket, Sockets


@pytest.fixture
def pair() -> Iterator[tuple[Socket, Socket]]:
    """A sender and a receiver."""
    sockets = Sockets("a test")
    receiver = sockets.add(sockets.context.socket(zmq.PULL))
    receiver.bind("inproc://inbox")
    sender = sockets.add(sockets.context.socket(zmq.PUSH))
    sender.connect("inproc://inbox")
    yield sender, receiver
    sockets.close()


class Received:
    """What an inbox hands out."""

    def __init__(self, receiver: Socket) -> None:
        self.messages: list[tuple[bytes, bytes | None]] = []
        self.inbox = Inbox(receiver, self._add)

    def _add(self, head: memoryview, body: memoryview | None) -> None:
        self.messages.append((bytes(head), None if body is None else bytes(body)))


async def test_burst_is_handed_out_whole_and_a_later_message_too(pair: tuple[Socket, Socket]) -> None:
    sender, receiver = pair
    received = Received(receiver)
    count = 4 * BURST + 3
    for number in range(count):
        sender.send_multipart([b"%d" % number, b"body"][: 1 + number % 2])
    await until(lambda: len(received.messages) == count, "all messages")
    assert received.messages == [(b"%d" % number, b"body" if number % 2 else None) for number in range(count)]
    sender.send(b"and one more")
    await until(lambda: len(received.messages) == count + 1, "a message after a pause")
    received.inbox.close()


async def test_messages_are_handed_out_in_order_whether_awaited_or_looked_for(pair: tuple[Socket, Socket]) -> None:
    sender, receiver = pair
    received = Received(receiver)
    for number in range(300):
        sender.send(b"%d" % number)
        if number % 7 == 0:
            received.inbox.look()
        if number % 50 == 0:
            await until(lambda n=number: len(received.messages) == n + 1, "what was sent")
    await until(lambda: len(received.messages) == 300, "all messages")
    assert [int(head) for head, _ in received.messages] == list(range(300))
    received.inbox.close()


@pytest.mark.parametrize("looked_for", [True, False])
async def test_a_message_of_too_many_frames_is_handed_out_empty(pair: tuple[Socket, Socket], looked_for: bool) -> None:
    sender, receiver = pair
    received = Received(receiver)
    sender.send_multipart([b"1", b"2", b"3"])
    sender.send_multipart([b"1", b"2"])
    if looked_for:
        received.inbox.look()
    await until(lambda: len(received.messages) == 2, "both")
    assert received.messages == [(b"", None), (b"1", b"2")]
    received.inbox.close()


async def test_nothing_is_handed_out_after_closing(pair: tuple[Socket, Socket]) -> None:
    sender, receiver = pair
    received = Received(receiver)
    sender.send(b"1")
    received.inbox.close()
    received.inbox.close()
    assert received.inbox.look() is False
    assert received.messages == []
