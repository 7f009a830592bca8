"""The readers on other hosts: what the writer sends them, owes to each, and hears of them."""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic

from aioshm.codec.frames import HEADER
from aioshm.config import SLOW_READER, Options
from aioshm.errors import AioshmError, PeerDied
from aioshm.logs import LogLimiter
from aioshm.queue.handle import RemoteAddress
from aioshm.queue.names.identity import Identity
from aioshm.queue.remote import wire
from aioshm.queue.remote.flow import Flow
from aioshm.queue.remote.peers import RemotePeer, RemotePeers
from aioshm.queue.remote.slowness import Slowness
from aioshm.queue.remote.writer_sockets import WriterSockets
from aioshm.ring.layout import VERSION

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
        ranks: The readers'.
        ip: Where to bind, from `check_ip`; None: this host's own address.
        options: The queue's.
        identity: What this writer has in common with those before it, and lets go of when the sockets are closed; None:
            nothing.

    Attributes:
        peers: Who reads.
        sockets: What leads to them.
        flow: What is sent to them, and kept until they have it.
        trouble: Makes the error that the writer has to raise from now on, if any.

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
    ) -> None:
        self._name = queue_id.hex()[:8]
        self.peers: RemotePeers = RemotePeers(ranks)
        self._queue_id = queue_id
        self._token = token
        self._identity = identity
        self._timeout = options.remote_timeout
        self._patience = options.stall_warning_s
        self._policy = options.on_reader_death
        self._changed: Callable[[], None] = _nothing
        self._secret = secrets.token_bytes(wire.SECRET_BYTES)
        self.sockets: WriterSockets = WriterSockets(ip, self._secret, options, len(ranks), identity)
        self.flow: Flow = Flow(self.sockets, self._secret, options)
        self._closed: asyncio.Future[None] | None = None
        self._closing_since = 0.0
        self._report_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limiter = LogLimiter(COMPLAINT_S)
        self._slowness = Slowness()
        self.trouble: Callable[[], AioshmError] | None = None

    @property
    def address(self) -> RemoteAddress:
        """What goes into the handle."""
        keys = self.sockets.keys
        return RemoteAddress(
            data=self.sockets.data,
            control=self.sockets.control,
            topic=self._secret,
            ranks=self.peers.ranks,
            server_key=None if keys is None else keys.server,
            client_public=None if keys is None else keys.public,
            client_secret=None if keys is None else keys.secret,
            lasting=self._identity is not None,
        )

    def start(self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None]) -> None:
        """Begin to admit readers; ``changed`` is called after every change that a waiting call may be interested in."""
        self._loop, self._changed = loop, changed
        self.sockets.start(loop, self._subscribed, self._message)

    # How they are

    @property
    def complete(self) -> bool:
        """Whether no reader is waited for any more."""
        return self.peers.complete

    def look(self) -> None:
        """Count on no reader that has lost its connection: it may be dead, and if not, it says hello again."""
        for peer in self.peers:
            peer.proven = peer.proven and self.sockets.reaches(peer.identity)

    @property
    def alive(self) -> int:
        """How many readers are attached."""
        return len(self.peers)

    def missing(self) -> list[str]:
        """Name the readers that are not attached yet."""
        return self.peers.missing()

    @property
    def left(self) -> dict[int, str]:
        """What became of the readers that were there before all were ready, and are not replaced."""
        return self.peers.left

    def take_death(self) -> PeerDied | None:
        """Return, once, who of them has died."""
        return self.peers.take_death()

    def laggards(self) -> list[str]:
        """Name the readers that the window waits for."""
        return [str(self.peers.of_rank(rank)) for rank in self.flow.window.laggards()]

    def slowest(self, _slots: int = 1, _large: Sequence[int] = ()) -> list[int]:
        """Return, by rank, which of them are furthest behind."""
        return self.flow.window.laggards()

    def lag_of(self, rank: int) -> tuple[str, int] | None:
        """Name a reader, and say how many messages it is behind; None if it is not there."""
        peer, window = self.peers.of_rank(rank), self.flow.window
        return None if peer is None else (str(peer), window.seq - window.readers[rank])

    def backlog(self) -> int:
        """Return how many messages the slowest reader has not finished with."""
        return self.flow.window.backlog()

    def go(self) -> None:
        """Tell every reader that all are ready; from now on a reader that is gone is not replaced."""
        self.peers.going = True
        for peer in self.peers:
            self.sockets.send(peer.identity, wire.Go())

    # What the sockets tell

    def _subscribed(self, rank: int) -> None:
        """Tell a reader what it will not get over its new connection by itself."""
        if rank in self.peers.ranks:
            self.flow.window.connected(rank)
            self.sockets.publish(_mark(self._secret, rank, self.flow.window.seq))

    def _message(self, identity: bytes, data: bytes) -> None:
        try:
            message = wire.parse_from_reader(data)
            if isinstance(message, wire.Hello):
                self._hello(identity, message)
                return
            peer = self.peers.of_identity(identity)
            if peer is None:
                return  # one that is gone, or never was
            peer.spoke = peer.heard = monotonic()
            if isinstance(message, wire.Acknowledge):
                self._acknowledged(peer, message)
            elif isinstance(message, wire.Resend):
                for first, last in message.ranges:
                    self._resend(peer, first, last)
            elif isinstance(message, wire.Proven):
                peer.proven = True
                self._changed()
            elif isinstance(message, wire.Finished):
                peer.finished = True
                self.sockets.send(identity, wire.Left())
                self._close_if_delivered()
            else:
                self.sockets.send(identity, wire.Left())
                self._remove(peer, "it has left")
                self._changed()
        except wire.WireError as error:
            held_back = self._limiter.admit()
            if held_back is not None:
                logger.warning(
                    "queue %s: dropped a message that no reader of it sends: %s (and %d more)",
                    self._name,
                    error,
                    held_back,
                )

    def _hello(self, identity: bytes, hello: wire.Hello) -> None:
        peer = self.peers.of_identity(identity)
        if peer is None:
            reason = self._why_unknown(hello)
            if reason is None and hello.topic != self._secret:
                self.sockets.send(identity, wire.Renewed(self._secret))
                return
            reason = reason or self._why_not(hello)
            if reason is not None:
                self.sockets.send(identity, wire.Refused(reason, evicted=False))
                return
            if not self.sockets.reaches(identity):
                return  # it has gone since: who was not admitted leaves its place free
        self.sockets.send(identity, wire.Welcome(os.getpid(), platform.node()))
        if peer is None:
            peer = self.peers.admit(identity, hello)
            self._slowness.concerns = self._slowness.concerns or hello.slow == "evict"
            self.flow.window.join(hello.rank)
            if self._timer is None:
                self._tick()
        peer.spoke = peer.heard = monotonic()
        if hello.proven:
            peer.proven = True
        if self.peers.going:
            self.sockets.send(identity, wire.Go())
        if self._closed is not None:
            self.sockets.send(identity, wire.Closing(self.flow.window.seq))
        self._changed()

    def _why_unknown(self, hello: wire.Hello) -> str | None:
        """Return why this is no reader of this queue."""
        if hello.version != VERSION:
            return f"this queue speaks version {VERSION}, not {hello.version}"
        known = hello.queue_id == self._queue_id or self._identity is not None  # whose handles are of one queue each
        if not known or not hmac.compare_digest(hello.token, self._token):
            return "the handle is another queue's"
        return None

    def _why_not(self, hello: wire.Hello) -> str | None:
        """Return why a reader cannot be admitted."""
        if hello.slow not in SLOW_READER:
            return f"this writer knows no slow={hello.slow!r}"
        self._make_way(hello.rank)
        return self.peers.why_not(hello.rank)

    def _make_way(self, rank: int) -> None:
        """Free the place of a reader that cannot be reached any more, if not all are ready; then it may come back."""
        peer = self.peers.of_rank(rank)
        if peer is not None and not self.peers.going and not self.sockets.reaches(peer.identity):
            self._remove(peer, "it cannot be reached")

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
        for peer in self.peers:
            # Silence of a program that does not run its loop is not the end of it, as long as ZeroMQ answers for it.
            # That takes up to half of the time to fail, which is why it extends nobody's time by more than that.
            message = wire.Tick() if self._closed is None else wire.Closing(self.flow.window.seq)
            if self.sockets.send(peer.identity, message):
                peer.heard = max(peer.heard, now - self._timeout / 2)
            silent_since = peer.heard if self._closed is None else max(peer.spoke, self._closing_since)
            if now - silent_since >= self._timeout:
                self._died(peer)
            else:
                due = min(due, silent_since + self._timeout)
        if len(self.peers):
            self._timer = self._loop.call_later(max(0.001, due - now), self._tick)
            if self._closed is not None and now >= self._report_at:
                self._report_at = now + self._patience
                self._report_unfinished(now)

    def _report_unfinished(self, now: float) -> None:
        waited_for = ", ".join(str(peer) for peer in self.peers if not peer.finished)
        logger.warning(
            "queue %s: closing for %.0f s: %s answers, but has not received everything",
            self._name,
            now - self._closing_since,
            waited_for,
        )

    def _died(self, peer: RemotePeer) -> None:
        silence = f"silent for {self._timeout:g} s"
        logger.warning("queue %s: remote reader %s is dead: %s", self._name, peer, silence)
        death = functools.partial(
            PeerDied, peer.rank, peer.pid, "reader", f"queue {self._name}, on {peer.host}: {silence}"
        )
        if self._policy == "raise" and not self.peers.going:
            self.peers.died[peer.rank] = death()
        elif self._policy == "raise" and self.trouble is None:
            self.trouble = death
        self.sockets.send(peer.identity, wire.Refused(f"it was {silence}", evicted=True))
        self._remove(peer, f"it was {silence}")
        self._changed()

    def evict_slow(self) -> bool:
        """Go on without readers that are too slow, now that the window has no room; return whether there were any."""
        if not self._slowness.concerns:
            return False
        window = self.flow.window
        overdue = self._slowness.overdue(self.peers, window.laggards(), window.readers, monotonic())
        for peer in overdue:
            behind = window.seq - window.readers[peer.rank]
            text = "queue %s: remote reader %s was too slow and was evicted, %d messages behind"
            logger.warning(text, self._name, peer, behind)
            self.sockets.send(peer.identity, wire.Refused(wire.TOO_SLOW, evicted=True))
            self._remove(peer, wire.TOO_SLOW)
        if overdue:
            self._changed()
        return bool(overdue)

    @property
    def evicts(self) -> bool:
        """Whether `evict_slow` may have something to do."""
        return self._slowness.concerns

    def _remove(self, peer: RemotePeer, why: str) -> None:
        self.peers.remove(peer, why)
        self.flow.leave(peer.rank)
        if self._closed is not None:
            self._close_if_delivered()

    # Closing

    def say_goodbye(self) -> None:
        """Tell the readers that nothing more will come; what is on its way is delivered."""
        if self._loop is None or self._closed is not None:
            return
        self._closed = self._loop.create_future()
        self._closing_since = monotonic()
        self._report_at = self._closing_since + self._patience
        for peer in self.peers:
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
        self.sockets.close()
        if self._identity is not None:
            self._identity.release()
        if self._closed is not None and not self._closed.done():
            with suppress(RuntimeError):  # the loop is closed, and would have called a waiting task back
                self._closed.set_result(None)

    def _close_if_delivered(self) -> None:
        if self.delivering and all(peer.finished for peer in self.peers):
            self.close()


def _mark(secret: bytes, rank: int, seq: int) -> bytes:
    return wire.address(secret, rank) + HEADER.pack(wire.MARK, 0, 0, 0, seq, 0, 0)


def _nothing() -> None: ...
