"""A subscriber that costs its machine as little as can be: it counts the bytes of what a PUB socket sends.

So a benchmark of publishers measures publishers, as if the subscriber ran on another host, and still knows that every
byte arrived. https://rfc.zeromq.org/spec/23/
"""

from __future__ import annotations

import socket
import sys

from benchmarks.attackers import NULL_GREETING
from benchmarks.framework.crew import Boss

TIMEOUT_S = 60.0
_READY_BODY = b"\x05READY\x0bSocket-Type" + (3).to_bytes(4, "big") + b"SUB"
_READY = bytes([4, len(_READY_BODY)]) + _READY_BODY
_SUBSCRIBE_TO_ALL = b"\x04\x0a\x09SUBSCRIBE"
_SHORT = 255  # the longest frame whose length is a single byte
_AT_A_TIME = 1 << 20


def message_bytes(*frames: int) -> int:
    """Return how many bytes a message with frames of these sizes is on the wire."""
    return sum(size + (2 if size <= _SHORT else 9) for size in frames)


def count_bytes(boss: Boss) -> None:
    """Role: an order that is an address is subscribed to; one that is a number is answered once so many bytes came."""
    peer: socket.socket | None = None
    while (order := boss.plain_order()) is not None:
        if isinstance(order, str):
            if peer is not None:
                peer.close()
            peer = _subscribe(order)
        else:
            assert peer is not None
            order -= _discard(peer, order)
        boss.reply(order)  # 0: so many and no more, as long as nothing else was sent


def _discard(peer: socket.socket, nbytes: int) -> int:
    """Wait for so many bytes, or the end; return how many came. Linux need not copy them."""
    room = bytearray(_AT_A_TIME)
    flags = socket.MSG_TRUNC if sys.platform == "linux" else 0  # tcp(7)
    came = 0
    while came < nbytes and (count := peer.recv_into(room, 0, flags)):
        came += count
    return came


def _subscribe(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    peer = socket.create_connection((host, int(port)), TIMEOUT_S)
    peer.sendall(NULL_GREETING + _READY)
    answer = b""
    while b"PUB" not in answer:  # it takes no subscription before its own READY is out
        chunk = peer.recv(4096)
        if not chunk:
            raise ConnectionError(f"{endpoint} hung up during the handshake")
        answer += chunk
    peer.sendall(_SUBSCRIBE_TO_ALL)
    peer.settimeout(None)  # with one, every read would be two system calls
    return peer
