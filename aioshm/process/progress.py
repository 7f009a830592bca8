"""Progress of a process, in a cell of memory that its supervisor reads.

Each process that aioshm starts inherits a file with one cell. The process writes the cell without a system call: before
and after each step or call, and while its event loop runs. The supervisor reads the cell, see
`aioshm.process.stalls`. Behind the cell is the output of ``faulthandler``.
"""

from __future__ import annotations

import asyncio
import faulthandler
import mmap
import multiprocessing
import os
import signal
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic_ns
from typing import Any, NamedTuple

from aioshm.arguments import check_seconds
from aioshm.process.limits import detach_when_forked

STARTING, IDLE, BUSY, ENDING, WAITING = range(5)
"""Phases. A process that is starting or ending has other limits, so it is not judged. A busy process that waits for its
peers, in a collective operation, is `WAITING`.
"""

TURN_S = 0.5
"""Seconds between two signs of life of an event loop."""

STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - 3 * hasattr(signal, "SIGRTMAX")
"""Makes a process write its stacks, if it says so in its cell."""

CELL_BYTES = 80
STACK_OFFSET = 4096
ATTRIBUTE = "_aioshm_progress"
"""The attribute of ``multiprocessing.current_process()`` with the inherited descriptor."""
FILE_NAME = "progress-of-aioshm"
"""Unlike those of queues, which begin with aioshm."""

_CELL = struct.Struct("=10Q")
_STATE, _TURNED, _SEEN, _SINCE, _EXPECTED, _REQUESTS, _WRITES_STACKS, _WAITED, _BLOCKS, _ANNOUNCED = range(10)
_ONE_STEP = 8
"""One step more, in the word of the state; the phase takes the bits below."""


class Sample(NamedTuple):
    """One reading of a cell."""

    phase: int
    steps: int  # steps, calls and blocks of `expect` that have begun or ended
    turned_ns: int  # the latest sign of life of the event loop, by the monotonic clock of the host; 0: no loop runs
    expected_s: float  # how long the present step may take, by its own word; 0: not known
    since_ns: int  # when the phase or a block of `expect` began or ended, to within `TURN_S`; 0: not known
    requests: int  # in the hands of the process
    writes_stacks: bool  # whether the process handles `STACK_SIGNAL`


class Cell:
    """The supervisor's end: an anonymous file that one process inherits."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create(FILE_NAME), "w+b", buffering=0)
        else:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 -- see `close`
        os.ftruncate(self._file.fileno(), STACK_OFFSET)

    def fileno(self) -> int:
        """The descriptor, which the process inherits by the same number."""
        return self._file.fileno()

    def read(self) -> Sample | None:
        """Return the present reading; None after `close`."""
        if self._file.closed:
            return None
        return parse(os.pread(self._file.fileno(), CELL_BYTES, 0))

    def drop_stacks(self) -> None:
        """Make room for the stacks that the process writes on `STACK_SIGNAL`; raise ValueError after `close`."""
        self._file.truncate(STACK_OFFSET)
        self._file.seek(STACK_OFFSET)  # the offset belongs to both processes

    def stacks(self) -> str:
        """Return what the process has written after `drop_stacks`."""
        size = os.fstat(self._file.fileno()).st_size - STACK_OFFSET
        return os.pread(self._file.fileno(), size, STACK_OFFSET).decode(errors="replace")

    def waits(self) -> str:
        """Return where the coroutine of the present step waits, as ``faulthandler`` writes stacks; "" if not known."""
        page = os.pread(self._file.fileno(), STACK_OFFSET, 0)
        words = _CELL.unpack_from(page)
        if words[_WAITED] != words[_STATE]:
            return ""
        return page[CELL_BYTES:].partition(b"\0")[0].decode(errors="replace")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def parse(cell: bytes) -> Sample:
    """Return the reading of a cell's bytes."""
    state, turned_ns, seen, since_ns, expected_ns, requests, writes_stacks, _, blocks, announced_ns = _CELL.unpack(cell)
    steps, phase = divmod(state, _ONE_STEP)
    if seen != state:  # begun since the latest sign of life
        since_ns = turned_ns
    since_ns = max(since_ns, announced_ns)
    return Sample(phase, steps + blocks, turned_ns, expected_ns / 1e9, since_ns, requests, bool(writes_stacks))


class Progress:
    """The end of the process itself; without an inherited cell, in private memory."""

    def __init__(self, descriptor: int | None = None) -> None:
        memory: mmap.mmap | bytearray = bytearray(CELL_BYTES)
        if descriptor is not None:
            memory = mmap.mmap(descriptor, STACK_OFFSET)
        self.is_watched: bool = descriptor is not None
        self._expected: dict[object, int] = {}  # by block that runs, in nanoseconds
        self._announcing = threading.Lock()
        self.on_expect: set[Callable[[], object]] = set()
        """Called in any thread when `expect` begins and ends; they raise nothing."""
        self._words = memoryview(memory)[:CELL_BYTES].cast("Q")
        self._steps = 0  # in units of `_ONE_STEP`
        self._waits = memoryview(memory)[CELL_BYTES:]
        self.task: asyncio.Task[Any] | None = None
        """The task that awaits the present step."""
        detach_when_forked(self)
        if descriptor is not None:
            self._words[_WRITES_STACKS] = _write_stacks_to(descriptor)

    def detach_after_fork(self) -> None:
        """Leave the cell to the parent, in a forked child."""
        self._words = memoryview(bytearray(CELL_BYTES)).cast("Q")
        self._waits = memoryview(b"")
        self._announcing = threading.Lock()
        self.on_expect = set()

    def enter(self, phase: int) -> None:
        """Note the beginning of a phase, such as a step's."""
        self._steps += _ONE_STEP
        self._words[_STATE] = self._steps | phase  # at once: no reader sees half of it

    def note_requests(self, count: int) -> None:
        """Note how many requests the process has."""
        self._words[_REQUESTS] = count

    def read(self) -> Sample:
        """Return the present reading."""
        return parse(bytes(self._words))

    @contextmanager
    def expect(self, seconds: float) -> Iterator[None]:
        """See the function `expect`."""
        block = object()
        self._announce(block, int(1e9 * seconds))
        try:
            yield
        finally:
            self._announce(block, 0)  # blocks of several tasks or threads may end in any order

    def _announce(self, block: object, expected_ns: int) -> None:
        with self._announcing:  # in any thread: the state is written by the thread of the steps alone
            self._expected.pop(block, None)
            if expected_ns:
                self._expected[block] = expected_ns
            self._words[_EXPECTED] = [0, *self._expected.values()][-1]
            self._words[_BLOCKS] += 1
            self._words[_ANNOUNCED] = monotonic_ns()
        for notify in tuple(self.on_expect):
            notify()

    @contextmanager
    def turning(self) -> Iterator[None]:
        """Give signs of life while the running loop runs, until the end of the block.

        Nothing happens where another part of the program gives them.
        """
        if self._words[_TURNED]:
            yield
            return
        loop = asyncio.get_running_loop()
        self.task = asyncio.current_task()
        handle: asyncio.TimerHandle

        def turn() -> None:
            nonlocal handle
            self._words[_TURNED] = monotonic_ns()
            if self._words[_SEEN] != self._words[_STATE]:
                self._see_state()
            if self._words[_STATE] % _ONE_STEP in (BUSY, WAITING):
                self._note_wait()
            handle = loop.call_later(TURN_S, turn)

        turn()
        try:
            yield
        finally:
            self._words[_TURNED] = 0  # a loop that has ended is not late
            if not loop.is_closed():
                handle.cancel()

    def _see_state(self) -> None:
        """Note the time of the present phase; a stamp does not, for the clock costs as much as the stamp."""
        self._words[_SEEN] = self._words[_STATE]
        self._words[_SINCE] = monotonic_ns()

    def _note_wait(self) -> None:
        """Write down where the coroutine of the step waits: it is on the stack of no thread."""
        if self._waits and self.task is not None:
            text = "".join(reversed(list(_waiting_frames(self.task.get_coro())))).encode()[: len(self._waits) - 1]
            self._waits[: len(text) + 1] = text + b"\0"
            self._words[_WAITED] = self._words[_STATE]

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Be idle, and give signs of life, until the end of the block: in a process without steps or calls."""
        if not self.is_watched or self._words[_TURNED]:  # nobody looks, or signs are given
            yield
            return
        self.enter(IDLE)
        with self.turning():
            yield


_own: Progress | None = None


def own() -> Progress:
    """Return the progress of this process."""
    global _own
    if _own is None:
        _own = Progress(getattr(multiprocessing.current_process(), ATTRIBUTE, None))
    return _own


@contextmanager
def expect(seconds: float) -> Iterator[None]:
    """Announce that what the block does may take long, so that the process does not count as stalled before.

        with progress.expect(600):
            compile_kernels()

    For steps and methods of engines and workers; may be called in any thread. Of several blocks at a time, the block
    that began last counts. Loading a model in ``initialize``, or in the constructor of a worker, needs none: the start
    has a limit of its own.

    Args:
        seconds: How long the block may take. The time counts from its beginning.

    Raises:
        TypeError, ValueError: ``seconds`` is not a positive number.
    """
    with own().expect(check_seconds("seconds", seconds)):
        yield


def _waiting_frames(awaited: Any) -> Iterator[str]:
    """Yield the calls of a waiting coroutine, outermost first, in the line format of ``faulthandler``."""
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n'
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)


def _write_stacks_to(descriptor: int) -> bool:
    """Have `STACK_SIGNAL` write the stacks there, and faults to the stderr; return whether the signal is handled."""
    if not faulthandler.is_enabled() and sys.stderr is not None:
        with suppress(OSError, ValueError, RuntimeError, AttributeError):  # stderr has no descriptor
            faulthandler.enable()
    if signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL:  # the program's own
        return False
    faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=True)
    return True
