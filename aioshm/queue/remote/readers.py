"""The readers on other hosts: what the writer sends them over ZeroMQ, keeps for each, and hears from them."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import secrets
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from aioshm.codec.frames import HEADER
from aioshm.config import Options
from aioshm.logs import LogLimiter
from aioshm.queue.handle import RemoteAddress
from aioshm.queue.names.identity import Identity
from aioshm.queue.registry import ReaderRegistry, ReaderSlot
from aioshm.queue.remote import wire
from aioshm.queue.remote.admission import Admission
from aioshm.queue.remote.outgoing import Flow
from aioshm.queue.remote.writer_sockets import WriterSockets
from aioshm.wait.limits import seconds

logger: logging.Logger = logging.getLogger("aioshm.queue")

TICKS = 4
"""How often within ``options.remote_timeout`` the writer asks whether its readers are there."""

CLOSED_LOOP_POLL_S = 0.005
"""How often a writer polls its sockets when it closes after its event loop."""

COMPLAINT_S = 10.0  # between two warnings of bad messages

GRACE_S = 1.0
"""How long a reader may acknowledge nothing while the window is full of messages for it: acknowledgements take their
time, and are read only when the writer's loop runs."""

REMEMBERED = 256
"""So many readers that are gone are told why when they come back."""


class RemoteReader:
    """An attached reader."""

    def __init__(self, identity: bytes, hello: wire.Hello, slot: ReaderSlot, first: int) -> None:
        self.identity = identity  # of its control socket, by which it is addressed
        self.slot = slot
        self.rank: int = slot.rank
        self.first = first  # its first message
        self.pid: int = hello.pid
        self.host: str = hello.host
        self.spoke: float = monotonic()  # when it last sent a message
        self.heard: float = self.spoke  # when it, or at least ZeroMQ in its process, was last known to be there
        self.cut_off: float | None = None  # since when it cannot be reached, while another one wants its rank
        self.finished = False  # it has everything, and knows that nothing more will come

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class RemoteReaders:
    """The transport of remote readers.

    ``identity`` has ports, keys and token that outlive this writer, which releases it with the sockets; nobody
    waits for readers of ``extra`` ranks.
    """

    kind = "remote"

    def __init__(
        self,
        registry: ReaderRegistry,
        queue_id: bytes,
        token: bytes,
        ranks: tuple[int, ...],
        ip: str | None,
        options: Options,
        identity: Identity | None = None,
        extra: frozenset[int] = frozenset(),
    ) -> None:
        self.registry = registry
        self.ranks = ranks
        self._identity = identity
        self.timeout_s: float = options.remote_timeout
        self._patience = options.stall_warning_s
        self.secret: bytes = secrets.token_bytes(wire.SECRET_BYTES)  # that data messages begin with
        self.sockets: WriterSockets = WriterSockets(ip, self.secret, options, len(ranks), identity)
        self.flow: Flow = Flow(self.sockets, self.secret, options)
        self.attached: dict[bytes, RemoteReader] = {}  # by identity
        self.gone: dict[bytes, str] = {}  # why readers are not there any more, by identity; the latest ones
        self.admission: Admission = Admission(self, None if identity is not None else queue_id, token)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._closed: asyncio.Future[None] | None = None
        self._closing_since = 0.0
        self._report_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._limiter = LogLimiter(COMPLAINT_S)
        self.evicts: bool = False  # whether a reader has asked to be evicted when it is too slow
        self._stuck: dict[int, tuple[int, float]] = {}  # what such readers had acknowledged, and since when, by rank
        registry.add(self, ranks, extra)

    @property
    def address(self) -> RemoteAddress:
        """The part of the handle that is for remote readers."""
        keys = self.sockets.keys
        return RemoteAddress(
            data=self.sockets.data,
            control=self.sockets.control,
            topic=self.secret,
            ranks=self.ranks,
            server_key=None if keys is None else keys.server,
            client_public=None if keys is None else keys.public,
            client_secret=None if keys is None else keys.secret,
            lasting=self._identity is not None,
        )

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to admit readers."""
        self.loop = loop
        self.sockets.start(loop, self._subscribed, self._message)

    def poll(self) -> None:
        """Handle what has arrived; before all are ready, count on no reader that has lost its connection.

        It may be dead, and if not, it says hello again.
        """
        self.sockets.look()
        if not self.registry.going:
            for reader in self.readers():
                if not self.sockets.reaches(reader.identity):
                    self.registry.doubt(reader.slot)

    def go(self) -> None:
        """Tell every reader that all are ready."""
        for reader in self.readers():
            if reader.slot.proven:
                self.sockets.send(reader.identity, wire.Go())

    def readers(self) -> list[RemoteReader]:
        """Return the readers that are attached."""
        return list(self.attached.values())

    # Transport, for the registry

    def progress(self, slot: ReaderSlot) -> tuple[int, int]:
        window = self.flow.window
        return window.readers.get(slot.rank, window.seq), window.seq

    def condition(self, _slot: ReaderSlot) -> str:
        return ""

    def evidence(self, slot: ReaderSlot) -> str:
        return f"lives, or did {seconds(monotonic() - slot.reader.heard)} ago"

    def row(self, _slot: ReaderSlot) -> dict[str, Any]:
        return {}  # only a remote reader's own end knows

    def keep(self, slot: ReaderSlot) -> None:
        """Do nothing: the window keeps what its rank has not acknowledged."""

    def drop(self, slot: ReaderSlot) -> None:
        self.flow.leave(slot.rank)

    def evict(self, slot: ReaderSlot, reader: Any, *, dismissed: bool) -> None:
        why = wire.DISMISSED if dismissed else wire.TOO_SLOW
        self.sockets.send(reader.identity, wire.Refused(why, evicted=True))
        self._forget(reader, why)
        self.drop(slot)

    def _forget(self, reader: RemoteReader, why: str) -> None:
        del self.attached[reader.identity]
        self.gone[reader.identity] = why
        if len(self.gone) > REMEMBERED:
            del self.gone[next(iter(self.gone))]
        self._close_if_delivered()

    # What the sockets report

    def _subscribed(self, rank: int) -> None:
        """Send a reader the number from which on its new connection has everything."""
        if rank in self.ranks:
            self.flow.window.connected(rank)
            self.sockets.publish(_mark(self.secret, rank, self.flow.window.seq))

    def _message(self, identity: bytes, data: bytes) -> None:
        try:
            message = wire.parse_from_reader(data)
            reader = self.attached.get(identity)
            if reader is not None:
                self._handle(reader, message)
            elif isinstance(message, wire.Hello):
                self.admission.greeted(identity, message)
        except wire.VersionError as error:
            self.sockets.send(identity, wire.Refused(str(error)))
        except wire.WireError as error:
            held_back = self._limiter.admit()
            if held_back is not None:
                logger.warning(
                    "queue %s: dropped a message that no reader of it sends: %s (and %d more)",
                    self.registry.name,
                    error,
                    held_back,
                )

    def _handle(self, reader: RemoteReader, message: wire.FromReader) -> None:
        reader.spoke = reader.heard = monotonic()
        if isinstance(message, wire.Hello):
            self._greet(reader, message)
        elif isinstance(message, wire.Acknowledge):
            if self.flow.acknowledged(reader.rank, message.consumed):
                self.registry.changed()
        elif isinstance(message, wire.Resend):
            for first, last in message.ranges:
                self._resend(reader, first, last)
        elif isinstance(message, wire.Proven):
            self._proven(reader)
            self.registry.changed()
        elif isinstance(message, wire.Finished):
            reader.finished = True
            self.sockets.send(reader.identity, wire.Left())
            self._close_if_delivered()
        else:
            self.sockets.send(reader.identity, wire.Left())
            self._forget(reader, "it has left")
            self.registry.left(reader.slot)
            self.registry.changed()

    def admit(self, identity: bytes, hello: wire.Hello, slot: ReaderSlot) -> None:
        """Attach a reader to a vacant slot."""
        window = self.flow.window
        first = window.readers[slot.rank] if slot.held else window.join(slot.rank, hello.history)
        reader = RemoteReader(identity, hello, slot, first)
        self.attached[identity] = reader
        self.registry.attach(slot, self, reader, pid=hello.pid, host=hello.host, slow=hello.slow, first=first)
        self.evicts = self.evicts or hello.slow == "evict"
        self._greet(reader, hello)
        if self._timer is None:
            self._tick()

    def _greet(self, reader: RemoteReader, hello: wire.Hello) -> None:
        """Send a reader, which has a new connection, what it may not have received."""
        self.sockets.send(reader.identity, wire.Welcome(os.getpid(), platform.node(), reader.rank, reader.first))
        if hello.proven:
            self._proven(reader)
        if self._closed is not None:
            self.sockets.send(reader.identity, wire.Closing(self.flow.window.seq))
        self.registry.changed()

    def _proven(self, reader: RemoteReader) -> None:
        self.registry.proven(reader.slot)
        if self.registry.going:
            self.sockets.send(reader.identity, wire.Go())

    def _resend(self, reader: RemoteReader, first: int, last: int) -> None:
        lost = self.flow.resend(reader.rank, first, last)
        if lost is not None:
            self.sockets.send(reader.identity, wire.Lost(*lost))

    # Readers that fall silent

    def _tick(self) -> None:
        """Ask every reader whether it is there, and give up those that have been silent for too long."""
        assert self.loop is not None
        self._timer = None
        if self.loop.is_closed():
            return
        self.sockets.look()  # what came while the loop was busy counts
        now = monotonic()
        due = now + self.timeout_s / TICKS
        for reader in self.readers():
            # Silence of a program that does not run its loop is not the end of it, as long as ZeroMQ answers for it.
            # That takes up to half of the time to fail, which is why it extends nobody's time by more than that.
            message = wire.Tick() if self._closed is None else wire.Closing(self.flow.window.seq)
            if self.sockets.send(reader.identity, message):
                reader.heard = max(reader.heard, now - self.timeout_s / 2)
            silent_since = reader.heard if self._closed is None else max(reader.spoke, self._closing_since)
            if now - silent_since >= self.timeout_s:
                self.died(reader, f"it was silent for {self.timeout_s:g} s")
            else:
                due = min(due, silent_since + self.timeout_s)
        if self.attached:
            self._timer = self.loop.call_later(max(0.001, due - now), self._tick)
            if self._closed is not None and now >= self._report_at:
                self._report_at = now + self._patience
                self._report_unfinished(now)

    def _report_unfinished(self, now: float) -> None:
        waited_for = ", ".join(str(reader) for reader in self.readers() if not reader.finished)
        logger.warning(
            "queue %s: closing for %.0f s: %s answers, but has not received everything",
            self.registry.name,
            now - self._closing_since,
            waited_for,
        )

    def died(self, reader: RemoteReader, why: str, *, blameless: bool = False) -> None:
        """Go on without a reader that cannot be reached any more; see `ReaderRegistry.died`."""
        if not blameless:
            self.sockets.send(reader.identity, wire.Refused(why, evicted=True))
        self._forget(reader, why)
        self.registry.died(reader.slot, why, blameless=blameless)
        self.registry.changed()

    # Slow readers

    def laggards(self) -> list[str]:
        """Name the readers that the window waits for."""
        return [self.registry.slots[rank].name for rank in self.flow.window.laggards()]

    def slowest(self, _slots: int = 1, _large: Sequence[int] = ()) -> list[int]:
        """Return the ranks of the readers that the window waits for."""
        return self.flow.window.laggards()

    def evict_slow(self) -> bool:
        """Go on without readers that are too slow, now that the window has no room; return whether there were any."""
        if not self.evicts:
            return False
        overdue = self._overdue(monotonic())
        for slot in overdue:
            self.registry.evict_slow(slot)
        return bool(overdue)

    def _overdue(self, now: float) -> list[ReaderSlot]:
        window = self.flow.window
        laggards = window.laggards()
        overdue = []
        stuck = {}
        for slot in self.registry.of(self):
            if slot.slow != "evict" or slot.rank not in laggards:
                continue
            acknowledged, since = self._stuck.get(slot.rank, (-1, now))
            if acknowledged != window.readers[slot.rank]:
                since = now
            stuck[slot.rank] = window.readers[slot.rank], since
            if now - since >= GRACE_S:
                overdue.append(slot)
        self._stuck = stuck
        return overdue

    # Closing

    @property
    def closing(self) -> bool:
        """Whether the goodbye was said: nobody is admitted any more."""
        return self._closed is not None

    @property
    def delivering(self) -> bool:
        """Whether this is waiting for readers to have received everything."""
        return self._closed is not None and not self._closed.done()

    def announce_close(self) -> None:
        """Tell the readers that nothing more will come; what is on its way is delivered."""
        if self.loop is None or self._closed is not None:
            return
        self._closed = self.loop.create_future()
        self._closing_since = monotonic()
        self._report_at = self._closing_since + self._patience
        self.admission.answer_all()
        for reader in self.readers():
            self.sockets.send(reader.identity, wire.Closing(self.flow.window.seq))
        self._close_if_delivered()

    async def wait_closed(self) -> None:
        """Return when every reader has received everything, or is gone, and the sockets are closed."""
        if self._closed is None:
            return
        if not self._closed.get_loop().is_closed():
            await asyncio.shield(self._closed)
            return
        # Nothing calls back any more, and nobody hears those who fall silent.
        deadline = monotonic() + self.timeout_s
        while self.delivering and monotonic() < deadline:
            self.sockets.look()
            await asyncio.sleep(CLOSED_LOOP_POLL_S)
        self.close()

    def close(self) -> None:
        """Close the sockets whatever the readers have. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.admission.close()
        self.sockets.close()
        if self._identity is not None:
            self._identity.release()
        if self._closed is not None and not self._closed.done():
            with suppress(RuntimeError):  # the loop is closed, and would have called a waiting task back
                self._closed.set_result(None)

    def _close_if_delivered(self) -> None:
        if self.delivering and all(reader.finished for reader in self.readers()):
            self.close()


def _mark(secret: bytes, rank: int, seq: int) -> bytes:
    return wire.address(secret, rank) + HEADER.pack(wire.MARK, 0, 0, 0, seq, 0, 0)
