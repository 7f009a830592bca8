"""Named segments that outlive their processes: found and removed, and never one that somebody holds."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from rings import python
from support import eventually, private_segments

from aioshm.ring import segment as segment_module
from aioshm.ring.segment import Segment, orphans, remove_orphan

SHM = Path("/dev/shm")


@pytest.fixture(autouse=True)
def only_segments_of_this_test() -> Iterator[None]:
    with private_segments():
        yield


HOLD = """
import sys
from aioshm.ring import segment
segment.NAME_PREFIX = sys.argv[1]
Segment = segment.Segment
segment = Segment.create(8192, "named") if len(sys.argv) == 2 else Segment.open(sys.argv[2], 8192)
print(segment.name, flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(*name: str) -> Iterator[tuple[str, int]]:
    """Let another process create a named segment, or open one; give its name and the process' pid to the block."""
    process = python(HOLD, segment_module.NAME_PREFIX, *name)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.communicate()


def kill(pid: int) -> None:
    process = psutil.Process(pid)
    process.kill()
    eventually(lambda: process.status() == psutil.STATUS_ZOMBIE, f"the end of {pid}")


def test_segment_is_an_orphan_when_its_creator_and_its_readers_are_killed() -> None:
    with holder() as (name, creator), holder(name) as (_, reader):
        for killed in (creator, reader):
            Segment.create(4096, "named").close()  # removes orphans
            assert (SHM / name).exists()
            assert orphans() == []
            assert not remove_orphan(name)
            kill(killed)
        assert orphans() == [name]
        Segment.create(4096, "named").close()
        assert not (SHM / name).exists()
        assert orphans() == []
        assert not remove_orphan(name)


def test_segment_of_this_process_is_no_orphan() -> None:
    strange = SHM / f"{segment_module.NAME_PREFIX}strange"  # anybody can create one
    strange.symlink_to(strange)
    segment = Segment.create(4096, "named")
    assert segment.name is not None
    assert orphans() == []
    assert not remove_orphan(segment.name)
    strange.unlink()
    chunk = segment.view[:8]
    segment.close()
    chunk[:] = b"mapped.."
    chunk.release()


def test_segment_that_is_being_created_is_no_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks for orphans locks each segment for an instant, which may be before its creator holds it."""
    flock, swept = fcntl.flock, threading.Event()

    def sweep_first(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_SH and not swept.is_set():
            swept.set()
            remove_orphan(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    segment = Segment.create(4096, "named")
    assert segment.name is not None
    exists = (SHM / segment.name).exists()
    segment.close()
    assert swept.is_set()
    assert exists
