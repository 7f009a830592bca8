"""The connections between a group and one worker process: a socket that makes it a worker, and two queues."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from aioshm.engine.workers.messages import Message
from aioshm.errors import AioshmError, QueueEmpty, QueueFull
from aioshm.queue import Handle, MessageQueue

_LENGTH = struct.Struct("!Q")


class Place(NamedTuple):
    """The rank that a process gets; the pickled call that makes the worker follows as a message of its own.

    Attributes:
        steps: The queue of calls of all workers.
        requests: The queue of calls of this worker.
    """

    rank: int
    steps: Handle
    requests: Handle


class ControlSocket:
    """Pickled messages of any size; neither end blocks its loop.

    Args:
        sock: This process' end of a pair of stream sockets.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._forgotten = weakref.finalize(self, sock.close)  # a forgotten group warns, its sockets do not, too

    async def send(self, message: object) -> None:
        """Send a message; raises OSError where the peer has exited, or either end is closed."""
        await self.send_pickled(pickle.dumps(message))

    async def send_pickled(self, message: bytes) -> None:
        """Send a message that is pickled already. If this is cancelled, close the socket: a part may be sent."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, _LENGTH.pack(len(message)))
        await loop.sock_sendall(self._socket, message)

    async def receive(self) -> Any:
        """Receive a message; raises EOFError or OSError where the peer has exited, or either end is closed."""
        return pickle.loads(await self.receive_pickled())

    async def receive_pickled(self) -> bytearray:
        """Receive a message as bytes. If this is cancelled, close the socket: a part may be lost."""
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
        """Close this end; a task that waits at it waits until cancelled. On its loop, or without any. Idempotent."""
        if self._socket.fileno() >= 0:
            loop = asyncio._get_running_loop()
            if loop is not None:
                loop.remove_reader(self._socket)
                loop.remove_writer(self._socket)
            self._forgotten()


class Channel:
    """The two queues of one worker process: the calls of it alone, and all of its answers.

    Attributes:
        n_requests: How many calls it was sent.
        after: The last call of all workers that was sent before it was there.
        lost: Whether a queue has ended, and the exit of the process is not known yet.
        closed: Whether the process is gone.
    """

    def __init__(self, rank: int, requests: MessageQueue, replies: MessageQueue, after: int) -> None:
        self.rank = rank
        self.requests = requests
        self.replies = replies
        self.n_requests: int = 0
        self.after = after
        self.lost = False
        self.closed: bool = False
        self._posting: set[asyncio.Task[None]] = set()

    async def send(self, message: Message) -> None:
        """Send a call; raises PeerDied or QueueClosed where the worker is gone, which has not seen the call then."""
        try:
            self.requests.enqueue_nowait(message)  # in order with the calls of all, where there is room
        except QueueFull:
            await self.requests.enqueue(message)
        self.n_requests += 1

    def post(self, message: Message) -> None:
        """Send a message without waiting: the ring can be full of calls that the worker has not come to."""
        try:
            self.requests.enqueue_nowait(message)
        except QueueFull:
            task = asyncio.get_running_loop().create_task(self._post_late(message))
            self._posting.add(task)
            task.add_done_callback(self._posting.discard)
        except AioshmError:  # the worker is gone, and all its calls end
            pass

    async def _post_late(self, message: Message) -> None:
        with suppress(AioshmError):
            await self.requests.enqueue(message)

    def rest(self) -> Iterable[Any]:
        """Take the last messages of a worker that is gone, once nobody else reads them."""
        with suppress(AioshmError, QueueEmpty):
            while True:
                yield self.replies.dequeue_nowait()

    async def aclose(self) -> None:
        """Close both queues. Idempotent."""
        self.closed = True
        for task in self._posting:
            task.cancel()
        try:
            await self.requests.aclose()
        finally:
            await self.replies.aclose()
