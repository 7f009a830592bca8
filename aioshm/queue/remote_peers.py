"""Who reads a queue over the network: the writer's record of its remote readers, and what it owes to each."""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import os
import platform
import secrets
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from aioshm.codec.frames import HEADER
from aioshm.config import Options
from aioshm.errors import AioshmError, PeerDied
from aioshm.logs import LogLimiter
from aioshm.queue import wire
from aioshm.queue.delivery import SendWindow
from aioshm.queue.handle import RemoteAddress
from aioshm.queue.outgoing import Outbox, Outgoing
from aioshm.queue.writer_sockets import WriterSockets
from aioshm.ring.layout import VERSION

logger = logging.getLogger("aioshm.queue")

TICKS = 4
"""How often within ``options.remote_timeout`` the writer asks whether its readers are there."""

CLOSED_LOOP_POLL_S = 0.005
"""How often a writer looks at its sockets when it closes after its event loop."""

COMPLAINT_S = 10.0  # between two warnings of bad messages


class RemotePeer:
    """One reader.

    Attributes:
        rank: Its rank.
        identity: Of its control socket, by which it is addressed.
        pid: Its process.
        host: Where that is.
        proven: Whether data has reached it.
        spoke: When it last said something, by the monotonic clock.
        heard: When it, or at least ZeroMQ in its process, was last known to be there.
        finished: Whether it has everything, and knows that nothing more will come.
    """

    def __init__(self, rank: int, identity: bytes, hello: wire.Hello) -> None:
        self.rank = rank
        self.identity = identity
        self.pid = hello.pid
        self.host = hello.host
        self.proven = hello.proven
        self.spoke = self.heard = monotonic()
        self.finished = False

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class RemotePeers:
    """The remote readers of one queue.

    Args:
        name: The queue's, for messages.
        ranks: The readers'.
        queue_id: The queue.
        token: What a reader must know.
        ip: Where to bind, from `check_ip`; None: this host's own address.
        options: The queue's.
        changed: Called after every change that a waiting call may be interested in.

    Attributes:
        trouble: Makes the error that the writer has to raise from now on, if any.
        resent: Messages that were sent again.

    Raises:
        ValueError: The address is not this host's.
        SharedMemoryError, OutOfDescriptors, OutOfThreads: The sockets cannot be had.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        queue_id: bytes,
        token: bytes,
        ip: str | None,
        options: Options,
        changed: Callable[[], None],
    ) -> None:
        self._name = name
        self.ranks = ranks
        self._queue_id = queue_id
        self._token = token
        self._timeout = options.remote_timeout
        self._patience = options.stall_warning_s
        self._policy = options.on_reader_death
        self._changed = changed
        self._secret = secrets.token_bytes(wire.SECRET_BYTES)
        self._everyone = wire.address(self._secret)
        self._sockets = WriterSockets(ip, self._secret, options, len(ranks))
        self._window: SendWindow[Outgoing] = SendWindow(options.remote_window, options.remote_window_bytes)
        self._outbox = Outbox()
        self._peers: dict[int, RemotePeer] = {}
        self._by_identity: dict[bytes, RemotePeer] = {}
        self._gone: dict[int, str] = {}  # and why
        self._going = False
        self._left: dict[int, str] = {}  # who was there before all were ready, by rank, and what became of it
        self._dead: dict[int, PeerDied] = {}  # who of them has died, which nobody has been told
        self._closed: asyncio.Future[None] | None = None
        self._closing_since = 0.0
        self._report_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limiter = LogLimiter(COMPLAINT_S)
        self.trouble: Callable[[], AioshmError] | None = None
        self.resent = 0

    @property
    def address(self) -> RemoteAddress:
        """What goes into the handle."""
        keys = self._sockets.keys
        return RemoteAddress(
            data=self._sockets.data,
            control=self._sockets.control,
            topic=self._secret,
            ranks=self.ranks,
            server_key=None if keys is None else keys.server,
            client_public=None if keys is None else keys.public,
            client_secret=None if keys is None else keys.secret,
        )

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to admit readers."""
        self._loop = loop
        self._sockets.start(loop, self._subscribed, self._message)

    # How they are

    @property
    def complete(self) -> bool:
        """Whether no reader is waited for any more."""
        return all(rank in self._gone or self._is_proven(rank) for rank in self.ranks)

    def look(self) -> None:
        """Count on no reader that has lost its connection: it may be dead, and if not, it says hello again."""
        for peer in self._peers.values():
            peer.proven = peer.proven and self._sockets.reaches(peer.identity)

    @property
    def alive(self) -> int:
        """How many readers are attached."""
        return len(self._peers)

    @property
    def kept(self) -> int:
        """How many messages are kept because some reader may need them again."""
        return len(self._window)

    @property
    def kept_bytes(self) -> int:
        """Their size."""
        return self._window.nbytes + self._outbox.nbytes

    def missing(self) -> list[str]:
        """Name the readers that are not attached yet."""
        missing = [rank for rank in self.ranks if rank not in self._gone and not self._is_proven(rank)]
        return [f"rank {rank} ({self._left[rank]})" if rank in self._left else f"rank {rank}" for rank in missing]

    @property
    def left(self) -> dict[int, str]:
        """What became of the readers that were there before all were ready, and are not replaced."""
        return self._left

    def take_death(self) -> PeerDied | None:
        """Return, once, who of them has died."""
        return self._dead.pop(next(iter(self._dead))) if self._dead else None

    def laggards(self) -> list[str]:
        """Name the readers that the window waits for."""
        return [str(self._peers[rank]) for rank in self._window.laggards()]

    def backlog(self) -> int:
        """Return how many messages the slowest reader has not finished with."""
        return self._window.backlog()

    def _is_proven(self, rank: int) -> bool:
        return rank in self._peers and self._peers[rank].proven

    # Sending

    def room(self, messages: int, nbytes: int) -> bool:
        """Return whether the window has room for so much more."""
        if self._outbox.nbytes:
            self._outbox.tidy()
        return self._window.room(messages, nbytes, self._outbox.nbytes)

    def waits_for_zeromq(self) -> bool:
        """Return whether what takes the room is only what ZeroMQ has not let go of, which nobody tells of."""
        return self._outbox.nbytes > 0

    def part(self, sizes: list[int]) -> int:
        """Return how many messages of these sizes may go together."""
        return self._window.part(sizes)

    @property
    def outbox(self) -> Outbox:
        """What makes messages."""
        return self._outbox

    def publish(self, message: Outgoing) -> None:
        """Send the next message to every reader."""
        if not self._window.readers:
            self._window.sent(message)
            self._outbox.let_go([message])
            return
        self._window.sent(message)
        self._transmit(self._everyone, message)

    def _transmit(self, whom: bytes, message: Outgoing) -> None:
        tracker = self._sockets.publish(whom + message.head, message.body)
        if tracker is not None:
            message.trackers.append(tracker)

    def go(self) -> None:
        """Tell every reader that all are ready; from now on a reader that is gone is not replaced."""
        self._going = True
        for peer in self._peers.values():
            self._sockets.send(peer.identity, wire.Go())

    # What the sockets tell

    def _subscribed(self, rank: int) -> None:
        """Tell a reader what it will not get over its new connection by itself."""
        if rank in self.ranks:
            self._window.connected(rank)
            self._sockets.publish(_mark(self._secret, rank, self._window.seq))

    def _message(self, identity: bytes, data: bytes) -> None:
        try:
            message = wire.parse_from_reader(data)
            if isinstance(message, wire.Hello):
                self._hello(identity, message)
                return
            peer = self._by_identity.get(identity)
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
                self._sockets.send(identity, wire.Left())
                self._close_if_delivered()
            else:
                self._sockets.send(identity, wire.Left())
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
        peer = self._by_identity.get(identity)
        if peer is None:
            reason = self._why_not(hello)
            if reason is not None:
                self._sockets.send(identity, wire.Refused(reason, evicted=False))
                return
            if not self._sockets.reaches(identity):
                return  # it has gone since: who was not admitted leaves its place free
        self._sockets.send(identity, wire.Welcome(os.getpid(), platform.node()))
        if peer is None:
            peer = RemotePeer(hello.rank, identity, hello)
            self._peers[hello.rank] = self._by_identity[identity] = peer
            self._left.pop(hello.rank, None)
            self._dead.pop(hello.rank, None)
            self._window.join(hello.rank)
            if self._timer is None:
                self._tick()
        peer.spoke = peer.heard = monotonic()
        if hello.proven:
            peer.proven = True
        if self._going:
            self._sockets.send(identity, wire.Go())
        if self._closed is not None:
            self._sockets.send(identity, wire.Closing(self._window.seq))
        self._changed()

    def _why_not(self, hello: wire.Hello) -> str | None:
        if hello.version != VERSION:
            return f"this queue speaks version {VERSION}, not {hello.version}"
        if hello.queue_id != self._queue_id or not hmac.compare_digest(hello.token, self._token):
            return "the handle is another queue's"
        if hello.rank not in self.ranks:
            return f"no remote reader has rank {hello.rank}"
        if hello.rank in self._gone:
            return f"rank {hello.rank} is gone: {self._gone[hello.rank]}"
        self._make_way(hello.rank)
        if hello.rank in self._peers:
            return f"rank {hello.rank} is taken by pid {self._peers[hello.rank].pid} on {self._peers[hello.rank].host}"
        return None

    def _make_way(self, rank: int) -> None:
        """Free the place of a reader that cannot be reached any more, if not all are ready; then it may come back."""
        peer = self._peers.get(rank)
        if peer is not None and not self._going and not self._sockets.reaches(peer.identity):
            self._remove(peer, "it cannot be reached")

    def _acknowledged(self, peer: RemotePeer, message: wire.Acknowledge) -> None:
        free = self._window.acknowledged(peer.rank, message.consumed)
        if free:
            self._outbox.let_go(free)
            self._changed()

    def _resend(self, peer: RemotePeer, first: int, last: int) -> None:
        messages, lost = self._window.resend(peer.rank, first, last)
        if lost is not None:
            self._sockets.send(peer.identity, wire.Lost(*lost))
        whom = wire.address(self._secret, peer.rank)
        for _seq, message in messages:
            self.resent += 1
            self._transmit(whom, message)

    # Who is still there

    def _tick(self) -> None:
        """Ask every reader whether it is there, and give up those that have been silent for too long."""
        assert self._loop is not None
        self._timer = None
        if self._loop.is_closed():
            return
        self._sockets.look()  # what came while the loop was busy counts
        now = monotonic()
        due = now + self._timeout / TICKS
        for peer in list(self._peers.values()):
            # Silence of a program that does not run its loop is not the end of it, as long as ZeroMQ answers for it.
            # That takes up to half of the time to fail, which is why it extends nobody's time by more than that.
            message = wire.Tick() if self._closed is None else wire.Closing(self._window.seq)
            if self._sockets.send(peer.identity, message):
                peer.heard = max(peer.heard, now - self._timeout / 2)
            silent_since = peer.heard if self._closed is None else max(peer.spoke, self._closing_since)
            if now - silent_since >= self._timeout:
                self._died(peer)
            else:
                due = min(due, silent_since + self._timeout)
        if self._peers:
            self._timer = self._loop.call_later(max(0.001, due - now), self._tick)
            if self._closed is not None and now >= self._report_at:
                self._report_at = now + self._patience
                self._report_unfinished(now)

    def _report_unfinished(self, now: float) -> None:
        waited_for = ", ".join(str(peer) for peer in self._peers.values() if not peer.finished)
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
        if self._policy == "raise" and not self._going:
            self._dead[peer.rank] = death()
        elif self._policy == "raise" and self.trouble is None:
            self.trouble = death
        self._sockets.send(peer.identity, wire.Refused(f"it was {silence}", evicted=True))
        self._remove(peer, f"it was {silence}")
        self._changed()

    def _remove(self, peer: RemotePeer, why: str) -> None:
        del self._peers[peer.rank], self._by_identity[peer.identity]
        if self._going:
            self._gone[peer.rank] = why
        else:
            self._left[peer.rank] = f"pid {peer.pid} on {peer.host}: {why}"
        self._outbox.let_go(self._window.leave(peer.rank))
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
        for peer in self._peers.values():
            self._sockets.send(peer.identity, wire.Closing(self._window.seq))
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
            self._sockets.look()
            await asyncio.sleep(CLOSED_LOOP_POLL_S)
        self.close_now()

    @property
    def delivering(self) -> bool:
        """Whether this is waiting for readers to have received everything."""
        return self._closed is not None and not self._closed.done()

    def close_now(self) -> None:
        """Close the sockets whatever the readers have. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sockets.close()
        if self._closed is not None and not self._closed.done():
            with suppress(RuntimeError):  # the loop is closed, and would have called somebody back
                self._closed.set_result(None)

    def _close_if_delivered(self) -> None:
        if self.delivering and all(peer.finished for peer in self._peers.values()):
            self.close_now()


def _mark(secret: bytes, rank: int, seq: int) -> bytes:
    return wire.address(secret, rank) + HEADER.pack(wire.MARK, 0, 0, 0, seq, 0, 0)
