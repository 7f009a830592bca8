"""One stream of many queues: round robin among queues with messages, one sleep for all the others.

The quick way takes a message from the next reader whose core is open, as `MessageQueue.dequeue`
does. The slow way handles the rest; while it waits it holds every reader's call lock, so that
nobody else uses a raised parked flag. A reader whose state another task has entered is left out
meanwhile.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from time import monotonic, monotonic_ns
from typing import Any, Self

from aioshm.closing import AsyncClosing
from aioshm.codec import T
from aioshm.config import Options
from aioshm.errors import AioshmError, HandleError, QueueClosed, RoleError
from aioshm.queue.api import MessageQueue
from aioshm.queue.base import QueueBase
from aioshm.queue.merge.places import Place, SharedSleep, check_rank, checked_reader, checked_readers
from aioshm.queue.merge.round import Errors, Round, check_errors, ranked
from aioshm.queue.state import YIELD_AFTER_MESSAGES, YIELD_AFTER_NS, CallLock
from aioshm.ring.cores import EMPTY, SLOW_PATH
from aioshm.wait.cpus import policy_for
from aioshm.wait.limits import Stall
from aioshm.wait.policy import Policy
from aioshm.wait.poller import Poller, ThreadPoller


def merge(readers: Mapping[int, MessageQueue[T]], *, errors: Errors = "raise") -> Merged[T]:
    """Make one stream out of many queues.

    For use as ``async for rank, obj in merge({rank: reader, ...})``; see `Merged`.

    Args:
        readers: The queues to read, each by the number (often the rank) that its messages are returned with. They need
            not be ready, and stay open when the iteration ends. Without any, the iteration ends at once.
        errors: With ``"raise"``, an error of a queue is raised, and its ``rank`` is the queue's. With ``"yield"``, it
            is an item, ``(rank, error)``. The iteration can continue after either.

    Raises:
        TypeError: Not a mapping from ints to queues.
        ValueError: A reader is there twice; ``errors`` is neither.
        RoleError: One of them is a writer.
    """
    check_errors(errors)
    return Merged(checked_readers(readers, MessageQueue, _KIND), errors)


class Merged(AsyncClosing, AsyncIterator[tuple[int, T | Any]]):
    """The messages of many queues, each as ``(rank, obj)``. Made by `merge`.

    Each queue's messages come in order, and queues with messages take turns. A queue whose writer closes it drops out.
    A queue that ends otherwise, or cannot be attached to, drops out with an error, which is raised once, or is an item
    with ``errors="yield"``: a `PeerDied`, `HandleError`, `ReaderEvicted` or `MessagesLost`. A damaged or lost message
    (`CorruptSlot`, `CodecError`, `MessagesLost`), a lack of memory or descriptors for one, and a `QueueRestarted` are
    raised in the same way, and their queue stays. `failed` has the errors that ended queues. After an error, iterate
    again. The iteration ends when all queues have ended. `add` and `remove` change the queues.

    Cancelling a wait loses nothing. Two tasks that iterate get different messages. During a wait, calls of other tasks
    on one of the readers wait, too; between two messages the readers can be used as if they were not merged. An
    iteration may be left, and begun again, at any time.

    To type checkers, ``obj`` is of the queues' type, or anything, such as an error.

    Attributes:
        failed: The errors of the queues that have ended with one, by rank.
    """

    def __init__(self, readers: Mapping[int, QueueBase[T]], errors: Errors = "raise") -> None:
        self._raises = errors == "raise"
        self._shared = SharedSleep()
        places = [self._place(rank, queue) for rank, queue in readers.items()]
        self._options = places[0].reader.state.options if places else Options()
        self._round = Round(places, self._options.stall_warning_s, monotonic())
        self.failed: dict[int, AioshmError] = self._round.failed
        self._turn = 0
        self._turn_ends_ns = 0
        self._spin_ns = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = CallLock()
        self._past = 0  # messages of the rings that have dropped out
        self._newest_ns = 0
        self._changed = False  # whether a queue was added or removed since the call locks were acquired

    def _place(self, rank: int, queue: QueueBase[Any]) -> Place:
        return Place(rank, queue, self._shared)

    # Changing what is merged

    def add(self, rank: int, reader: MessageQueue[T]) -> None:
        """Add a queue, which begins to attach. Any task of the loop may call this, also while another one iterates.

        Args:
            rank: The number that its messages are returned with, also that of a queue that has ended or was removed.
            reader: Its reader's end, which need not be ready.

        Raises:
            TypeError: Not an int and a queue.
            ValueError: The rank is taken, or the reader is there already.
            RoleError: The queue is a writer, or belongs to another loop; or this does.
            EndClosed: This was closed.
        """
        check_rank("rank must be an int", rank)
        self.add_checked(rank, checked_reader("reader", reader, MessageQueue, _KIND))

    def add_checked(self, rank: int, queue: QueueBase[T]) -> None:
        """Add a reader of either API."""
        self._check_here()
        place = self._place(rank, queue)
        self._round.check_addition(rank, place.reader)
        if not self._round.running:
            self._options = place.reader.state.options
        if self._loop is not None:
            _attach(place)
        self._round.add(place, monotonic())
        self._changed = True
        self._turn = 0  # the quick way knows the queue once the call locks have been acquired anew
        self._shared.wake()

    def remove(self, rank: int) -> None:
        """Remove a queue. Any task of the loop may call this, also while another one iterates.

        Its reader stays open, and still receives every message that the merge has not returned. The iteration ends
        with the last queue.

        Args:
            rank: That of the queue; one that has ended is forgotten, with its error.

        Raises:
            ValueError: There is no such rank.
            RoleError: This belongs to another loop.
        """
        self._check_here()
        place = self._round.remove(rank)
        if place is not None:
            if place.ring is not None:
                self._past += place.ring.seq
                self._shared.forget(place.ring)
            place.leave()
        self._changed = True
        self._shared.wake()

    def _check_here(self) -> None:
        if self._loop is not None and asyncio._get_running_loop() is not self._loop:
            raise RoleError(f"{self!r} belongs to another event loop than this one")

    # Receiving

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, T | Any]:
        """Receive the next message of any queue.

        Raises:
            StopAsyncIteration: All of them have ended, or this was closed.
            AioshmError: One of them has ended with it, or has a damaged message, unless errors are items; its ``rank``
                is the queue's.
            RoleError: A reader belongs to another loop, thread or process, or another merge is waiting for it, or this
                was called inside of a block that has its slot.
        """
        item = self.take_soon()
        if item is None:
            item = await self._next()
        return item

    def take_soon(self) -> tuple[int, T | Any] | None:
        """Return a message that is there or comes within a short spin, as for ``anext``; None: a wait is due."""
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
        """Go round the queues once; return the first message, or None."""
        for _, place in zip(self._round.running, self._round.order, strict=False):
            try:
                obj = place.receive()
            except Exception as error:
                return self._tell(place, place.damaged(error))
            if obj is SLOW_PATH:
                try:
                    obj = place.poll()
                except AioshmError as error:
                    return self._tell(place, error)
            if obj is not EMPTY:
                self._turn -= 1
                return place.rank, obj
        return None

    async def _next(self) -> tuple[int, Any]:
        loop = asyncio.get_running_loop()
        self._check_here()
        await self._lock.acquire(None, None)
        try:
            if self._loop is None:
                self._start(loop)
            while self._round.running:
                await self._yield_turn()
                item = await self._wait_entered()
                if item is not None:
                    return item
        finally:
            self._lock.release()
            if not self._round.running:
                self._shared.close()
        raise StopAsyncIteration

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Belong to the loop, and begin to attach wherever that was not done."""
        for place in self._round.running:
            _attach(place)
        self._loop = loop

    async def _yield_turn(self) -> None:
        """Run other tasks, if the budget is spent."""
        if self._turn <= 0 or monotonic_ns() >= self._turn_ends_ns:
            for place in self._round.running:
                place.reader.state.give_way()
            await asyncio.sleep(0)
            self._new_turn()

    def _new_turn(self) -> None:
        self._turn = YIELD_AFTER_MESSAGES
        now_ns = monotonic_ns()  # the same for all, so that none goes on while others have to wait
        self._turn_ends_ns = now_ns + YIELD_AFTER_NS
        for place in self._round.running:
            place.reader.state.new_turn(now_ns)
            place.reader.state.core.spin_ns = 0  # spinning for one would keep the others waiting

    # Waiting

    async def _wait_entered(self) -> tuple[int, Any] | None:
        """Wait for a message and take it; None: acquire the call locks again, or nothing is left."""
        if self._changed:
            self._changed = False
            self._shared.close()  # there are others to wait for than before
        running = self._round.in_turn()
        reached: list[Place] = []
        try:
            for place in running:
                await place.enter()
                reached.append(place)
            if self._round.silence_due(monotonic()):
                self._tell_silence(0)
            entered = sorted((place for place in running if place.entered), key=lambda place: not place.hidden)
            while True:
                if not self._can_continue():
                    await self._sleep(entered)
                if self._changed or not self._round.running:
                    return None
                self._note_ready(entered)  # after the sleep: a writer may have sent and closed during it
                for place in entered:
                    if place.running and (item := self._take(place)) is not None:
                        return item
                if not self._round.running or self._locks_changed() or monotonic_ns() >= self._turn_ends_ns:
                    return None
        finally:
            for place in reached:
                if place.running:
                    place.leave()

    async def _sleep(self, entered: Sequence[Place]) -> None:
        assert self._loop is not None
        shared, count = self._shared, self._past
        for place in self._round.running:
            if place.ring is not None:
                count += place.ring.seq
                self._newest_ns = max(self._newest_ns, place.ring.core.published_ns)
        rings = [place.ring for place in entered if place.running and not place.late and place.ring]
        poller = shared.poller
        if poller is None:
            shared.poller = poller = self._new_poller()
        shared.rings = rings
        stall = Stall(self._round.look_at - monotonic(), self._tell_silence)
        deadline = self._look_again_at(entered)
        try:
            if await poller.wait(self._can_continue, count, self._newest_ns, deadline=deadline, stall=stall):
                self._new_turn()
        except TimeoutError:
            pass  # another thread may be done with its reader
        finally:
            shared.rings = ()
            self._spin_ns = poller.inline_spin_ns

    def _look_again_at(self, entered: Sequence[Place]) -> float | None:
        """Return when to look at readers that were left out, if none of them wakes this."""
        return None

    def _new_poller(self) -> Poller | ThreadPoller:
        others: list[int] = []
        for place in self._round.running:
            if place.ring is not None:
                others += place.reader.source.other_ends()
        if not others:  # what comes through sockets cannot be spun for
            return self._poller_of(Policy(may_spin=False))
        processes = [*{pid for pid in others if pid}, *(pid for pid in others if not pid)]
        policy = policy_for(processes, self._options)
        self._shared.yields = policy.crowded
        return self._poller_of(policy)

    def _poller_of(self, policy: Policy) -> Poller | ThreadPoller:
        assert self._loop is not None
        return Poller(self._loop, self._shared, policy, self._shared.spin)

    def _can_continue(self) -> bool:
        for place in self._round.running:
            if place.can_continue():
                return True
        return self._changed or not self._round.running

    def _locks_changed(self) -> bool:
        """Return whether a reader whose call lock was taken can be locked now."""
        return any(not place.entered and place.can_continue() for place in self._round.running)

    def _note_ready(self, entered: Sequence[Place]) -> None:
        for place in entered:
            if place.quick is None and place.reader.state.ready:
                place.now_ready()
                if place.ring is not None:
                    self._past -= place.ring.seq  # only what comes from here on is counted
                self._shared.close()  # there are others to wait for than before

    def _tell_silence(self, _waited_s: float) -> float:
        return self._round.tell_silence(monotonic())

    # Taking

    def _take(self, place: Place) -> tuple[int, Any] | None:
        """Return a queue's next message, or the error that is its end; None if there is nothing, or it has closed."""
        state, source = place.reader.state, place.reader.source
        error = place.failure if state.refusal is None else state.refusal()
        if error is None:
            news = place.reader.pop_news()
            if isinstance(news, HandleError):
                error = news
            elif news is not None:
                return self._tell(place, news)
        if error is None:
            gone = source.gone  # before looking: what was published before the writer went is then seen
            try:
                obj = EMPTY if place.quick is None or place.late else place.poll()
            except AioshmError as damage:
                if not place.hidden:
                    self._round.begin_behind(place)
                return self._tell(place, damage)
            if obj is not EMPTY:
                self._turn -= 1
                if not place.hidden:
                    self._round.begin_behind(place)
                return self._give(place, obj)
            if place.late:
                if source.gone is None:
                    return None
                error = source.lost()
            elif gone is None:
                return None
            else:
                error = gone()
            past = 0 if place.ring is None else place.ring.seq
            if place.goes_on_after(error):
                self._past += past
                self._shared.close()
                return None
        if isinstance(error, RoleError):
            raise error
        place.leave()  # closing it may be waiting for that
        if place.ring is not None:
            self._past += place.ring.seq
        self._shared.close()
        if isinstance(error, QueueClosed):
            self._round.drop(place)
            return None
        self._round.fail(place, error)
        return self._tell(place, error)

    def _give(self, place: Place, obj: Any) -> tuple[int, Any]:
        return place.rank, obj

    def _tell(self, place: Place, error: AioshmError) -> tuple[int, Any]:
        """Return an error as an item, or raise it."""
        self._turn -= 1
        error = error.with_traceback(None)
        if self._raises:
            raise ranked(error, place.rank)
        return place.rank, error

    # Closing

    async def aclose(self) -> None:
        """End the iteration: a waiting task's, too. The readers stay open. Idempotent."""
        self.end()

    def end(self) -> None:
        """End the iteration; call this on the loop of the merge."""
        self._round.close()
        self._shared.wake()
        self._shared.close()

    def __del__(self) -> None:
        if hasattr(self, "_shared"):
            self._shared.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._round.running)} queues>"


_KIND = "a MessageQueue"


def _attach(place: Place) -> None:
    """Begin to attach, unless that was done."""
    try:
        place.reader.start_attaching()
    except RoleError:
        raise
    except AioshmError as error:
        place.failure = error
