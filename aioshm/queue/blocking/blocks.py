"""Blocks that have a slot of an end whose calls block: ``with mq.lease() as obj``."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any, Protocol

_BEFORE_WITH = dis.opmap.get("BEFORE_WITH", -1)


class Owner(Protocol):
    """The end, as its blocks use it."""

    def enter_block(self, block: Block) -> None:
        """Wait for the slot; sets what the block shows."""

    def undo_block(self, block: Block) -> None:
        """Leave a block that was never entered."""

    def leave_block(self, block: Block, *error: Any) -> bool | None:
        """Leave the block. Does nothing once done."""


class Block(AbstractContextManager[Any]):
    """One block. What a signal's handler raises on the way in or out leaves no slot behind.

    Python calls ``__enter__`` and ``__exit__`` without looking for signals on the way back, so one that returns has
    been entered. On the way to ``__exit__`` it does look: `gone` finds out that this will not be called any more.

    Attributes:
        open_block: Waits for the slot.
        value: What ``as`` gets, until that has it.
        opened: The block of the end that has the slot; None while there is none.
        undone: Whether it was never entered: what it was to show is to stay where it is.
        lost: Whether nobody will leave it.
        frame: That of the ``with`` statement; None where it is entered in another way.
    """

    def __init__(self, owner: Owner, open_block: Callable[[], Any]) -> None:
        self._owner = owner
        self.open_block = open_block
        self.value: Any = None
        self.opened: Any = None
        self.undone: bool = False
        self.lost: bool = False
        self.frame: FrameType | None = None
        self._at = -1

    def __enter__(self) -> Any:
        self.frame = frame = sys._getframe(1)
        self._at = frame.f_lasti
        try:
            self._owner.enter_block(self)
        except BaseException:
            # First, and without a call: where the next handler raises in the one below, the next call of the end does
            # what is left to do.
            self.lost = self.undone = True
            if self.opened is not None:
                self._owner.undo_block(self)
            self.value = None
            raise
        # The value keeps no name here: a lease would take that for a holder.
        value, self.value = self.value, None
        return value

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return self._owner.leave_block(self, exc_type, exc, traceback)
        except BaseException:
            self.lost = True
            if self.opened is not None:  # interrupted before it had begun
                self._owner.leave_block(self, exc_type, exc, traceback)
            raise

    def gone(self) -> bool:
        """Return whether the ``with`` statement has ended, though nobody was told: something was raised on the way."""
        frame, at = self.frame, self._at
        if self.lost or frame is None or at < 0 or frame.f_code.co_code[at] != _BEFORE_WITH:
            return self.lost  # where it was entered in another way, nobody knows
        inside, here = _handler(frame, at + 2), _handler(frame, frame.f_lasti)
        return inside is not None and inside not in _handlers_around(frame, here)


def _handler(frame: FrameType, at: int) -> int | None:
    """Return where an instruction's exceptions are handled."""
    for entry in dis._parse_exception_table(frame.f_code):  # type: ignore[attr-defined]
        if entry.start <= at < entry.end:
            return int(entry.target)
    return None


def _handlers_around(frame: FrameType, target: int | None) -> set[int]:
    """Return the handlers around a place, from the innermost outwards."""
    found: set[int] = set()
    while target is not None and target not in found:
        found.add(target)
        target = _handler(frame, target)
    return found
