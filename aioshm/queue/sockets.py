"""Messages that do not fit a chunk: frames from the writer's XPUB socket to each local reader's SUB socket.

A message has two frames, ``[secret, sequence number]`` and the body, laid out as in a chunk. The secret was told over
the lifeline and to admitted readers only, so that whoever else may get hold of the address can neither feed a reader
nor, because of the uid filter, listen. There are no high-water marks: the ring bounds what is in flight, because a
slot is released only once its payload has arrived.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio

from aioshm.codec.frames import HEADER, write_body
from aioshm.errors import CorruptSlot, SharedMemoryError
from aioshm.wait.address import remove
from aioshm.wait.line import settle
from aioshm.wait.poller import Stall

logger = logging.getLogger("aioshm.queue")

SECRET_BYTES = 16
LINGER_MS = 10_000
"""How long a closing writer tries to hand over payloads that a reader's kernel does not take."""

SECRET = slice(HEADER.size, HEADER.size + SECRET_BYTES)
"""Where in a slot's header an overflow marker repeats the secret."""

# libzmq's own word for "never", -1, drops what was received and not yet read when the connection ends.
_NEVER_MS = 2**31 - 1

_HEAD = struct.Struct("<16sQ")
_NO_SEQ = 2**64 - 1  # in the head of the frame that proves the channel


SOCKET_BUFFER_BYTES = 4 * 1024 * 1024
"""Asked of the kernel, which may grant less: the more of a payload it takes at once, the fewer are the wake-ups."""

IDLE_BODIES = 2
"""So many bodies that were sent are kept to be filled again: touching fresh memory costs several times the copy."""


class Bodies:
    """The memory that payloads are gathered in, used again once ZeroMQ has let go of it."""

    def __init__(self) -> None:
        self._sent: list[tuple[mmap.mmap, zmq.MessageTracker]] = []

    def take(self, size: int) -> mmap.mmap:
        """Return memory of at least this size, the caller's until `give`."""
        done = [entry for entry in self._sent if entry[1].done]
        fitting = min((entry for entry in done if len(entry[0]) >= size), key=lambda entry: len(entry[0]), default=None)
        if fitting is not None and len(fitting[0]) <= 4 * size:
            self._sent.remove(fitting)
            return fitting[0]
        for entry in done[: max(0, len(done) - IDLE_BODIES + 1)]:
            self._sent.remove(entry)  # the oldest
        body = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                body.madvise(mmap.MADV_HUGEPAGE)
        return body

    def give(self, body: mmap.mmap, tracker: zmq.MessageTracker) -> None:
        """Let it be used again once the tracker says that it was sent."""
        self._sent.append((body, tracker))


def _endpoint(address: str) -> str:
    return f"ipc://{address}"


class OverflowSender:
    """The writer's end.

    Args:
        address: Where to bind, from `new_address`.
        secret: What every message begins with.

    Raises:
        SharedMemoryError: The socket cannot be bound.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._address = address
        self._secret = secret
        self._sent = False
        self._bodies = Bodies()
        self._closing: asyncio.Future[None] | None = None
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.SNDBUF, SOCKET_BUFFER_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # every subscription is announced, not only the first
        if hasattr(zmq, "IPC_FILTER_UID"):
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        try:
            self._socket.bind(_endpoint(address))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SharedMemoryError(error.errno, f"cannot bind {address} for large messages: {error}") from None

    async def prove(self) -> None:
        """Answer each new subscription, for ever: what a reader then receives proves its channel."""
        while True:
            if (await self._socket.recv())[:1] == b"\x01":
                self._send(_NO_SEQ, b"")

    def send(self, seq: int, parts: Sequence[bytes | memoryview], buffers: Sequence[memoryview], size: int) -> None:
        """Send a message to every reader. Never blocks; copies what the caller may change afterwards.

        Args:
            seq: The message's sequence number.
            parts: The main part in pieces.
            buffers: The out-of-band buffers.
            size: Of the body that `write_body` makes of them.
        """
        self._sent = True
        if len(parts) == 1 and not buffers and isinstance(parts[0], bytes):
            self._send(seq, parts[0])
            return
        body = self._bodies.take(size)
        view = memoryview(body)[:size]
        write_body(view, parts, buffers)
        self._bodies.give(body, self._send(seq, view))

    def _send(self, seq: int, body: bytes | memoryview) -> zmq.MessageTracker:
        # Without a high-water mark a send is done when the call returns, or has failed for good.
        sending: Any = self._socket.send_multipart([_HEAD.pack(self._secret, seq), body], copy=False, track=True)
        assert sending.done()
        tracker: zmq.MessageTracker = sending.result()
        return tracker

    def close_now(self) -> None:
        """Close without waiting for readers that have not taken their payloads."""
        self._context.destroy(linger=0)
        remove(self._address)  # libzmq leaves the file

    async def aclose(self) -> None:
        """Close once the readers' kernels have taken every payload, or after `LINGER_MS`."""
        if not self._sent:
            self.close_now()
            return
        if self._closing is None:
            self._socket.close(linger=LINGER_MS)
            remove(self._address)
            self._closing = asyncio.ensure_future(asyncio.to_thread(self._context.term))
        await asyncio.shield(self._closing)


class OverflowReceiver:
    """A reader's end.

    Args:
        address: Where the writer is bound.
        secret: What every genuine message begins with.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._secret = secret
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RCVBUF, SOCKET_BUFFER_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A connection that is lost means that the writer is gone; nobody else may take its place.
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        monitor: zmq.asyncio.Socket = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._hung_up: asyncio.Future[Any] = asyncio.ensure_future(monitor.recv_multipart())
        self._interrupted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._receiving: asyncio.Future[Any] | None = None
        self._held: tuple[int, memoryview] | None = None
        self._socket.connect(_endpoint(address))

    async def prove(self) -> None:
        """Return when a message from the writer has arrived here."""
        while self._received(await self._socket.recv_multipart(copy=False)) is None:
            pass

    async def receive(
        self, seq: int, deadline: float | None, cancel: asyncio.Event | None, stall: Stall | None
    ) -> memoryview | None:
        """Return the body of message ``seq``, or None if the writer is gone and will not deliver it, or on `interrupt`.

        Cancelling this, or running into the deadline, loses nothing: the next call goes on with the same receive.

        Raises:
            CorruptSlot: A later payload came, so this one is lost.
            TimeoutError: The deadline has passed.
            QueueCancelled: ``cancel`` is set.
        """
        while (body := self.receive_nowait(seq)) is None:
            assert self._receiving is not None
            awaited = [self._receiving, self._interrupted]
            if self.lost():
                return None
            if not self._hung_up.done():
                awaited.append(self._hung_up)
            await settle(*awaited, deadline=deadline, cancel=cancel, stall=stall)
            if self._interrupted.done():
                return None
        return body

    def lost(self) -> bool:
        """Return whether no message can arrive any more, and none is there."""
        # What had arrived before the end of the connection is in the socket by the time that end is reported.
        return (
            self._hung_up.done()
            and (self._receiving is None or not self._receiving.done())
            and not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        )

    def interrupt(self) -> None:
        """Let a waiting `receive` return."""
        if not self._interrupted.done():
            self._interrupted.set_result(None)

    def receive_nowait(self, seq: int) -> memoryview | None:
        """Return the body of message ``seq``, or None if it has not arrived.

        Raises:
            CorruptSlot: A later payload came, so this one is lost.
        """
        while True:
            if self._held is None:
                if self._receiving is None:
                    self._receiving = asyncio.ensure_future(self._socket.recv_multipart(copy=False))
                if not self._receiving.done():
                    return None
                frames = self._receiving.result()
                self._receiving = None
                self._held = self._received(frames)
                continue
            found, body = self._held
            if found > seq and found != _NO_SEQ:
                raise CorruptSlot(found, seq, "its payload never came")
            self._held = None
            if found == seq:
                return body

    def _received(self, frames: list[zmq.Frame]) -> tuple[int, memoryview] | None:
        if len(frames) != 2 or len(frames[0]) != _HEAD.size:
            logger.warning("dropped a large message of %d frames from a stranger", len(frames))
            return None
        secret, seq = _HEAD.unpack(frames[0].buffer)
        if secret != self._secret:
            logger.warning("dropped a large message with a wrong secret")
            return None
        return seq, frames[1].buffer

    def close(self) -> None:
        """Close at once; payloads that have not been received are dropped. Idempotent."""
        self._socket.disable_monitor()
        self._context.destroy(linger=0)
