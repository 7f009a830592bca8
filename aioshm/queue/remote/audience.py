"""The readers on other hosts: what the writer sends them, owes to each, and hears of them."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

from msgspec.structs import asdict

from aioshm.codec.frames import HEADER
from aioshm.config import Options
from aioshm.errors import AioshmError, PeerDied
from aioshm.logs import LogLimiter
from aioshm.queue.handle import RemoteAddress
from aioshm.queue.membership import ReaderInfo
from aioshm.queue.names.identity import Identity
from aioshm.queue.remote import wire
from aioshm.queue.remote.door import Door, Key
from aioshm.queue.remote.flow import Flow
from aioshm.queue.remote.places import RemotePeer, RemotePlaces
from aioshm.queue.remote.slowness import Slowness
from aioshm.queue.remote.writer_sockets import WriterSockets
from aioshm.queue.stats import ReaderStats

logger: logging.Logger = logging.getLogger("aioshm.queue")

TICKS = 4
"""How often within ``options.remote_timeout`` the writer asks whether its readers are there."""

CLOSED_LOOP_POLL_S = 0.005
"""How often a writer looks at its sockets when it closes after its event loop."""

COMPLAINT_S = 10.0  # between two warnings of bad messages


class NetworkAudience:
    """The remote readers of one queue.

    Args:
        queue_id: The queue.
        token: What a reader must know.
        ranks: Of the places for readers.
        ip: Where to bind, from `check_ip`; None: this host's own address.
        options: The queue's.
        identity: What this writer has in common with those before it, and lets go of when the sockets are closed; None:
            nothing.
        extra: Those places that nobody waits for before the queue is ready.

    Attributes:
        places: Who reads.
        sockets: What leads to them.
        flow: What is sent to them, and kept until they have it.

    Raises:
        ValueError: The address is not this host's.
        SharedMemoryError, OutOfDescriptors, OutOfThreads: The sockets cannot be had.
    """

    def __init__(
        self,
        queue_id: bytes,
        token: bytes,
        ranks: tuple[int, ...],
        ip: str | None,
        options: Options,
        identity: Identity | None = None,
        extra: frozenset[int] = frozenset(),
    ) -> None:
        self._name = queue_id.hex()[:8]
        self._identity = identity
        self._timeout = options.remote_timeout
        self._patience = options.stall_warning_s
        self._changed: Callable[[], None] = _nothing
        self._secret = secrets.token_bytes(wire.SECRET_BYTES)
        self.sockets: WriterSockets = WriterSockets(ip, self._secret, options, len(ranks), identity)
        self.flow: Flow = Flow(self.sockets, self._secret, options)
        self.places: RemotePlaces = RemotePlaces(
            self._name, ranks, extra, self.flow.window, self.flow.leave, options.on_reader_death, options.remote_timeout
        )
        key = Key(None if identity is not None else queue_id, token, self._secret)  # which is of one queue at a time
        self._door = Door(
            self.places, self.sockets, key, options.remote_timeout, self._admitted, self._died, self._removed
        )
        self._closed: asyncio.Future[None] | None = None
        self._closing_since = 0.0
        self._report_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limiter = LogLimiter(COMPLAINT_S)
        self._slowness = Slowness()

    @property
    def address(self) -> RemoteAddress:
        """What goes into the handle."""
        keys = self.sockets.keys
        return RemoteAddress(
            data=self.sockets.data,
            control=self.sockets.control,
            topic=self._secret,
            ranks=self.places.ranks,
            server_key=None if keys is None else keys.server,
            client_public=None if keys is None else keys.public,
            client_secret=None if keys is None else keys.secret,
            lasting=self._identity is not None,
        )

    def start(self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None]) -> None:
        """Begin to admit readers; ``changed`` is called after every change that a waiting call may be interested in."""
        self._loop, self._changed = loop, changed
        self._door.open(loop)
        self.sockets.start(loop, self._subscribed, self._message)

    # How they are

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of the places for remote readers."""
        return self.places.ranks

    @property
    def complete(self) -> bool:
        """Whether no reader is waited for any more."""
        return self.places.complete

    def look(self) -> None:
        """Find out what has come; count on no reader that has lost its connection before all are ready.

        It may be dead, and if not, it says hello again.
        """
        self.sockets.look()
        for peer in self.places:
            if not (self.places.going or self.sockets.reaches(peer.identity)):
                self.places.doubt(peer)

    @property
    def alive(self) -> int:
        """How many readers are attached."""
        return len(self.places)

    def missing(self) -> list[str]:
        """Name the readers that are not attached yet."""
        return self.places.missing()

    @property
    def left(self) -> dict[int, str]:
        """What became of the readers that were there before all were ready, and are not replaced."""
        return self.places.left

    def take_death(self) -> PeerDied | None:
        """Return, once, who of them has died."""
        return self.places.take_death()

    @property
    def held(self) -> dict[int, tuple[int, int]]:
        """Whose places wait for a replacement: by rank, its process, and the first message that is kept for it."""
        held = [info for info in self.places.readers() if info.state == "held"]
        return {info.rank: (info.pid, info.read) for info in held}

    @property
    def trouble(self) -> Callable[[], AioshmError] | None:
        """What makes the error that the writer has to raise for now, if any."""
        return self.places.trouble

    def readers(self) -> list[ReaderInfo]:
        """Return who reads, or did."""
        return self.places.readers()

    def reader_stats(self) -> list[ReaderStats]:
        """Return the same: how long messages took, and how large they were, only a remote reader's own end knows."""
        return [ReaderStats(**asdict(info)) for info in self.readers()]

    def laggards(self) -> list[str]:
        """Name the readers that the window waits for."""
        return [self.places.whose(rank) for rank in self.flow.window.laggards()]

    def slowest(self, _slots: int = 1, _large: Sequence[int] = ()) -> list[int]:
        """Return, by rank, which of them are furthest behind."""
        return self.flow.window.laggards()

    def lag_of(self, rank: int) -> tuple[str, int] | None:
        """Name a reader, and say how many messages it is behind; None if it is not there."""
        window = self.flow.window
        return (self.places.whose(rank), window.seq - window.readers[rank]) if rank in window.readers else None

    def backlog(self) -> int:
        """Return how many messages the slowest reader has not finished with."""
        return self.flow.window.backlog()

    def go(self) -> None:
        """Tell every reader that all are ready; from now on a newcomer begins at the present."""
        self.places.going = True
        for peer in self.places:
            if peer.proven:
                self.sockets.send(peer.identity, wire.Go())

    # What the sockets tell

    def _subscribed(self, rank: int) -> None:
        """Tell a reader what it will not get over its new connection by itself."""
        if rank in self.places.ranks:
            self.flow.window.connected(rank)
            self.sockets.publish(_mark(self._secret, rank, self.flow.window.seq))

    def _message(self, identity: bytes, data: bytes) -> None:
        try:
            message = wire.parse_from_reader(data)
            peer = self.places.of_identity(identity)
            if isinstance(message, wire.Hello):
                if peer is None:
                    self._door.knock(identity, message)
                else:
                    self._greet(peer, message)
                return
            if peer is None:
                return  # one that is gone, or never was
            peer.spoke = peer.heard = monotonic()
            if isinstance(message, wire.Acknowledge):
                self._acknowledged(peer, message)
            elif isinstance(message, wire.Resend):
                for first, last in message.ranges:
                    self._resend(peer, first, last)
            elif isinstance(message, wire.Proven):
                self._proven(peer)
                self._changed()
            elif isinstance(message, wire.Finished):
                peer.finished = True
                self.sockets.send(identity, wire.Left())
                self._close_if_delivered()
            else:
                self.sockets.send(identity, wire.Left())
                self.places.has_left(peer)
                self._removed()
        except wire.VersionError as error:
            self.sockets.send(identity, wire.RefusedPlainly(str(error)))
        except wire.WireError as error:
            held_back = self._limiter.admit()
            if held_back is not None:
                logger.warning(
                    "queue %s: dropped a message that no reader of it sends: %s (and %d more)",
                    self._name,
                    error,
                    held_back,
                )

    def _admitted(self, peer: RemotePeer, hello: wire.Hello) -> None:
        self._slowness.concerns = self._slowness.concerns or hello.slow == "evict"
        self._greet(peer, hello)
        if self._timer is None:
            self._tick()

    def _greet(self, peer: RemotePeer, hello: wire.Hello) -> None:
        """Tell a reader, which has a new connection, what it may not have heard."""
        self.sockets.send(peer.identity, wire.Welcome(os.getpid(), platform.node(), peer.rank, peer.first))
        peer.spoke = peer.heard = monotonic()
        if hello.proven:
            self._proven(peer)
        if self._closed is not None:
            self.sockets.send(peer.identity, wire.Closing(self.flow.window.seq))
        self._changed()

    def _proven(self, peer: RemotePeer) -> None:
        self.places.proven(peer)
        if self.places.going:
            self.sockets.send(peer.identity, wire.Go())

    def _acknowledged(self, peer: RemotePeer, message: wire.Acknowledge) -> None:
        if self.flow.acknowledged(peer.rank, message.consumed):
            self._changed()

    def _resend(self, peer: RemotePeer, first: int, last: int) -> None:
        lost = self.flow.resend(peer.rank, first, last)
        if lost is not None:
            self.sockets.send(peer.identity, wire.Lost(*lost))

    # Who is still there

    def _tick(self) -> None:
        """Ask every reader whether it is there, and give up those that have been silent for too long."""
        assert self._loop is not None
        self._timer = None
        if self._loop.is_closed():
            return
        self.sockets.look()  # what came while the loop was busy counts
        now = monotonic()
        due = now + self._timeout / TICKS
        for peer in self.places:
            # Silence of a program that does not run its loop is not the end of it, as long as ZeroMQ answers for it.
            # That takes up to half of the time to fail, which is why it extends nobody's time by more than that.
            message = wire.Tick() if self._closed is None else wire.Closing(self.flow.window.seq)
            if self.sockets.send(peer.identity, message):
                peer.heard = max(peer.heard, now - self._timeout / 2)
            silent_since = peer.heard if self._closed is None else max(peer.spoke, self._closing_since)
            if now - silent_since >= self._timeout:
                self._died(peer, f"it was silent for {self._timeout:g} s")
            else:
                due = min(due, silent_since + self._timeout)
        if len(self.places):
            self._timer = self._loop.call_later(max(0.001, due - now), self._tick)
            if self._closed is not None and now >= self._report_at:
                self._report_at = now + self._patience
                self._report_unfinished(now)

    def _report_unfinished(self, now: float) -> None:
        waited_for = ", ".join(str(peer) for peer in self.places if not peer.finished)
        logger.warning(
            "queue %s: closing for %.0f s: %s answers, but has not received everything",
            self._name,
            now - self._closing_since,
            waited_for,
        )

    def _died(self, peer: RemotePeer, why: str) -> None:
        logger.warning("queue %s: remote reader %s is dead: %s", self._name, peer, why)
        self.sockets.send(peer.identity, wire.Refused(why, evicted=True))
        self.places.has_died(peer, why)
        self._removed()

    def evict_slow(self) -> bool:
        """Go on without readers that are too slow, now that the window has no room; return whether there were any."""
        if not self._slowness.concerns:
            return False
        window = self.flow.window
        overdue = self._slowness.overdue(self.places.waited_for(), window.laggards(), window.readers, monotonic())
        for peer in overdue:
            behind = window.seq - window.readers[peer.rank]
            text = "queue %s: remote reader %s was too slow and was evicted, %d messages behind"
            logger.warning(text, self._name, peer, behind)
            self._evict(peer, wire.TOO_SLOW)
        if overdue:
            self._removed()
        return bool(overdue)

    def dismiss(self, rank: int) -> None:
        """Wait for a reader no more, whether it is there, has died, or never came."""
        peer = self.places.dismiss(rank)
        if peer is not None:
            self.sockets.send(peer.identity, wire.Refused(wire.DISMISSED, evicted=True))
        self._removed()

    def _evict(self, peer: RemotePeer, why: str) -> None:
        self.sockets.send(peer.identity, wire.Refused(why, evicted=True))
        self.places.evict(peer, why)

    @property
    def evicts(self) -> bool:
        """Whether `evict_slow` may have something to do."""
        return self._slowness.concerns

    def _removed(self) -> None:
        """Go on where a reader is not there any more; who waits for its place may have it, once this is done."""
        if self._closed is not None:
            self._close_if_delivered()
        else:
            self._door.place_is_free()
        self._changed()

    # Closing

    def say_goodbye(self) -> None:
        """Tell the readers that nothing more will come; what is on its way is delivered."""
        if self._loop is None or self._closed is not None:
            return
        self._closed = self._loop.create_future()
        self._closing_since = monotonic()
        self._report_at = self._closing_since + self._patience
        self.places.closed = True
        self._door.answer_all()
        for peer in self.places:
            self.sockets.send(peer.identity, wire.Closing(self.flow.window.seq))
        self._close_if_delivered()

    async def wait_closed(self) -> None:
        """Return when every reader has received everything, or is gone, and the sockets are closed."""
        if self._closed is None:
            return
        if not self._closed.get_loop().is_closed():
            await asyncio.shield(self._closed)
            return
        # Nothing calls back any more, and nobody hears those who fall silent.
        deadline = monotonic() + self._timeout
        while self.delivering and monotonic() < deadline:
            self.sockets.look()
            await asyncio.sleep(CLOSED_LOOP_POLL_S)
        self.close()

    @property
    def delivering(self) -> bool:
        """Whether this is waiting for readers to have received everything."""
        return self._closed is not None and not self._closed.done()

    def close(self) -> None:
        """Close the sockets whatever the readers have. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._door.close()
        self.sockets.close()
        if self._identity is not None:
            self._identity.release()
        if self._closed is not None and not self._closed.done():
            with suppress(RuntimeError):  # the loop is closed, and would have called a waiting task back
                self._closed.set_result(None)

    def _close_if_delivered(self) -> None:
        if self.delivering and all(peer.finished for peer in self.places):
            self.close()


def _mark(secret: bytes, rank: int, seq: int) -> bytes:
    return wire.address(secret, rank) + HEADER.pack(wire.MARK, 0, 0, 0, seq, 0, 0)


def _nothing() -> None: ...
