"""Proxies between a publisher and its subscribers."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from .helpers import ANY


class LossyProxy:
    """Stands between a publisher's PUB and a subscriber, and drops a share of the messages."""

    def __init__(self, upstream: str, share: float) -> None:
        self._front = _socket(zmq.SUB)
        self._front.subscribe(b"")
        self._front.connect(upstream)
        self._back: zmq.Socket[bytes] | None = _socket(zmq.PUB)
        self._back.bind(ANY)
        self.endpoint = self._back.last_endpoint.rstrip(b"\0").decode()
        self._random = random.Random(1)
        self._share = share
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            while self._front.poll(0):
                frames = self._front.recv_multipart()
                if self._back is not None and self._random.random() >= self._share:
                    self._back.send_multipart(frames)
            await asyncio.sleep(0.001)

    def cut(self) -> None:
        """End all connections; `bind_again` accepts new ones."""
        assert self._back is not None
        self._back.close()
        self._back = None

    def bind_again(self) -> bool:
        """Bind the old endpoint; False as long as ZeroMQ has not released the address."""
        back = _socket(zmq.PUB)
        try:
            back.bind(self.endpoint)
        except zmq.ZMQError:
            back.close()
            return False
        self._back = back
        return True

    async def __aenter__(self) -> LossyProxy:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._front.close()
        if self._back is not None:
            self._back.close()


def _socket(kind: int) -> zmq.Socket[bytes]:
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    made.set_hwm(0)
    made.linger = 0
    return made


@contextmanager
def kept_endpoint() -> Iterator[str]:
    """Yield an endpoint that the kernel assigns to no further socket within the block.

    A socket that does not listen keeps the port; another one may bind it and listen, as both say SO_REUSEADDR.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{keeper.getsockname()[1]}"
