"""One stream of many queues: the readers take turns, and sleep together.

The fast path takes a message from the next reader whose core is open. The slow path handles everything else. While it
waits, it owns every reader's call lock, so that no other call uses a raised parked flag. It leaves out readers whose
call lock another task owns.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from time import monotonic, monotonic_ns
from typing import Any, Self

from aioshm.closing import AsyncClosing
from aioshm.codec import T
from aioshm.errors import AioshmError, EndClosed, HandleError, QueueClosed, RoleError
from aioshm.queue.api import MessageQueue
from aioshm.queue.base import QueueBase
from aioshm.queue.merge.place import (
    Errors,
    Place,
    SharedSleep,
    check_errors,
    check_rank,
    checked_reader,
    checked_readers,
    ranked,
)
from aioshm.queue.state import YIELD_AFTER_MESSAGES, YIELD_AFTER_NS, CallLock
from aioshm.ring.cores import EMPTY, SLOW_PATH
from aioshm.wait.limits import MIN_PAUSE_S, Stall
from aioshm.wait.policy import Policy
from aioshm.wait.poller import Poller, policy_for


def merge(readers: Mapping[int, MessageQueue[T]], *, errors: Errors = "raise") -> Merged[T]:
    """Make one stream out of many queues.

    For use as ``async for rank, obj in merge({rank: reader, ...})``; see `Merged`.

    Args:
        readers: The queues to read, by rank: each message is returned with the rank of its queue. The readers need not
            be ready, and stay open when the iteration ends. Without readers, the iteration ends immediately.
        errors: With ``"raise"``, the iteration raises an error of a queue, whose ``rank`` is the queue's. With
            ``"yield"``, the error is an item, ``(rank, error)``. The iteration can continue after either.

    Raises:
        TypeError: ``readers`` is not a mapping from ints to queues.
        ValueError: ``readers`` has a reader twice, or ``errors`` has another value.
        RoleError: A queue is a writer.
    """
    check_errors(errors)
    return Merged(checked_readers(readers, MessageQueue, _KIND), errors)


class Merged(AsyncClosing, AsyncIterator[tuple[int, T | Any]]):
    """The messages of many queues, each as ``(rank, obj)``. Made by `merge`.

    Each queue's messages come in order, and queues with messages take turns. A queue that its writer closes drops out.
    A queue that ends otherwise, or cannot be attached to, drops out with an error, which is raised once, or is an item
    with ``errors="yield"``: a `PeerDied`, `HandleError`, `ReaderEvicted` or `MessagesLost`. A damaged or lost message
    (`CorruptSlot`, `CodecError`, `MessagesLost`), a lack of memory or descriptors for a message, and a `QueueRestarted`
    are raised in the same way, and the queue stays. `failed` has the errors that ended queues. After an error, iterate
    again. The iteration ends when all queues have ended. `add` and `remove` change the queues.

    Cancelling a wait loses nothing. Two tasks that iterate get different messages. During a wait, other tasks' calls on
    a reader wait, too; between two messages, the readers can be used as if they were not merged. An iteration may be
    left and begun again at any time.

    To type checkers, ``obj`` is of the queues' type, or anything, such as an error.

    Attributes:
        failed: The errors of the queues that ended with an error, by rank.
    """

    def __init__(self, readers: Mapping[int, QueueBase[T]], errors: Errors = "raise") -> None:
        self._raises = errors == "raise"
        self.failed: dict[int, AioshmError] = {}
        self._shared = SharedSleep()
        # By rank, with the queues that have ended.
        self._places = {rank: self._place(rank, queue) for rank, queue in readers.items()}
        # The queues that have not ended: each has its turn before any has another.
        self._running: deque[Place] = deque(self._places.values())
        self._closed = False
        self._turn = 0
        self._turn_ends_ns = 0
        self._spin_ns = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = CallLock()
        self._changed = False  # a queue was added or removed since the call locks were acquired
        self._silent_at = monotonic()  # when to check for silent queues

    def _place(self, rank: int, queue: QueueBase[Any]) -> Place:
        return Place(rank, queue, self._shared)

    # Adding and removing queues

    def add(self, rank: int, reader: MessageQueue[T]) -> None:
        """Add a queue, which begins to attach. Any task of the loop may call this, also during an iteration.

        Args:
            rank: The rank that the queue's messages are returned with; that of an ended or removed queue is free again.
            reader: The queue's reader, which need not be ready.

        Raises:
            TypeError: The arguments are not an int and a queue.
            ValueError: The rank is taken, or the merge has the reader already.
            RoleError: The queue is a writer, or belongs to another loop than the merge.
            EndClosed: The merge was closed.
        """
        check_rank("rank must be an int", rank)
        self.add_checked(rank, checked_reader("reader", reader, MessageQueue, _KIND))

    def add_checked(self, rank: int, queue: QueueBase[T]) -> None:
        """Add a reader of either API."""
        self._check_here()
        if self._closed:
            raise EndClosed("this merge was closed: merge the readers anew")
        for other in self._running:
            if other.rank == rank:
                taken = f"rank {rank} is taken by {other.reader!r}"
                raise ValueError(f"{taken}: take another one, or remove({rank}) first")
            if other.reader is queue.end:
                raise ValueError(f"{other.reader!r} is there already, as rank {other.rank}")
        place = self._place(rank, queue)
        if self._loop is not None:
            place.start()
        self._places[rank] = place
        self.failed.pop(rank, None)
        self._running.append(place)
        self._changed = True
        self._shared.wake()

    def remove(self, rank: int) -> None:
        """Remove a queue. Any task of the loop may call this, also during an iteration.

        The reader stays open, and still receives every message that the merge has not returned. The iteration ends
        with the last queue.

        Args:
            rank: The queue's rank. Removing an ended queue also removes its error from `failed`.

        Raises:
            ValueError: The merge has no such rank.
            RoleError: The merge belongs to another loop.
        """
        self._check_here()
        place = self._places.pop(rank, None)
        if place is None:
            known = sorted(self._places) or "none at all"
            raise ValueError(f"rank {rank!r} is not in this merge: there is {known}")
        self.failed.pop(rank, None)
        if place in self._running:
            self._drop(place)
            if place.ring is not None:
                self._shared.forget(place.ring)
            place.leave()
        self._changed = True
        self._shared.wake()

    def _drop(self, place: Place) -> None:
        place.running = False
        self._running.remove(place)

    def _check_here(self) -> None:
        if self._loop is not None and asyncio._get_running_loop() is not self._loop:
            raise RoleError(f"{self!r} belongs to another event loop than this one")

    # Receiving

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, T | Any]:
        """Receive the next message of any queue.

        Raises:
            StopAsyncIteration: All queues have ended, or the merge was closed.
            AioshmError: A queue has ended with this error, or has a damaged message, unless errors are items; ``rank``
                is the queue's.
            RoleError: A reader belongs to another loop, thread or process, or another merge waits for the reader, or
                the caller is inside of a block that has the reader's slot.
        """
        item = self.take_soon()
        if item is None:
            item = await self._next()
        return item

    def take_soon(self) -> tuple[int, T | Any] | None:
        """Return a message if one arrives within a short spin, as ``anext``; None: a wait is due."""
        until_ns = 0
        while self._turn > 0:
            item = self._take_one()
            if item is not None:
                return item
            now_ns = monotonic_ns()
            if not until_ns:
                until_ns = now_ns + self._spin_ns
            if now_ns >= until_ns:
                break
            if self._shared.yields:
                os.sched_yield()
        return None

    def _take_one(self) -> tuple[int, Any] | None:
        """Poll each queue once; return the first message, or None."""
        for place in tuple(self._running):
            try:
                obj = place.receive()
            except Exception as error:
                self._begin_behind(place)
                return self._deliver_error(place, place.damaged(error))
            if obj is SLOW_PATH:
                return None
            if obj is not EMPTY:
                self._turn -= 1
                self._begin_behind(place)
                return place.rank, obj
        return None

    def _begin_behind(self, place: Place) -> None:
        """Begin the next round behind this queue. Any thread may call this."""
        try:
            self._running.rotate(-1 - self._running.index(place))
        except ValueError:
            pass  # the queue was removed

    async def _next(self) -> tuple[int, Any]:
        loop = asyncio.get_running_loop()
        self._check_here()
        await self._lock.acquire(None, None)
        try:
            if self._loop is None:
                for place in self._running:
                    place.start()
                self._loop = loop
            while self._running:
                await self._yield_turn()
                item = await self._wait_entered()
                if item is not None:
                    return item
        finally:
            self._lock.release()
            if not self._running:
                self._shared.close()
        raise StopAsyncIteration

    async def _yield_turn(self) -> None:
        """Run other tasks, if the budget is spent."""
        if self._turn <= 0 or monotonic_ns() >= self._turn_ends_ns:
            await asyncio.sleep(0)
            self._new_turn()

    def _new_turn(self) -> None:
        self._turn = YIELD_AFTER_MESSAGES
        now_ns = monotonic_ns()  # the same for all readers, so that their budgets end together
        self._turn_ends_ns = now_ns + YIELD_AFTER_NS
        for place in self._running:
            place.reader.state.new_turn(now_ns)
            place.reader.state.core.spin_ns = 0  # a spin for one reader would delay all others

    # Waiting

    async def _wait_entered(self) -> tuple[int, Any] | None:
        """Wait for a message and take it; None: acquire the call locks again, or all queues have ended."""
        if self._changed:
            self._changed = False
            self._shared.close()
        running = tuple(self._running)
        reached: list[Place] = []
        try:
            for place in running:
                await place.enter()
                reached.append(place)
            self._check_silence()
            entered = sorted((place for place in running if place.entered), key=lambda place: not place.hidden)
            while True:
                if not self._can_continue():
                    await self._sleep(entered)
                if self._changed or not self._running:
                    return None
                self._note_ready(entered)  # after the sleep: a writer may have sent and closed meanwhile
                for place in entered:
                    if place.running:
                        item = self._take(place)
                        if item is not None:
                            return item
                if not self._running or self._locks_changed() or monotonic_ns() >= self._turn_ends_ns:
                    return None
        finally:
            for place in reached:
                if place.running:
                    place.leave()

    async def _sleep(self, entered: Sequence[Place]) -> None:
        shared = self._shared
        rings = [place.ring for place in self._running if place.ring is not None]
        count = sum(ring.seq for ring in rings)
        newest_ns = max((ring.published_ns for ring in rings), default=0)
        if shared.poller is None:
            shared.poller = self._new_poller()
        poller = shared.poller
        shared.rings = [place.ring for place in entered if place.running and not place.late and place.ring]
        stall = Stall(0, self._check_silence)
        stall.at = self._silent_at
        deadline = self._look_again_at(entered)
        try:
            if await poller.wait(self._can_continue, count, newest_ns, deadline=deadline, stall=stall):
                self._new_turn()
        except TimeoutError:
            pass  # another thread may have released its reader
        finally:
            shared.rings = ()
            self._spin_ns = poller.inline_spin_ns

    def _check_silence(self, _waited_s: float = 0.0) -> float:
        """Ask silent queues' writers, or report them; return the seconds until the next call."""
        now = monotonic()
        if now >= self._silent_at:
            for place in self._running:
                place.check_silence(now)
            due = min((place.stall.at for place in self._running), default=now)
            self._silent_at = max(now + MIN_PAUSE_S, due)
        return self._silent_at - now

    def _look_again_at(self, entered: Sequence[Place]) -> float | None:
        """Return when to poll readers that were left out, if they cannot wake the merge."""
        return None

    def _new_poller(self) -> Poller:
        others: list[int] = []
        for place in self._running:
            if place.ring is not None:
                others += place.reader.source.other_ends()
        if not others:  # there is no ring to spin on
            return self._poller_of(Policy(may_spin=False))
        known = {pid for pid in others if pid}
        policy = policy_for([*known, *(pid for pid in others if not pid)], self._running[0].reader.state.options)
        self._shared.yields = policy.crowded
        return self._poller_of(policy)

    def _poller_of(self, policy: Policy) -> Poller:
        assert self._loop is not None
        return Poller(self._loop, self._shared, policy, self._shared.spin)

    def _can_continue(self) -> bool:
        for place in self._running:
            if place.can_continue():
                return True
        return self._changed or not self._running

    def _locks_changed(self) -> bool:
        """Return whether a call lock that another task had is free now."""
        return any(not place.entered and place.can_continue() for place in self._running)

    def _note_ready(self, entered: Sequence[Place]) -> None:
        for place in entered:
            if not place.ready and place.reader.state.ready:
                place.now_ready()
                self._shared.close()

    # Taking

    def _take(self, place: Place) -> tuple[int, Any] | None:
        """Return a queue's next message or error; None if there is none, or the queue was closed."""
        refusal = place.reader.state.refusal
        if refusal is not None:
            return self._end(place, refusal())
        if place.failure is not None:
            return self._end(place, place.failure)
        news = place.reader.pop_news()
        if isinstance(news, HandleError):
            return self._end(place, news)
        if news is not None:
            return self._deliver_error(place, news)
        source = place.reader.source
        gone = source.gone  # before polling: messages published before the writer went are then received first
        obj: Any = EMPTY
        if place.ready and not place.late:
            try:
                obj = place.poll()
            except AioshmError as damage:
                if not place.hidden:
                    self._begin_behind(place)
                return self._deliver_error(place, damage)
        if obj is not EMPTY:
            self._turn -= 1
            if not place.hidden:
                self._begin_behind(place)
            return self._deliver(place, obj)
        if place.late:
            if source.gone is None:
                return None
            error = source.lost()
        elif gone is None:
            return None
        else:
            error = gone()
        if place.reconnects_after(error):
            self._shared.close()
            return None
        return self._end(place, error)

    def _end(self, place: Place, error: AioshmError) -> tuple[int, Any] | None:
        """Drop a queue that ends with an error; return the error, or None if the queue was closed."""
        if isinstance(error, RoleError):
            raise error
        place.leave()  # closing the reader may be waiting for the call lock
        self._shared.close()
        self._begin_behind(place)
        self._drop(place)
        if isinstance(error, QueueClosed):
            return None
        self.failed[place.rank] = error
        return self._deliver_error(place, error)

    def _deliver(self, place: Place, obj: Any) -> tuple[int, Any]:
        return place.rank, obj

    def _deliver_error(self, place: Place, error: AioshmError) -> tuple[int, Any]:
        """Return an error as an item, or raise it."""
        self._turn -= 1
        error = error.with_traceback(None)
        if self._raises:
            raise ranked(error, place.rank)
        return place.rank, error

    # Closing

    async def aclose(self) -> None:
        """End the iteration, also in a task that waits. The readers stay open. Idempotent."""
        self.end()

    def end(self) -> None:
        """End the iteration, on the loop of the merge."""
        self._closed = True
        self._running.clear()
        self._shared.wake()
        self._shared.close()

    def __del__(self) -> None:
        if hasattr(self, "_shared"):
            self._shared.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._running)} queues>"


_KIND = "a MessageQueue"
