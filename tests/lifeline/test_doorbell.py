from __future__ import annotations

import asyncio
import os
import select

import pytest

from aioshm.lifeline.sockets import HAVE_EVENTFD, Doorbell

pytestmark = pytest.mark.skipif(not HAVE_EVENTFD, reason="there is no eventfd here")


def readable(doorbell: Doorbell) -> bool:
    return bool(select.select([doorbell.fd], [], [], 0)[0])


def test_a_full_one_does_not_block() -> None:
    doorbell = Doorbell.create()
    os.eventfd_write(doorbell.fd, 2**64 - 2)  # the most it holds (eventfd(2))
    doorbell.ring()
    doorbell.drain()
    assert not readable(doorbell)
    doorbell.close()


async def test_watching_a_closed_one_does_nothing() -> None:
    loop = asyncio.get_running_loop()
    doorbell = Doorbell.create()
    doorbell.close()
    doorbell.watch(loop, lambda: None)
    doorbell.unwatch(loop)


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
