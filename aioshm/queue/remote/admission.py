"""The admission of remote readers: a newcomer is admitted, refused, or waits until it is known which of the two."""

from __future__ import annotations

import asyncio
import hmac
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from aioshm.config import SLOW_READER
from aioshm.errors import HandleError, NoPlaceVacant
from aioshm.lifeline.protocol import ANY_RANK
from aioshm.queue.registry import ReaderSlot
from aioshm.queue.remote import wire
from aioshm.ring.layout import VERSION

if TYPE_CHECKING:
    from aioshm.queue.remote.readers import RemoteReader, RemoteReaders

CUT_OFF_S = 1.0
"""A reader that cannot be reached for so long, or for a quarter of ``options.remote_timeout``, is taken for dead where
another one has come for its rank: one that lives connects again in less."""

ASK_S = 0.02
"""How often the writer checks, while a newcomer waits, whether the reader that has the rank is there."""


class Newcomer(NamedTuple):
    """A reader that waits to be admitted, since a time of the monotonic clock."""

    hello: wire.Hello
    since: float


class Admission:
    """Answers readers that the writer does not know; with a queue id of None, whichever queue's have the token."""

    def __init__(self, readers: RemoteReaders, queue_id: bytes | None, token: bytes) -> None:
        self._readers = readers
        self._sockets = readers.sockets
        self._registry = readers.registry
        self._queue_id = queue_id
        self._token = token
        self._cut_off_s = min(CUT_OFF_S, readers.timeout_s / 4)
        self._waiting: dict[bytes, Newcomer] = {}  # by identity
        self._timer: asyncio.TimerHandle | None = None

    def greeted(self, identity: bytes, hello: wire.Hello) -> None:
        """Answer the greeting of a reader that is not attached."""
        topic = self._readers.secret
        reason = self._why_unknown(hello)
        if reason is not None:
            self._sockets.send(identity, wire.Refused(reason))
        elif hello.topic != topic and not self._readers.closing:
            self._sockets.send(identity, wire.Renewed(topic))
        elif hello.leaving:
            self._registry.missed(hello.rank, f"pid {hello.pid} on {hello.host}")
            self._waiting.pop(identity, None)
            self._sockets.send(identity, wire.Left())
        else:
            came = self._waiting.get(identity)
            self._admit_or_not(identity, Newcomer(hello, monotonic() if came is None else came.since))

    def _why_unknown(self, hello: wire.Hello) -> str | None:
        """Return why this is no reader of this queue."""
        if hello.version != VERSION:
            return wire.other_version(hello.version)
        if self._queue_id not in (None, hello.queue_id) or not hmac.compare_digest(hello.token, self._token):
            return "the handle is another queue's"
        if hello.slow not in SLOW_READER:
            return f"this writer knows no slow_reader={hello.slow!r}"
        return None

    def _admit_or_not(self, identity: bytes, newcomer: Newcomer) -> None:
        hello = newcomer.hello
        for reader in self._in_the_way(hello):
            self._look_for(reader)
        answer = self.answer(identity, newcomer)
        if isinstance(answer, wire.Wait):
            if identity not in self._waiting:
                self._waiting[identity] = newcomer
                self._sockets.send(identity, answer)
            if self._timer is None:
                assert self._readers.loop is not None
                self._timer = self._readers.loop.call_later(ASK_S, self._ask_again)
            return
        self._waiting.pop(identity, None)
        if isinstance(answer, wire.Refused):
            self._sockets.send(identity, answer)
        elif self._sockets.reaches(identity):  # who has gone since leaves its place free
            self._readers.admit(identity, hello, answer)

    def answer(self, identity: bytes, newcomer: Newcomer) -> ReaderSlot | wire.Refused | wire.Wait:
        """Return the slot that a newcomer may have, or what to send it instead."""
        hello, since = newcomer
        if self._readers.closing:
            return wire.Refused("the writer has closed the queue", closed=True)
        if hello.admitted and self._registry.going:
            return wire.Refused(self._readers.gone.get(identity, "it is not one of the readers"), evicted=True)
        try:
            return self._registry.choose(hello.rank, self._readers)
        except HandleError as error:
            in_the_way = self._in_the_way(hello)
            silent = any(reader.spoke < since for reader in in_the_way)
            if silent and monotonic() - since < self._readers.timeout_s:
                who = ", ".join(map(str, in_the_way))
                return wire.Wait(f"it asks whether who has the place is still there: {who}")
            return wire.Refused(str(error), full=isinstance(error, NoPlaceVacant))

    def _in_the_way(self, hello: wire.Hello) -> list[RemoteReader]:
        """Return the readers that have what a newcomer wants."""
        return [reader for reader in self._readers.readers() if hello.rank in (reader.rank, ANY_RANK)]

    def _look_for(self, reader: RemoteReader) -> None:
        """Ask a reader whether it is there, because another one has come for its rank; it may be dead, or come back.

        Before all are ready it makes way immediately: it has missed nothing.
        """
        now = monotonic()
        if self._sockets.reaches(reader.identity):
            reader.cut_off = None
            return
        reader.cut_off = now if reader.cut_off is None else reader.cut_off
        if not self._registry.going:
            self._readers.died(reader, "it cannot be reached", blameless=True)
        elif now - reader.cut_off >= self._cut_off_s:
            self._readers.died(reader, "its connection has ended, and another reader has come for its place")

    def _ask_again(self) -> None:
        self.close()
        loop = self._readers.loop
        if loop is None or loop.is_closed() or self._sockets.closed:
            return
        self._sockets.look()
        self.answer_all()

    def answer_all(self) -> None:
        """Answer now the readers that wait to be admitted, as far as that can be decided."""
        for identity, newcomer in list(self._waiting.items()):
            self._admit_or_not(identity, newcomer)

    def close(self) -> None:
        """Answer nobody by itself any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
