"""Signals whose handlers raise at every place of a block's way in and out, several right after each other."""

from __future__ import annotations

import _thread
import gc
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from faces import Thread, make_writer
from managed import open_things
from support import eventually

from aioshm import blocking
from aioshm.process.loop_thread import LoopThread

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)


class _Interrupted(Exception):
    pass


class _Stopped(BaseException):
    """Is no `Exception`, as KeyboardInterrupt is none."""


class Interrupter:
    """Lets signals come at one of the places where Python looks for them, counted from `arm` on.

    Those are where a Python function begins, and where one in C has returned. Where several come at once, their
    handlers run one by one: what the first raises is on its way, or is being handled, when the next one raises.

    Attributes:
        came: Whether the signals have come.
        raising: Whether handlers raise. Unsetting it takes no call: no handler runs before that.
    """

    def __init__(self) -> None:
        self.came = self.raising = False
        self._left = 0
        self._numbers: tuple[signal.Signals, ...] = ()
        self._more = 0

    def arm(self, place: int, numbers: tuple[signal.Signals, ...], more: int = 0) -> None:
        """Raise, and count, from here on.

        Args:
            place: At which place signals come.
            numbers: Which do.
            more: How many functions in Python begin until one more signal comes; 0: none does.
        """
        self.came, self._left, self._numbers = False, place, numbers
        self.raising = True
        self._more = more
        gc.disable()  # others' callbacks of the collector, such as hypothesis's, are not to be interrupted
        if more:
            sys.settrace(self._count_on)  # as the other function is taken off where a handler raises in it
        sys.setprofile(self._count)

    def disarm(self) -> None:
        """Count no more."""
        sys.setprofile(None)
        sys.settrace(None)
        gc.enable()

    def check_raised(self) -> None:
        """Check that between calls handlers raise, and at once, however a call was interrupted."""
        for number in SIGNALS:
            with pytest.raises(_Interrupted):
                self.raising = True
                signal.raise_signal(number)
            self.raising = False

    def _count(self, _frame: object, event: str, _arg: object) -> None:
        if event not in ("call", "c_return"):
            return
        self._left -= 1
        if self._left == 0:
            self.came = True
            list(map(_thread.interrupt_main, self._numbers))  # one call, so that all have come when the first is seen

    def _count_on(self, _frame: object, _event: str, _arg: object) -> None:
        if self.came and self._more:
            self._more -= 1
            if not self._more:
                _thread.interrupt_main(SIGNALS[-1])


@contextmanager
def interrupter(error: type[BaseException] = _Interrupted) -> Iterator[Interrupter]:
    """Give an interrupter to the block, in which handlers raise that error."""

    interrupter = Interrupter()

    def handle(*_: object) -> None:
        if interrupter.raising:
            raise error

    before = [signal.signal(number, handle) for number in SIGNALS]
    # A block that is dropped while one exception is on its way calls back; Python reports what the next handler raises
    # there. Not by a function in Python, which would be interrupted itself.
    report, sys.unraisablehook = sys.unraisablehook, id
    try:
        yield interrupter
        assert [signal.getsignal(number) for number in SIGNALS] == [handle] * len(SIGNALS)
    finally:
        interrupter.disarm()
        sys.unraisablehook = report
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def ends() -> Iterator[tuple[blocking.MessageQueue, blocking.MessageQueue]]:
    """Give a writer and its reader, both ready, to the block."""
    with make_writer(codec="raw", chunks=16) as writer:
        with blocking.MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            waiting = Thread(writer.wait_until_ready, 20)
            reader.wait_until_ready(20)
            waiting.result()
            yield writer, reader


def read_interrupted(how: str, numbers: tuple[signal.Signals, ...], more: int = 0) -> None:
    """Interrupt a block that reads at its first place, at its second one, and so on to its last."""
    with ends() as (writer, reader), interrupter() as interrupt:
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
                interrupt.arm(place, numbers, more)
                with block(20) as view:
                    got = view[0]
                interrupt.disarm()
            except _Interrupted:
                pass
            interrupt.raising = False
            interrupt.disarm()
            interrupt.check_raised()
            came, view = interrupt.came, None
            if got is not None:
                assert got == received % 256, f"interrupted at place {place}"
                received += 1
            with block(20) as view:
                assert view[0] == received % 256, f"interrupted at place {place}"
            view = None
            received += 1
            assert (reader.messages, reader.held.lock.owner) == (received, 0), f"interrupted at place {place}"
        assert place > 50


def write_interrupted(numbers: tuple[signal.Signals, ...], more: int = 0) -> None:
    """Interrupt a block that writes at its first place, at its second one, and so on to its last."""
    with ends() as (writer, reader), interrupter() as interrupt:
        place = 0
        came = True
        while came:
            place += 1
            before = writer.messages
            try:
                interrupt.arm(place, numbers, more)
                with writer.acquire_write(20) as chunk:
                    chunk[0] = 1
                interrupt.disarm()
            except _Interrupted:
                pass
            interrupt.raising = False
            interrupt.disarm()
            interrupt.check_raised()
            came, chunk = interrupt.came, None
            with writer.acquire_write(20) as chunk:
                chunk[0] = 2
            chunk = None
            assert writer.held.lock.owner == 0, f"interrupted at place {place}"
            received = [reader.dequeue(20)[0] for _ in range(writer.messages - before)]
            assert received in ([1, 2], [2]), f"interrupted at place {place}"
        assert received == [1, 2]
        assert place > 50


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("how", ["lease", "acquire_read"])
def test_a_block_that_reads_loses_nothing(how: str, count: int) -> None:
    read_interrupted(how, SIGNALS[:count])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_block_that_writes_sends_all_or_nothing(count: int) -> None:
    write_interrupted(SIGNALS[:count])


LATER = (1, 2, 3, 4, 6, 9, 14, 20)


@pytest.mark.slow
@pytest.mark.parametrize("more", LATER)
def test_a_block_that_reads_is_interrupted_again_a_little_later(more: int) -> None:
    for count in (1, 2):
        read_interrupted("acquire_read", SIGNALS[:count], more)


@pytest.mark.slow
@pytest.mark.parametrize("more", LATER)
def test_a_block_that_writes_is_interrupted_again_a_little_later(more: int) -> None:
    for count in (1, 2):
        write_interrupted(SIGNALS[:count], more)


def test_background_loop_whose_start_or_end_is_interrupted_leaves_nothing() -> None:
    def left() -> set[Any]:
        # Interrupted early in `Thread.start`, CPython 3.13 goes on listing a thread that has never begun.
        begun = {each for each in threading.enumerate() if each.name == "aioshm-loop" and each.ident is not None}
        return begun - threads | open_things() - before

    LoopThread("a test").stop()
    threads, before = set(threading.enumerate()), open_things()
    with interrupter(_Stopped) as interrupt, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        place = 0
        came = True
        while came:
            place += 1
            try:
                interrupt.arm(place, SIGNALS[:1])
                LoopThread("a test").stop()
                interrupt.disarm()
            except _Stopped:  # for an `Exception` after the start of a thread, threading raises KeyError now and then
                pass
            interrupt.raising = False
            interrupt.disarm()
            came = interrupt.came
            gc.collect()
            eventually(lambda: not left(), f"the end of {left()}")
        assert place > 50
    assert not [each for each in warned if issubclass(each.category, ResourceWarning)]
