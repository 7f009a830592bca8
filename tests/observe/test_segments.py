"""Segments of this user's processes are found by their descriptors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from aioshm import MessageQueue
from aioshm.observe.scan import Segment, find_segments


def of_this_process() -> list[Segment]:
    return [segment for segment in find_segments()[0] if os.getpid() in segment.holders]


async def test_segment_that_another_holder_has_given_up_is_opened_through_the_last_one() -> None:
    async with MessageQueue(0, 0):
        [segment] = of_this_process()
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
    assert of_this_process() == []
