"""What an attack costs the process that is attacked: how long its loop was held, how much memory it took at most."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType

ATTACKER = Path(__file__).with_name("attacker.py")
# What strangers may do to one loop, and to its process.
HELD_S = 0.05
MEMORY_KB = 64 << 10


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


class Strain:
    """Measures while it is entered.

    Attributes:
        held_s: The longest that anything kept this loop's thread busy: processor time, for others may have the cores.
        grown_kb: By how much resident memory was larger at its peak than before.
    """

    def __init__(self) -> None:
        self.held_s = 0.0
        self.grown_kb = 0

    async def __aenter__(self) -> Strain:
        gc.collect()
        gc.freeze()  # what other tests have left is not looked through again for this one's garbage
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again, proc(5)
        self._before = _status("VmRSS")
        self._busy = time.thread_time()
        self._beat()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._next_beat.cancel()
        self.grown_kb = _status("VmHWM") - self._before

    def _beat(self) -> None:
        busy = time.thread_time()
        self.held_s, self._busy = max(self.held_s, busy - self._busy), busy
        self._next_beat = asyncio.get_running_loop().call_later(0.001, self._beat)  # no task, which is a turn later

    def check(self) -> None:
        assert self.held_s <= HELD_S, f"the loop was held for {self.held_s:.3f} s"
        assert self.grown_kb <= MEMORY_KB, f"memory has grown by {self.grown_kb} KB"


@asynccontextmanager
async def attack(
    endpoint: str, kind: str, name: str, seconds: float = 2.0, connections: int = 1
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Attack the port of ``endpoint`` with clients of type ``kind``, from another process."""
    port = endpoint.rpartition(":")[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ATTACKER), port, kind, name, str(seconds), str(connections), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def cuts(process: asyncio.subprocess.Process) -> int:
    """Wait until an attacker has given up, or its time is over; return how often it was hung up on."""
    output, _ = await process.communicate()
    return int(output.split()[1])
