"""Who reads a queue: the writer's record of its local readers, kept by what their lifelines tell."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator

from msgspec.structs import asdict

from aioshm.config import SLOW_READER, OnReaderDeath
from aioshm.errors import AioshmError, HandleError, NoPlaceVacant, PeerDied
from aioshm.lifeline.peer import Peer
from aioshm.lifeline.protocol import ANY_RANK, Hello, Welcome
from aioshm.process.state import is_dying
from aioshm.queue.local.behind import Behind
from aioshm.queue.local.place import Place
from aioshm.queue.membership import Change, ChangeLog, ReaderDied, ReaderInfo, ReaderJoined, ReaderLeft
from aioshm.queue.stats import ReaderStats
from aioshm.ring import RingWriter
from aioshm.ring.layout import ABSENT, ATTACHED, DIED, DISMISSED, EVICTED, HELD, LEFT

logger: logging.Logger = logging.getLogger("aioshm.queue")

MakeWelcome = Callable[[int, int, bool], tuple[Welcome, list[int]]]
"""Makes the answer to an admitted reader, with the descriptors that go along: of its rank, its first message, and
whether all are ready."""


class Roster:
    """The places for the readers of one queue; what a `LifelineListener` calls its host.

    A vacant place counts as having read everything. A newcomer is admitted between two messages.

    Args:
        name: The queue's, for messages.
        ranks: Of the places, in the order of the ring's flags.
        extra: Those of them that nobody waits for before the queue is ready.
        ring: The writer's cursor.
        policy: What to do when a reader dies.
        welcome: Makes the answer to an admitted reader.

    Attributes:
        ranks: Of the places.
        came: Called with a reader that has just been told where to connect.
        came_to: Called with the rank of a reader that was admitted.
        elsewhere: Says why a rank is taken by a remote reader, if it is.
        body_gone: Says of a message that did not fit a chunk whether it is not to be had any more.
        behind: Which of them keep messages from being written.
        changed: Called after every change, and when a reader rang for the writer.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        extra: frozenset[int],
        ring: RingWriter,
        policy: OnReaderDeath,
        welcome: MakeWelcome,
    ) -> None:
        self._name = name
        self.ranks = ranks
        self._ring = ring
        self._policy = policy
        self._welcome = welcome
        self.came: Callable[[Peer], None] = _nothing
        self.came_to: Callable[[int], None] = _nothing
        self.elsewhere: Callable[[int], str | None] = _nowhere
        self.body_gone: Callable[[int], bool] = bool
        self.changed: Callable[[], None] = _nothing
        self._places = [Place(rank, rank in extra, settled=rank in extra) for rank in ranks]
        self._index = {rank: index for index, rank in enumerate(ranks)}
        self.behind: Behind = Behind(name, self._places, ring, self._evict_slow)
        self._going = False
        self._left: dict[int, str] = {}  # who was there before all were ready, by rank, and what became of it
        self._died: dict[int, PeerDied] = {}  # who of them has died, which nobody has been told
        self._bells: tuple[tuple[int, Peer], ...] = ()  # who is attached, with the places in the order of the flags
        self._first = 0  # the number of the first message of the reader that is being admitted
        self._logs: weakref.WeakSet[ChangeLog] = weakref.WeakSet()
        self._untold: deque[Change] = deque()  # changes that the logs are told of in a later turn of the loop
        for index, place in enumerate(self._places):
            if place.extra:
                ring.evict(index)

    @property
    def peers(self) -> list[Peer | None]:
        """Who is attached, in the order of the ring's flags."""
        return [place.peer for place in self._places]

    @property
    def complete(self) -> bool:
        """Whether no reader is waited for any more."""
        return all(place.settled for place in self._places)

    @property
    def alive(self) -> int:
        """How many readers are attached."""
        return len(self._bells)

    @property
    def held(self) -> dict[int, tuple[int, int]]:
        """Whose places wait for a replacement: by rank, its process, and the first message that is kept for it."""
        held = [(index, place) for index, place in enumerate(self._places) if place.held]
        return {place.rank: (place.pid, self._ring.messages_read(index)) for index, place in held}

    @property
    def trouble(self) -> Callable[[], AioshmError] | None:
        """What makes the error that the writer has to raise for now, if any."""
        return next((place.trouble for place in self._places if place.trouble is not None), None)

    def attached_ranks(self) -> list[int]:
        """Return the ranks of the readers that are attached."""
        return [peer.rank for peer in self._there()]

    def pids(self) -> list[int]:
        """Return the readers' process ids as this process sees them; 0 for one that it cannot see, or that is gone."""
        there = [place for place in self._places if place.peer is not None or not place.extra]
        return [0 if place.peer is None else place.peer.seen_pid for place in there]

    def go(self) -> None:
        """Tell every reader that all are ready; from now on a newcomer begins at the present."""
        self._going = True
        for peer in self._there():
            peer.go()

    def hand_over(self, fd: int) -> None:
        """Pass a descriptor to every reader."""
        for peer in self._there():
            peer.hand_over(fd)

    def call_to_subscribe(self) -> None:
        """Tell every reader that messages begin to come over ZeroMQ, too."""
        for peer in self._there():
            peer.call_to_subscribe()

    def _there(self) -> Iterator[Peer]:
        return (peer for _, peer in self._bells)

    def _have(self, index: int, peer: Peer | None) -> None:
        """Note who is attached to a place."""
        self._places[index].peer = peer
        self._bells = tuple((index, place.peer) for index, place in enumerate(self._places) if place.peer is not None)

    def ring_bells(self) -> None:
        """Wake the readers whose parked flags are up."""
        parked = self._ring.readers_parked
        for index, peer in self._bells:
            if parked[index]:
                parked[index] = 0  # one ring is enough, however many messages follow until it wakes
                try:
                    peer.ring()
                except BaseException:  # a signal's handler has interrupted this: the next call rings again
                    parked[index] = 1
                    raise

    def missing(self) -> list[str]:
        """Name the readers that are not attached yet."""
        missing = [place.rank for place in self._places if not place.settled]
        return [f"rank {rank} ({self._left[rank]})" if rank in self._left else f"rank {rank}" for rank in missing]

    @property
    def left(self) -> dict[int, str]:
        """What became of the readers that were there, or nearly, before all were ready, and are not replaced."""
        return self._left

    def take_death(self) -> PeerDied | None:
        """Return, once, who of them has died."""
        return self._died.pop(next(iter(self._died))) if self._died else None

    # Telling of changes

    def readers(self) -> list[ReaderInfo]:
        """Return who reads, or did: every place but those extra ones that never had a reader."""
        ring, known = self._ring, [(i, p) for i, p in enumerate(self._places) if p.state != "absent" or not p.extra]
        return [place.info(ring.messages_read(index), ring.seq) for index, place in known]

    def reader_stats(self) -> list[ReaderStats]:
        """Return the same, and what the ring's header tells of how they read."""
        places = {place.rank: index for index, place in enumerate(self._places)}
        rows = [(info, self._ring.reader_row(places[info.rank])) for info in self.readers()]
        return [ReaderStats(**asdict(info), bytes=row.bytes, latency=row.latency) for info, row in rows]

    def new_log(self) -> ChangeLog:
        """Return what notes the changes from now on, as long as somebody has it."""
        self._tell_all()  # they were before
        log = ChangeLog()
        self._logs.add(log)
        return log

    def tell(self, change: Change) -> None:
        """Note a change."""
        self._untold.append(change)
        self._tell_all()

    def _tell_all(self) -> None:
        """Note the changes, in order, that were not noted when they came about."""
        while self._untold:
            change = self._untold.popleft()
            for log in list(self._logs):
                log.add(change)

    # What the lifelines tell (see `lifeline.Host`)

    def admit(self, hello: Hello) -> tuple[Welcome, list[int]]:
        """Admit a reader to a place that is vacant: nobody has it, or it is held for a replacement."""
        if hello.slow not in SLOW_READER:
            raise HandleError(f"this writer knows no slow={hello.slow!r}")
        if hello.rank == ANY_RANK:
            vacant = (index for index, place in enumerate(self._places) if place.vacant)
            index = next((index for index in vacant if self.elsewhere(self._places[index].rank) is None), None)
            if index is None:
                who = ", ".join(f"rank {place.rank} ({place.whose()})" for place in self._places)
                raise NoPlaceVacant(f"no place is vacant: {who or 'the queue has none'}")
        else:
            index = self._index.get(hello.rank)
            if index is None:
                raise HandleError(f"no local reader has rank {hello.rank}")
        place = self._places[index]
        taken = self.elsewhere(place.rank) if place.vacant else place.why_taken()
        if taken is not None:
            raise HandleError(f"rank {place.rank} is taken{taken}")
        if place.held:
            self._first = self._ring.resume(index, copies=place.copies and hello.slow != "block")
        elif self._going or place.extra:
            self._first = self._ring.admit(index, min(max(0, hello.history), self._ring.seq), self.body_gone)
        else:
            self._first = 0
        self._ring.give_way()
        return self._welcome(place.rank, self._first, self._going)

    def awaits_end(self, hello: Hello) -> bool:
        """Return whether a reader that has what this one wants is about to be gone: its process is being ended."""
        return any(hello.rank in (peer.rank, ANY_RANK) and is_dying(peer.seen_pid) for peer in self._there())

    def why_taken(self, rank: int) -> str | None:
        """Say why a rank is not to be had by a remote reader; None: it is."""
        index = self._index.get(rank)
        if index is None or (self._places[index].vacant and not self._places[index].held):
            return None
        place = self._places[index]
        return f": {place.whose()}" if place.held else place.why_taken()

    def supplanted(self, rank: int) -> None:
        """Note that a remote reader has come to a place that either may have."""
        index = self._index.get(rank)
        if index is not None:
            self._places[index].trouble = None

    def withdrawn(self, welcome: Welcome) -> None:
        """Let the place of a reader that could not be told be vacant again."""
        index = self._index[welcome.rank]
        place = self._places[index]
        if (self._going or place.extra) and not place.held:
            self._ring.evict(index)

    def missed(self, hello: Hello, said_goodbye: bool) -> None:
        """Note a reader that was never here; the reader that takes its place makes up for it."""
        index = self._index.get(hello.rank)
        if index is not None and not self._going and self._places[index].vacant:
            self._note_end(self._places[index], hello.pid, said_goodbye)

    def attached(self, peer: Peer) -> None:
        """Note a new reader."""
        index = self._index[peer.rank]
        place = self._places[index]
        self._have(index, peer)
        place.pid, place.state, place.joined_at = peer.pid, "attached", time.time()
        place.copies, place.trouble = peer.slow != "block", None
        self._left.pop(peer.rank, None)
        self._died.pop(peer.rank, None)
        self.behind.lenient.pop(index, None)
        self._ring.set_reader_state(index, ATTACHED, peer.pid)
        self.came(peer)
        if place.copies:
            self.behind.lenient[index] = peer.slow == "evict"
        self.came_to(peer.rank)
        self._untold.append(ReaderJoined(peer.rank, peer.pid, self._first))

    def announce(self) -> None:
        """Tell of the readers that have come and gone, and let those look again who wait for that."""
        self._tell_all()
        self.changed()

    def proven(self, peer: Peer) -> None:
        """Note that a reader can receive everything."""
        place = self._places[self._index[peer.rank]]
        if not place.settled:  # else nobody has waited for it
            place.settled = True
            self.changed()

    def gone(self, peer: Peer, said_goodbye: bool) -> None:
        """Go on without a reader that left; one that died is a matter of policy.

        Before all are ready nothing has been sent, so there is nothing to go on without.
        """
        index = self._index[peer.rank]
        place = self._places[index]
        if place.leaving is peer:
            place.leaving = None
            return
        self._have(index, None)
        if not self._going:
            self._vacate(index, peer, said_goodbye)
            return
        place.settled = True
        if said_goodbye:
            self._leave(index)
        else:
            self._die(index)
        if place.trouble is not None or not self._bells:
            self.announce()  # now: else a call would go on in the room that this makes, as if all were well

    def _leave(self, index: int) -> None:
        place = self._places[index]
        place.state = "left"
        self._ring.set_reader_state(index, LEFT, place.pid)
        self._untold.append(ReaderLeft(place.rank, place.pid, self._ring.messages_read(index)))
        self._give_up(index)

    def _die(self, index: int) -> None:
        place, read = self._places[index], self._ring.messages_read(index)
        held = self._policy == "hold"
        place.state = "held" if held else "died"
        self._ring.set_reader_state(index, HELD if held else DIED, place.pid)
        self._untold.append(ReaderDied(place.rank, place.pid, read, held))
        if self._policy == "raise":
            place.trouble = functools.partial(PeerDied, place.rank, place.pid, "reader", f"queue {self._name}")
        elif held:
            text = "queue %s: reader %d (pid %d) died; its place is held for a replacement, from message %d on"
            logger.warning(text, self._name, place.rank, place.pid, read)
            self._ring.resume(index, copies=place.copies)  # what it had leased goes back
            return
        else:
            text = "queue %s: reader %d (pid %d) died and was evicted at message %d"
            logger.warning(text, self._name, place.rank, place.pid, read)
        self._give_up(index)

    def _give_up(self, index: int) -> None:
        """Count a place as having read everything."""
        self.behind.lenient.pop(index, None)
        self._ring.evict(index)

    def _vacate(self, index: int, peer: Peer, said_goodbye: bool) -> None:
        place = self._places[index]
        self.behind.lenient.pop(index, None)
        place.settled, place.state = place.extra, "left" if said_goodbye else "died"
        self._ring.set_reader_state(index, ABSENT, 0)
        change = ReaderLeft if said_goodbye else ReaderDied
        self.tell(change(peer.rank, peer.pid, 0))
        if place.extra:
            self._ring.evict(index)
        self._note_end(place, peer.pid, said_goodbye)

    def _note_end(self, place: Place, pid: int, said_goodbye: bool) -> None:
        if not place.extra:
            self._left[place.rank] = f"pid {pid} has {'left' if said_goodbye else 'died'}"
        if not said_goodbye:
            if self._policy == "raise" and not place.extra:
                about = f"queue {self._name}, before all readers were ready"
                self._died[place.rank] = PeerDied(place.rank, pid, "reader", about)
            else:
                logger.warning("queue %s: reader %d (pid %d) died; its place is free", self._name, place.rank, pid)
        self.changed()

    def woken(self) -> None:
        """Look at the ring again."""
        self.changed()

    # Evicting

    def _evict_slow(self, index: int, behind: int) -> None:
        place = self._places[index]
        text = "queue %s: reader %d (pid %d) was too slow and was evicted, %d messages behind"
        logger.warning(text, self._name, place.rank, place.pid, behind)
        self._evict(index, EVICTED)
        self.changed()

    def dismiss(self, rank: int) -> None:
        """Wait for a reader no more, whether it is there, has died, or never came."""
        index = self._index[rank]
        place = self._places[index]
        place.trouble, place.settled, place.extra = None, True, True
        self._left.pop(rank, None)
        self._died.pop(rank, None)
        if place.peer is not None:
            self._evict(index, DISMISSED)
        else:
            if place.held:
                place.state = "died"
            self._give_up(index)
        self.changed()

    def _evict(self, index: int, state: int) -> None:
        """Go on without a reader that is there, or whose place is held."""
        place = self._places[index]
        self._ring.set_reader_state(index, state, place.pid)  # first: it looks there when its messages are gone
        self._give_up(index)
        place.settled, place.leaving = True, place.peer
        self._have(index, None)
        if place.leaving is None:
            place.state = "died"
            return
        place.state = "evicted"
        self.tell(ReaderLeft(place.rank, place.pid, self._ring.messages_read(index), evicted=True))
        place.leaving.evict()


def _nothing(*_: object) -> None: ...


def _nowhere(_rank: int) -> str | None:
    return None
