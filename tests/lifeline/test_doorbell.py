from __future__ import annotations

import asyncio
import os
import select

import pytest
from support import until

from aioshm.lifeline.doorbell import HAVE_EVENTFD, Doorbell

pytestmark = pytest.mark.skipif(not HAVE_EVENTFD, reason="there is no eventfd here")


def readable(doorbell: Doorbell) -> bool:
    return bool(select.select([doorbell.fd], [], [], 0)[0])


def test_rings_do_not_pile_up() -> None:
    doorbell = Doorbell.create()
    assert not readable(doorbell)
    for _ in range(1000):
        doorbell.ring()
    assert readable(doorbell)
    doorbell.drain()
    assert not readable(doorbell)
    doorbell.drain()
    doorbell.ring()
    assert readable(doorbell)
    doorbell.close()


def test_it_rings_wherever_its_descriptor_is_held() -> None:
    doorbell = Doorbell.create()
    other = Doorbell(os.dup(doorbell.fd))
    other.ring()
    assert readable(doorbell)
    doorbell.drain()
    assert not readable(other)
    other.close()
    doorbell.close()


def test_a_full_one_does_not_block() -> None:
    doorbell = Doorbell.create()
    os.eventfd_write(doorbell.fd, 2**64 - 2)  # the most it holds (eventfd(2))
    doorbell.ring()
    doorbell.drain()
    assert not readable(doorbell)
    doorbell.close()


def test_closing() -> None:
    doorbell = Doorbell.create()
    fd = doorbell.fd
    assert not os.get_inheritable(fd)
    assert not os.get_blocking(fd)
    doorbell.close()
    doorbell.close()
    doorbell.ring()
    assert doorbell.fd == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


async def test_it_wakes_a_loop() -> None:
    doorbell = Doorbell.create()
    loop = asyncio.get_running_loop()
    heard = []

    doorbell.watch(loop, lambda: heard.append(True))
    for number in range(1, 4):
        doorbell.ring()
        doorbell.ring()
        await until(lambda expected=number: len(heard) == expected, "the doorbell")
    doorbell.unwatch(loop)
    doorbell.close()
    doorbell.unwatch(loop)
    assert len(heard) == 3
