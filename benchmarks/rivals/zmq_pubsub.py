"""``zmq.asyncio`` PUB/SUB over ipc with pickle, no high-water mark, large messages without copies.

From `OUT_OF_BAND_BYTES` on, pickle's buffers travel as frames of their own and are sent and received with
``copy=False``: the quickest way there is, although what arrives is then read-only, and the sender must not touch its
buffers again.
"""

from __future__ import annotations

import pickle
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Any

import zmq

from benchmarks.payloads import KIB, Payload
from benchmarks.rivals.base import Line, Rival
from benchmarks.rivals.zmq_ends import SocketReceiver, SocketSender, socket_line

OUT_OF_BAND_BYTES = 64 * KIB


class PickleSender(SocketSender):
    """Publishes what ``pickle.dumps`` returns."""

    async def send(self, message: Any) -> None:
        await self.socket.send(pickle.dumps(message, 5))


class FramesSender(SocketSender):
    """Publishes the pickle and, beside it, the buffers."""

    async def send(self, message: Any) -> None:
        buffers: list[pickle.PickleBuffer] = []
        main = pickle.dumps(message, 5, buffer_callback=buffers.append)
        await self.socket.send_multipart([main, *buffers], copy=False)


class PickleReceiver(SocketReceiver):
    """Receives a pickle."""

    async def receive(self) -> Any:
        return pickle.loads(await self.socket.recv())


class FramesReceiver(SocketReceiver):
    """Receives a pickle and its buffers."""

    async def receive(self) -> Any:
        main, *buffers = await self.socket.recv_multipart(copy=False)
        return pickle.loads(main.buffer, buffers=[frame.buffer for frame in buffers])


def _line(payload: Payload, n_reader: int) -> Line:
    name = f"aioshm-benchmark-{secrets.token_hex(8)}"
    # A Linux abstract socket leaves no file behind, however the processes end.
    address = f"ipc://@{name}" if sys.platform == "linux" else f"ipc://{Path(tempfile.gettempdir()) / name}"
    if payload.nbytes >= OUT_OF_BAND_BYTES:
        return socket_line(zmq.PUB, address, n_reader, FramesSender, FramesReceiver)
    return socket_line(zmq.PUB, address, n_reader, PickleSender, PickleReceiver)


RIVAL = Rival("zmq.asyncio", _line, blocks=False)
