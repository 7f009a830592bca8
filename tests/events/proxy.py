"""What stands between a publisher and its subscribers."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zmq

from .helpers import ANY


class LossyProxy:
    """Stands between a publisher's PUB and a subscriber and drops a share of the messages."""

    def __init__(self, upstream: str, share: float, seed: int = 1) -> None:
        context = zmq.Context.instance()
        self._front: zmq.Socket[bytes] = context.socket(zmq.SUB)
        self._back: zmq.Socket[bytes] = context.socket(zmq.PUB)
        for end in (self._front, self._back):
            end.set_hwm(0)
            end.linger = 0
        self._front.subscribe(b"")
        self._front.connect(upstream)
        self.upstream = upstream
        self._back.bind(ANY)
        self.endpoint = self._back.last_endpoint.rstrip(b"\0").decode()
        self._random = random.Random(seed)
        self._share = share
        self.dropped = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            while self._front.poll(0):
                frames = self._front.recv_multipart()
                if self._random.random() < self._share:
                    self.dropped += 1
                else:
                    self._back.send_multipart(frames)
            await asyncio.sleep(0.001)

    def follow(self, upstream: str) -> None:
        self._front.disconnect(self.upstream)
        self._front.connect(upstream)
        self.upstream = upstream

    def bind_again(self) -> bool:
        """Bind where it was; False as long as ZeroMQ has not given the address back."""
        try:
            self._back.bind(self.endpoint)
        except zmq.ZMQError:
            return False
        return True

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._front.close()
        self._back.close()


@contextmanager
def kept_endpoint() -> Iterator[str]:
    """Give an endpoint that the kernel gives to nobody else within the block.

    A socket that does not listen keeps the port; another one may bind it and listen, as both say SO_REUSEADDR.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{keeper.getsockname()[1]}"


class TcpProxy:
    """Forwards TCP connections to an endpoint, and can cut them."""

    def __init__(self, upstream: str) -> None:
        self._upstream = int(upstream.rpartition(":")[2])
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """End all connections; peers may connect again."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_forward(reader, up_writer))
                group.create_task(_forward(up_reader, writer))
        except asyncio.CancelledError:  # the connection is cut
            return
        finally:
            for each in (writer, up_writer):
                each.close()


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()
