"""One blocking stream of many queues: round robin, and one sleep in the calling thread.

While it sleeps, a merge holds the lock of every reader. The background loop handles attaching,
deaths and special messages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from threading import get_ident
from time import monotonic
from typing import Any, Self

from aioshm.closing import Closing
from aioshm.codec import T
from aioshm.config import Options
from aioshm.errors import AioshmError, HandleError, MessagesLost, PeerDied, QueueClosed, ReaderEvicted, RoleError
from aioshm.process.lock import ProcessLock
from aioshm.process.loop_thread import process_lock, shared_loop
from aioshm.queue.blocking.end import BlockingEnd
from aioshm.queue.blocking.queue import MessageQueue
from aioshm.queue.ends.reading import ReadingEnd
from aioshm.queue.ends.writing import WritingEnd
from aioshm.queue.merge.places import SharedSleep, check_rank, checked_reader, checked_readers
from aioshm.queue.merge.round import Errors, Round, check_errors, ranked
from aioshm.ring import RingReader
from aioshm.ring.cores import EMPTY, SLOW_PATH
from aioshm.wait.cpus import policy_for
from aioshm.wait.limits import Stall
from aioshm.wait.policy import Policy
from aioshm.wait.threads import ThreadPoller

TAKEN_S = 0.01
"""How often to look after a reader that another thread uses."""

OTHERS_S = 0.1
"""How often a thread looks whether there is anything for it while another one waits for all queues."""

LOOK_EVERY = 256
"""After so many messages, queues are looked after that had none."""


def merge(readers: Mapping[int, MessageQueue[T]], *, errors: Errors = "raise") -> Merged[T]:
    """Make one stream out of many queues.

    For use as ``for rank, obj in merge({rank: reader, ...})``; see `Merged`.

    Args:
        readers: Readers' ends by the rank, or any other number, that their messages are to come with. They need not be
            ready; they stay open when the iteration ends. Without any, it ends at once.
        errors: What becomes of an error of one of the queues: ``"raise"``: it comes out of the iteration, with the
            queue's rank as its ``rank``; ``"yield"``: it is an item, ``(rank, error)``. Both ways one can go on.

    Raises:
        TypeError: Not a mapping from ints to queues of `aioshm.blocking`.
        ValueError: A reader is there twice; ``errors`` is neither.
        RoleError: One of them is a writer.
    """
    check_errors(errors)
    ends = checked_readers(readers, MessageQueue, _KIND, _end_of)
    return Merged([_Place(rank, readers[rank].held, end) for rank, end in ends.items()], errors)


class _Place:
    """One reader's place in the round."""

    __slots__ = ("held", "late", "rank", "reader", "running")

    def __init__(self, rank: int, held: BlockingEnd, reader: ReadingEnd) -> None:
        self.rank = rank
        self.held = held
        self.reader = reader
        # True while the next message is incomplete.
        self.late: bool = False
        self.running: bool = True

    @property
    def ring(self) -> RingReader | None:
        """The reader's ring, if it has one by now."""
        return None if self.reader.state.dismantled else self.reader.source.ring

    def look(self) -> None:
        """Receive an available message; called on the loop."""
        reader, state = self.reader, self.reader.state
        state.check_refusal()
        if not state.ready:
            reader.start_attaching()
            state.check_refusal()
        news = reader.tell()
        if news is not None:
            raise news
        source = reader.source
        gone = source.gone  # before looking: what was published before the writer went is then seen
        obj = reader.poll() if state.ready else EMPTY
        self.late = obj is SLOW_PATH
        if obj is not EMPTY and not self.late:
            self.held.undelivered.append(obj)
        elif gone is not None:
            error = source.lost() if self.late else gone()
            self.late = False
            reader.go_on_after(error)

    # For the round

    def reserve(self) -> bool:
        """Return whether this thread holds the reader's lock."""
        return self.held.lock.owner == get_ident()

    def release(self) -> None:
        """Do nothing: the merge holds the lock until it wakes."""


class Merged(Closing, Iterator[tuple[int, T | Any]]):
    """The messages of many queues, each as ``(rank, obj)``. Made by `merge`.

    Each queue's messages come in its order; among the queues that have messages, each has its turn before any of them
    has another. A queue whose writer closes it drops out; one that ends otherwise, or cannot be attached to, does so
    with an error: a `PeerDied`, a `HandleError`, a `ReaderEvicted`, or a `MessagesLost`. It is told once, by then the
    queue is out, and the iteration can be gone on with: ``next``, or another ``for``. It ends when all have ended.
    `add` and `remove` change what it is of. A message that is damaged or lost is told in the same way, as is a
    `QueueRestarted`, and the queue goes on; `failed` tells which error is its queue's end. With ``errors="yield"``
    errors are items, as are exceptions that were sent as messages: nothing else tells one from the other.

    What a signal's handler raises ends a wait and loses nothing. Two threads that iterate get different messages. While
    this waits, calls that other threads make on one of the readers wait, too; `close` ends the wait from any thread.
    An iteration may be left, and begun again, at any time.

    Attributes:
        failed: The errors of the queues that have ended with one, by rank.
    """

    def __init__(self, places: Sequence[_Place], errors: Errors = "raise") -> None:
        self._raises = errors == "raise"
        self._options = places[0].reader.state.options if places else Options()
        self._round = Round(places, self._options.stall_warning_s, monotonic())
        self.failed: dict[int, AioshmError] = self._round.failed
        self._shared = SharedSleep()
        self._poller: ThreadPoller | None = None
        self._slept_for: list[RingReader] = []  # what the poller was made for
        self._lock = ProcessLock(OTHERS_S)  # of the threads that wait
        self._news = False  # whether anything has happened since the loop has looked
        self._found: list[tuple[_Place, AioshmError]] = []  # errors to be told
        self._budget = LOOK_EVERY
        self._pid = os.getpid()

    # Changing what is merged

    def add(self, rank: int, reader: MessageQueue[T]) -> None:
        """Let another queue have its turns, from any thread, also while one waits here.

        Args:
            rank: What its messages are to come with; that of a queue which has ended, or was removed, is free again.
            reader: Its reader's end, which need not be ready.

        Raises:
            TypeError: Not an int and a queue of `aioshm.blocking`.
            ValueError: The rank is taken, or the reader is there already.
            RoleError: The queue is a writer.
            EndClosed: This was closed.
        """
        check_rank("rank must be an int", rank)
        end = checked_reader("reader", reader, MessageQueue, _KIND, _end_of)
        self._round.add(_Place(rank, reader.held, end), monotonic())
        self._wake()

    def remove(self, rank: int) -> None:
        """Leave a queue out from now on, from any thread, also while one waits here.

        Its reader stays open, and receives what was not received here. The iteration ends if it was the last.

        Args:
            rank: That of the queue; one that has ended is forgotten, with its error.

        Raises:
            ValueError: There is no such rank.
        """
        self._round.remove(rank)
        self._wake()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[int, T | Any]:
        """Receive the next message of any queue.

        Raises:
            StopIteration: All of them have ended, or this was closed.
            AioshmError: One of them has ended with it, or has a damaged message, unless errors are items; its ``rank``
                is the queue's.
            RoleError: This thread has an event loop that runs, or is inside of a block that has a reader's slot; or a
                reader belongs to another process.
        """
        around = self._round
        while running := around.running:
            if self._found:
                return self._tell(*self._found.pop())
            self._budget -= 1
            left = len(running) if self._budget > 0 else 0
            for place in around.order if left else ():
                undelivered = place.held.undelivered
                if not undelivered:
                    try:
                        place.held.receive_now(1)
                    except AioshmError as error:
                        return self._tell(place, error)
                if undelivered:
                    # No call between this and the return: see `MessageQueue.dequeue`.
                    obj = undelivered[0]
                    del undelivered[0]
                    return place.rank, obj
                left -= 1
                if not left:
                    break
            self._budget = LOOK_EVERY
            self._wait(running)
        raise StopIteration

    def _tell(self, place: _Place, error: AioshmError) -> tuple[int, Any]:
        """Return an error as an item, or raise it."""
        error = error.with_traceback(None)
        if self._raises:
            raise ranked(error, place.rank)
        return place.rank, error

    # Waiting

    def _wait(self, running: list[_Place]) -> None:
        """Run the loop's checks of the queues; sleep if there is nothing to do."""
        me, mine = get_ident(), self._lock
        running[0].held.loop()  # refuses a thread that has an event loop
        if mine.owner == me:
            raise RoleError(
                f"{self!r}: called by a signal handler that has interrupted it, and so would wait for itself"
            )
        if mine.acquire(me, monotonic() + OTHERS_S):
            try:
                self._wait_in_turn(running, me)
            finally:
                mine.owner = 0
                if mine.waiting:
                    mine.wake()

    def _wait_in_turn(self, running: list[_Place], me: int) -> None:
        turns: list[Any] = []
        states: list[Any] = []
        call_locks: list[Any] = []
        taken: list[_Place] = []
        # Consumed without a call, so that no handler comes in between.
        end_turns = map(setattr, turns, repeat("owner"), repeat(0))
        leave = map(setattr, call_locks, repeat("calls"), repeat(0))
        unwatch = map(setattr, states, repeat("watcher"), repeat(None))
        loop = running[0].held.loop()
        for place in running:
            place.held.loop()
        try:
            for place in running:
                mine = place.held.lock
                mine.owner = (before := mine.owner) or me
                if before == me:
                    raise RoleError(
                        f"{place.reader!r}: called inside of a block that has its slot, and so would wait for itself"
                    )
                if not before:
                    turns += [mine]
                    taken.append(place)
                    place.reader.state.watcher = self._woken
                    states += [place.reader.state]
                    call_locks += [place.reader.state.lock]
            self._news = False
            loop.do(lambda: self._look(taken))
            idle = running is self._round.running and not any(place.held.undelivered for place in running)
            if self._round.silence_due(monotonic()):
                self._round.tell_silence(monotonic())
            if idle and not self._found:
                self._sleep(running, taken, states, me)
        finally:
            _ = [*leave, *unwatch, *end_turns]
            if process_lock.owner == me:
                process_lock.owner = process_lock.next_owner
            for place in taken:
                place.held.release()

    def _look(self, taken: list[_Place]) -> None:
        """Receive available messages, and find errors; called on the loop."""
        around = self._round
        for place in [place for place in around.in_turn() if place in taken]:
            if place.held.undelivered or not place.running:
                continue
            try:
                place.look()
            except RoleError:
                raise
            except QueueClosed:
                around.drop(place)
            except AioshmError as error:
                own = isinstance(error, MessagesLost) and place.ring is not None and not place.ring.copies
                if own or isinstance(error, (PeerDied, HandleError, ReaderEvicted)):
                    around.fail(place, error)
                else:
                    around.begin_behind(place)
                self._found.append((place, error))
                return
            place.held.state.wake_peers()

    def _sleep(self, running: list[_Place], taken: list[_Place], states: list[Any], me: int) -> None:
        process_lock.acquire(me)  # before the rings are read, which the loop may close
        rings = [place.ring for place in taken if place.running and place.ring is not None]
        poller = self._poller
        if poller is None or rings != self._slept_for:
            poller = self._new_poller(taken, rings)
        for state in states:
            state.lock.calls = 1
            state.core.open = False
        waiting = [(place, place.ring) for place in taken if place.running and not place.late]
        self._shared.rings = watched = [ring for _, ring in waiting if ring is not None]
        looks = [ring.ready for ring in watched]
        around = self._round

        def may_go_on() -> bool:
            return self._news or running is not around.running or any(look() for look in looks)

        stall = Stall(max(0.0, around.look_at - monotonic()), self._tell_silence)
        deadline = monotonic() + TAKEN_S if len(taken) < len(running) else None
        count = sum(ring.seq for ring in rings)
        newest_ns = max((ring.core.published_ns for ring in rings), default=0)
        try:
            if not may_go_on():
                self._wake_peers()
                poller.wait(may_go_on, count, newest_ns, deadline=deadline, stall=stall).send(None)
        except StopIteration:
            pass
        except TimeoutError:
            pass  # another thread may be done with its reader
        finally:
            self._shared.rings = ()

    def _new_poller(self, taken: list[_Place], rings: list[RingReader]) -> ThreadPoller:
        if self._poller is not None:
            self._poller.close()
        places = [place for place in taken if place.running and place.ring is not None]
        others = [pid for place in places for pid in place.reader.source.other_ends()]
        doorbells = [doorbell for place in places if (doorbell := place.reader.source.doorbell) is not None]
        policy = policy_for(others, self._options, in_threads=True) if others else Policy(may_spin=False)
        self._shared.yields = policy.crowded
        self._poller = ThreadPoller(shared_loop().loop, self._shared, policy, self._shared.spin, doorbells)
        self._slept_for = rings
        return self._poller

    def _wake_peers(self) -> None:
        for place in self._round.running:
            place.held.state.wake_peers()

    def _woken(self) -> None:
        self._news = True
        if self._poller is not None:
            self._poller.wake()

    _wake = _woken

    def _tell_silence(self, _waited_s: float) -> float:
        return self._round.tell_silence(monotonic())

    # Closing

    def close(self) -> None:
        """End the iteration, one that waits in another thread too. The readers stay open. Idempotent."""
        self._round.close()
        self._wake()

    aclose = close

    def __del__(self) -> None:
        poller = getattr(self, "_poller", None)
        if poller is not None and self._pid == os.getpid():
            poller.close()

    def __repr__(self) -> str:
        return f"<blocking {type(self).__name__} of {len(self._round.running)} queues>"


_KIND = "an aioshm.blocking.MessageQueue"


def _end_of(reader: MessageQueue[Any]) -> ReadingEnd | WritingEnd:
    return reader.held.end
