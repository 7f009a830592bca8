"""Ends that nobody closes: Python still ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGINNING = """
import asyncio, os, sys, threading
import aioshm.blocking
from aioshm import MessageQueue

async def attached():
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1")
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    await asyncio.gather(writer.wait_until_ready(10), reader.wait_until_ready(10))
    await writer.enqueue(bytearray(1_000_000))
    assert len(await reader.dequeue(10)) == 1_000_000
    return writer, reader
"""

ENDINGS = {
    "kept by a module": "kept = asyncio.run(attached())",
    "an error": """
async def main():
    ends = await attached()
    raise SystemExit(0)
asyncio.run(main())
""",
    "never awaited": 'writer = MessageQueue(1, 0, connect_ip="127.0.0.1")',
    "blocking": """
writer = aioshm.blocking.MessageQueue(1, 0, connect_ip="127.0.0.1")
handle = writer.export_handle()
def read():
    global reader
    reader = aioshm.blocking.MessageQueue.create_from_handle(handle, 0)
    assert reader.dequeue(10) == "text"
thread = threading.Thread(target=read)
thread.start()
writer.enqueue("text", 10)
thread.join()
""",
    "forked": """
ends = asyncio.run(attached())
pid = os.fork()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_python_ends_all_the_same(ending: str) -> None:
    done = subprocess.run(
        # Without the warning of Python 3.12 and later that a process with threads, such as ZeroMQ's, forks.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", BEGINNING + ENDINGS[ending]],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (done.returncode, done.stderr) == (0, "")
