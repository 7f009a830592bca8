"""Windows: what is shown is the slot, and nothing is left mapped."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rings import content, fds
from windowed import NEW, OLD, address_of, as_tensor, mappings, permissions, put

from aioshm.config import Backing
from aioshm.errors import HandleError, SharedMemoryError
from aioshm.ring import ShmRingBuffer, window
from aioshm.ring.layout import Layout
from aioshm.ring.window import Windows

SHAPES = {
    "default": (3000, 4),
    "tiny": (64, 50),
    "a page": (4096, 4),
    "uneven": (10_001, 4),
    "a byte": (1, 3),
}


@pytest.fixture(params=["memfd", "named"])
def backing(request: pytest.FixtureRequest) -> Backing:
    return request.param


@pytest.mark.parametrize(("chunk_bytes", "chunks"), SHAPES.values(), ids=SHAPES.keys())
class TestShows:
    def test_each_slots_own_bytes(self, backing: Backing, chunk_bytes: int, chunks: int) -> None:
        ring = ShmRingBuffer(3, chunk_bytes, chunks, slots=chunks, inline_bytes=0, backing=backing)
        windows = Windows(ring.fd, ring.layout)
        messages = [content(index, max(chunk_bytes, 8))[:chunk_bytes] for index in range(chunks)]
        for index, message in enumerate(messages):
            put(ring, index, message)
        for index, message in enumerate(messages):
            view = windows.view(index, len(message))
            assert (bytes(view), view.readonly, view.contiguous, view.format) == (message, True, True, "B")
            assert len(windows.view(index, chunk_bytes)) == chunk_bytes
            assert len(windows.view(index, 0)) == 0
            with pytest.raises(TypeError, match="read-only"):
                view[:1] = b"x"
        del view
        windows.close()
        ring.close()

    def test_what_is_kept_stays_while_neighbours_change(self, exchange: None, chunk_bytes: int, chunks: int) -> None:
        ring = ShmRingBuffer(3, chunk_bytes, chunks, slots=chunks, inline_bytes=0)
        windows = Windows(ring.fd, ring.layout)
        kept = []
        for index in range(chunks):
            put(ring, index, bytes([index + 1]) * chunk_bytes)
        for index in range(chunks):
            kept.append(windows.view(index, chunk_bytes))
            assert windows.settle(index, chunk_bytes)
            put(ring, index, b"\xff" * chunk_bytes)
        assert [bytes(view) for view in kept] == [bytes([index + 1]) * chunk_bytes for index in range(chunks)]
        for index in range(chunks):
            assert bytes(windows.view(index, chunk_bytes)) == b"\xff" * chunk_bytes
        windows.close()
        assert [bytes(view) for view in kept] == [bytes([index + 1]) * chunk_bytes for index in range(chunks)]
        ring.close()


class TestNotKept:
    def test_nothing_is_copied_and_the_window_stays(self, ring: ShmRingBuffer, windows: Windows) -> None:
        addresses = set()
        for number in range(100):
            nbytes = put(ring, 3, content(number, 3000))
            view = windows.view(3, nbytes)
            array = np.frombuffer(view, np.uint8)
            tensor = as_tensor(view)
            assert bytes(view) == array.tobytes() == bytes(tensor.numpy()) == content(number, 3000)
            addresses.add(address_of(view))
            del view, array, tensor
            assert not windows.settle(3, nbytes)
        assert len(addresses) == 1
        assert mappings(ring) == 2

    def test_what_is_written_through_it_is_private(self, ring: ShmRingBuffer, windows: Windows) -> None:
        assert permissions(address_of(memoryview(ring.view))) == "rw-s"
        nbytes = put(ring, 0, content(1, 9000))
        view = windows.view(0, nbytes)
        assert view.readonly
        address = address_of(view)
        assert permissions(address) == "rw-p"
        ctypes.memset(address, 0, nbytes)
        assert bytes(view) == bytes(nbytes)
        assert bytes(ring.chunk(0)[:nbytes]) == content(1, 9000)
        del view
        assert not windows.settle(0, nbytes)
        assert bytes(windows.view(0, nbytes)) == content(1, 9000), "another window"

    def test_a_slot_that_was_never_shown(self, windows: Windows) -> None:
        assert not windows.settle(0, 10)

    @pytest.mark.parametrize("install", [sys.settrace, sys.setprofile])
    def test_is_known_under_a_tracer(self, windows: Windows, install: Callable[[Any], None]) -> None:
        before = sys.gettrace() if install is sys.settrace else sys.getprofile()

        def trace(*_: object) -> Any:
            return trace

        try:
            install(trace)
            for _ in range(100):
                windows.view(0, 10)
                assert not windows.settle(0, 10)
                view = windows.view(0, 10)
                assert windows.settle(0, 10)
                del view
        finally:
            install(before)


class TestLeaks:
    def test_no_mapping_and_no_descriptor_in_many_leases(self) -> None:
        ring = ShmRingBuffer(1, 100, 40, slots=40, inline_bytes=0)
        before = fds()
        windows = Windows(ring.fd, ring.layout)
        maps = len(Path("/proc/self/maps").read_text().splitlines())
        kept: list[Any] = []
        for number in range(10_000):
            index = number % 40
            view = windows.view(index, 64)
            if number % 7 == 0:
                kept.append(np.frombuffer(view, np.uint8))
            if len(kept) > 5:
                kept.pop(0)
            del view
            windows.settle(index, 64)
        assert len(before) < len(fds()) <= len(before) + 2, "one more where a page fault made it ask for the pagemap"
        assert mappings(ring) <= 41
        assert len(Path("/proc/self/maps").read_text().splitlines()) <= maps + 60
        kept.clear()
        windows.close()
        assert mappings(ring) == 1
        assert fds() == before
        ring.close()

    def test_windows_are_kept_for_so_many_slots_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(window, "MAX_WINDOWS", 10)
        ring = ShmRingBuffer(1, 5000, 100, slots=100, inline_bytes=0)
        windows = Windows(ring.fd, ring.layout)
        for index in range(100):
            put(ring, index, OLD + b"%d" % index)
        held = windows.view(0, 13)
        for index in range(1, 100):
            assert bytes(windows.view(index, 14)).rstrip(b"\0") == OLD + b"%d" % index
            assert not windows.settle(index, 14)
            assert mappings(ring) <= 11
        assert windows.settle(0, 13)
        assert bytes(held) == OLD + b"0"
        windows.close()
        ring.close()

    def test_windows_that_are_all_held_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(window, "MAX_WINDOWS", 2)
        ring = ShmRingBuffer(1, 100, 5, slots=5, inline_bytes=0)
        windows = Windows(ring.fd, ring.layout)
        views = [windows.view(index, 5) for index in range(5)]
        assert mappings(ring) == 6
        assert [windows.settle(index, 5) for index in range(5)] == [True] * 5
        assert mappings(ring) == 1
        del views
        windows.close()
        ring.close()

    def test_a_whole_large_chunk(self) -> None:
        ring = ShmRingBuffer(1, 24 << 20, 2, slots=2, inline_bytes=0)
        windows = Windows(ring.fd, ring.layout)
        chunk = np.frombuffer(ring.chunk(1), np.uint8)
        chunk[:] = 7
        array = np.frombuffer(windows.view(1, 24 << 20), np.uint8)
        assert windows.settle(1, 24 << 20)
        chunk[:] = 8
        assert (array == 7).all()
        del chunk, array
        windows.close()
        ring.close()


class TestClose:
    def test_makes_copies_of_what_is_held(self, ring: ShmRingBuffer, exchange: None) -> None:
        windows = Windows(ring.fd, ring.layout)
        for index in range(3):
            put(ring, index, OLD)
        windows.view(0, 12)
        kept = [windows.view(1, 12), as_tensor(windows.view(2, 12))]
        windows.close()
        assert mappings(ring) == 1
        for index in range(3):
            put(ring, index, NEW)
        assert [bytes(kept[0]), bytes(kept[1].numpy())] == [OLD, OLD]

    def test_is_idempotent_and_final(self, windows: Windows) -> None:
        windows.view(0, 1)
        windows.close()
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


class TestRefuses:
    @pytest.mark.parametrize("index", [-1, 4, 1 << 70])
    def test_slots_that_are_not_there(self, windows: Windows, index: int) -> None:
        with pytest.raises(ValueError, match="there is no chunk"):
            windows.view(index, 1)
        assert not windows.settle(index, 1)

    @pytest.mark.parametrize("nbytes", [-1, 3001, 1 << 70])
    def test_lengths_that_do_not_fit(self, ring: ShmRingBuffer, windows: Windows, nbytes: int) -> None:
        with pytest.raises(ValueError, match="0 to 3000 bytes"):
            windows.view(0, nbytes)
        put(ring, 0, OLD)
        view = windows.view(0, 12)
        with pytest.raises(ValueError, match="0 to 3000 bytes"):
            windows.settle(0, nbytes)
        assert windows.settle(0, 12)
        put(ring, 0, NEW)
        assert bytes(view) == OLD

    def test_descriptors_that_are_none(self) -> None:
        layout = Layout.of(1, 100, 2, 2, 0)
        with pytest.raises(SharedMemoryError) as caught:
            Windows(-1, layout)
        assert caught.value.errno == errno.EBADF

    def test_a_segment_that_is_too_small(self) -> None:
        before = fds()
        ring = ShmRingBuffer(1, 100, 2, slots=2, inline_bytes=0)
        with pytest.raises(HandleError, match="its layout needs"):
            Windows(ring.fd, Layout.of(1, 100, 200, 200, 0))
        ring.close()
        assert fds() == before

    def test_what_cannot_be_mapped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        read_end, write_end = os.pipe()
        monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((0, 0, 0, 0, 0, 0, 1 << 30, 0, 0, 0)))
        windows = Windows(read_end, Layout.of(1, 100, 2, 2, 0))
        with pytest.raises(SharedMemoryError, match="no window of 4096 bytes") as caught:
            windows.view(0, 1)
        assert caught.value.errno in (errno.ENODEV, errno.EACCES)
        monkeypatch.undo()
        windows.close()
        os.close(read_end)
        os.close(write_end)
