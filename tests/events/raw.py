"""A plain socket, as any other consumer of events has it."""

from __future__ import annotations

import zmq
from support import until

from aioshm.events.protocol import wire


class Raw:
    """A plain ZeroMQ socket, as any other consumer has it; waits without blocking the loop."""

    def __init__(self, kind: int, endpoint: str, hwm: int = 1000) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self.socket.set_hwm(hwm)
        self.socket.linger = 0
        if kind == zmq.SUB:
            self.socket.subscribe(b"")
        self.socket.connect(endpoint)

    async def receive(self) -> list[bytes]:
        await until(lambda: bool(self.socket.poll(0)))
        return self.socket.recv_multipart()

    async def ask(self, *frames: bytes) -> list[list[bytes]]:
        self.socket.send_multipart(frames)
        answer = [await self.receive()]
        while answer[-1][-2:] != [wire.END_SEQ, b""]:
            answer.append(await self.receive())
        return answer
