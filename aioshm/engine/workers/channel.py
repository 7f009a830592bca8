"""The connections between a group and one worker process: a control socket and queues."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import weakref
from contextlib import suppress
from typing import Any, NamedTuple

from aioshm.engine.workers.messages import Message
from aioshm.errors import AioshmError, QueueFull
from aioshm.queue import Handle, MessageQueue

_LENGTH = struct.Struct("!Q")


class Requests(NamedTuple):
    """The handles of the queues with the calls for a worker."""

    of_all: Handle
    of_one: Handle


class ControlSocket:
    """Sends and receives pickled messages of any size over a stream socket, without blocking the loop.

    Every method raises EOFError or OSError if the peer has exited, or if either end is closed. A cancelled call may
    leave a part of a message behind: close the socket then.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._forgotten = weakref.finalize(self, sock.close)  # no second warning: an unclosed group gives one

    async def send(self, message: object) -> None:
        """Send a message."""
        await self.send_pickled(pickle.dumps(message))

    async def send_pickled(self, message: bytes) -> None:
        """Send a pickled message."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, _LENGTH.pack(len(message)))
        await loop.sock_sendall(self._socket, message)

    async def receive(self) -> Any:
        """Receive a message."""
        return pickle.loads(await self.receive_pickled())

    async def receive_pickled(self) -> bytearray:
        """Receive a message without unpickling it."""
        (length,) = _LENGTH.unpack(await self._receive(_LENGTH.size))
        return await self._receive(length)

    async def _receive(self, n_bytes: int) -> bytearray:
        received = bytearray(n_bytes)
        missing = memoryview(received)
        while missing:
            n_received = await asyncio.get_running_loop().sock_recv_into(self._socket, missing)
            if not n_received:
                raise EOFError("the peer has closed its end")
            missing = missing[n_received:]
        return received

    def close(self) -> None:
        """Close the socket, on its loop or where no loop runs. Tasks that wait for it need cancelling. Idempotent."""
        if self._socket.fileno() >= 0:
            loop = asyncio._get_running_loop()
            if loop is not None:
                loop.remove_reader(self._socket)
                loop.remove_writer(self._socket)
            self._forgotten()


class Channel:
    """The two queues of one worker process: for calls of this worker only, and for all of its answers."""

    def __init__(self, requests: MessageQueue, replies: MessageQueue, after: int) -> None:
        self.requests = requests
        self.replies = replies
        self.n_requests: int = 0  # calls sent over this channel
        self.after = after  # the last broadcast that was sent before this worker was ready

    async def send(self, message: Message) -> None:
        """Send a call; raises PeerDied or QueueClosed if the worker is gone and has not received the call."""
        try:
            self.requests.enqueue_nowait(message)  # no await if there is room: keeps the order with broadcasts
        except QueueFull:
            await self.requests.enqueue(message)
        self.n_requests += 1

    async def post_late(self, message: Message) -> None:
        """Send a message that is no call, if the worker is still there."""
        with suppress(AioshmError):
            await self.requests.enqueue(message)

    async def aclose(self) -> None:
        """Close both queues. Idempotent."""
        try:
            await self.requests.aclose()
        finally:
            await self.replies.aclose()
