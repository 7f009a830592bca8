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
def prefix() -> Iterator[str]:
    with private_segments() as prefix:
        yield prefix


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


class TestOrphans:
    def test_segment_is_an_orphan_when_its_creator_and_its_readers_are_killed(self) -> None:
        with holder() as (name, creator):
            with holder(name) as (_, reader):
                for killed in (creator, reader):
                    assert (SHM / name).exists()
                    assert name not in orphans()
                    assert not remove_orphan(name)
                    kill(killed)
                assert name in orphans()
            assert remove_orphan(name)
            assert not (SHM / name).exists()
            assert name not in orphans()
            assert not remove_orphan(name)

    def test_one_of_this_process_is_none(self) -> None:
        segment = Segment.create(4096, "named")
        assert segment.name is not None
        assert segment.name not in orphans()
        assert not remove_orphan(segment.name)
        chunk = segment.view[:8]
        segment.unlink()
        segment.close()
        chunk[:] = b"mapped.."
        chunk.release()

    def test_segments_of_killed_processes_are_removed_by_the_next_creation(self, prefix: str) -> None:
        for _ in range(3):
            with holder() as (_, pid):
                kill(pid)
        with holder() as (held, _):
            assert len(list(SHM.glob(f"{prefix}*"))) == 1, "each creation removes the one before"
            segment = Segment.create(4096, "named")
            assert {path.name for path in SHM.glob(f"{prefix}*")} == {held, segment.name}
            segment.close()


class TestSweepingAtTheWrongMoment:
    """Whoever looks for orphans locks each segment for an instant; one that is being created just then is none."""

    def test_between_making_the_file_and_holding_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
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


class TestResourceTracker:
    CREATE = """
import subprocess, sys
from aioshm.ring import ShmRingBuffer
for backing in ("memfd", "named"):
    ring = ShmRingBuffer(1, 64, 2, backing=backing)
    ring.writer().commit()
    if ring.name:
        other = ShmRingBuffer.from_name(ring.layout, ring.name, ring.queue_id)
        command = [sys.executable, "-W", "always", "-c", sys.argv[1], ring.name, ring.queue_id.hex()]
        subprocess.run(command, check=True)
        print(ring.reader(0).messages_read(0))
        other.close()
    ring.close()
"""
    ATTACH = """
import sys
from aioshm.ring import Layout, ShmRingBuffer
layout = Layout.of(1, 64, 2, None)
ring = ShmRingBuffer.from_name(layout, sys.argv[1], bytes.fromhex(sys.argv[2]))
reader = ring.reader(0)
assert reader.ready()
reader.release()
reader.close()
ring.close()
"""

    def test_says_nothing(self) -> None:
        process = python(self.CREATE, self.ATTACH)
        assert (*process.communicate(), process.returncode) == ("1\n", "", 0)
