"""Timers with a descriptor: when they ring, what they refuse."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterator
from time import monotonic_ns

import pytest

from aioshm.wait.timer import HAVE_TIMERFD, timerfd_create, timerfd_settime

MS = 1_000_000


@pytest.mark.skipif(not HAVE_TIMERFD, reason="only Linux has them")
class TestTimers:
    @pytest.fixture
    def timer(self) -> Iterator[int]:
        fd = timerfd_create()
        yield fd
        os.close(fd)

    def rings(self, fd: int, within_s: float = 30) -> bool:
        return bool(select.select([fd], [], [], within_s)[0])

    def test_at_a_moment(self, timer: int) -> None:
        assert not self.rings(timer, 0)
        at_ns = monotonic_ns() + 20 * MS
        assert timerfd_settime(timer, at_ns) is None
        assert self.rings(timer)
        assert monotonic_ns() >= at_ns
        assert os.read(timer, 8) == (1).to_bytes(8, "little")
        with pytest.raises(BlockingIOError):
            os.read(timer, 8)

    @pytest.mark.parametrize("at_ns", [1, -1, -(1 << 60), 10**9])
    def test_long_ago_rings_at_once(self, timer: int, at_ns: int) -> None:
        timerfd_settime(timer, at_ns)
        assert self.rings(timer)

    def test_disarmed(self, timer: int) -> None:
        timerfd_settime(timer, 1)
        assert self.rings(timer)
        timerfd_settime(timer, 0)
        assert not self.rings(timer, 0)

    def test_is_not_inherited(self, timer: int) -> None:
        assert not os.get_inheritable(timer)

    def test_no_descriptor(self, timer: int) -> None:
        for fd in (-1, 1 << 30):
            with pytest.raises(OSError, match=os.strerror(errno.EBADF)) as caught:
                timerfd_settime(fd, 1)
            assert caught.value.errno == errno.EBADF
        other, end = os.pipe()
        with pytest.raises(OSError, match=os.strerror(errno.EINVAL)) as caught:
            timerfd_settime(other, 1)
        assert caught.value.errno == errno.EINVAL
        os.close(other)
        os.close(end)
        with pytest.raises(OverflowError):
            timerfd_settime((1 << 32) + timer, 1)

    def test_garbage(self, timer: int) -> None:
        for arguments in (("1", 1), (None, 1), (timer, "1"), (timer, None), (timer,), (), (timer, 1, 1)):
            with pytest.raises(TypeError):
                timerfd_settime(*arguments)
        assert not self.rings(timer, 0)
