"""Iterating over the changes of who reads a queue, where calls block."""

from __future__ import annotations

from typing import Self

from aioshm.errors import QueueClosed
from aioshm.queue.blocking.held import Held
from aioshm.queue.ends.membership import Membership
from aioshm.queue.ends.writing import WritingEnd
from aioshm.queue.membership import Change


class BlockingMembership:
    """The changes from when this was made on; see `aioshm.blocking.MessageQueue.membership`.

    Args:
        held: The writer's end.
        writer: The same.
        timeout: For how long each step waits, in seconds; None: for ever.
    """

    def __init__(self, held: Held, writer: WritingEnd, timeout: float | None) -> None:
        self._held = held
        self._changes = Membership(writer, timeout)
        self._timeout = timeout
        self._kept: list[Change] = []  # where a call that a signal's handler ends leaves it to the next one

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Change:
        if not self._kept:
            try:
                self._held.run(self._next, self._timeout)
            except QueueClosed:
                raise StopIteration from None
        if not self._kept:
            raise StopIteration
        return self._kept.pop()

    async def _next(self, left: float | None) -> None:
        change = await self._changes.next(left)
        if change is not None:
            self._kept.append(change)
