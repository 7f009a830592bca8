"""A TCP proxy that delays, cuts, truncates and swallows what passes through it."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import msgspec
from remotes import wide_writer

from aioshm import Handle, MessageQueue

CHUNK_BYTES = 64 * 1024
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset and forgets what was not sent


class Proxy:
    """Listens on a port of its own and forwards to a target (``tcp://127.0.0.1:1234``), as well as it is told to.

    Attributes:
        connections: How many there were.
        refused: How many there were while `refusing`.
        pings: How many heartbeats of ZeroMQ have passed, where nothing is encrypted.
        delay_s: How long each chunk waits, at most: a random time below.
        refusing: Whether new connections are reset at once.
    """

    def __init__(self, target: str, rng: random.Random | None = None, port: int = 0) -> None:
        host, _, target_port = target.removeprefix("tcp://").rpartition(":")
        self._target = host.strip("[]"), int(target_port)
        self._port = port
        self._rng = random.Random(0) if rng is None else rng
        self._open: set[_Connection] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._misbehaving: asyncio.Task[None] | None = None
        self.connections = 0
        self.refused = 0
        self.pings = 0
        self.delay_s = 0.0
        self.refusing = False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port, limit=CHUNK_BYTES)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.behave()
        self._server.close()
        self.refuse()
        while self._open:
            await asyncio.sleep(0.001)
        await self._server.wait_closed()

    @property
    def endpoint(self) -> str:
        """Where it listens, as ZeroMQ writes it."""
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    # Misbehaviour

    def cut(self, *, reset: bool = True) -> None:
        """End every connection, with a reset, or as if both ends had closed it."""
        for connection in self._open:
            connection.end(reset)

    def refuse(self) -> None:
        """End all connections, and reset new ones."""
        self.refusing = True
        self.cut()

    def half_close(self) -> None:
        """Close one direction of every connection; what comes from the other end still arrives."""
        for connection in self._open:
            connection.half_close(self._rng.choice((0, 1)))

    def truncate(self) -> None:
        """Forward only a part of the next chunk of every connection, then end it."""
        for connection in self._open:
            connection.truncating = True

    def stall(self) -> None:
        """Forward nothing until `resume`, but keep every connection and accept new ones."""
        self._flowing.clear()

    def resume(self) -> None:
        """Forward again."""
        self._flowing.set()

    def misbehave(self, every_s: float, delay_s: float) -> None:
        """Do one of all that every so often on average until `behave`; chunks wait for so long at most."""
        self.delay_s = delay_s
        self._misbehaving = asyncio.ensure_future(self._misbehave(every_s))

    async def behave(self) -> None:
        """Forward everything again, at once."""
        if self._misbehaving is not None:
            self._misbehaving.cancel()
            await asyncio.wait([self._misbehaving])
            self._misbehaving = None
        self.delay_s, self.refusing = 0.0, False
        self.resume()

    async def _misbehave(self, every_s: float) -> None:
        rng = self._rng
        while True:
            # In sleeps of the loop, which take longer where the machine has much else to do, as handshakes do: else
            # none would ever be done between two of these times.
            for _ in range(int(1000 * rng.expovariate(1 / every_s))):
                await asyncio.sleep(0.001)
            what = rng.choice(("reset", "close", "half close", "truncate", "truncate", "stall", "refuse"))
            if what in ("reset", "close"):
                self.cut(reset=what == "reset")
            elif what == "half close":
                self.half_close()
            elif what == "truncate":
                self.truncate()
            elif what == "stall":
                self.stall()
                await asyncio.sleep(rng.uniform(0, every_s))
                self.resume()
            else:
                self.refuse()
                await asyncio.sleep(rng.uniform(0, every_s))
                self.refusing = False

    # Forwarding

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(reader, writer)
        self._open.add(connection)
        self.refused += self.refusing
        try:
            if not self.refusing and await connection.extend(*self._target):
                self.connections += 1
                await connection.forward(self)
        finally:
            connection.end(True)
            self._open.discard(connection)

    async def pause(self) -> None:
        """Wait as long as a chunk has to."""
        if self.delay_s:
            await asyncio.sleep(self._rng.uniform(0, self.delay_s))
        await self._flowing.wait()

    def part(self, chunk: bytes) -> bytes:
        """Return what is forwarded of a chunk that is truncated."""
        return chunk[: self._rng.randrange(len(chunk))]


class _Connection:
    """Two sockets, and a task for each direction."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._ends = [(reader, writer)]
        self._directions: list[asyncio.Task[None]] = []
        self.truncating = False
        self.ended = False

    async def extend(self, host: str, port: int) -> bool:
        """Connect to the target; return whether that could be done."""
        try:
            self._ends.append(await asyncio.open_connection(host, port, limit=CHUNK_BYTES))
        except OSError:
            return False
        return not self.ended

    async def forward(self, proxy: Proxy) -> None:
        (reader, writer), (target_reader, target_writer) = self._ends
        ways = (reader, target_writer), (target_reader, writer)
        self._directions = [asyncio.ensure_future(self._forward(proxy, *way)) for way in ways]
        try:
            await asyncio.wait(self._directions, return_when=asyncio.FIRST_COMPLETED)
            if any(not each.done() for each in self._directions):  # one direction was closed by whoever sends in it
                await asyncio.wait(self._directions, timeout=0.1)
        finally:
            for each in self._directions:
                each.cancel()
            await asyncio.wait(self._directions)

    async def _forward(self, proxy: Proxy, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while chunk := await source.read(CHUNK_BYTES):
                await proxy.pause()
                proxy.pings += b"\x04PING" in chunk
                if self.truncating:
                    sink.write(proxy.part(chunk))
                    await sink.drain()
                    self.end(False)
                    return
                sink.write(chunk)
                await sink.drain()
            sink.write_eof()
        except OSError:
            self.end(True)

    def half_close(self, direction: int) -> None:
        if self._directions and not self.ended:
            self.ended = True
            self._directions[direction].cancel()
            self._ends[1 - direction][1].write_eof()

    def end(self, reset: bool) -> None:
        self.ended = True
        for _, writer in self._ends:
            sock = writer.get_extra_info("socket")
            if reset and sock is not None and not writer.transport.is_closing():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                writer.transport.abort()
            else:
                writer.close()
        for each in self._directions:
            each.cancel()


@asynccontextmanager
async def proxied(handle: Handle, rng: random.Random | None = None) -> AsyncIterator[tuple[Handle, Proxy, Proxy]]:
    """Give a handle to the block whose remote readers go through proxies: one for data, one for control."""
    assert handle.remote is not None
    async with Proxy(handle.remote.data, rng) as data, Proxy(handle.remote.control, rng) as control:
        remote = msgspec.structs.replace(handle.remote, data=data.endpoint, control=control.endpoint)
        yield msgspec.structs.replace(handle, remote=remote), data, control


@asynccontextmanager
async def through_proxies(
    rng: random.Random | None = None, **arguments: Any
) -> AsyncIterator[tuple[MessageQueue, MessageQueue, Proxy, Proxy]]:
    """Give a ready writer to the block, its remote reader, and the proxies between them, for data and for control."""
    async with wide_writer(0, 1, **arguments) as writer:
        async with proxied(writer.export_handle(), rng) as (handle, data, control):
            async with MessageQueue.create_from_handle(handle, 0) as reader:
                await asyncio.gather(writer.wait_until_ready(20), reader.wait_until_ready(20))
                yield writer, reader, data, control
