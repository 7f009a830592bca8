"""Windows: a view shows its chunk, a held one becomes a copy, and nothing is left mapped."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rings import fds
from windowed import KEEP, NEW, OLD, Keep, address_of, mappings, permissions, put

from aioshm.errors import SharedMemoryError
from aioshm.ring import ShmRingBuffer, mapping, window
from aioshm.ring.window import Windows


class TestNotKept:
    @pytest.mark.parametrize("install", [sys.settrace, sys.setprofile])
    def test_is_known_under_a_tracer(self, windows: Windows, install: Callable[[Any], None]) -> None:
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


class TestClose:
    def test_is_idempotent_and_final(self, windows: Windows) -> None:
        windows.view(0, 1)
        for _ in range(2):
            windows.close()
        assert not windows.settle(0, 1)
        with pytest.raises(SharedMemoryError, match="closed"):
            windows.view(0, 1)

    def test_forgetting_it_is_a_warning_and_no_leak(self, ring: ShmRingBuffer) -> None:
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


class TestKept:
    @pytest.mark.parametrize("keep", KEEP, ids=lambda keep: keep.__name__[6:])
    def test_becomes_a_copy(self, ring: ShmRingBuffer, windows: Windows, exchange: None, keep: Keep) -> None:
        nbytes = put(ring, 1, OLD * 200)
        kept, read = keep(windows.view(1, nbytes))
        assert windows.settle(1, nbytes)
        assert not windows.settle(1, nbytes)
        put(ring, 1, NEW * 200)
        assert bytes(windows.view(1, nbytes)) == NEW * 200
        assert not windows.settle(1, nbytes)
        assert read() == OLD * 200
        del kept, read
        gc.collect()
        assert mappings(ring) == 2

    def test_shows_nothing_of_the_ring_behind_the_message(self, ring: ShmRingBuffer, windows: Windows) -> None:
        put(ring, 0, b"x" * 3000)
        view = windows.view(0, 3000)
        assert windows.settle(0, 10)
        put(ring, 0, b"y" * 3000)
        assert bytes(view) == b"x" * 10 + bytes(2990)
        assert set(view.obj[:]) <= {0, ord("x")}

    def test_is_given_back_with_its_last_holder(self, ring: ShmRingBuffer, windows: Windows, exchange: None) -> None:
        view = windows.view(0, 100)
        address = address_of(view)
        array = np.frombuffer(view, np.uint8)[50:]
        assert windows.settle(0, 100)
        assert mappings(ring) == 1
        del view
        assert permissions(address) == "rw-p"
        del array
        assert permissions(address) is None

    def test_in_a_child(self, ring: ShmRingBuffer, windows: Windows) -> None:
        nbytes = put(ring, 0, OLD)
        settled = windows.view(0, nbytes)
        assert windows.settle(0, nbytes)
        open_ = windows.view(0, nbytes)
        pid = os.fork()
        if pid == 0:
            good = bytes(settled) == OLD == bytes(open_)
            windows.close()
            put(ring, 0, NEW)
            os._exit(0 if good and bytes(open_) == OLD == bytes(settled) else 1)
        assert os.waitpid(pid, 0)[1] == 0
        assert bytes(settled) == OLD == bytes(open_)

    def test_while_another_thread_looks(self) -> None:
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
    maps = Path("/proc/self/maps").read_text().count("\n")

    def fail(*_: object) -> int | None:
        ctypes.set_errno(errno.ENOMEM)
        return mapping._MAP_FAILED

    class Libc:
        mmap = staticmethod(fail if what == "no memory for the copy" else mapping._libc.mmap)
        mremap = staticmethod(fail)
        munmap = staticmethod(mapping._libc.munmap)

    monkeypatch.setattr(mapping, "_libc", Libc)
    monkeypatch.setattr(window, "_exchange", window._move_over)
    for failing in (lambda: windows.settle(0, 12), windows.close):
        with pytest.raises(SharedMemoryError, match="drop what was leased") as caught:
            failing()
        assert caught.value.errno == errno.ENOMEM
        assert bytes(view) == bytes(windows.view(0, 12)) == OLD
    assert Path("/proc/self/maps").read_text().count("\n") <= maps + 1
    del view
    assert not windows.settle(0, 12)
