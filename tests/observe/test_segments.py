"""Segments are found again without looking at every descriptor of every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aioshm import MessageQueue
from aioshm.observe import segments
from aioshm.observe.segments import SegmentFinder


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The processes whose descriptors were listed."""
    pids: list[int] = []
    look_at = segments._look_at

    def note(pid: int, key: Any, now: float) -> Any:
        pids.append(pid)
        return look_at(pid, key, now)

    monkeypatch.setattr(segments, "_look_at", note)
    return pids


def mine(finder: SegmentFinder) -> set[str]:
    """Return what segments this process has open."""
    return {path for segment in finder.find()[0] for path in segment.paths if path.startswith(f"/proc/{os.getpid()}/")}


@contextmanager
def counted() -> Iterator[None]:
    """Skip where the kernel does not count a process's descriptors."""
    if not os.stat("/proc/self/fd").st_size:
        pytest.skip("Linux older than 6.2 does not tell how many descriptors a process has")
    yield


async def test_who_has_opened_nothing_is_not_looked_at_again(listed: list[int]) -> None:
    async with MessageQueue(0, 0):
        with counted():
            finder = SegmentFinder()
            first = mine(finder)
            assert os.getpid() in listed
            listed.clear()
            assert mine(finder) == first
            assert os.getpid() not in listed
            async with MessageQueue(0, 0):
                assert len(mine(finder)) == len(first) + 1
                assert os.getpid() in listed
            assert mine(finder) == first


async def test_one_queue_in_the_place_of_another_is_found(listed: list[int]) -> None:
    finder = SegmentFinder()
    async with MessageQueue(0, 0):
        before = {segment.link for segment in finder.find()[0] if os.getpid() in segment.holders}
    async with MessageQueue(0, 0):  # with as many descriptors, and under the same numbers
        after = [segment for segment in finder.find()[0] if os.getpid() in segment.holders]
        assert len(after) == 1
        assert os.stat(after[0].paths[0]).st_size > 0
    assert before


async def test_a_segment_is_opened_by_whoever_still_has_it() -> None:
    async with MessageQueue(0, 0):
        [segment] = [each for each in SegmentFinder().find()[0] if os.getpid() in each.holders]
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        with open(os.devnull) as other:
            segment.paths[:0] = [f"/proc/{ended.pid}/fd/3", f"/proc/self/fd/{other.fileno()}"]
            fd = segment.open()
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        assert (status.st_dev, status.st_ino) == segment.identity
    with pytest.raises(FileNotFoundError, match="nobody has /memfd:aioshm"):
        segment.open()


async def test_in_the_long_run_everybody_is_looked_at(listed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    finder = SegmentFinder()
    mine(finder)
    listed.clear()
    monkeypatch.setattr(segments, "LOOK_AGAIN_S", -1.0)
    mine(finder)
    assert os.getpid() in listed
