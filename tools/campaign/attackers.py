"""Strangers at a queue's ports, in every way: ``python -m tools.campaign.attackers SECONDS AT_LEAST HOST:PORT...``.

Each way opens and leaves so many connections a second, without waiting for an answer for long; where the machine is too
busy for more than ``AT_LEAST`` of each kind, it takes longer. Says at the end how many it made of each kind. For the
machine that it runs on, at the lowest priority: it plays others.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import zmq

PER_SECOND = 40
PATIENCE_S = 30.0

# ZMTP 3.1 (RFC 37): signature, version, mechanism, as-server, filler.
_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01"
NULL_GREETING = _GREETING + b"NULL".ljust(20, b"\0") + bytes(32)
CURVE_GREETING = _GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)


def scan(sock: socket.socket) -> None:
    """Connect and leave."""


def garbage(sock: socket.socket) -> None:
    """Send noise."""
    sock.sendall(random.randbytes(random.choice([1, 10, 64, 1000, 100_000])))


def http(sock: socket.socket) -> None:
    """Take it for a web server."""
    sock.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")


def half_greeting(sock: socket.socket) -> None:
    """Begin properly and go away."""
    sock.sendall(NULL_GREETING[: random.randrange(1, 64)])


def null_handshake(sock: socket.socket) -> None:
    """Offer no security."""
    sock.sendall(NULL_GREETING + b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB\x08Identity\x00\x00\x00\x00")


def oversized(sock: socket.socket) -> None:
    """Announce a frame of many exabytes."""
    sock.sendall(NULL_GREETING + b"\x02" + (2**62).to_bytes(8, "big") + b"x" * 1000)


def curve_garbage(sock: socket.socket) -> None:
    """Pretend to have keys."""
    sock.sendall(CURVE_GREETING + b"\x04\xc8\x05HELLO" + random.randbytes(194))


def silent(sock: socket.socket) -> None:
    """Connect and say nothing for a while."""
    kept.append(sock)


kept: list[socket.socket] = []
RAW = (scan, garbage, http, half_greeting, null_handshake, oversized, curve_garbage, silent)


@dataclass
class Attack:
    """How long to go on, and what has been done so far."""

    ends: float
    at_least: int
    made: dict[str, int]

    def goes_on(self, way: str) -> bool:
        """Return whether it is not yet time to end, or too little has been done in this way, on a busy machine."""
        now = time.monotonic()
        return now < self.ends or (self.made[way] <= self.at_least and now < self.ends + PATIENCE_S)


def annoy(way: Callable[[socket.socket], None], port: tuple[str, int], attack: Attack) -> None:
    """Do it again and again."""
    made = attack.made
    while attack.goes_on(way.__name__):
        try:
            sock = socket.create_connection(port, timeout=1)
            way(sock)
            if way is not silent:
                sock.close()
            made[way.__name__] += 1
        except OSError:
            made["refused"] += 1
        time.sleep(1 / PER_SECOND)


def with_zeromq(port: tuple[str, int], attack: Attack) -> None:
    """Be a true ZeroMQ peer of each kind, without keys or with wrong ones; say whether anything was received."""
    address = f"tcp://{port[0]}:{port[1]}"
    context = zmq.Context()
    made = attack.made
    while attack.goes_on("zeromq"):
        sockets = []
        for kind in (zmq.SUB, zmq.DEALER):
            for keys in (False, True):
                sock = context.socket(kind)
                sock.linger = 0
                if kind == zmq.SUB:
                    sock.subscribe(b"")
                if keys:
                    sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
                    sock.curve_serverkey = zmq.curve_keypair()[0]
                sock.connect(address)
                if kind == zmq.DEALER:
                    with suppress(zmq.Again):  # it may have been turned away already, which leaves nobody to send to
                        sock.send_multipart([b"", os.urandom(200)], zmq.NOBLOCK)
                        sock.send(os.urandom(200), zmq.NOBLOCK)
                sockets.append(sock)
                made["zeromq"] += 1
        time.sleep(0.1)
        for sock in sockets:
            if sock.type == zmq.SUB:
                made["received"] += bool(sock.poll(0))
            sock.close()
    context.term()


def main() -> None:
    """Annoy until the time is over."""
    os.nice(19)
    seconds, at_least, *ports = sys.argv[1:]
    print("annoying", *ports, flush=True)
    made = dict.fromkeys([*(way.__name__ for way in RAW), "zeromq", "received", "refused"], 0)
    attack = Attack(time.monotonic() + float(seconds), int(at_least), made)
    threads = []
    for text in ports:
        host, _, port = text.rpartition(":")
        where = host.strip("[]"), int(port)
        threads += [threading.Thread(target=annoy, args=(way, where, attack)) for way in RAW]
        threads.append(threading.Thread(target=with_zeromq, args=(where, attack)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(made, flush=True)


if __name__ == "__main__":
    main()
