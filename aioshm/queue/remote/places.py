"""The places for the remote readers of one queue: who has them, who may have one, what becomes of one. No I/O."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from aioshm.errors import AioshmError, PeerDied
from aioshm.lifeline.protocol import ANY_RANK
from aioshm.queue.membership import Change, ReaderDied, ReaderInfo, ReaderJoined, ReaderLeft, ReaderState
from aioshm.queue.remote import wire
from aioshm.wait.stall import seconds

logger: logging.Logger = logging.getLogger("aioshm.queue")

REMEMBERED = 256
"""So many readers that are gone are told why, where they come back."""


class Window(Protocol):
    """The writer's window, as places see it: see `SendWindow`."""

    seq: int
    readers: dict[int, int]

    def join(self, rank: int, history: int = 0, /) -> int: ...


class RemotePeer:
    """One reader.

    Attributes:
        rank: Its rank.
        first: Sequence number of its first message.
        heir: Whether its place was held for it.
        identity: Of its control socket, by which it is addressed.
        pid: Its process.
        host: Where that is.
        slow: What becomes of it when it is too slow.
        proven: Whether data has reached it.
        spoke: When it last said something, by the monotonic clock.
        heard: When it, or at least ZeroMQ in its process, was last known to be there.
        cut_off: Since when there is no connection to it, as far as that was looked at for the sake of another reader.
        finished: Whether it has everything, and knows that nothing more will come.
    """

    def __init__(self, identity: bytes, hello: wire.Hello, rank: int, first: int, *, heir: bool) -> None:
        self.rank = rank
        self.first = first
        self.heir = heir
        self.identity = identity
        self.pid: int = hello.pid
        self.host: str = hello.host
        self.slow: str = hello.slow
        self.proven: bool = hello.proven
        self.spoke: float = monotonic()
        self.heard: float = self.spoke
        self.cut_off: float | None = None
        self.finished = False

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


@dataclass(slots=True)
class RemotePlace:
    """What the writer knows of one place.

    Attributes:
        rank: Its rank.
        extra: Whether nobody waits for a reader here before the queue is ready.
        settled: Whether no reader is waited for any more.
        peer: The reader that is there.
        former: The last reader, which is gone.
        state: What became of the reader.
        joined_at: When it was admitted, by ``time.time()``.
        read: How many messages the former one had finished with.
        trouble: Makes what the writer raises because of the reader's death, until that is replaced or dismissed.
    """

    rank: int
    extra: bool
    settled: bool
    peer: RemotePeer | None = None
    former: RemotePeer | None = None
    state: ReaderState = "absent"
    joined_at: float = 0.0
    read: int = 0
    trouble: Callable[[], AioshmError] | None = None

    @property
    def held(self) -> bool:
        """Whether its messages wait for a replacement of the reader that has died."""
        return self.state == "held"

    @property
    def reader(self) -> RemotePeer | None:
        """The reader that is there, or was."""
        return self.peer or self.former

    def whose(self) -> str:
        """Name the place and who reads there, for people."""
        peer = self.reader
        if peer is None or self.peer is not None:
            return f"rank {self.rank}" if peer is None else str(peer)
        fate = "has died; its place is held" if self.held else "is gone"
        return f"rank {self.rank} (pid {peer.pid} on {peer.host} {fate})"


class RemotePlaces:
    """The places for remote readers.

    A vacant place counts as having read everything. A newcomer begins with the message that is sent next, or with some
    before it that the window still keeps; one at a held place with the first that the one before has not acknowledged.

    Args:
        name: The queue's, for messages.
        ranks: Of the places.
        extra: Those of them that nobody waits for before the queue is ready.
        window: Counts on the readers.
        leave: Lets the window count on a reader no more.
        policy: What to do when a reader dies.
        patience_s: For how long a newcomer waits to know whether the reader lives that has the place.

    Attributes:
        ranks: Of the places.
        left: Who was there before all were ready, and is not replaced, by rank, and what became of it.
        going: Whether all are ready: from then on a newcomer begins at the present.
        closed: Whether the writer is closing: nobody is admitted any more.
        tell: Is told of every change.
        elsewhere: Says why a rank is taken by a reader on the writer's host, if it is.
        came: Is told the rank of each reader that was admitted.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        extra: frozenset[int],
        window: Window,
        leave: Callable[[int], None],
        policy: str,
        patience_s: float,
    ) -> None:
        self._name = name
        self.ranks = ranks
        self._window = window
        self._leave = leave
        self._policy = policy
        self._patience_s = patience_s
        self._places = {rank: RemotePlace(rank, rank in extra, settled=rank in extra) for rank in ranks}
        self._by_identity: dict[bytes, RemotePeer] = {}
        self._gone: dict[bytes, str] = {}  # why readers are not there any more, by identity; the latest ones
        self.left: dict[int, str] = {}
        self._died: dict[int, PeerDied] = {}  # who of them has died, which nobody has been told
        self.going = False
        self.closed = False
        self.tell: Callable[[Change], None] = _nothing
        self.elsewhere: Callable[[int], str | None] = _nowhere
        self.came: Callable[[int], None] = _nothing

    # Who is there

    def __iter__(self) -> Iterator[RemotePeer]:
        return iter(list(self._by_identity.values()))

    def __len__(self) -> int:
        return len(self._by_identity)

    def of_rank(self, rank: int) -> RemotePeer | None:
        """Return the reader that has a rank, if it is there."""
        place = self._places.get(rank)
        return None if place is None else place.peer

    def of_identity(self, identity: bytes) -> RemotePeer | None:
        """Return the reader that is addressed so, if it is there."""
        return self._by_identity.get(identity)

    def waited_for(self) -> list[RemotePeer]:
        """Return the readers that the window may wait for: those that are there, and those whose places are held."""
        return [*self, *(place.former for place in self._held() if place.former is not None)]

    def _held(self) -> list[RemotePlace]:
        return [place for place in self._places.values() if place.held]

    @property
    def held(self) -> list[int]:
        """The ranks whose messages wait for a replacement."""
        return [place.rank for place in self._held()]

    def whose(self, rank: int) -> str:
        """Name a rank and who reads there, for people."""
        return self._places[rank].whose()

    @property
    def complete(self) -> bool:
        """Whether no reader is waited for any more."""
        return all(place.settled for place in self._places.values())

    def missing(self) -> list[str]:
        """Name the readers that are not attached yet."""
        missing = [place.rank for place in self._places.values() if not place.settled]
        return [f"rank {rank} ({self.left[rank]})" if rank in self.left else f"rank {rank}" for rank in missing]

    def is_proven(self, rank: int) -> bool:
        """Return whether data has reached a reader."""
        peer = self.of_rank(rank)
        return peer is not None and peer.proven

    def take_death(self) -> PeerDied | None:
        """Return, once, who has died before all were ready."""
        return self._died.pop(next(iter(self._died))) if self._died else None

    @property
    def trouble(self) -> Callable[[], AioshmError] | None:
        """What makes the error that the writer has to raise for now, if any."""
        return next((place.trouble for place in self._places.values() if place.trouble is not None), None)

    def readers(self) -> list[ReaderInfo]:
        """Return who reads, or did: every place but those extra ones that never had a reader."""
        return [self._info(place) for place in self._places.values() if place.state != "absent" or not place.extra]

    def _info(self, place: RemotePlace) -> ReaderInfo:
        seq, peer = self._window.seq, place.reader
        there = place.peer is not None or place.held
        read = self._window.readers.get(place.rank, seq) if there else place.read
        return ReaderInfo(
            rank=place.rank,
            pid=0 if peer is None else peer.pid,
            host="" if peer is None else peer.host,
            state=place.state,
            joined_at=place.joined_at,
            read=read,
            lag=seq - read if there else 0,
        )

    # Who comes

    def answer(self, hello: wire.Hello, identity: bytes, since: float, now: float) -> int | wire.Refused | wire.Wait:
        """Return the rank that a newcomer may have; or what to tell it instead.

        Args:
            hello: Its greeting.
            identity: By which it is addressed.
            since: When it came, by the monotonic clock.
            now: By the same.
        """
        if self.closed:
            return wire.Refused("the writer has closed the queue", closed=True)
        if hello.admitted and self.going:
            return wire.Refused(self._gone.get(identity, "it is not one of the readers"), evicted=True)
        any_rank = hello.rank == ANY_RANK
        if not any_rank and hello.rank not in self._places:
            return wire.Refused(f"no remote reader has rank {hello.rank}")
        places = list(self._places.values()) if any_rank else [self._places[hello.rank]]
        for place in places:
            if place.peer is None and self.elsewhere(place.rank) is None:
                return place.rank
        in_the_way = self.in_the_way(hello)
        if any(peer.spoke < since for peer in in_the_way) and now - since < self._patience_s:
            who = ", ".join(map(str, in_the_way))
            return wire.Wait(f"it asks whether who has the place is still there: {who}")
        if any_rank:
            who = ", ".join(f"rank {place.rank}{self._why_taken(place, now)}" for place in places)
            return wire.Refused(f"no place is vacant: {who or 'the queue has none'}", full=True)
        return wire.Refused(f"rank {hello.rank} is taken{self._why_taken(places[0], now)}")

    def in_the_way(self, hello: wire.Hello) -> list[RemotePeer]:
        """Return the readers that have what a newcomer wants."""
        return [peer for peer in self if hello.rank in (peer.rank, ANY_RANK)]

    def _why_taken(self, place: RemotePlace, now: float) -> str:
        if place.peer is None:
            return self.elsewhere(place.rank) or ""
        heard = seconds(now - place.peer.heard)
        return f" by pid {place.peer.pid} on {place.peer.host}, which lives, or did {heard} ago"

    def why_taken(self, rank: int) -> str | None:
        """Say why a rank is not to be had by a reader on the writer's host; None: it is."""
        place = self._places.get(rank)
        if place is None or (place.peer is None and not place.held):
            return None
        assert place.reader is not None
        who = f"pid {place.reader.pid} on {place.reader.host}"
        return f" by {who}" if place.peer is not None else f": it is held for a remote reader, in the place of {who}"

    def admit(self, identity: bytes, hello: wire.Hello, rank: int) -> RemotePeer:
        """Note a new reader at a vacant place."""
        place, window = self._places[rank], self._window
        heir = place.held
        first = window.readers[rank] if heir else window.join(rank, hello.history)
        place.peer = peer = RemotePeer(identity, hello, rank, first, heir=heir)
        self._by_identity[identity] = peer
        place.state, place.trouble, place.joined_at = "attached", None, time.time()
        self._forget(rank)
        self.came(rank)
        self.tell(ReaderJoined(rank, peer.pid, first))
        return peer

    def proven(self, peer: RemotePeer) -> None:
        """Note that data has reached a reader."""
        peer.proven = True
        self._places[peer.rank].settled = True

    def doubt(self, peer: RemotePeer) -> None:
        """Note that data may not reach a reader any more, which is not ready then."""
        if not self.going:
            peer.proven = False
            self._places[peer.rank].settled = self._places[peer.rank].extra

    def supplanted(self, rank: int) -> None:
        """Note that a reader on the writer's host has come to a place that either may have."""
        place = self._places.get(rank)
        if place is not None and place.peer is None:
            place.trouble = None

    def missed(self, hello: wire.Hello) -> None:
        """Note a reader that was never here, and has left; the reader that takes its place makes up for it."""
        place = self._places.get(hello.rank)
        if place is not None and place.peer is None and not (self.going or place.extra):
            self.left[hello.rank] = f"pid {hello.pid} on {hello.host}: it has left"

    # Who goes

    def has_left(self, peer: RemotePeer) -> None:
        """Go on without a reader that has said goodbye; a place that was held for one that had nothing yet stays so."""
        place = self._places[peer.rank]
        self._vacate(place, peer, "held" if peer.heir and not peer.proven else "left", "it has left")
        self.tell(ReaderLeft(place.rank, peer.pid, place.read))

    def has_died(self, peer: RemotePeer, why: str, *, blameless: bool = False) -> None:
        """Go on without a reader that is not to be reached any more; it is a matter of policy how.

        Args:
            peer: The reader.
            why: For people.
            blameless: Whether nobody is to be told before all are ready: it may come back, and has missed nothing.
        """
        place = self._places[peer.rank]
        # One that is not waited for may lose what it has not received.
        held = self.going and self._policy == "hold" and peer.slow != "skip"
        self._vacate(place, peer, "held" if held else "died", why)
        about = f"queue {self._name}, on {peer.host}: {why}"
        death = functools.partial(PeerDied, peer.rank, peer.pid, "reader", about)
        if self._policy == "raise" and self.going:
            place.trouble = death
        elif self._policy == "raise" and not blameless and not place.extra:
            self._died[peer.rank] = death()
        if held:
            text = "queue %s: the place of remote reader %s is held for a replacement, from message %d on"
            logger.warning(text, self._name, peer, place.read)
        self.tell(ReaderDied(place.rank, peer.pid, place.read, held))

    def evict(self, peer: RemotePeer, why: str) -> None:
        """Go on without a reader that is there, or whose place is held."""
        place = self._places[peer.rank]
        if place.peer is not peer:
            self._give_up(place)
            return
        self._vacate(place, peer, "evicted", why)
        place.settled = True
        self.tell(ReaderLeft(place.rank, peer.pid, place.read, evicted=True))

    def dismiss(self, rank: int) -> RemotePeer | None:
        """Wait for a reader no more; return the one that was there."""
        place = self._places[rank]
        place.extra, place.trouble = True, None
        self._forget(rank)
        peer = place.peer
        if peer is not None:
            self.evict(peer, wire.DISMISSED)
            self._forget(rank)
        elif place.held:
            self._give_up(place)
        place.settled = True
        return peer

    def _give_up(self, place: RemotePlace) -> None:
        place.read = self._window.readers.get(place.rank, place.read)
        place.state = "died"
        self._leave(place.rank)

    def _forget(self, rank: int) -> None:
        self.left.pop(rank, None)
        self._died.pop(rank, None)

    def _vacate(self, place: RemotePlace, peer: RemotePeer, state: ReaderState, why: str) -> None:
        del self._by_identity[peer.identity]
        self._gone[peer.identity] = why
        if len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]
        place.read = self._window.readers[place.rank]
        place.peer, place.former, place.state = None, peer, state
        if state != "held":
            self._leave(place.rank)
        if self.going:
            place.settled = True
        else:
            place.settled = place.extra
            if not place.extra:
                self.left[place.rank] = f"pid {peer.pid} on {peer.host}: {why}"


def _nothing(*_: object) -> None: ...


def _nowhere(_rank: int) -> str | None:
    return None
