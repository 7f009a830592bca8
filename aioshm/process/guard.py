"""Keeps signal handlers from raising in the middle of what must not be torn, until it is over."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps, whose conversions to enums would cost each call 80 us
import signal
import threading
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_NUMBERS = tuple(sorted(map(int, signal.valid_signals())))
_getsignal: Callable[[int], Any] = _signal.getsignal
_signal_signal: Callable[[int, Any], Any] = _signal.signal

PATIENCE_S = 1.0
"""After so long, what a handler raises once more is raised at once: a user who presses Ctrl-C again wants to leave."""


class Guard:
    """Runs the handlers of signals, but keeps what they raise.

    Python runs handlers on the main thread alone, between any two of its instructions; elsewhere this does nothing.
    While it is on, each signal that has a handler has one of this instead, which calls it. The handlers may see that
    (``signal.getsignal``); where one sets another handler for its signal, that one stays.

    Attributes:
        error: What the first handler to raise has raised. To be taken without a call, as handlers are back by then
            and raise in calls: ``error, guard.error = guard.error, None``.
        on_error: Called once one has.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.on_error: Callable[[], object] | None = None
        self._saved: dict[int, Any] = {}
        self._replaced = False
        self._active = False
        self._since = 0.0

    def begin(self) -> None:
        """Begin to keep what handlers raise; whatever this raises, call `end`."""
        if get_ident() != threading.main_thread().ident:
            return
        ours = self._handle
        self._replaced = self._active = True
        try:
            for number, handler in zip(_NUMBERS, map(_getsignal, _NUMBERS), strict=True):
                if handler is None or type(handler) is int or handler == ours:
                    continue
                self._saved[number] = handler  # before it is replaced: what replaces it looks here
                _signal_signal(number, ours)
        except BaseException:  # raised by a handler that is not replaced yet
            self._active = False
            raise

    def end(self) -> None:
        """Give the signals their handlers back; raises nothing but what they raise from then on.

        Where several raise one right after the other, some may be given back by the next call only; until then they
        are called, and what they raise is raised.
        """
        if not self._replaced or get_ident() != threading.main_thread().ident:
            return
        try:
            for number, handler in self._saved.items():
                if _getsignal(number) == self._handle:
                    _signal_signal(number, handler)
        except BaseException:  # raised by a handler that is back, on the way to the next one
            self._active = False  # first, and without a call: the next signal may be there already
            self.end()
            raise
        self._replaced = self._active = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        handler = self._saved[number]
        if not self._active:  # it could not be given back yet
            handler(number, frame)
            return
        try:
            handler(number, frame)
        except BaseException as error:
            if self.error is None:
                self.error = error.with_traceback(None)
                self._since = monotonic()
                if self.on_error is not None:
                    self.on_error()
            elif monotonic() - self._since > PATIENCE_S:
                raise


def built(make: Callable[[], T]) -> T:
    """Return what a function makes; what a signal's handler raises meanwhile, this raises afterwards.

    For msgspec's decoders: CPython can crash where a handler raises while msgspec 0.22 looks at the types of one.
    """
    guard = Guard()
    try:
        guard.begin()
        return make()
    finally:
        try:
            guard.end()
        finally:
            if guard.error is not None:
                raise guard.error
