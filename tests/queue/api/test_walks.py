"""How many files a slow `dequeue` crosses: what a reader of the code, or of a traceback, has to follow."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from support import HELPERS

import aioshm
import aioshm.blocking
from aioshm import MessageQueue
from aioshm.queue import Handle

pytestmark = pytest.mark.skipif(not aioshm.native_core, reason="counts what the docs say of the C core")

PACKAGE = str(Path(aioshm.__file__).parent)
MOST = 10
WARM_UP = 20
MESSAGES = 100


class Files:
    """The files of the package of which this thread runs something."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __enter__(self) -> None:
        sys.setprofile(self._note)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and "/testing/" not in name:
            self.names.add(name[len(PACKAGE) + 1 :])


@pytest.fixture
def handle() -> Iterator[Handle]:
    """Give the handle of a writer that sends a message every 5 ms, so that a reader parks, and spins in windows."""
    command = [sys.executable, str(HELPERS / "walks_child.py")]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield Handle.from_json(child.stdout.readline())
    finally:
        child.communicate(timeout=20)


async def test_a_slow_dequeue_crosses_few_files(handle: Handle) -> None:
    files = Files()
    async with MessageQueue.create_from_handle(handle, 0) as reader:
        await reader.wait_until_ready(20)
        for _ in range(WARM_UP):
            await reader.dequeue(20)
        for _ in range(MESSAGES):
            with files:
                await reader.dequeue()
        assert reader.stats().parks
    assert len(files.names) <= MOST, "\n".join(sorted(files.names))


def test_a_slow_blocking_dequeue_crosses_few_files(handle: Handle) -> None:
    files = Files()
    with aioshm.blocking.MessageQueue.create_from_handle(handle, 0) as reader:
        reader.wait_until_ready(20)
        for _ in range(WARM_UP):
            reader.dequeue(20)
        for _ in range(MESSAGES):
            with files:
                reader.dequeue()
        assert reader.stats().parks
    assert len(files.names) <= MOST, "\n".join(sorted(files.names))
