"""Timers with a descriptor."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterator
from time import monotonic_ns

import pytest

from aioshm.wait.timer import HAVE_TIMERFD, timerfd_create, timerfd_settime

pytestmark = pytest.mark.skipif(not HAVE_TIMERFD, reason="only Linux has them")

MS = 1_000_000


@pytest.fixture
def timerfd() -> Iterator[int]:
    fd = timerfd_create()
    yield fd
    os.close(fd)


def expires(fd: int, within_s: float = 30) -> bool:
    return bool(select.select([fd], [], [], within_s)[0])


@pytest.mark.parametrize("later_ns", [20 * MS, 0, -(10**9), -(1 << 60)])
def test_timerfd_expires_at_a_time_and_can_be_disarmed(timerfd: int, later_ns: int) -> None:
    assert not os.get_inheritable(timerfd)
    assert not expires(timerfd, 0)
    at_ns = monotonic_ns() + later_ns
    timerfd_settime(timerfd, at_ns)
    assert expires(timerfd)
    assert monotonic_ns() >= at_ns
    assert os.read(timerfd, 8) == (1).to_bytes(8, "little")
    with pytest.raises(BlockingIOError):
        os.read(timerfd, 8)
    timerfd_settime(timerfd, 1)
    timerfd_settime(timerfd, 0)
    assert not expires(timerfd, 0)


def test_timerfd_refuses_other_descriptors(timerfd: int) -> None:
    other, end = os.pipe()
    for fd, number in ((-1, errno.EBADF), (1 << 30, errno.EBADF), (other, errno.EINVAL)):
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            timerfd_settime(fd, 1)
        assert caught.value.errno == number
    os.close(other)
    os.close(end)
    with pytest.raises(OverflowError):
        timerfd_settime((1 << 32) + timerfd, 1)
