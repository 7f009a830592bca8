"""Which pages were written to, as the kernel says it, or as all its entries do."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from aioshm.ring.mapping import MAP_NORESERVE, Pagemap, address_of, map_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no pagemap elsewhere")

PAGE = mmap.PAGESIZE
PAGES = 2048


@pytest.fixture
def mapped() -> Iterator[mmap.mmap]:
    """A private mapping of a file, of which some pages were looked at."""
    fd = os.memfd_create("pages")
    os.ftruncate(fd, PAGES * PAGE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    with mmap.mmap(-1, PAGES * PAGE, flags, mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | MAP_NORESERVE
        map_memory(address_of(memory), len(memory), *how, fd)
        for page in (0, 7, PAGES - 1):
            assert memory[page * PAGE] == 0
        yield memory
    os.close(fd)


@pytest.fixture(params=["scanned", "all entries"])
def pagemap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pagemap]:
    if request.param == "all entries":

        def refuse(*_: Any) -> int:
            raise OSError(25, "Inappropriate ioctl for device")

        monkeypatch.setattr(fcntl, "ioctl", refuse)
    pagemap = Pagemap()
    yield pagemap
    pagemap.close()


def test_only_pages_that_were_written_to_count(pagemap: Pagemap, mapped: mmap.mmap) -> None:
    address = address_of(mapped)
    assert not pagemap.written(address, len(mapped))
    mapped[1000 * PAGE + 5] = 1
    assert pagemap.written(address, len(mapped))
    assert pagemap.written(address, 1000 * PAGE + 1), "a part of a page counts as all of it"
    assert not pagemap.written(address, 1000 * PAGE)


def test_a_kernel_that_scans_need_not_give_all_entries(monkeypatch: pytest.MonkeyPatch, mapped: mmap.mmap) -> None:
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 7):
        pytest.skip("PAGEMAP_SCAN came with Linux 6.7")
    pagemap, read = Pagemap(), []
    monkeypatch.setattr(os, "pread", lambda *args: read.append(args) or b"")
    mapped[3 * PAGE] = 1
    assert pagemap.written(address_of(mapped), len(mapped))
    assert not pagemap.written(address_of(mapped), PAGE)
    assert not read
    pagemap.close()


def test_without_pagemap_everything_may_have_been_written(monkeypatch: pytest.MonkeyPatch, mapped: mmap.mmap) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    pagemap = Pagemap()
    assert pagemap.written(address_of(mapped), PAGE)
    pagemap.close()
