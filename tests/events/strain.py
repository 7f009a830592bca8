"""The cost of an attack to its victim: how long the loop was blocked, and the peak of memory."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import TracebackType

import zmq

# Limits for the damage of strangers to a loop and to its process.
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
        gc.freeze()  # the collector skips the garbage of earlier tests
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


def array(length: int) -> bytes:
    return b"\xdd" + length.to_bytes(4, "big")


# An event in the form of an array, up to its tokens.
STORED = b"\x97\xabBlockStored\x91\x01\xc0"
# Events of batches that are expensive to decode.
ATTACKS = {
    "nils": array(2_000_000) + b"\xc0" * 2_000_000,
    "nested": array(1) + b"\x99" + STORED[1:] + b"\x90\x01\xc0\xc0\xc0\x91" + array(2_000_000) + b"\x90" * 2_000_000,
}


@asynccontextmanager
async def attack(endpoint: str, name: str) -> AsyncIterator[None]:
    """Send such batches to a subscriber that binds, from another process."""
    process = await asyncio.create_subprocess_exec(sys.executable, __file__, endpoint, name)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


if __name__ == "__main__":
    stranger: zmq.Socket[bytes] = zmq.Context().socket(zmq.XPUB)
    stranger.connect(sys.argv[1])
    stranger.recv()  # a subscription
    for number in count():
        payload = b"\x93\xcb" + bytes(8) + ATTACKS[sys.argv[2]] + b"\x07"
        stranger.send_multipart([b"", number.to_bytes(8, "big"), payload])
        time.sleep(0.01)
