"""The read loop of a socket: every message, a burst at a time, and no look more than it needs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import zmq
from support import until

from aioshm.zeromq.pump import Pump, drain, whole
from aioshm.zeromq.sockets import BURST, Socket, Sockets


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets("a test")
    yield sockets
    sockets.close()


@pytest.fixture
def pair(sockets: Sockets) -> tuple[Socket, Socket]:
    """A sender and a receiver."""
    receiver = sockets.add(sockets.context.socket(zmq.PULL))
    receiver.bind("inproc://pump")
    sender = sockets.add(sockets.context.socket(zmq.PUSH))
    sender.connect("inproc://pump")
    return sender, receiver


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_message_may_close_the_socket(pair: tuple[Socket, Socket], sockets: Sockets, count: int) -> None:
    sender, receiver = pair
    for _ in range(3):
        sender.send(b"")
    taken: list[list[bytes]] = []

    def take(frames: list[bytes]) -> None:
        taken.append(frames)
        if len(taken) == count:
            sockets.close()

    assert drain(receiver, whole(receiver), take) is False
    assert len(taken) == count


async def test_a_pump_reads_what_came_while_it_was_paused(pair: tuple[Socket, Socket]) -> None:
    sender, receiver = pair
    taken: list[list[bytes]] = []
    pump = Pump.of_messages(asyncio.get_running_loop(), receiver, taken.append, whole(receiver))
    sender.send(b"0")
    await until(lambda: len(taken) == 1, "the first message")
    pump.pause()
    for number in range(1, 3 * BURST):
        sender.send(b"%d" % number)
    pump.run()
    assert len(taken) == 1
    pump.resume()
    await until(lambda: len(taken) == 3 * BURST, "the others")
    assert taken == [[b"%d" % number] for number in range(3 * BURST)]
    pump.pause()


async def test_error_of_one_message_leaves_no_later_one_unread(pair: tuple[Socket, Socket]) -> None:
    sender, receiver = pair
    loop = asyncio.get_running_loop()
    errors: list[object] = []
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    taken: list[list[bytes]] = []

    def take(frames: list[bytes]) -> None:
        taken.append(frames)
        if len(taken) == 1:
            raise ValueError("the first message")

    for _ in range(3):
        sender.send(b"")
    assert receiver.poll(10_000)  # the descriptor is silent from here on
    pump = Pump.of_messages(loop, receiver, take, whole(receiver))
    await until(lambda: len(taken) == 3)
    pump.pause()
    assert [str(error) for error in errors] == ["the first message"]
