"""Segments that grow, and that give their memory back."""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

import psutil
import pytest
from rings import fds

from aioshm.errors import SharedMemoryError
from aioshm.ring.segment import Segment

BACKINGS = pytest.mark.parametrize("backing", ["memfd", "named"])


@BACKINGS
def test_growing_keeps_the_content_and_adds_zeros(backing: Any) -> None:
    before = fds()
    segment = Segment.create(4096, backing, may_grow=True)
    segment.view[:] = b"x" * 4096
    assert segment.grow(100_000)
    assert (segment.size, len(segment.view), os.fstat(segment.fd).st_size) == (100_000, 100_000, 100_000)
    assert bytes(segment.view) == b"x" * 4096 + bytes(95_904)
    segment.view[99_999] = 1
    segment.close()
    assert fds() == before


def test_other_mappings_see_what_they_saw() -> None:
    segment = Segment.create(4096, "memfd", may_grow=True)
    other = Segment(os.dup(segment.fd), 4096, None)
    assert segment.grow(8192)
    segment.view[0] = 7
    assert (other.view[0], other.size) == (7, 4096)
    other.close()
    segment.close()


def test_a_named_one_reserves_what_it_grows_by() -> None:
    segment = Segment.create(4096, "named", may_grow=True)
    assert segment.grow(100_000)
    assert os.fstat(segment.fd).st_blocks * 512 >= 100_000
    segment.close()


def test_one_that_may_not_grow_stays_usable() -> None:
    segment = Segment.create(4096, "memfd")
    assert not segment.grow(8192)
    assert (segment.size, len(segment.view)) == (4096, 4096)
    segment.view[4095] = 1
    segment.close()


def test_nobody_can_shrink_one_that_may_grow() -> None:
    segment = Segment.create(8192, "memfd", may_grow=True)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, 4096)
    segment.close()


def test_one_that_cannot_be_mapped_again_stays_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = Segment.create(4096, "memfd", may_grow=True)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        assert not segment.grow(8192)
    segment.view[0] = 1
    assert segment.size == 4096
    segment.close()


@BACKINGS
def test_one_that_cannot_be_mapped_at_all_is_a_typed_error(backing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fds()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        with pytest.raises(SharedMemoryError):
            Segment.create(4096, backing)
    assert fds() == before


def test_growing_beyond_the_machine_is_refused() -> None:
    segment = Segment.create(4096, "memfd", may_grow=True)
    with pytest.raises(SharedMemoryError, match="this machine"):
        segment.grow(psutil.virtual_memory().total + psutil.swap_memory().total + (1 << 30))
    assert segment.size == 4096
    segment.close()


@BACKINGS
def test_forgetting_gives_the_memory_back(backing: Any) -> None:
    segment = Segment.create(1 << 20, backing, may_grow=True)
    segment.view[:] = b"x" * (1 << 20)
    assert os.fstat(segment.fd).st_blocks * 512 >= 1 << 20
    segment.forget()
    assert os.fstat(segment.fd).st_blocks == 0
    assert bytes(segment.view[:4096]) == bytes(4096)
    segment.view[:] = b"y" * (1 << 20)
    assert segment.size == 1 << 20
    segment.close()
