"""Which pages were written to."""

from __future__ import annotations

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


@pytest.fixture
def pagemap() -> Iterator[Pagemap]:
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


def test_without_pagemap_everything_may_have_been_written(monkeypatch: pytest.MonkeyPatch, mapped: mmap.mmap) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    pagemap = Pagemap()
    assert pagemap.written(address_of(mapped), PAGE)
    pagemap.close()
