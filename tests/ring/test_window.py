"""Windows: a view shows its chunk, a held one becomes a copy, what is lent is taken back, nothing is left mapped."""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rings import fds
from support import forked

from aioshm.errors import SharedMemoryError
from aioshm.ring import ShmRingBuffer, mapping, window
from aioshm.ring.layout import CHUNK_HEADER_BYTES, chunk_at
from aioshm.ring.mapping import address_of
from aioshm.ring.window import LoanWindow, Windows

OLD, NEW = b"old message ", b"NEW MESSAGE "


@pytest.fixture
def ring() -> Iterator[ShmRingBuffer]:
    ring = ShmRingBuffer(2, 3000, 4, slots=4, inline_bytes=0)
    yield ring
    ring.close()


@pytest.fixture
def windows(ring: ShmRingBuffer) -> Iterator[Windows]:
    windows = Windows(ring.fd, ring.layout)
    yield windows
    windows.close()


@pytest.fixture(params=["mremap", "map_fixed"])
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange memory as Linux does, and as other systems do."""
    chosen = {"mremap": window._move_over, "map_fixed": window._map_over}[request.param]
    monkeypatch.setattr(window, "_exchange", chosen)


def put(ring: ShmRingBuffer, chunk: int, message: bytes) -> int:
    """Write to a chunk through the ring's own mapping; return the length."""
    place = chunk_at(ring.layout.pools, chunk)
    assert place is not None
    start = place[0] + CHUNK_HEADER_BYTES
    ring.view[start : start + len(message)] = message
    return len(message)


def maps() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


def mappings(ring: ShmRingBuffer) -> int:
    """Return how often this process maps the segment."""
    return sum(line.split()[4] == str(os.fstat(ring.fd).st_ino) for line in maps())


def permissions(address: int) -> str | None:
    """Return the permissions of the mapping at an address, or None if there is none."""
    for line in maps():
        addresses, flags, _ = line.split(maxsplit=2)
        begin, end = (int(text, 16) for text in addresses.split("-"))
        if begin <= address < end:
            return flags
    return None


@pytest.mark.parametrize("install", [sys.settrace, sys.setprofile])
def test_view_that_is_not_held_is_known_under_a_tracer(windows: Windows, install: Callable[[Any], None]) -> None:
    before = sys.gettrace() if install is sys.settrace else sys.getprofile()

    def trace(*_: object) -> Any:
        return trace

    try:
        install(trace)
        windows.view(0, 10)
        assert not windows.settle(0, 10)
        view = windows.view(0, 10)
        assert windows.settle(0, 10)
        del view
    finally:
        install(before)


@pytest.mark.parametrize("readable", [True, False])
def test_window_is_used_again_unless_it_may_have_been_written_to(
    windows: Windows, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    if not readable:
        monkeypatch.setattr(os, "open", refuse)
    windows.view(0, 3000).tobytes()
    first = windows.windows[0]
    windows.settle(0, 3000)
    assert (windows.windows.get(0) is first) is readable


def test_close_is_idempotent_and_final(windows: Windows) -> None:
    windows.view(0, 1)
    for _ in range(2):
        windows.close()
    assert not windows.settle(0, 1)
    with pytest.raises(SharedMemoryError, match="closed"):
        windows.view(0, 1)


def test_forgetting_windows_is_a_warning_and_no_leak(ring: ShmRingBuffer) -> None:
    before = fds()
    windows = Windows(ring.fd, ring.layout)
    put(ring, 0, OLD)
    view = windows.view(0, 12)
    with pytest.warns(ResourceWarning, match="not closed"):
        del windows
    put(ring, 0, NEW)
    assert bytes(view) == OLD
    assert fds() == before
    assert mappings(ring) == 1


KEEP: dict[str, Callable[[memoryview], Callable[[], bytes]]] = {
    "view": lambda view: view.tobytes,
    "cast": lambda view: memoryview(view.cast("b")).toreadonly().tobytes,
    "array": lambda view: np.frombuffer(view, np.uint8).tobytes,
    "pickle buffer": lambda view: memoryview(pickle.PickleBuffer(view)).tobytes,
}
"""Each keeps something of a view, and returns a call that reads its bytes."""


@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
def test_what_is_kept_becomes_a_copy(ring: ShmRingBuffer, windows: Windows, exchange: None, keep: Any) -> None:
    nbytes = put(ring, 1, OLD * 200)
    read = keep(windows.view(1, nbytes))
    assert windows.settle(1, nbytes)
    assert not windows.settle(1, nbytes)
    put(ring, 1, NEW * 200)
    assert bytes(windows.view(1, nbytes)) == NEW * 200
    assert not windows.settle(1, nbytes)
    assert read() == OLD * 200
    del read
    assert mappings(ring) == 2


def test_copy_shows_nothing_of_the_ring_behind_the_message(ring: ShmRingBuffer, windows: Windows) -> None:
    put(ring, 0, b"x" * 3000)
    view = windows.view(0, 3000)
    assert windows.settle(0, 10)
    put(ring, 0, b"y" * 3000)
    assert bytes(view) == b"x" * 10 + bytes(2990)
    assert set(view.obj[:]) <= {0, ord("x")}


def test_copy_is_given_back_with_its_last_holder(ring: ShmRingBuffer, windows: Windows, exchange: None) -> None:
    view = windows.view(0, 100)
    address = address_of(view)
    array = np.frombuffer(view, np.uint8)[50:]
    assert windows.settle(0, 100)
    assert mappings(ring) == 1
    del view
    assert permissions(address) == "rw-p"
    del array
    assert permissions(address) is None


def test_forked_child_keeps_what_is_held(ring: ShmRingBuffer, windows: Windows) -> None:
    nbytes = put(ring, 0, OLD)
    view = windows.view(0, nbytes)
    child_keeps_it = forked(lambda kept: bytes(kept) == OLD, view)
    put(ring, 0, NEW)
    assert child_keeps_it()
    assert bytes(view) == OLD


def test_thread_that_reads_during_the_exchange_sees_no_other_bytes() -> None:
    nbytes = 1 << 20
    ring = ShmRingBuffer(1, nbytes, 1, slots=1, inline_bytes=0)
    windows = Windows(ring.fd, ring.layout)
    arrays, sums, looks = [], set(), threading.Semaphore(0)

    def look() -> None:
        while arrays:
            sums.add(int(arrays[-1].sum()))  # without the GIL
            looks.release()

    put(ring, 0, b"\x01" * nbytes)
    arrays.append(np.frombuffer(windows.view(0, nbytes), np.uint8))
    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(20):
        looks.acquire()
        assert windows.settle(0, nbytes)
        arrays.append(np.frombuffer(windows.view(0, nbytes), np.uint8))
    assert all((array == 1).all() for array in arrays)
    arrays.clear()
    thread.join()
    assert sums == {nbytes}
    windows.close()
    ring.close()


@pytest.mark.parametrize("what", ["no memory for the copy", "the copy cannot be moved"])
def test_without_memory_nothing_changes_and_it_can_be_tried_again(
    ring: ShmRingBuffer, windows: Windows, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    put(ring, 0, OLD)
    view = windows.view(0, 12)
    places: list[Any] = []

    def fail(place: Any, *_: object) -> int | None:
        places.append(place)
        ctypes.set_errno(errno.ENOMEM)
        return mapping._MAP_FAILED

    monkeypatch.setattr(mapping._libc, "mmap" if what == "no memory for the copy" else "mremap", fail)
    monkeypatch.setattr(window, "_exchange", window._move_over)
    for failing in (lambda: windows.settle(0, 12), windows.close):
        with pytest.raises(SharedMemoryError, match="drop what was leased") as caught:
            failing()
        assert caught.value.errno == errno.ENOMEM
        assert permissions(places[-1] or 0) is None, "the copy is unmapped"
        assert bytes(view) == bytes(windows.view(0, 12)) == OLD
    del view
    assert not windows.settle(0, 12)


# Loans

START, ROOM = 4096 + 640, 100_000


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("lent")
    os.ftruncate(fd, START + ROOM + 5000)
    yield fd
    os.close(fd)


def lent(fd: int) -> tuple[LoanWindow, Any]:
    """Return a window, and an array that is kept of it."""
    window = LoanWindow(fd, START, ROOM)
    return window, np.ndarray(1000, np.uint8, window.memory, window.begin + 64)  # type: ignore[arg-type]


def test_lent_memory_that_cannot_be_exchanged_is_an_error(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise OSError(errno.ENOMEM, "no memory")

    loan, array = lent(fd)
    monkeypatch.setattr(window, "map_memory", refuse)
    with pytest.raises(SharedMemoryError, match="drop it in the block"):
        loan.take_back()
    del array


@pytest.mark.skipif(sys.platform != "linux", reason="pages are moved on Linux")
def test_a_move_that_fails_is_the_last_one_and_unmaps_nothing(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "_moves_pages", True)
    monkeypatch.setattr(mapping._libc, "mremap", lambda *_: mapping._MAP_FAILED)
    before = len(window._abandoned)
    for number in (1, 2):
        loan, array = lent(fd)
        array[:] = number
        assert not loan.take_back()
        array[:] = 255
        assert os.pread(fd, 1000, START + 64) == bytes([number]) * 1000
    assert not window._moves_pages
    assert len(window._abandoned) == before + 1


def test_lent_window_is_closed_with_something_kept(fd: int) -> None:
    loan, array = lent(fd)
    array[:] = 3
    loan.close()
    array[:] = 4
    assert os.pread(fd, 1000, START + 64) == b"\3" * 1000
    assert array.tolist() == [4] * 1000
