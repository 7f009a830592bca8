"""Signals whose handlers raise, at every place of a block's way in and out; one, or several right after each other."""

from __future__ import annotations

import _thread
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from faces import Thread, handling, pair
from support import eventually

from aioshm.errors import RoleError

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


class _Interrupted(Exception):
    pass


class Interrupter:
    """Sends a signal at one of the places where Python runs handlers, counted from `arm` on.

    A handler runs where a Python function begins, and where a C function has returned.

    Attributes:
        came: Whether the signal has come.
        raising: Whether the handler raises. Unsetting it takes no call: no handler runs before that.
    """

    def __init__(self) -> None:
        self.came = self.raising = False
        self._left = 0
        self._numbers: tuple[signal.Signals, ...] = ()

    def arm(self, place: int, count: int = 1) -> None:
        """Send so many signals at this place from here on."""
        self.came = False
        self._numbers = SIGNALS[:count]
        self._left = place
        self.raising = True
        gc.disable()  # others' callbacks of the collector, such as hypothesis's, are not to be interrupted
        sys.setprofile(self._count)

    def disarm(self) -> bool:
        """Count no more; return whether the signal has come."""
        sys.setprofile(None)
        gc.enable()
        return self.came

    def _count(self, _frame: object, event: str, _arg: object) -> None:
        if event not in ("call", "c_return"):
            return
        self._left -= 1
        if self._left == 0:
            self.came = True
            list(map(_thread.interrupt_main, self._numbers))  # one call, so that all have come when the first is seen


@contextmanager
def interrupter() -> Iterator[Interrupter]:
    """Give an interrupter to the block, in which handlers raise that error."""
    interrupter = Interrupter()

    def handle(*_: object) -> None:
        if interrupter.raising:
            raise _Interrupted

    # A block that is dropped while one exception is on its way calls back; Python reports what the next handler raises
    # there. Not by a function in Python, which would be interrupted itself.
    report, sys.unraisablehook = sys.unraisablehook, id
    with handling(handle, *SIGNALS):
        try:
            yield interrupter
        finally:
            interrupter.disarm()
            sys.unraisablehook = report


@pytest.fixture(autouse=True)
def calls_of_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a type in a function: handlers run after the call of a type, too, which no profiler sees."""
    seen = SimpleNamespace(ref=lambda *arguments: weakref.ref(*arguments))
    monkeypatch.setattr("aioshm.queue.blocking.blocks.weakref", seen)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("how", ["lease", "acquire_read"])
def test_block_that_reads_and_is_interrupted_at_any_place_loses_nothing(how: str, count: int) -> None:
    with pair(codec="raw", chunks=16) as (writer, reader), interrupter() as interrupt:
        block: Callable[..., Any] = getattr(reader, how)
        sent = received = place = 0
        came = True
        while came:
            place += 1
            while sent < received + 2:
                writer.enqueue(bytes([sent % 256]), 20)
                sent += 1
            got = view = None
            try:
                interrupt.arm(place, count)
                with block(20) as view:
                    got = view[0]
                interrupt.disarm()
            except _Interrupted:
                pass
            interrupt.raising = False
            came = interrupt.disarm()
            view = None
            if got is not None:
                assert got == received % 256, f"interrupted at place {place}"
                received += 1
            with block(20) as view:
                assert view[0] == received % 256, f"interrupted at place {place}"
            view = None
            received += 1
            assert (reader.messages, reader.held.lock.owner) == (received, 0), f"interrupted at place {place}"
        assert place > 50


@pytest.mark.parametrize("count", [1, 3])
def test_block_that_writes_and_is_interrupted_at_any_place_sends_all_or_nothing(count: int) -> None:
    with pair(codec="raw", chunks=16) as (writer, reader), interrupter() as interrupt:
        place = 0
        came = True
        while came:
            place += 1
            before = writer.messages
            try:
                interrupt.arm(place, count)
                with writer.acquire_write(20) as chunk:
                    chunk[0] = 1
                interrupt.disarm()
            except _Interrupted:
                pass
            interrupt.raising = False
            came = interrupt.disarm()
            chunk = None
            with writer.acquire_write(20) as chunk:
                chunk[0] = 2
            chunk = None
            assert writer.held.lock.owner == 0, f"interrupted at place {place}"
            received = [reader.dequeue(20)[0] for _ in range(writer.messages - before)]
            assert received in ([1, 2], [2]), f"interrupted at place {place}"
        assert received == [1, 2]
        assert place > 50


@pytest.mark.parametrize(("error", "count"), [(_Interrupted, 6), (RoleError, 1)])
def test_call_on_the_loop_that_handlers_interrupt_sends_nothing_later(error: type[Exception], count: int) -> None:
    numbers = [*SIGNALS, signal.SIGPROF, signal.SIGVTALRM, signal.SIGHUP][:count]
    call = SimpleNamespace(runs=True, interrupted=False)

    def handle(*_: object) -> None:
        if call.runs:
            raise error

    def send(caller: int) -> None:
        eventually(lambda: writer.held.state.lock.calls, "the call to wait on the loop")
        # The GIL stays here, so that all have come when the first is seen. Only one is a true signal, which wakes the
        # caller: six handlers of C nest, and overflow the stack that pytest's faulthandler gives them.
        for number in numbers[1:]:
            _thread.interrupt_main(number)
        signal.pthread_kill(caller, numbers[0])

    with pair() as (writer, reader):
        writer.enqueue_many(range(4), 20)
        with handling(handle, *numbers):
            sending = Thread(send, threading.get_ident())
            try:
                writer.enqueue_many(["late"], 20)
            except error:
                call.runs = False  # takes no call: no handler raises before this
                call.interrupted = True
            sending.result()
        assert (call.interrupted, writer.messages) == (True, 4)
        assert reader.dequeue_many(9, 20) == [*range(4)]
        writer.enqueue("after", 20)
        assert reader.dequeue(20) == "after"


def test_end_that_a_handler_closes_is_closed_wherever_the_next_handler_raises() -> None:
    place = 0
    came = True
    while came:
        place += 1
        with pair() as (_, reader), interrupter() as interrupt:

            def close_and_arm(place: int = place) -> None:
                reader.close()
                interrupt.arm(place)

            try:
                reader.held.alone(close_and_arm, None)
                interrupt.disarm()
            except _Interrupted:
                pass
            interrupt.raising = False
            came = interrupt.disarm()
            eventually(lambda held=reader.held: held.closed, f"the end that was interrupted at place {place}")
    assert place > 10
