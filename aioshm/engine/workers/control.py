"""The socket between a group and one of its processes: how a process becomes a worker."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
import weakref
from typing import Any, NamedTuple

from aioshm.queue import Handle

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
