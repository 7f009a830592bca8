"""Plain sockets, as any other consumer or publisher of events has them."""

from __future__ import annotations

import zmq
from support import until

from aioshm.events import BlockStored, CurveKeys, EventBatch
from aioshm.events.protocol import wire
from aioshm.events.protocol.encoding import BatchEncoder
from aioshm.zeromq.endpoint import attach, open_socket


class Raw:
    """A plain ZeroMQ socket, as any other consumer has it; waits without blocking the loop."""

    def __init__(self, kind: int, endpoint: str, hwm: int = 1000, *, bind: bool = False) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        self.socket.set_hwm(hwm)
        self.socket.linger = 0
        if kind == zmq.SUB:
            self.socket.subscribe(b"")
        if bind:
            self.socket.bind(endpoint)
        else:
            self.socket.connect(endpoint)

    @property
    def endpoint(self) -> str:
        return self.socket.last_endpoint.rstrip(b"\0").decode()

    async def send_and_be_disconnected(self, *frames: bytes) -> None:
        monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self.socket.send_multipart(frames)
            await until(lambda: bool(monitor.poll(0)), "the end of the connection")
        finally:
            self.socket.disable_monitor()
            monitor.close()

    async def receive(self) -> list[bytes]:
        await until(lambda: bool(self.socket.poll(0)))
        return self.socket.recv_multipart()

    async def ask(self, *frames: bytes) -> list[list[bytes]]:
        self.socket.send_multipart(frames)
        answer = [await self.receive()]
        while answer[-1][-2:] != [wire.END_SEQ, b""]:
            answer.append(await self.receive())
        return answer


class RawPublisher:
    """A publisher's process, reduced to its socket; sends any number."""

    def __init__(self, endpoint: str, *, bind: bool, topic: bytes = b"", curve: CurveKeys | None = None) -> None:
        self._topic = topic
        self._encoder = BatchEncoder()
        self._socket = open_socket(zmq.Context.instance(), zmq.XPUB, endpoint, bind=bind, hwm=1000, curve=curve)
        attach(self._socket, endpoint, bind=bind)

    async def subscribed(self) -> RawPublisher:
        """Wait for a subscription: later batches arrive."""
        await until(lambda: bool(self._socket.poll(0)), "a subscription")
        self._socket.recv()
        return self

    def frames(self, seq: int, block: int) -> list[bytes]:
        """Return batch ``seq``, which stores one block."""
        stored = BlockStored([block], None, [1], 1, None, "GPU")
        payload = self._encoder.encode(EventBatch(float(seq), [stored]), 0)
        return [self._topic, wire.pack_seq(seq), bytes(payload)]

    def send(self, seq: int, block: int) -> None:
        self._socket.send_multipart(self.frames(seq, block))

    def close(self) -> None:
        """Be gone, as after a crash."""
        self._socket.close(linger=1000)
