"""Lent windows: what is filled through one is in the segment, and nothing that is kept reaches it afterwards."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from aioshm.errors import SharedMemoryError
from aioshm.ring import mapping
from aioshm.ring import window as windows
from aioshm.ring.window import LoanWindow

START, ROOM = 4096 + 640, 100_000
LARGE = 5 << 20
"""More than one table of pages maps."""


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("lent")
    os.ftruncate(fd, START + LARGE + 5000)
    yield fd
    os.close(fd)


@pytest.fixture
def window(fd: int) -> LoanWindow:
    return LoanWindow(fd, START, ROOM)


def _array(window: LoanWindow, at: int = 64, size: int = 1000) -> Any:
    return np.ndarray(size, np.uint8, window.memory, window.begin + at)  # type: ignore[arg-type]


def test_memory_that_cannot_be_exchanged_is_an_error(window: LoanWindow, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    array = _array(window)
    monkeypatch.setattr("aioshm.ring.window.map_memory", refuse)
    with pytest.raises(SharedMemoryError, match="drop it in the block"):
        window.take_back()
    del array


@pytest.mark.skipif(sys.platform != "linux", reason="pages are moved on Linux")
def test_a_move_that_fails_is_the_last_one_and_unmaps_nothing(
    fd: int, window: LoanWindow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "_moves_pages", True)
    monkeypatch.setattr(mapping._libc, "mremap", lambda *_: mapping._MAP_FAILED)
    before = len(windows._abandoned)
    for number in (1, 2):
        array = _array(window)
        array[:] = number
        assert not window.take_back()
        array[:] = 255
        assert os.pread(fd, 1000, START + 64) == bytes([number]) * 1000
        window = LoanWindow(fd, START, ROOM)
    assert not windows._moves_pages
    assert len(windows._abandoned) == before + 1


def test_closed_with_something_kept(fd: int, window: LoanWindow) -> None:
    array = _array(window)
    array[:] = 3
    window.close()
    array[:] = 4
    assert os.pread(fd, 1000, START + 64) == b"\3" * 1000
    assert array.tolist() == [4] * 1000
