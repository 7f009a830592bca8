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


RAW: dict[str, Callable[[], bytes]] = {
    "scan": bytes,  # connects and leaves
    "garbage": lambda: random.randbytes(random.choice([1, 10, 64, 1000, 100_000])),
    "http": lambda: b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",  # takes the port for a web server
    "half_greeting": lambda: NULL_GREETING[: random.randrange(1, 64)],
    "null_handshake": lambda: (  # offers no security
        NULL_GREETING + b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB\x08Identity\x00\x00\x00\x00"
    ),
    "oversized": lambda: NULL_GREETING + b"\x02" + (2**62).to_bytes(8, "big") + b"x" * 1000,  # a frame of exabytes
    "curve_garbage": lambda: CURVE_GREETING + b"\x04\xc8\x05HELLO" + random.randbytes(194),  # pretends to have keys
    "silent": bytes,  # stays connected for a while
}
"""Ways to be a stranger, and the bytes that each sends."""

kept: list[socket.socket] = []


def speak(way: str, sock: socket.socket) -> None:
    """Send the bytes of a way, and leave unless it is silent."""
    sock.sendall(RAW[way]())
    if way == "silent":
        kept.append(sock)
    else:
        sock.close()


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


def annoy(way: str, port: tuple[str, int], attack: Attack) -> None:
    """Do it again and again."""
    while attack.goes_on(way):
        try:
            speak(way, socket.create_connection(port, timeout=1))
            attack.made[way] += 1
        except OSError:
            attack.made["refused"] += 1
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
    made = dict.fromkeys([*RAW, "zeromq", "received", "refused"], 0)
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
