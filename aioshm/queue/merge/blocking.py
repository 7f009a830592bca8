"""One blocking stream of many queues; an awaited merge on the background loop does everything but the fast path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from threading import get_ident
from time import monotonic
from typing import Any, Self

from aioshm.closing import Closing
from aioshm.codec import T
from aioshm.errors import AioshmError, RoleError
from aioshm.lifeline.sockets import Doorbell
from aioshm.process.loop_thread import LoopThread, shared_loop
from aioshm.queue.blocking.end import BlockingEnd, check_thread
from aioshm.queue.blocking.queue import MessageQueue
from aioshm.queue.merge import stream
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
from aioshm.wait.policy import Policy
from aioshm.wait.poller import Poller

TAKEN_S = 0.01
"""How often to poll a reader that another thread uses."""

LOOK_EVERY = 256
"""After so many messages, the slow path polls the queues without messages."""


def merge(readers: Mapping[int, MessageQueue[T]], *, errors: Errors = "raise") -> Merged[T]:
    """Make one stream out of many queues.

    For use as ``for rank, obj in merge({rank: reader, ...})``; see `Merged`. Arguments and errors are those of
    `aioshm.merge`.
    """
    check_errors(errors)
    return Merged(checked_readers(readers, MessageQueue, _KIND), errors)


class _Place(Place):
    """One reader in a blocking merge, which also acquires the lock of the blocking API."""

    def __init__(self, rank: int, queue: MessageQueue[Any], shared: SharedSleep) -> None:
        super().__init__(rank, queue, shared)
        self.held: BlockingEnd = queue.held
        self.locked: bool = False

    async def enter(self) -> None:
        lock = self.held.lock
        me = get_ident()
        if lock.owner:  # a call of another thread; no call, and so no other thread, until the lock is acquired
            return
        lock.owner = me
        self.locked = True
        self.held.state.wake_peers()
        await super().enter()

    def leave(self) -> None:
        super().leave()
        if self.locked:
            self.locked = False
            self.held.lock.owner = 0
            self.held.lock.wake()

    def can_continue(self) -> bool:
        if not self.locked:
            return not self.held.lock.owner
        return bool(self.held.undelivered) or self.held.failure is not None or super().can_continue()

    def poll(self) -> Any:
        try:
            return super().poll()
        finally:
            self.held.state.wake_peers()


class _Merging(stream.Merged[Any]):
    """The awaited merge on the background loop; puts messages in the readers' undelivered ones."""

    def __init__(self, readers: Mapping[int, Any], found: list[tuple[int, AioshmError]]) -> None:
        super().__init__(readers)
        self._found = found

    def _place(self, rank: int, queue: Any) -> _Place:
        return _Place(rank, queue, self._shared)

    async def wait(self) -> None:
        """Wait for a message or an error, or until all queues have ended."""
        try:
            await self._next()
        except StopAsyncIteration:
            pass

    def _take(self, place: Place) -> tuple[int, Any] | None:
        assert isinstance(place, _Place)
        held = place.held
        if held.undelivered:  # from an interrupted call; the reader need not be ready
            return place.rank, None
        failure = held.failure
        if failure is not None:
            held.failure = None
            return self._deliver_error(place, failure)
        held.state.raw.clear()
        return super()._take(place)

    def _deliver(self, place: Place, obj: Any) -> tuple[int, Any]:
        assert isinstance(place, _Place)
        place.held.undelivered.insert(0, obj)
        return place.rank, None

    def _deliver_error(self, place: Place, error: AioshmError) -> tuple[int, Any]:
        self._found.append((place.rank, error.with_traceback(None)))
        return place.rank, None

    def _look_again_at(self, entered: Sequence[Place]) -> float | None:
        if len(entered) == len(self._running):
            return None
        return monotonic() + TAKEN_S

    def _poller_of(self, policy: Policy) -> Poller:
        assert self._loop is not None
        doorbells: list[Doorbell] = []
        for place in self._running:
            doorbell = place.reader.source.doorbell
            if place.ring is not None and doorbell is not None:
                doorbells.append(doorbell)
        return Poller(self._loop, self._shared, policy, self._shared.spin, doorbells)


class Merged(Closing, Iterator[tuple[int, T | Any]]):
    """The messages of many queues, each as ``(rank, obj)``. Made by `merge`.

    As `aioshm.Merged`, for threads: an exception of a signal handler ends a wait and loses nothing; two threads that
    iterate get different messages. During a wait, other threads' calls on a reader wait, too.

    Attributes:
        failed: The errors of the queues that ended with an error, by rank.
    """

    def __init__(self, readers: Mapping[int, MessageQueue[T]], errors: Errors = "raise") -> None:
        self._raises = errors == "raise"
        self._found: list[tuple[int, AioshmError]] = []  # errors to deliver
        self._merging = _Merging(readers, self._found)
        self.failed: dict[int, AioshmError] = self._merging.failed
        self._budget = LOOK_EVERY
        self._closed = False
        self._waiting: set[int] = set()  # threads that wait in this merge
        self._loop: LoopThread | None = None

    def add(self, rank: int, reader: MessageQueue[T]) -> None:
        """Add a queue, from any thread, also during an iteration.

        Args:
            rank: The rank that the queue's messages are returned with; that of an ended or removed queue is free again.
            reader: The queue's reader, which need not be ready.

        Raises:
            TypeError: The arguments are not an int and a queue of `aioshm.blocking`.
            ValueError: The rank is taken, or the merge has the reader already.
            RoleError: The queue is a writer.
            EndClosed: The merge was closed.
        """
        check_rank("rank must be an int", rank)
        checked_reader("reader", reader, MessageQueue, _KIND)
        self._own_loop().do(lambda: self._merging.add_checked(rank, reader))

    def remove(self, rank: int) -> None:
        """Remove a queue, from any thread, also during an iteration.

        The reader stays open, and still receives every message that the merge has not returned. The iteration ends
        with the last queue.

        Args:
            rank: The queue's rank. Removing an ended queue also removes its error from `failed`.

        Raises:
            ValueError: The merge has no such rank.
        """
        self._own_loop().do(lambda: self._merging.remove(rank))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, T | Any]:
        """Receive the next message of any queue.

        Raises:
            StopIteration: All queues have ended, or the merge was closed.
            AioshmError: A queue has ended with this error, or has a damaged message, unless errors are items; ``rank``
                is the queue's.
            RoleError: This thread has a running event loop, or is inside of a block that has a reader's slot; or a
                reader belongs to another process.
        """
        while not self._closed:
            if self._found:
                found = self._found[0]
                del self._found[0]
                return self._deliver_error(*found)
            running = tuple(self._merging._running)
            if not running:
                break
            self._budget -= 1
            polled = running if self._budget > 0 else ()
            for place in polled:
                assert isinstance(place, _Place)
                undelivered = place.held.undelivered
                if not undelivered:
                    try:
                        place.held.receive_now(1)
                    except AioshmError as error:
                        self._merging._begin_behind(place)
                        return self._deliver_error(place.rank, error)
                if undelivered:
                    self._merging._begin_behind(place)
                    # No call from here to the return: see `MessageQueue.dequeue`.
                    obj = undelivered[0]
                    del undelivered[0]
                    return place.rank, obj
            self._budget = LOOK_EVERY
            self._wait(running)
        raise StopIteration

    def _deliver_error(self, rank: int, error: AioshmError) -> tuple[int, Any]:
        """Return an error as an item, or raise it."""
        error = error.with_traceback(None)
        if self._raises:
            raise ranked(error, rank)
        return rank, error

    def _wait(self, running: Sequence[Place]) -> None:
        """Wait on the background loop for a message or an error."""
        loop = self._own_loop()
        me = get_ident()
        if me in self._waiting:
            raise RoleError(
                f"{self!r}: called by a signal handler that has interrupted it, and so would wait for itself"
            )
        ends = [place.held for place in running if isinstance(place, _Place)]
        for held in ends:
            held.loop()
            if held.lock.owner == me:
                why = "called inside of a block that has its slot, and so would wait for itself"
                raise RoleError(f"{held.end!r}: {why}")
        try:
            self._waiting.add(me)
            loop.run(self._merging.wait)
        finally:
            self._waiting.discard(me)
            for held in ends:
                held.release()

    def _own_loop(self) -> LoopThread:
        check_thread(self)
        if self._loop is None:
            self._loop = shared_loop()
        return self._loop

    def close(self) -> None:
        """End the iteration, also in a thread that waits. The readers stay open. Idempotent."""
        self._closed = True
        if self._loop is None:
            self._merging.end()
        else:
            self._loop.post(self._merging.end)

    aclose = close

    def __del__(self) -> None:
        if getattr(self, "_loop", None) is not None:
            self.close()

    def __repr__(self) -> str:
        return f"<blocking {type(self).__name__} of {len(self._merging._running)} queues>"


_KIND = "an aioshm.blocking.MessageQueue"
