from __future__ import annotations

import asyncio
import os
import select

import pytest
from support import until

from aioshm.lifeline.bell import HAVE_EVENTFD, Bell

pytestmark = pytest.mark.skipif(not HAVE_EVENTFD, reason="there is no eventfd here")


def readable(bell: Bell) -> bool:
    return bool(select.select([bell.fd], [], [], 0)[0])


def test_rings_do_not_pile_up() -> None:
    bell = Bell.create()
    assert not readable(bell)
    for _ in range(1000):
        bell.ring()
    assert readable(bell)
    bell.drain()
    assert not readable(bell)
    bell.drain()
    bell.ring()
    assert readable(bell)
    bell.close()


def test_it_rings_wherever_its_descriptor_is_held() -> None:
    bell = Bell.create()
    other = Bell(os.dup(bell.fd))
    other.ring()
    assert readable(bell)
    bell.drain()
    assert not readable(other)
    other.close()
    bell.close()


def test_a_full_one_does_not_block() -> None:
    bell = Bell.create()
    os.eventfd_write(bell.fd, 2**64 - 2)  # the most it holds (eventfd(2))
    bell.ring()
    bell.drain()
    assert not readable(bell)
    bell.close()


def test_closing() -> None:
    bell = Bell.create()
    fd = bell.fd
    assert not os.get_inheritable(fd)
    assert not os.get_blocking(fd)
    bell.close()
    bell.close()
    bell.ring()
    assert bell.fd == -1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


async def test_it_wakes_a_loop() -> None:
    bell = Bell.create()
    loop = asyncio.get_running_loop()
    heard = []

    def rung() -> None:
        bell.drain()
        heard.append(True)

    loop.add_reader(bell.fd, rung)
    for number in range(1, 4):
        bell.ring()
        bell.ring()
        await until(lambda expected=number: len(heard) == expected, "the bell")
    loop.remove_reader(bell.fd)
    bell.close()
    assert len(heard) == 3
