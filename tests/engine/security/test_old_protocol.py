"""Strangers whose ZMTP is older than 3.0: ZeroMQ lets them in, and knows nothing of them but what they send."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from typing import Any

import pytest
from served_engine import Engine, ask, collected, served

from aioshm.engine import EngineZmqAddresses

LOOPBACK = "tcp://127.0.0.1:0"


def connect(address: str, greeting: bytes, *messages: bytes) -> socket.socket:
    """Connect, and send messages of one frame."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    peer = socket.create_connection((host, int(port)))
    peer.sendall(greeting)
    peer.settimeout(20)
    peer.recv(10)  # ZeroMQ has let the peer in
    for message in messages:
        peer.sendall(message)
    return peer


@pytest.mark.usefixtures("runtime_dir")
async def test_old_peers_are_ignored_and_block_no_engine() -> None:
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    addresses = EngineZmqAddresses([LOOPBACK], [LOOPBACK])
    zmtp_2 = b"\xff" + bytes(8) + b"\x7f\x01"
    async with served(Engine(), addresses=addresses, secure=False) as serving:
        with ExitStack() as stack:
            for number in range(10):
                body = b"\x00\x04" + number.to_bytes(4, "big")  # ZMTP 2.0: flags, length, frame
                stack.enter_context(connect(addresses.inputs[0], zmtp_2 + b"\x05\0\0", body, body))  # DEALER
                stack.enter_context(connect(addresses.outputs[0], zmtp_2 + b"\x08\0\0", body, body))  # PUSH
                stack.enter_context(connect(addresses.outputs[0], b"\x01\x00", b"\x05\x00" + bytes(4)))  # ZMTP 1.0
                assert len(await collected(serving.client.submit(ask(f"r{number}", 3)))) == 3
    assert not wrong
