"""The readers on other hosts: admission, messages, polling of silent readers, eviction of slow ones, closing."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import platform
import secrets
from time import monotonic
from typing import Any

from aioshm.codec import Encoded
from aioshm.codec.frames import HEADER, message_bytes
from aioshm.config import SLOW_READER, Options
from aioshm.errors import HandleError, NoPlaceVacant
from aioshm.lifeline.protocol import ANY_RANK
from aioshm.logs import LogLimiter
from aioshm.queue.handle import RemoteAddress
from aioshm.queue.names.identity import Identity
from aioshm.queue.registry import ReaderRegistry, ReaderSlot
from aioshm.queue.remote import wire
from aioshm.queue.remote.messages import pack
from aioshm.queue.remote.sockets import WriterSockets
from aioshm.queue.remote.window import Outgoing, SendWindow
from aioshm.ring.layout import TRACE_BYTES, VERSION
from aioshm.wait.limits import seconds

logger: logging.Logger = logging.getLogger("aioshm.queue")

TICKS = 4
"""How often within ``options.remote_timeout`` the writer polls its readers."""

CLOSING_POLL_S = 0.005
"""How often a closing writer checks whether its readers have received everything."""

COMPLAINT_S = 10.0  # between two warnings of malformed messages

GRACE_S = 1.0
"""How long a full window may wait for a reader's acknowledgement before the reader is too slow."""

CUT_OFF_S = 1.0
"""A reader without a connection for so long, or for a quarter of ``options.remote_timeout``, may be replaced."""

ANSWER_S = 0.5
"""How long a reader's answer decides on newcomers for its rank."""

REMEMBERED = 256
"""How many readers, detached or refused, get the reason if they greet again."""


class RemoteReader:
    """An attached reader."""

    def __init__(self, identity: bytes, hello: wire.Hello, slot: ReaderSlot, first: int) -> None:
        self.identity = identity  # the routing id of the reader's control socket
        self.slot = slot
        self.rank: int = slot.rank
        self.first = first  # number of the first message
        self.pid: int = hello.pid
        self.host: str = hello.host
        # By the monotonic clock
        self.spoke: float = monotonic()  # the time of the latest message
        self.heard: float = self.spoke  # the latest time at which the process, or at least ZeroMQ in it, was alive
        self.asked: float = 0.0  # the latest time at which the reader was polled for a newcomer
        self.cut_off: float | None = None  # the first time at which a newcomer found the reader unreachable
        self.finished = False  # the reader has received everything and expects nothing more

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class RemoteReaders:
    """The transport of remote readers; the queue becomes ready without readers of ``extra`` ranks."""

    kind = "remote"
    pack = staticmethod(pack)

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
        self.timeout_s: float = options.remote_timeout
        self._queue_id = queue_id
        self._token = token
        self._identity = identity
        self._patience = options.stall_warning_s
        self._bounds = options.remote_window, options.remote_window_bytes
        self.topic: bytes = secrets.token_bytes(wire.SECRET_BYTES)
        self.sockets: WriterSockets = WriterSockets(ip, self.topic, options, len(ranks), identity)
        self.window: SendWindow = SendWindow(*self._bounds, options.remote_history)
        self.resent: int = 0  # messages sent again
        self._head_bytes = wire.HEAD_BYTES + TRACE_BYTES * options.trace_context
        self.attached: dict[bytes, RemoteReader] = {}  # by identity
        self.gone: dict[bytes, str] = {}  # by identity: why the latest readers are gone, or were refused
        self.evicts: bool = False  # some reader has asked to be evicted when too slow
        self.closing: bool = False  # no reader is admitted any more
        self.loop: asyncio.AbstractEventLoop | None = None
        self._closing_since = 0.0
        self._report_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._limiter = LogLimiter(COMPLAINT_S)
        self._stuck: dict[tuple[int, int], float] = {}  # by rank and acknowledgement: since when nothing follows
        registry.add(self, ranks, extra)

    @property
    def address(self) -> RemoteAddress:
        """The part of the handle for remote readers."""
        keys = self.sockets.keys
        return RemoteAddress(
            data=self.sockets.data,
            control=self.sockets.control,
            ranks=self.ranks,
            server_key=None if keys is None else keys.server,
            client_public=None if keys is None else keys.public,
            client_secret=None if keys is None else keys.secret,
            lasting=self._identity is not None,
        )

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to admit readers."""
        self.loop = loop
        self.sockets.start(loop, self)

    def poll(self) -> None:
        """Handle received messages."""
        self.sockets.look()

    def go(self) -> None:
        """Notify every reader that all are ready."""
        for reader in self.readers():
            if reader.slot.proven:
                self.sockets.send(reader.identity, wire.Go())

    def readers(self) -> list[RemoteReader]:
        """Return the attached readers."""
        return list(self.attached.values())

    # Messages

    def window_bytes(self, *sizes: int) -> int:
        """Return the most bytes of the window that messages of these sizes take."""
        return sum(sizes) + self._head_bytes * len(sizes)

    def parts(self, messages: list[Encoded]) -> list[list[Encoded]]:
        """Divide messages into runs that fit an empty window."""
        parts = []
        while messages:
            count = self.window.part([self.window_bytes(message_bytes(message)) for message in messages])
            parts.append(messages[:count])
            messages = messages[count:]
        return parts

    def publish(self, message: Outgoing | None) -> None:
        """Send the next message to every reader; None: only count the message."""
        self.window.sent(message)
        if message is not None and self.window.readers:
            self._transmit(wire.EVERYONE, message)

    def _resend(self, rank: int, first: int) -> None:
        """Send the messages from ``first`` on to one reader again; raise `WireError` if it was never sent."""
        for message in self.window.resend(rank, first):
            self.resent += 1
            self._transmit(rank, message)

    def _transmit(self, rank: int, message: Outgoing) -> None:
        for head, body in wire.parts(wire.address(self.topic, rank) + message.head, message.body):
            self.sockets.publish(head, body)

    # The registry's transport

    def progress(self, slot: ReaderSlot) -> tuple[int, int]:
        window = self.window
        return window.readers.get(slot.rank, window.seq), window.seq

    def condition(self, _slot: ReaderSlot) -> str:
        return ""

    def evidence(self, slot: ReaderSlot) -> str:
        return f"lives, or did {seconds(monotonic() - slot.reader.heard)} ago"

    def row(self, _slot: ReaderSlot) -> dict[str, Any]:
        return {}  # known at the reader only

    def keep(self, slot: ReaderSlot) -> None:
        """Do nothing: the window keeps unacknowledged messages."""

    def drop(self, slot: ReaderSlot) -> None:
        self.window.leave(slot.rank)

    def evict(self, slot: ReaderSlot, reader: Any, *, dismissed: bool) -> None:
        why = wire.DISMISSED if dismissed else wire.TOO_SLOW
        self._end(reader, why)
        self._forget(reader, why)
        self.drop(slot)

    def _end(self, reader: RemoteReader, why: str) -> None:
        """Send an attached reader its refusal, and nothing more."""
        self.sockets.send(reader.identity, wire.Refused(why, evicted=True))
        if self.registry.going:  # else a reader that reconnects might be admitted again
            self.sockets.cut_off(reader.rank)

    def _forget(self, reader: RemoteReader, why: str | None) -> None:
        """Detach a reader; the same reader may return if ``why`` is None."""
        del self.attached[reader.identity]
        if why is not None:
            self._ban(reader.identity, why)
        self._close_if_delivered()

    def _ban(self, identity: bytes, why: str) -> None:
        """Refuse all later greetings of a reader: the reader has given up, but some may be on their way."""
        self.gone[identity] = why
        if len(self.gone) > REMEMBERED:
            del self.gone[next(iter(self.gone))]

    # Events of the sockets

    def subscribed(self, rank: int) -> None:
        """Send the mark that begins a reader's new data connection."""
        if rank in self.ranks:
            window = self.window
            window.connected(rank)
            mark = HEADER.pack(wire.MARK, 0, 0, 0, window.seq, 0, 0)
            self.sockets.publish(wire.address(self.topic, rank) + mark)

    def receive(self, identity: bytes, data: bytes) -> None:
        """Handle a control message."""
        try:
            message = wire.parse_from_reader(data)
            reader = self.attached.get(identity)
            if reader is not None:
                self._handle(reader, message)
            elif isinstance(message, wire.Hello):
                self._admit_or_refuse(identity, message)
            elif isinstance(message, wire.Leave):
                self.sockets.send(identity, wire.Refused("it is not one of the readers"))
        except wire.WireError as error:
            text = "queue %s: dropped a message that no reader of it sends: %s"
            self._limiter.warn(logger, text, self.registry.name, error)

    def _handle(self, reader: RemoteReader, message: wire.FromReader) -> None:
        reader.spoke = reader.heard = monotonic()
        reader.cut_off = None
        if isinstance(message, wire.Hello):
            self._welcome(reader, message)
        elif isinstance(message, wire.Acknowledge):
            if self.window.acknowledged(reader.rank, message.consumed):
                self.registry.changed()
        elif isinstance(message, wire.Resend):
            self._resend(reader.rank, message.first)
        elif isinstance(message, wire.Finished):
            reader.finished = True
            self.sockets.send(reader.identity, wire.Left())
            self._close_if_delivered()
        else:
            self.sockets.send(reader.identity, wire.Left())
            self._forget(reader, "it has left")
            self.registry.left(reader.slot)
            self.registry.changed()

    # Admission

    def _admit_or_refuse(self, identity: bytes, hello: wire.Hello) -> None:
        answer = self.answer(identity, hello)
        if isinstance(answer, wire.Refused):
            self._ban(identity, answer.reason)
        if not isinstance(answer, ReaderSlot):
            self.sockets.send(identity, answer)
        elif self.sockets.reaches(identity):
            self._admit(identity, hello, answer)

    def answer(self, identity: bytes, hello: wire.Hello) -> ReaderSlot | wire.Refused | wire.Wait:
        """Return a newcomer's slot, or the message to send instead."""
        if hello.version != VERSION:
            text = f"this queue speaks version {VERSION}, not {hello.version}"
            return wire.Refused(f"{text}: both ends need the same release of aioshm")
        own_queue = self._identity is not None or hello.queue_id == self._queue_id
        if not own_queue or not hmac.compare_digest(hello.token, self._token):
            return wire.Refused("the handle is another queue's")
        if hello.slow not in SLOW_READER:
            return wire.Refused(f"this writer knows no slow_reader={hello.slow!r}")
        if self.closing:
            return wire.Refused("the writer has closed the queue", closed=True)
        if hello.topic not in (b"", self.topic):
            return wire.Refused("another writer has taken its place", evicted=True)
        if identity in self.gone or (hello.topic and self.registry.going):
            return wire.Refused(self.gone.get(identity, "it is not one of the readers"), evicted=True)
        rivals = [reader for reader in self.readers() if hello.rank in (reader.rank, ANY_RANK)]
        for rival in rivals:
            self._check_reachable(rival)
        try:
            return self.registry.choose(hello.rank, self)
        except HandleError as error:
            awaited = [rival for rival in rivals if self._awaits_answer(rival)]  # all are asked at the same time
            if awaited:
                who = ", ".join(map(str, rivals))
                return wire.Wait(f"it asks whether who has the place is still there: {who}")
            return wire.Refused(str(error), full=isinstance(error, NoPlaceVacant))

    def _check_reachable(self, reader: RemoteReader) -> None:
        """Poll a reader whose rank a newcomer asks for; detach the reader if it has no connection.

        Before all are ready, the reader loses its rank immediately: it has missed nothing, and may return.
        """
        if self.sockets.reaches(reader.identity):
            reader.cut_off = None
            return
        now = monotonic()
        if reader.cut_off is None:
            reader.cut_off = now
        if not self.registry.going:
            self._died(reader, "it cannot be reached", blameless=True)
        elif now - reader.cut_off >= min(CUT_OFF_S, self.timeout_s / 4):
            self._died(reader, "its connection has ended, and another reader has come for its place")

    def _awaits_answer(self, reader: RemoteReader) -> bool:
        """Return whether the reader, just polled for a newcomer, may still answer within ``options.remote_timeout``."""
        now = monotonic()
        if reader.spoke >= reader.asked and now - reader.asked >= ANSWER_S:
            reader.asked = now
        return reader.spoke < reader.asked and now - reader.asked < self.timeout_s

    def _admit(self, identity: bytes, hello: wire.Hello, slot: ReaderSlot) -> None:
        window = self.window
        first = window.readers[slot.rank] if slot.held else window.join(slot.rank, hello.history)
        reader = RemoteReader(identity, hello, slot, first)
        self.attached[identity] = reader
        self.registry.attach(slot, self, reader, pid=hello.pid, host=hello.host, slow=hello.slow, first=first)
        self.evicts = self.evicts or hello.slow == "evict"
        self._welcome(reader, hello)
        if self._timer is None:
            assert self.loop is not None
            self._timer = self.loop.call_later(self.timeout_s / TICKS, self._tick)

    def _welcome(self, reader: RemoteReader, hello: wire.Hello) -> None:
        """Answer a greeting with everything that the reader may not have received."""
        welcome = wire.Welcome(os.getpid(), platform.node(), reader.rank, reader.first, self.topic, *self._bounds)
        self.sockets.send(reader.identity, welcome)
        if hello.proven:
            self.registry.proven(reader.slot)
            if self.registry.going:
                self.sockets.send(reader.identity, wire.Go())
        if self.closing:
            self.sockets.send(reader.identity, wire.Closing(self.window.seq))
        self.registry.changed()

    # Silent readers

    def _tick(self) -> None:
        """Poll every reader, and give up readers that have been silent for too long."""
        assert self.loop is not None
        self.sockets.look()  # messages that arrived while the loop was busy count; they may close the sockets
        self._timer = None
        if self.sockets.closed:
            return
        now = monotonic()
        due = now + self.timeout_s / TICKS
        for reader in self.readers():
            # A reader that does not run its loop is silent but lives, as long as ZeroMQ answers heartbeats in its
            # process. A dead connection takes up to half of the timeout to fail, so it extends the time by half.
            message = wire.Closing(self.window.seq) if self.closing else wire.Tick()
            if self.sockets.send(reader.identity, message):
                reader.heard = max(reader.heard, now - self.timeout_s / 2)
            silent_since = max(reader.spoke, self._closing_since) if self.closing else reader.heard
            if now - silent_since >= self.timeout_s:
                self._died(reader, f"it was silent for {self.timeout_s:g} s")
            else:
                due = min(due, silent_since + self.timeout_s)
        if self.attached:
            self._timer = self.loop.call_later(max(0.001, due - now), self._tick)
            if self.closing and now >= self._report_at:
                self._report_at = now + self._patience
                self._report_unfinished(now)

    def _report_unfinished(self, now: float) -> None:
        unfinished = ", ".join(str(reader) for reader in self.readers() if not reader.finished)
        text = "queue %s: closing for %.0f s: %s answers, but has not received everything"
        logger.warning(text, self.registry.name, now - self._closing_since, unfinished)

    def _died(self, reader: RemoteReader, why: str, *, blameless: bool = False) -> None:
        """Detach an unreachable reader, as `ReaderRegistry.died`."""
        if not blameless:
            self._end(reader, why)
        self._forget(reader, None if blameless else why)
        self.registry.died(reader.slot, why, blameless=blameless)
        self.registry.changed()

    # Slow readers

    def laggards(self) -> list[str]:
        """Return the names of readers that the window waits for."""
        return [self.registry.slots[rank].name for rank in self.window.laggards()]

    def evict_slow(self) -> bool:
        """Evict readers that are too slow for a full window; return whether there were any."""
        if not self.evicts:
            return False
        overdue = self._overdue(monotonic())
        for slot in overdue:
            self.registry.evict_slow(slot)
        return bool(overdue)

    def _overdue(self, now: float) -> list[ReaderSlot]:
        window = self.window
        laggards = window.laggards()
        overdue = []
        stuck = {}
        for slot in self.registry.of(self):
            if slot.slow == "evict" and slot.rank in laggards:
                stopped_at = slot.rank, window.readers[slot.rank]
                stuck[stopped_at] = self._stuck.get(stopped_at, now)
                if now - stuck[stopped_at] >= GRACE_S:
                    overdue.append(slot)
        self._stuck = stuck
        return overdue

    # Closing

    @property
    def delivering(self) -> bool:
        """True while a closing writer waits for readers to receive everything."""
        return self.closing and not self.sockets.closed

    def announce_close(self) -> None:
        """Announce the end of the queue; messages on their way are delivered."""
        if self.loop is None or self.closing:
            return
        self.closing = True
        self._closing_since = monotonic()
        self._report_at = self._closing_since + self._patience
        for reader in self.readers():
            self.sockets.send(reader.identity, wire.Closing(self.window.seq))
        self._close_if_delivered()

    async def wait_closed(self) -> None:
        """Wait until every reader has received everything or is gone, and close the sockets."""
        deadline = monotonic() + self.timeout_s
        while self.delivering:
            if self.loop is not asyncio.get_running_loop() and monotonic() >= deadline:
                self.close()  # a loop that has stopped, or is closed, detects no silent readers
                return
            self.sockets.look()
            await asyncio.sleep(CLOSING_POLL_S)

    def close(self) -> None:
        """Close the sockets immediately. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.sockets.close()
        if self._identity is not None:
            self._identity.release()

    def _close_if_delivered(self) -> None:
        if self.delivering and all(reader.finished for reader in self.readers()):
            self.close()
