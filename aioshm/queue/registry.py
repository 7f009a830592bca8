"""The reader registry: which reader, local or remote, has which rank of a queue. No sockets, no event loop."""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from aioshm.errors import AioshmError, HandleError, NoPlaceVacant, PeerDied
from aioshm.lifeline.protocol import ANY_RANK
from aioshm.queue.membership import Change, ChangeLog, ReaderDied, ReaderInfo, ReaderJoined, ReaderLeft, ReaderState
from aioshm.queue.stats import ReaderStats

logger: logging.Logger = logging.getLogger("aioshm.queue")


class Transport(Protocol):
    """The readers of one kind: `LocalReaders` and `RemoteReaders`."""

    kind: str

    def progress(self, slot: ReaderSlot) -> tuple[int, int]:
        """Return how many messages the reader has finished with, and how many the writer has published."""

    def condition(self, slot: ReaderSlot) -> str:
        """Return the state of the attached reader's process; empty: unknown."""

    def evidence(self, slot: ReaderSlot) -> str:
        """Return how the writer knows that the attached reader lives, as a relative clause."""

    def row(self, slot: ReaderSlot) -> dict[str, Any]:
        """Return the fields of `ReaderStats` that `ReaderInfo` lacks, for the slot's reader."""

    def keep(self, slot: ReaderSlot) -> None:
        """Keep the messages that the slot's departed reader has not finished with."""

    def drop(self, slot: ReaderSlot) -> None:
        """Stop waiting for the slot's reader, as if it had read everything."""

    def evict(self, slot: ReaderSlot, reader: Any, *, dismissed: bool) -> None:
        """Stop waiting for the slot's reader, and notify it: it was too slow, or ``dismissed`` by the program."""


@dataclass(slots=True, eq=False)
class ReaderSlot:
    """One rank of a queue, its reader, and how the previous reader went."""

    rank: int
    extra: bool  # the queue becomes ready without a reader here
    settled: bool  # the queue does not wait for a reader here any more
    transports: tuple[Transport, ...]  # the transports that may admit readers
    transport: Transport  # the transport of the attached reader, or of the last one
    state: ReaderState = "absent"
    reader: Any = None  # the attached reader, in the form that its transport uses
    leaving: Any = None  # an evicted local reader that is still open: a second one would write to the same flags
    pid: int = 0  # of the present or latest reader, as are the next five fields
    host: str = ""
    slow: str = "block"
    joined_at: float = 0.0
    proven: bool = False  # the writer knows that data can reach the reader
    heir: bool = False  # the slot was held for this reader
    read: int = 0  # how many messages the last reader had finished with when it went
    departure: str = ""  # how a reader went before all were ready; cleared when another attaches
    death: PeerDied | None = None  # the death of such a reader, until it was raised
    trouble: Callable[[], PeerDied] | None = None  # the writer's error until the reader is replaced

    @property
    def held(self) -> bool:
        """True while the messages that a dead reader has not read are kept for its replacement."""
        return self.state == "held"

    @property
    def in_use(self) -> bool:
        """True if the writer waits for this slot's messages to be read."""
        return self.reader is not None or self.held

    @property
    def process(self) -> str:
        """The process of the present or latest reader."""
        return f"pid {self.pid} on {self.host}" if self.transport.kind == "remote" else f"pid {self.pid}"

    @property
    def name(self) -> str:
        """The rank and its reader, for log lines and errors."""
        if self.held:
            return f"rank {self.rank} ({self.process} has died; its place is held)"
        if self.reader is not None:
            condition = self.transport.condition(self)
            return f"rank {self.rank} ({self.process}{condition and f', {condition}'})"
        return f"rank {self.rank} ({self.process} is gone)" if self.pid else f"rank {self.rank}"

    def is_vacant(self, transport: Transport) -> bool:
        """Return whether a reader of a transport can have this slot. Unlike `why_taken`, make no system calls."""
        free = self.reader is None and self.leaving is None
        return free and (not self.held or self.transport is transport)

    def why_taken(self, transport: Transport) -> str:
        """Return why a reader of a transport cannot have this slot; an empty string if it can."""
        if self.leaving is not None:
            return f": its reader (pid {self.pid} was evicted) has its end open still, and has to close it first"
        if self.reader is not None:
            return f" by {self.process}, which {self.transport.evidence(self)}"
        if self.held and self.transport is not transport:
            return f": {self.process} has died; its place is held for a {self.transport.kind} reader"
        return ""


class ReaderRegistry:
    """The readers of one queue: transports report changes, and the writer asks for the state."""

    def __init__(self, name: str, policy: str) -> None:
        self.name = name
        self._policy = policy
        self.slots: dict[int, ReaderSlot] = {}
        # True once all readers were ready: later readers begin with new messages.
        self.going: bool = False
        # Called after every change that may let a waiting call continue.
        self.changed: Callable[[], None] = _nothing
        self._logs: weakref.WeakSet[ChangeLog] = weakref.WeakSet()

    def add(self, transport: Transport, ranks: tuple[int, ...], extra: frozenset[int]) -> None:
        """Allow a transport's readers at these ranks; several transports may share a rank."""
        for rank in ranks:
            slot = self.slots.get(rank)
            if slot is None:
                self.slots[rank] = ReaderSlot(rank, rank in extra, rank in extra, (transport,), transport)
            else:
                slot.transports += (transport,)
        self.slots = dict(sorted(self.slots.items()))

    # The readers

    def of(self, transport: Transport) -> Iterator[ReaderSlot]:
        """Yield the slots in use by readers of one transport."""
        return (slot for slot in self.slots.values() if slot.in_use and slot.transport is transport)

    @property
    def complete(self) -> bool:
        """True if no reader is missing."""
        return all(slot.settled for slot in self.slots.values())

    @property
    def alive(self) -> int:
        """How many readers are attached."""
        return sum(slot.reader is not None for slot in self.slots.values())

    @property
    def in_use(self) -> bool:
        """True if a reader is attached, or a replacement is awaited."""
        return any(slot.in_use for slot in self.slots.values())

    def missing(self) -> list[str]:
        """Name the readers that are not attached yet."""
        return [
            f"rank {slot.rank} ({slot.departure})" if slot.departure else f"rank {slot.rank}"
            for slot in self.slots.values()
            if not slot.settled
        ]

    def departed(self) -> list[str]:
        """Name the readers that went before all were ready, and were not replaced."""
        return [f"rank {slot.rank} ({slot.departure})" for slot in self.slots.values() if slot.departure]

    def pop_death(self) -> PeerDied | None:
        """Return, once, the death of a reader before all were ready."""
        for slot in self.slots.values():
            if slot.death is not None:
                death, slot.death = slot.death, None
                return death
        return None

    @property
    def trouble(self) -> Callable[[], AioshmError] | None:
        """Creates the error that the writer has to raise until a dead reader is replaced; None: no error."""
        return next((slot.trouble for slot in self.slots.values() if slot.trouble is not None), None)

    def unread(self) -> list[tuple[ReaderSlot, int]]:
        """Return the held slots that have unread messages, each with the number of its first unread message."""
        held = [(slot, *slot.transport.progress(slot)) for slot in self.slots.values() if slot.held]
        return [(slot, read) for slot, read, written in held if read < written]

    def backlog(self) -> int:
        """Return how many messages the slowest reader has not finished with."""
        return max((self.lag(slot) for slot in self.slots.values()), default=0)

    def lag(self, slot: ReaderSlot) -> int:
        """Return how many messages a slot's reader has not finished with."""
        read, written = slot.transport.progress(slot)
        return written - read if slot.in_use else 0

    def readers(self) -> tuple[ReaderInfo, ...]:
        """Return the reader of every slot, except extra slots that never had a reader."""
        return tuple(ReaderInfo(**self._info(slot)) for slot in self._known())

    def stats(self) -> tuple[ReaderStats, ...]:
        """Return the statistics of the same readers as `readers`."""
        return tuple(ReaderStats(**self._info(slot), **slot.transport.row(slot)) for slot in self._known())

    def _known(self) -> Iterator[ReaderSlot]:
        return (slot for slot in self.slots.values() if slot.state != "absent" or not slot.extra)

    def _info(self, slot: ReaderSlot) -> dict[str, Any]:
        return {
            "rank": slot.rank,
            "pid": slot.pid,
            "host": slot.host,
            "state": slot.state,
            "joined_at": slot.joined_at,
            "read": slot.transport.progress(slot)[0] if slot.in_use else slot.read,
            "lag": self.lag(slot),
        }

    # Changes

    def new_log(self) -> ChangeLog:
        """Return a log of all changes from now on; the registry holds the log only weakly."""
        log = ChangeLog()
        self._logs.add(log)
        return log

    def report(self, change: Change) -> None:
        """Add a change to the logs."""
        for log in list(self._logs):
            log.add(change)

    # Readers that attach

    def choose(self, rank: int, transport: Transport) -> ReaderSlot:
        """Return the vacant slot for a newcomer, or raise `HandleError` or `NoPlaceVacant`."""
        slots = [slot for slot in self.slots.values() if transport in slot.transports]
        if rank == ANY_RANK:
            for slot in slots:
                if slot.is_vacant(transport):
                    return slot
            who = ", ".join(f"rank {slot.rank}{slot.why_taken(transport)}" for slot in slots)
            raise NoPlaceVacant(
                f"no place is vacant: {who or 'the queue has none'}; see Options(max_readers=) of the writer"
            )
        for slot in slots:
            if slot.rank == rank:
                if why := slot.why_taken(transport):
                    raise HandleError(f"rank {rank} is taken{why}")
                return slot
        raise HandleError(f"no {transport.kind} reader has rank {rank}")

    def attach(
        self, slot: ReaderSlot, transport: Transport, reader: Any, *, pid: int, host: str, slow: str, first: int
    ) -> None:
        """Note that a reader was admitted to a vacant slot; ``first``: the number of its first message."""
        slot.heir = slot.held
        slot.transport = transport
        slot.reader = reader
        slot.state = "attached"
        slot.pid = pid
        slot.host = host
        slot.slow = slow
        slot.proven = False
        slot.joined_at = time.time()
        _forget(slot)
        self.report(ReaderJoined(slot.rank, pid, first))

    def proven(self, slot: ReaderSlot) -> None:
        """Note that data can reach a reader."""
        slot.proven = True
        slot.settled = True

    # Readers that leave or die

    def missed(self, rank: int, process: str, death: PeerDied | None = None) -> None:
        """Note a reader that left or died before its admission; the next reader replaces it."""
        slot = self.slots.get(rank)
        if slot is None or self.going or slot.reader is not None or slot.leaving is not None:
            return
        if not slot.extra:
            slot.departure = f"{process} has {'left' if death is None else 'died'}"
        if death is not None:
            self._note_early_death(slot, process, death)
        self.changed()

    def left(self, slot: ReaderSlot) -> None:
        """Note that a reader left; a slot stays held if the replacement of a dead reader received nothing."""
        self._vacate(slot, "held" if slot.heir and not slot.proven else "left", "has left")
        self.report(ReaderLeft(slot.rank, slot.pid, slot.read))

    def died(self, slot: ReaderSlot, why: str = "", *, blameless: bool = False) -> None:
        """Note a reader's death; ``blameless``: a reader lost before all are ready may return, and missed nothing."""
        # A remote reader that skips messages may lose messages that it has not received.
        keeps = slot.transport.kind == "local" or slot.slow != "skip"
        held = self.going and self._policy == "hold" and keeps
        self._vacate(slot, "held" if held else "died", "has died" + (f": {why}" if why else ""))
        process = f"pid {slot.pid}" + (f" on {slot.host}: {why}" if why else "")
        about = f"queue {self.name}" + (f", on {slot.host}: {why}" if why else "")
        if not self.going:
            about += ", before all readers were ready"
        death = functools.partial(PeerDied, slot.rank, slot.pid, "reader", about)
        if not self.going and not blameless:
            self._note_early_death(slot, process, death())
        elif held:
            text = "queue %s: reader %d (%s) died; its place is held for a replacement, from message %d on"
            logger.warning(text, self.name, slot.rank, process, slot.read)
        elif self.going and self._policy == "raise":
            slot.trouble = death
            if why:  # a closing writer would not raise it
                logger.warning("queue %s: reader %d (%s) died", self.name, slot.rank, process)
        elif self.going:
            text = "queue %s: reader %d (%s) died and was evicted at message %d"
            logger.warning(text, self.name, slot.rank, process, slot.read)
        self.report(ReaderDied(slot.rank, slot.pid, slot.read, held))

    def _note_early_death(self, slot: ReaderSlot, process: str, death: PeerDied) -> None:
        if self._policy == "raise" and not slot.extra:
            slot.death = death
        else:
            logger.warning("queue %s: reader %d (%s) died; its place is free", self.name, slot.rank, process)

    def evict_slow(self, slot: ReaderSlot) -> None:
        """Continue without a reader that is too slow, or is dead and has a held slot."""
        text = "queue %s: reader %d (%s) was too slow and was evicted, %d messages behind"
        logger.warning(text, self.name, slot.rank, slot.process, self.lag(slot))
        self._evict(slot, dismissed=False)
        self.changed()

    def dismiss(self, rank: int) -> None:
        """Stop waiting for a reader, whether attached, dead, or never seen."""
        slot = self.slots.get(rank)
        if slot is None:
            raise ValueError(f"rank must be a reader's, one of {tuple(self.slots)}, not {rank}")
        slot.extra = True
        slot.settled = True
        _forget(slot)
        if slot.in_use:
            self._evict(slot, dismissed=True)
        else:
            for transport in slot.transports:
                transport.drop(slot)
        self.changed()

    def _evict(self, slot: ReaderSlot, *, dismissed: bool) -> None:
        reader = slot.reader
        if reader is None:
            self._vacate(slot, "died", "")
            return
        slot.read = slot.transport.progress(slot)[0]
        slot.reader = None
        slot.state = "evicted"
        slot.settled = True
        slot.transport.evict(slot, reader, dismissed=dismissed)
        self.report(ReaderLeft(slot.rank, slot.pid, slot.read, evicted=True))

    def _vacate(self, slot: ReaderSlot, state: ReaderState, departure: str) -> None:
        slot.read = slot.transport.progress(slot)[0]
        slot.reader = None
        slot.state = state
        if slot.held:
            slot.transport.keep(slot)
        else:
            slot.transport.drop(slot)
        slot.settled = self.going or slot.extra
        if not slot.settled:
            slot.departure = f"{slot.process} {departure}"


def _forget(slot: ReaderSlot) -> None:
    """Clear the record of the slot's earlier readers."""
    slot.departure = ""
    slot.death = None
    slot.trouble = None


def _nothing() -> None: ...
