"""The door of a queue for remote readers: who comes is admitted, refused, or told to wait until that is known."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from aioshm.config import SLOW_READER
from aioshm.queue.remote import wire
from aioshm.queue.remote.places import RemotePeer, RemotePlaces
from aioshm.queue.remote.writer_sockets import WriterSockets
from aioshm.ring.layout import VERSION

CUT_OFF_S = 1.0
"""A reader that cannot be reached for so long, or for a quarter of ``options.remote_timeout``, is taken for dead where
another one has come for its place: one that lives connects again in less."""

ASK_S = 0.02
"""How often the writer looks, while a newcomer waits, whether the reader that has the place is there."""


class Key(NamedTuple):
    """What a reader must know.

    Attributes:
        queue_id: The queue; None: whichever has the token.
        token: The handle's secret.
        topic: What the data messages begin with.
    """

    queue_id: bytes | None
    token: bytes
    topic: bytes


class Newcomer(NamedTuple):
    """A reader that waits to be admitted.

    Attributes:
        hello: Its greeting.
        since: When it came, by the monotonic clock.
    """

    hello: wire.Hello
    since: float


class Door:
    """Answers the readers that the writer does not know.

    Args:
        places: Says who may have one.
        sockets: What leads to them.
        key: What they must know.
        timeout_s: How long a reader may be silent.
        greet: Is told of each reader that was admitted.
        died: Is told of each that has not come back while another one waits for its place, and why.
        changed: Is called after other changes.
    """

    def __init__(
        self,
        places: RemotePlaces,
        sockets: WriterSockets,
        key: Key,
        timeout_s: float,
        greet: Callable[[RemotePeer, wire.Hello], None],
        died: Callable[[RemotePeer, str], None],
        changed: Callable[[], None],
    ) -> None:
        self._places = places
        self._sockets = sockets
        self._key = key
        self._cut_off_s = min(CUT_OFF_S, timeout_s / 4)
        self._greet = greet
        self._died = died
        self._changed = changed
        self._waiting: dict[bytes, Newcomer] = {}  # by identity
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to answer."""
        self._loop = loop

    def knock(self, identity: bytes, hello: wire.Hello) -> None:
        """Answer a greeting of a reader that has no place."""
        reason = self._why_unknown(hello)
        if reason is not None:
            self._sockets.send(identity, wire.RefusedPlainly(reason))
        elif hello.topic != self._key.topic and not self._places.closed:
            self._sockets.send(identity, wire.Renewed(self._key.topic))
        elif hello.leaving:
            self._places.missed(hello)
            self._waiting.pop(identity, None)
            self._sockets.send(identity, wire.Left())
            self._changed()
        else:
            came = self._waiting.get(identity)
            self._admit_or_not(identity, Newcomer(hello, monotonic() if came is None else came.since))

    def _why_unknown(self, hello: wire.Hello) -> str | None:
        """Return why this is no reader of this queue."""
        key = self._key
        if hello.version != VERSION:
            return wire.other_version(hello.version)
        if key.queue_id not in (None, hello.queue_id) or not hmac.compare_digest(hello.token, key.token):
            return "the handle is another queue's"
        if hello.slow not in SLOW_READER:
            return f"this writer knows no slow={hello.slow!r}"
        return None

    def _admit_or_not(self, identity: bytes, newcomer: Newcomer) -> None:
        hello, since = newcomer
        for other in self._places.in_the_way(hello):
            self._look_for(other)
        answer = self._places.answer(hello, identity, since, monotonic())
        if isinstance(answer, wire.Wait):
            if identity not in self._waiting:
                self._waiting[identity] = newcomer
                self._sockets.send(identity, answer)
            if self._timer is None:
                assert self._loop is not None
                self._timer = self._loop.call_later(ASK_S, self._ask_again)
            return
        self._waiting.pop(identity, None)
        if isinstance(answer, wire.Refused):
            self._sockets.send(identity, answer)
        elif self._sockets.reaches(identity):  # who has gone since leaves its place free
            self._greet(self._places.admit(identity, hello, answer), hello)

    def _look_for(self, peer: RemotePeer) -> None:
        """Ask a reader whether it is there, because another one has come for its place; it may be dead, or come back.

        Before all are ready it makes way at once: it has missed nothing.
        """
        now = monotonic()
        if self._sockets.reaches(peer.identity):
            peer.cut_off = None
            return
        peer.cut_off = now if peer.cut_off is None else peer.cut_off
        if not self._places.going:
            self._places.has_died(peer, "it cannot be reached", blameless=True)
            self._changed()
        elif now - peer.cut_off >= self._cut_off_s:
            self._died(peer, "its connection has ended, and another reader has come for its place")

    def place_is_free(self) -> None:
        """Answer soon who waits for a place."""
        if self._waiting and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon(self._ask_again)

    def _ask_again(self) -> None:
        self.close()
        if self._loop is None or self._loop.is_closed() or self._sockets.closed:
            return
        self._sockets.look()
        self.answer_all()

    def answer_all(self) -> None:
        """Answer now who waits for a place, as far as that is known."""
        for identity, newcomer in list(self._waiting.items()):
            self._admit_or_not(identity, newcomer)

    def close(self) -> None:
        """Answer nobody by itself any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
