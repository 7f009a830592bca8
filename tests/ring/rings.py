"""What the tests do with rings, here and in other processes: spawned children import it, so nothing of pytest here."""

from __future__ import annotations

import copyreg
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from types import ModuleType
from typing import Any, NamedTuple

from aioshm.ring import Layout, ShmRingBuffer, reference
from aioshm.ring.ends import ReaderControl, WriterControl
from aioshm.ring.slot import Slot

try:
    from aioshm.ring import _native
except ImportError:
    _native = None  # type: ignore[assignment]


class Cores(NamedTuple):
    """A writer's and a reader's core that belong together, and the module that has them."""

    writer: type[WriterControl]
    reader: type[Peeking]
    module: ModuleType


class Peeking(ReaderControl):
    """A reader's end of which tests look at slots."""

    def peek(self) -> Slot | None:
        """Return the slot of the next message; None: there is no message."""
        self.check_unused()
        if not self.ready():
            return None
        return self.slots[self.seq % self.layout.slots]


class ReferenceWriter(WriterControl, reference.WriterBase): ...


class ReferenceReader(Peeking, reference.ReaderBase): ...


class OrderedWriter(ReferenceWriter):
    reorders = True


class OrderedReader(ReferenceReader):
    reorders = True


NATIVE: Cores | None = None
if _native is not None:

    class NativeWriter(WriterControl, _native.WriterBase): ...

    class NativeReader(Peeking, _native.ReaderBase): ...

    NATIVE = Cores(NativeWriter, NativeReader, _native)

PORTABLE = Cores(ReferenceWriter, ReferenceReader, reference)
ORDERED = Cores(OrderedWriter, OrderedReader, reference)
TWINS = {"portable": PORTABLE, "ordered": ORDERED}
CORES: dict[str, Cores] = TWINS if NATIVE is None else {"native": NATIVE, **TWINS}

NewRing = Callable[..., ShmRingBuffer]

_PATTERN = bytes(range(256)) * 20


def fds() -> set[str]:
    """Return this process' open descriptors."""
    return set(os.listdir("/proc/self/fd"))


def content(number: int, room: int) -> bytes:
    """Return what message ``number`` holds: a mix-up of slots, lengths or laps shows."""
    stamp = number.to_bytes(8, "little")
    start = number % 251
    return stamp + _PATTERN[start : start + number * 37 % (room - len(stamp) + 1)]


def _reopened(layout: Layout, fd: Any, queue_id: bytes) -> ShmRingBuffer:
    return ShmRingBuffer.from_fd(layout, fd.detach(), queue_id)


# So that a ring can be an argument of a spawned process.
copyreg.pickle(ShmRingBuffer, lambda ring: (_reopened, (ring.layout, DupFd(ring.fd), ring.queue_id)))


def python(code: str, *args: object) -> subprocess.Popen[str]:
    """Start a Python process that reports every warning."""
    command = [sys.executable, "-W", "always", "-c", code, *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
