"""Lent windows: what is filled through one is in the segment, and nothing that is kept reaches it afterwards."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

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


@pytest.fixture(params=[True, False], ids=["pages move", "pages do not move"])
def moves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernel can move pages, as Linux from 5.13 on can."""
    if not request.param:
        monkeypatch.setattr("aioshm.ring.window._moves_pages", False)
    return bool(request.param)


def _array(window: LoanWindow, at: int = 64, size: int = 1000) -> Any:
    return np.ndarray(size, np.uint8, window.memory, window.begin + at)  # type: ignore[arg-type]


def _tensor(window: LoanWindow) -> Any:
    flat = torch.frombuffer(window.memory, dtype=torch.uint8, count=1000, offset=window.begin + 64)
    return torch.empty(0, dtype=torch.uint8).set_(flat.untyped_storage())


def _bytes(window: LoanWindow) -> Any:
    return memoryview(window.memory)[window.begin + 64 : window.begin + 1064]


def _fill(made: Any, number: int) -> None:
    made[:] = bytes([number]) * 1000 if isinstance(made, memoryview) else number


EVERY_KIND = pytest.mark.parametrize("make", [_array, _tensor, _bytes])


def test_it_shows_the_segment(fd: int, window: LoanWindow) -> None:
    array = _array(window)
    array[:] = 7
    window.write(0, b"head")
    assert os.pread(fd, 4, START) == b"head"
    assert os.pread(fd, 1000, START + 64) == b"\7" * 1000
    assert window.offset_of(memoryview(array)[10:20]) == 74
    assert window.offset_of(memoryview(bytearray(10))) == -1


@EVERY_KIND
def test_nothing_kept_leaves_the_window_where_it_is(fd: int, window: LoanWindow, make: Callable[..., Any]) -> None:
    memory = window.memory
    del memory  # which would hold it
    where = id(window.memory)
    for number in range(4):
        made = make(window)
        _fill(made, number)
        del made
        assert window.take_back(), "it can be used again"
        assert id(window.memory) == where
        assert os.pread(fd, 1000, START + 64) == bytes([number]) * 1000


@EVERY_KIND
def test_a_name_that_lasts_until_the_next_round_reads_zeros_and_reaches_nothing(
    fd: int, window: LoanWindow, make: Callable[..., Any], moves: bool
) -> None:
    for number in range(1, 4):
        made = make(window)
        _fill(made, number)
        assert window.take_back() is moves
        assert bytes(memoryview(made)[:1] if make is not _tensor else made.numpy()[:1]) == b"\0"
        _fill(made, 255)
        assert os.pread(fd, 1000, START + 64) == bytes([number]) * 1000
        if not moves:
            window = LoanWindow(fd, START, ROOM)


def test_a_large_window_moves_on_and_on(fd: int) -> None:
    window = LoanWindow(fd, START, LARGE)
    kept = []
    for number in range(5):
        array = _array(window, 0, LARGE)
        array[:] = number
        if number % 2 == 0:
            kept.append(array)
        assert window.take_back()
        array[:] = 255
        assert os.pread(fd, LARGE, START) == bytes([number]) * LARGE
        assert (_array(window, 0, LARGE) == number).all(), "the next loan sees the same memory"
    assert all((array == 255).all() for array in kept)


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
