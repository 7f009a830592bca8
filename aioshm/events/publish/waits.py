"""Waiting, on the publisher's loop, for what the sender does: until a batch is sent, or there is room for one more."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from aioshm.errors import PublisherClosed
from aioshm.events.protocol.outbox import Outbox


class SenderWaits:
    """Futures that the sender's turns resolve.

    Attributes:
        pending: Whether a call waits; looked at after every turn.
    """

    def __init__(self, outbox: Outbox) -> None:
        self.pending: bool = False
        self._outbox = outbox
        self._closed = False
        self._progress: list[asyncio.Future[None]] = []
        self._room: deque[asyncio.Future[None]] = deque()

    @property
    def for_room(self) -> bool:
        """Whether a call waits for room, so that others have to queue up."""
        return bool(self._room)

    def turn(self) -> None:
        """Let everybody who waits look again, or as many as there is room for."""
        progress, self._progress = self._progress, []
        for waiter in progress:
            _resolve(waiter)
        self._let_in()
        self.pending = bool(self._room)

    def close(self) -> None:
        """Let everybody know that there will be no more room."""
        self._closed = True
        self.turn()

    async def sent(self, target: int, timeout: float | None) -> None:
        """Wait until no batch with a number below ``target`` waits.

        Raises:
            TimeoutError: Some still do; the text says how many.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (waiting := self._outbox.waiting_before(target)) > 0:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._progress.append(turn)
            self.pending = True
            try:
                # Not ``wait_for``: before 3.12 it swallows a cancellation that comes together with the
                # result.
                async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
                    await turn
            except TimeoutError:
                raise TimeoutError(f"{waiting} event batches still wait to be sent after {timeout} s") from None

    async def room(self, timeout: float | None) -> None:
        """Wait, in turn, until there is room for a batch; the caller has to put it in before it awaits anything.

        Raises:
            TimeoutError: There was none in time.
            PublisherClosed: The publisher was closed meanwhile.
        """
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._room.append(turn)
        self.pending = True
        try:
            async with asyncio.timeout(timeout):
                await turn
                while self._outbox.room <= 0 and not self._closed:  # ``publish`` was quicker
                    turn = loop.create_future()
                    self._room.appendleft(turn)
                    self.pending = True
                    await turn
        except BaseException as error:
            if turn in self._room:
                self._room.remove(turn)
            self._let_in()  # the room that this one leaves is the next one's
            if isinstance(error, TimeoutError):
                waiting = len(self._outbox.waiting)
                raise TimeoutError(f"{waiting} event batches still wait to be sent after {timeout} s") from None
            raise
        if self._closed:
            raise PublisherClosed("this event publisher was closed before there was room for the batch")

    def _let_in(self) -> None:
        room = self._outbox.room
        while self._room and (room > 0 or self._closed):
            room -= _resolve(self._room.popleft())


def _resolve(waiter: asyncio.Future[None]) -> bool:
    if waiter.done() or waiter.get_loop().is_closed():
        return False
    waiter.set_result(None)
    return True
