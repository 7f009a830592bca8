"""What stands between a publisher and its subscribers."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import suppress
from pathlib import Path

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


def free_endpoint() -> str:
    """Return an endpoint at a port that nobody has, and that the kernel gives to nobody who asks for any."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(first // 2, first)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"tcp://127.0.0.1:{port}"
