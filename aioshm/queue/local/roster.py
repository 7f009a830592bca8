"""Who reads a queue: the writer's record of its local readers, kept by what their lifelines tell."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence

from aioshm.config import SLOW_READER, OnReaderDeath
from aioshm.errors import AioshmError, HandleError, PeerDied
from aioshm.lifeline.peer import Peer
from aioshm.lifeline.protocol import Hello, Welcome
from aioshm.logs import LogLimiter
from aioshm.process.state import process_state
from aioshm.ring import RingWriter
from aioshm.ring.layout import ABSENT, ATTACHED, DIED, EVICTED, LEFT

logger: logging.Logger = logging.getLogger("aioshm.queue")

COMPLAINT_S = 10.0  # between two warnings of messages that are lost


class Roster:
    """The readers of one queue; what a `LifelineListener` calls its host.

    Args:
        name: The queue's, for messages.
        ranks: Of the local readers, in the order of the ring's flags.
        ring: The writer's cursor.
        policy: What to do when a reader dies.
        welcome: Makes the answer to an admitted reader, with the descriptors that go along.

    Attributes:
        ranks: Of the local readers.
        peers: Who is attached, in the same order.
        came: Called when a reader has just been told where to connect.
        lenient: Which of them the writer does not wait for, by their places in that order, and whether they are evicted
            instead of losing messages.
        changed: Called after every change, and when a reader rang for the writer.
        trouble: Makes the error that the writer has to raise from now on, if any.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        ring: RingWriter,
        policy: OnReaderDeath,
        welcome: Callable[[], tuple[Welcome, list[int]]],
    ) -> None:
        self._name = name
        self.ranks = ranks
        self._ring = ring
        self._policy = policy
        self._welcome = welcome
        self.came: Callable[[], None] = _nothing
        self.changed: Callable[[], None] = _nothing
        self.peers: list[Peer | None] = [None] * len(ranks)
        self.lenient: dict[int, bool] = {}
        self._limiter = LogLimiter(COMPLAINT_S)
        self._settled = [False] * len(ranks)  # proven, or gone
        self._going = False
        self._left: dict[int, str] = {}  # who was there before all were ready, by rank, and what became of it
        self._gone: dict[int, str] = {}  # the same of who was there after that
        self._died: dict[int, PeerDied] = {}  # who of them has died, which nobody has been told
        self.trouble: Callable[[], AioshmError] | None = None

    @property
    def complete(self) -> bool:
        """Whether no reader is waited for any more."""
        return all(self._settled)

    @property
    def alive(self) -> int:
        """How many readers are attached."""
        return sum(peer is not None for peer in self.peers)

    def attached_ranks(self) -> list[int]:
        """Return the ranks of the readers that are attached."""
        return [peer.rank for peer in self.peers if peer is not None]

    def pids(self) -> list[int]:
        """Return the readers' process ids as this process sees them; 0 for one that it cannot see, or that is gone."""
        return [0 if peer is None else peer.seen_pid for peer in self.peers]

    def go(self) -> None:
        """Tell every reader that all are ready; from now on a reader that is gone is not replaced."""
        self._going = True
        for peer in self.peers:
            if peer is not None:
                peer.go()

    def hand_over(self, fd: int) -> None:
        """Pass a descriptor to every reader."""
        for peer in self.peers:
            if peer is not None:
                peer.hand_over(fd)

    def call_to_subscribe(self) -> None:
        """Tell every reader that messages begin to come over ZeroMQ, too."""
        for peer in self.peers:
            if peer is not None:
                peer.call_to_subscribe()

    def ring_bells(self) -> None:
        """Wake the readers whose parked flags are up."""
        parked = self._ring.readers_parked
        for index, peer in enumerate(self.peers):
            if parked[index]:
                parked[index] = 0  # one ring is enough, however many messages follow until it wakes
                try:
                    if peer is not None:
                        peer.ring()
                except BaseException:  # a signal's handler has interrupted this: the next call rings again
                    parked[index] = 1
                    raise

    def missing(self) -> list[str]:
        """Name the readers that are not attached yet."""
        missing = [rank for rank, ok in zip(self.ranks, self._settled, strict=True) if not ok]
        return [f"rank {rank} ({self._left[rank]})" if rank in self._left else f"rank {rank}" for rank in missing]

    @property
    def left(self) -> dict[int, str]:
        """What became of the readers that were there, or nearly, before all were ready, and are not replaced."""
        return self._left

    def take_death(self) -> PeerDied | None:
        """Return, once, who of them has died."""
        return self._died.pop(next(iter(self._died))) if self._died else None

    def laggards(self, slots: int = 1, large: Sequence[int] = ()) -> list[str]:
        """Name the readers that keep so many messages from being written, with pid and process state."""
        return list(self._described(self._ring.laggards(slots, large)))

    def slowest(self, slots: int = 1, large: Sequence[int] = ()) -> list[int]:
        """Return, by rank, which of those that keep so many messages from being written are furthest behind."""
        read = {index: self._ring.messages_read(index) for index in self._ring.laggards(slots, large)}
        least = min(read.values(), default=0)
        return [self.ranks[index] for index, count in read.items() if count == least]

    def lag_of(self, rank: int) -> tuple[str, int] | None:
        """Name a reader, and say how many messages it is behind; None if it is not there."""
        if rank not in self.ranks or self.peers[index := self.ranks.index(rank)] is None:
            return None
        return next(iter(self._described([index]))), self._ring.seq - self._ring.messages_read(index)

    def make_room(self, slots: int, large: Sequence[int]) -> None:
        """Let no reader that need not be waited for keep so many messages from being written."""
        blocker = self._ring.core.blocker(slots, large)
        for index, evicts in list(self.lenient.items()):
            if not self._ring.pass_over(index, blocker):
                continue
            behind = self._ring.seq - self._ring.messages_read(index)
            if evicts:
                self._evict_slow(index, behind)
            elif (held_back := self._limiter.admit()) is not None:
                (who,) = self._described([index])
                text = "queue %s: %s is too slow, %d messages behind, and loses some (and %d more warnings)"
                logger.warning(text, self._name, who, behind, held_back)

    def _evict_slow(self, index: int, behind: int) -> None:
        peer = self.peers[index]
        assert peer is not None
        text = "queue %s: reader %d (pid %d) was too slow and was evicted, %d messages behind"
        logger.warning(text, self._name, peer.rank, peer.pid, behind)
        self._ring.set_reader_state(index, EVICTED, peer.pid)  # first: it looks there when its messages are gone
        self._ring.evict(index)
        del self.lenient[index]
        self.peers[index], self._settled[index] = None, True
        self._gone[peer.rank] = f"pid {peer.pid} was evicted"
        peer.hang_up()
        self.changed()

    def backlog(self) -> int:
        """Return how many messages the slowest reader has not finished with."""
        written = self._ring.seq
        return max((written - self._ring.messages_read(i) for i, peer in enumerate(self.peers) if peer), default=0)

    def _described(self, indices: Iterable[int]) -> Iterable[str]:
        for index in indices:
            peer = self.peers[index]
            state = "gone" if peer is None else f"pid {peer.pid}, {process_state(peer.seen_pid)}"
            yield f"rank {self.ranks[index]} ({state})"

    # What the lifelines tell (see `lifeline.Host`)

    def admit(self, hello: Hello) -> tuple[Welcome, list[int]]:
        """Admit a reader to a place that is free: nobody has it, or had it when all were ready."""
        if hello.rank not in self.ranks:
            raise HandleError(f"no local reader has rank {hello.rank}")
        if hello.slow not in SLOW_READER:
            raise HandleError(f"this writer knows no slow={hello.slow!r}")
        index = self.ranks.index(hello.rank)
        taken_by = self.peers[index]
        if taken_by is not None:
            raise HandleError(f"rank {hello.rank} is taken by pid {taken_by.pid}, which {_lives(taken_by.seen_pid)}")
        if self._settled[index]:
            who = f"its reader ({self._gone[hello.rank]}) is gone"
            raise HandleError(f"rank {hello.rank} is taken: {who}, and the queue goes on without it")
        return self._welcome()

    def missed(self, hello: Hello, said_goodbye: bool) -> None:
        """Note a reader that was never here; the reader that takes its place makes up for it."""
        if hello.rank in self.ranks and not self._going and self.peers[self.ranks.index(hello.rank)] is None:
            self._note_end(hello.rank, hello.pid, said_goodbye)

    def attached(self, peer: Peer) -> None:
        """Note a new reader."""
        index = self.ranks.index(peer.rank)
        self.peers[index] = peer
        self._left.pop(peer.rank, None)
        self._died.pop(peer.rank, None)
        self._ring.set_reader_state(index, ATTACHED, peer.pid)
        self.came()
        if peer.slow != "block":
            self.lenient[index] = peer.slow == "evict"

    def proven(self, peer: Peer) -> None:
        """Note that a reader can receive everything."""
        self._settled[self.ranks.index(peer.rank)] = True
        self.changed()

    def gone(self, peer: Peer, said_goodbye: bool) -> None:
        """Go on without a reader that left; one that died is a matter of policy.

        Before all are ready nothing has been sent, so its place is free for another one.
        """
        index = self.ranks.index(peer.rank)
        self.peers[index] = None
        self.lenient.pop(index, None)
        if not self._going:
            self._vacate(index, peer, said_goodbye)
            return
        self._settled[index] = True
        self._gone[peer.rank] = _end_of(peer.pid, said_goodbye)
        self._ring.set_reader_state(index, LEFT if said_goodbye else DIED, peer.pid)
        if not said_goodbye and self._policy == "raise":
            if self.trouble is None:
                self.trouble = functools.partial(PeerDied, peer.rank, peer.pid, "reader", f"queue {self._name}")
        else:
            if not said_goodbye:
                logger.warning(
                    "queue %s: reader %d (pid %d) died and was evicted at message %d",
                    self._name,
                    peer.rank,
                    peer.pid,
                    self._ring.messages_read(index),
                )
            self._ring.evict(index)
        self.changed()

    def _vacate(self, index: int, peer: Peer, said_goodbye: bool) -> None:
        self._settled[index] = False
        self._ring.set_reader_state(index, ABSENT, 0)
        self._note_end(peer.rank, peer.pid, said_goodbye)

    def _note_end(self, rank: int, pid: int, said_goodbye: bool) -> None:
        self._left[rank] = _end_of(pid, said_goodbye)
        if not said_goodbye:
            if self._policy == "raise":
                self._died[rank] = PeerDied(rank, pid, "reader", f"queue {self._name}, before all readers were ready")
            else:
                logger.warning("queue %s: reader %d (pid %d) died; its place is free", self._name, rank, pid)
        self.changed()

    def woken(self) -> None:
        """Look at the ring again."""
        self.changed()


def _lives(pid: int) -> str:
    """Say whether a process lives that has a place."""
    state = process_state(pid)
    if state in ("gone", "zombie", "dead"):
        return f"does not live any more ({state}): something that it has left running keeps its connection open"
    return f"lives ({state})" if pid > 0 else f"is {state}"


def _end_of(pid: int, said_goodbye: bool) -> str:
    return f"pid {pid} has {'left' if said_goodbye else 'died'}"


def _nothing() -> None: ...
