"""An iterator over the changes among a queue's readers."""

from __future__ import annotations

from typing import Self

from aioshm.queue.ends.writing import WritingEnd
from aioshm.queue.membership import Change
from aioshm.wait.limits import deadline_after, settle


class Membership:
    """The changes from when this was made on; see `aioshm.MessageQueue.membership`.

    Args:
        writer: Whose readers.
        timeout: For how long each step waits, in seconds; None: for ever.

    Raises:
        ValueError, TypeError: ``timeout`` is none.
    """

    def __init__(self, writer: WritingEnd, timeout: float | None) -> None:
        deadline_after(timeout)
        self._writer = writer
        self._timeout = timeout
        self._log = writer.registry.new_log()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Change:
        change = await self.next(self._timeout)
        if change is None:
            raise StopAsyncIteration
        return change

    async def aclose(self) -> None:
        """End an iteration; the writer stays open."""

    async def next(self, timeout: float | None) -> Change | None:
        """Wait for the next change, and return it; None: the queue was closed.

        Raises:
            TimeoutError: There was none in time.
        """
        deadline, state = deadline_after(timeout), self._writer.state
        while (change := self._log.take()) is None and not state.closed:
            self._writer.listen()
            try:
                await settle(state.news(), deadline=deadline)
            except TimeoutError:
                raise TimeoutError(f"{state!r}: no reader has come or gone in time") from None
        return change
