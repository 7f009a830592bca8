"""Ends of a queue in processes of their own."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

CHILD = Path(__file__).with_name("child.py")


class Child:
    """A running ``child.py``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def says(self, beginning: str = "") -> str:
        assert self._process.stdout is not None
        line = (await asyncio.wait_for(self._process.stdout.readline(), 20)).decode().rstrip("\n")
        assert line.startswith(beginning), f"the child said {line!r} instead of {beginning!r}"
        return line

    async def rest(self) -> list[str]:
        """Return the lines that it says until its end."""
        assert self._process.stdout is not None
        return (await asyncio.wait_for(self._process.stdout.read(), 20)).decode().splitlines()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def end(self) -> int:
        return await asyncio.wait_for(self._process.wait(), 20)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.end()


@asynccontextmanager
async def child(*arguments: str, script: Path = CHILD) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    try:
        yield Child(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        assert process.stderr is not None
        complaints = (await asyncio.wait_for(process.stderr.read(), 10)).decode()
        assert complaints == "", f"no traceback, no warning of the resource tracker: {complaints}"
        # asyncio leaves the pipe's transport to the garbage collector.
        process._transport.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0)
