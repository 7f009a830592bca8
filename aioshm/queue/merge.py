"""One stream out of many queues: round robin among those that have something, one sleep for all that have not.

The quick way takes a message from the next reader whose core lets it pass, as `MessageQueue.dequeue` does; whatever it
cannot decide is left to the slow way, at the latest when the loop's other tasks have to have their turn. That one
stands in every reader's line while it waits, so that nobody else uses a parked flag that is up for all of them; a
reader in whose line somebody else stands already is left out until that has ended.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import cycle
from time import monotonic_ns
from types import TracebackType
from typing import Any, Self

from aioshm.codec import cannot_decode
from aioshm.errors import AioshmError, QueueClosed, RoleError
from aioshm.queue.base import MessageQueue
from aioshm.queue.end import TURN_MESSAGES, TURN_NS, End, predictor_among
from aioshm.queue.reader_end import ReaderEnd
from aioshm.ring import RingReader
from aioshm.ring.atomics import ELSEWHERE, NOTHING
from aioshm.wait.line import Line
from aioshm.wait.poller import Poller, Stall
from aioshm.wait.predictor import Predictor


def merge(readers: Mapping[int, MessageQueue]) -> Merged:
    """Make one stream out of many queues.

    For use as ``async for rank, obj in merge({rank: reader, ...})``; see `Merged`.

    Args:
        readers: Readers' ends by the rank, or any other number, that their messages are to come with. They need not be
            ready; they stay open when the iteration ends.

    Raises:
        TypeError: Not a mapping from ints to queues.
        ValueError: There are none, or a reader is there twice.
        RoleError: One of them is a writer.
    """
    if not isinstance(readers, Mapping):
        raise TypeError(f"readers must be a mapping from ranks to readers, not {readers!r}")
    if not readers:
        raise ValueError("readers must not be empty")
    ranks: dict[ReaderEnd, int] = {}
    for rank, reader in readers.items():
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise TypeError(f"the keys of readers must be ints, not {rank!r}")
        if not isinstance(reader, ReaderEnd):
            if isinstance(reader, End):
                raise RoleError(f"readers[{rank}] must be a reader; this is a writer: {reader!r}")
            raise TypeError(f"readers[{rank}] must be a MessageQueue, not {reader!r}")
        if ranks.setdefault(reader, rank) != rank:
            raise ValueError(f"readers[{ranks[reader]}] and readers[{rank}] must not be the same reader")
    return Merged(readers)  # type: ignore[arg-type]


class Merged(AsyncIterator[tuple[int, Any]]):
    """The messages of many queues, each as ``(rank, obj)``. Made by `merge`.

    Each queue's messages come in its order; among the queues that have messages, each has its turn before any of them
    has another. A queue whose writer closes it drops out; one that ends otherwise, or cannot be attached to, first
    gives ``(rank, error)``: a `PeerDied`, a `HandleError`, or a `MessagesLost`. The iteration ends when all have ended.

    A message that is damaged or lost is given as ``(rank, error)``, too: a `CorruptSlot`, `CodecError` or
    `MessagesLost`; so is, for each try, a `SharedMemoryError` while there is no room for a message. The queue goes on.
    Who also sends exceptions as messages tells them from these by `failed`, and should send something else.

    Cancelling a wait loses nothing. Two tasks that iterate get different messages. While this waits, calls that other
    tasks make on one of the readers wait in line behind it, and go before it afterwards; between two messages the
    readers can be used as if they were not merged. An iteration may be left, and begun again, at any time.

    Attributes:
        failed: The errors of the queues that have ended with one, by rank.
    """

    def __init__(self, readers: Mapping[int, ReaderEnd]) -> None:
        self.failed: dict[int, AioshmError] = {}
        self._bed = bed = _Bed()
        self._running = [_Place(rank, reader, bed) for rank, reader in readers.items()]
        self._options = self._running[0].reader._options
        self._round = cycle(self._running)  # where it stands, the next round begins
        self._turn = 0
        self._turn_ends_ns = 0
        self._spin_ns = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._line = Line()
        self._past = 0  # messages of the rings that have dropped out
        self._newest_ns = 0

    # Receiving

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Any]:
        """Receive the next message of any queue.

        Raises:
            StopAsyncIteration: All of them have ended, or this was closed.
            RoleError: A reader belongs to another loop, thread or process, or another merge is waiting for it, or this
                was called inside of a block that has its slot.
        """
        if self._turn > 0:
            left, until = len(self._running), 0
            for place in self._round:
                try:
                    obj = place.receive()
                except Exception as error:
                    obj = place.damaged(error)
                if obj is ELSEWHERE:
                    obj = place.poll()
                if obj is not NOTHING:
                    self._turn -= 1
                    return place.rank, obj
                left -= 1
                if not left:
                    if not self._spin_ns:
                        break
                    now = monotonic_ns()
                    if not until:
                        until = now + self._spin_ns
                    elif now >= until:
                        break
                    left = len(self._running)
        return await self._next()

    async def _next(self) -> tuple[int, Any]:
        loop = asyncio.get_running_loop()
        if self._loop is not None and loop is not self._loop:
            raise RoleError(f"{self!r} belongs to another event loop than this one")
        await self._line.join(None, None)
        try:
            if self._loop is None:
                self._start(loop)
            while self._running:
                await self._yield_turn()
                item = await self._wait_in_lines()
                if item is not None:
                    return item
        finally:
            self._line.leave()
            if not self._running:
                self._bed.close()
        raise StopAsyncIteration

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Belong to the loop, and begin to attach wherever that was not done."""
        for place in self._running:
            try:
                place.reader._start_attaching()
            except RoleError:
                raise
            except AioshmError as error:
                place.failure = error
        self._loop = loop

    async def _yield_turn(self) -> None:
        """Let the loop's other tasks run, if this one has had its turn."""
        if self._turn <= 0 or monotonic_ns() >= self._turn_ends_ns:
            await asyncio.sleep(0)
            self._new_turn()

    def _new_turn(self) -> None:
        self._turn = TURN_MESSAGES
        self._turn_ends_ns = monotonic_ns() + TURN_NS
        for place in self._running:
            place.reader._new_turn()
            place.reader._core.spin_ns = 0  # spinning for one would keep the others waiting

    # Waiting

    async def _wait_in_lines(self) -> tuple[int, Any] | None:
        """Wait for a message and take it; None: the lines have to be joined anew, or there is nothing left to wait for.

        Nobody else takes anything from the queues meanwhile but those who have stood in their lines before.
        """
        running = [next(self._round) for _ in self._running]  # beginning with whose turn it is
        self._set_round(running)
        reached: list[_Place] = []
        try:
            for place in running:
                await place.enter()
                reached.append(place)
            entered = sorted((place for place in running if place.entered), key=lambda place: not place.hidden)
            while True:
                self._note_ready(entered)
                if not self._may_go_on():
                    await self._sleep(entered)
                if not self._running:  # this was closed
                    return None
                for place in entered:
                    if place.running and (item := self._take(place)) is not None:
                        return item
                if not self._running or self._lines_changed() or monotonic_ns() >= self._turn_ends_ns:
                    return None
        finally:
            for place in reached:
                if place.running:
                    place.leave()

    async def _sleep(self, entered: Sequence[_Place]) -> None:
        assert self._loop is not None
        bed, count = self._bed, self._past
        for place in self._running:
            if place.ring is not None:
                count += place.ring.seq
                self._newest_ns = max(self._newest_ns, place.ring.core.published_ns)
        watched = (place.ring for place in entered if place.running and not place.late)
        rings = [ring for ring in watched if ring is not None]
        poller = bed.poller
        if poller is None:
            bed.poller = poller = self._new_poller(self._loop)
        bed.rings = rings
        stall = Stall(self._options.stall_warning_s, self._report)
        try:
            if await poller.wait(self._may_go_on, count, self._newest_ns, stall=stall):
                self._new_turn()
        finally:
            bed.rings = ()
            self._spin_ns = poller.inline_spin_ns

    def _new_poller(self, loop: asyncio.AbstractEventLoop) -> Poller:
        options = self._options
        others: list[int] = []
        for place in self._running:
            if place.ring is not None:
                others += place.reader._other_ends()
        if not others:  # what comes through sockets cannot be spun for
            return Poller(loop, self._bed, Predictor(may_spin=False), "park", self._bed.spin)
        processes = [*{pid for pid in others if pid}, *(pid for pid in others if not pid)]
        return Poller(loop, self._bed, predictor_among(processes, options), options.wait, self._bed.spin)

    def _may_go_on(self) -> bool:
        for place in self._running:
            if place.may_go_on():
                return True
        return not self._running

    def _lines_changed(self) -> bool:
        """Return whether a reader that was left out need not be any more."""
        return any(not place.entered and not place.reader._in_line for place in self._running)

    def _note_ready(self, entered: Sequence[_Place]) -> None:
        for place in entered:
            if place.quick is None and place.reader._ready:
                place.now_ready()
                self._bed.close()  # there are others to wait for than before

    def _report(self) -> None:
        for place in self._running:
            place.reader._report_waiting()

    # Taking

    def _take(self, place: _Place) -> tuple[int, Any] | None:
        """Return a queue's next message, or the error that is its end; None if there is nothing, or it has closed."""
        reader = place.reader
        error = place.failure if reader._refusal is None else reader._refusal()
        if error is None:
            gone = reader._writer_gone  # before looking: what was published before the writer went is then seen
            obj = NOTHING if place.quick is None or place.late else place.poll()
            if obj is not NOTHING:
                self._turn -= 1
                if not place.hidden:
                    self._begin_behind(place)
                return place.rank, obj
            if place.late:
                if reader._writer_gone is None:
                    return None
                error = reader._annex_lost()
            elif gone is None:
                return None
            else:
                error = gone()
        if isinstance(error, RoleError):
            raise error
        self._drop(place)
        if isinstance(error, QueueClosed):
            return None
        self._turn -= 1
        self.failed[place.rank] = error
        return place.rank, error

    def _drop(self, place: _Place) -> None:
        place.running = False
        place.leave()  # closing it may be waiting for that
        if place.ring is not None:
            self._past += place.ring.seq
        self._set_round([other for other in self._running if other is not place])
        self._bed.close()

    def _begin_behind(self, place: _Place) -> None:
        at = self._running.index(place) + 1
        self._set_round(self._running[at:] + self._running[:at])

    def _set_round(self, running: list[_Place]) -> None:
        self._running, self._round = running, cycle(running)

    # Closing

    async def aclose(self) -> None:
        """End the iteration: a waiting task's, too. The readers stay open. Idempotent."""
        self._set_round([])
        self._bed.wake()
        self._bed.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_bed"):
            self._bed.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._running)} queues>"


class _Bed:
    """What is asleep when all are: a poller, and the rings whose parked flags it raises as if they were one.

    It knows no readers: the event loop may know the poller for longer than anybody knows the readers.
    """

    def __init__(self) -> None:
        self.rings: Sequence[RingReader] = ()
        self.poller: Poller | None = None
        self._pid = os.getpid()

    def __setitem__(self, index: int, value: int) -> None:
        for ring in self.rings:
            ring.parked[index] = value

    def spin(self, budget_ns: int) -> bool:
        """Spin for at most so many nanoseconds; return whether one of the rings has a message."""
        looks = [ring.ready for ring in self.rings]
        until = monotonic_ns() + budget_ns if looks else 0
        while True:
            for ready in looks:
                if ready():
                    return True
            if monotonic_ns() >= until:
                return False

    def wake(self) -> None:
        if self.poller is not None:
            self.poller.wake()

    def close(self) -> None:
        """Let go of the poller; a forked child leaves it alone, whose loop is its parent's."""
        if self.poller is not None and os.getpid() == self._pid:
            self.poller.close()
        self.poller = None


class _Place:
    """One reader's place in the round.

    Attributes:
        rank: What its messages come with.
        receive: Returns its next message, or `NOTHING` where the quick way has none.
        quick: What that is while nothing is the matter; None until the reader is ready.
        ring: The ring that it reads, if any.
        late: Whether its next message has not arrived completely; nothing is there until the reader is woken.
        entered: Whether this merge stands in its line.
        hidden: Whether the quick way could not see, before its line was joined, what there is; then it goes first.
        failure: Why attaching could not even begin.
        running: Whether the queue has not ended.
    """

    __slots__ = (
        "_bed",
        "entered",
        "failure",
        "hidden",
        "late",
        "quick",
        "rank",
        "reader",
        "receive",
        "ring",
        "running",
    )

    def __init__(self, rank: int, reader: ReaderEnd, bed: _Bed) -> None:
        self.rank = rank
        self.reader = reader
        self.receive: Callable[[], Any] = _nothing
        self.quick: Callable[[], Any] | None = None
        self.ring: RingReader | None = None
        self.late = False
        self.entered = False
        self.hidden = False
        self.failure: AioshmError | None = None
        self.running = True
        self._bed = bed

    def now_ready(self) -> None:
        """Note that the reader is ready."""
        self.receive = self.quick = self.reader._quick_receive()
        self.ring = self.reader._own_ring()

    async def enter(self) -> None:
        """Join the reader's line if that is empty, and watch what happens to it in any case. Never suspends the task.

        Raises:
            RoleError: Another merge is there, or a block of this task.
        """
        reader = self.reader
        if reader._watcher is not None:
            raise RoleError(f"{reader!r}: another merge is waiting for it")
        if not reader._in_line or reader._holder is reader._whoever_calls():
            shut = self.quick is not None and not reader._core.open
            self.hidden = shut or reader._writer_gone is not None or reader._refusal is not None
            await reader._enter(None)
            self.entered = True
            self._arrived()
        reader._watcher = self._woken

    def leave(self) -> None:
        """Leave the line, and watch no more."""
        reader = self.reader
        reader._watcher = None
        if self.entered:
            self.entered = False
            reader._leave()

    def may_go_on(self) -> bool:
        """Return whether there is anything to do."""
        reader = self.reader
        if not self.entered:
            return not reader._in_line
        if self.late:
            return False
        if self.quick is not None:
            return reader._may_go_on()
        return (
            reader._ready or reader._refusal is not None or reader._writer_gone is not None or self.failure is not None
        )

    def poll(self) -> Any:
        """Return the next message, or what is wrong with it, or `NOTHING`: see `late`."""
        try:
            obj = self.reader._poll()
        except AioshmError as error:
            return error.with_traceback(None)
        if obj is not ELSEWHERE:
            return obj
        self.late, self.receive = True, _nothing
        return NOTHING

    def damaged(self, error: Exception) -> AioshmError:
        """Return what is wrong with a message that could not be received."""
        if self.ring is None and isinstance(error, AioshmError):
            return error.with_traceback(None)
        assert error.__traceback__ is not None
        error.__traceback__ = error.__traceback__.tb_next  # without the frame that is to refer to what is made of it
        return cannot_decode(error, self.reader.codec_name)

    def _woken(self) -> None:
        self._arrived()
        self._bed.wake()

    def _arrived(self) -> None:
        if self.late and self.quick is not None:
            self.late, self.receive = False, self.quick


def _nothing() -> Any:
    return NOTHING
