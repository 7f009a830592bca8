"""Descriptors that a writer passes to its readers, again and again."""

from __future__ import annotations

import errno
import os
import socket

import pytest
from doors import Reader, opened
from support import raising, until

MANY = 600
"""More than a socket's buffer takes."""


def numbered(amount: int) -> list[int]:
    fds = []
    for number in range(amount):
        fd = os.memfd_create("numbered")
        os.write(fd, b"%d" % number)
        fds.append(fd)
    return fds


def told_apart(fds: list[int | None]) -> list[int]:
    numbers = []
    for fd in fds:
        assert fd is not None
        numbers.append(int(os.pread(fd, 20, 0)))
        os.close(fd)
    return numbers


async def test_come_in_order_although_the_reader_does_not_look_for_long(any_address: str) -> None:
    async with opened(any_address) as door:
        reader = await Reader.admitted(any_address)
        fds = numbered(20)
        for number in range(MANY):
            door.peers[0].hand_over(fds[number % 20])
        assert door.peers[0]._outbox, "the socket took all of them: this test means nothing"
        await until(lambda: len(reader.passed) == MANY, "every descriptor")
        assert told_apart(reader.passed) == [number % 20 for number in range(MANY)]
        for fd in fds:
            os.close(fd)
        reader.lifeline.close()
        await until(lambda: door.log[-1] == ("left", 0), "the goodbye")


@pytest.mark.parametrize("code", [errno.ETOOMANYREFS, errno.ENOMEM, errno.ENOBUFS])
async def test_that_the_system_does_not_take_now_are_passed_later(
    address: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(address) as door:
        reader = await Reader.admitted(address)
        fds = numbered(3)
        with monkeypatch.context() as patch:
            patch.setattr(socket, "send_fds", raising(OSError(code, os.strerror(code))))
            for fd in fds:
                door.peers[0].hand_over(fd)
        await until(lambda: len(reader.passed) == 3, "all descriptors")
        assert told_apart(reader.passed) == [0, 1, 2]
        for fd in fds:
            os.close(fd)
        reader.lifeline.close()
