"""The keys of an encrypted ZeroMQ connection."""

from __future__ import annotations

from dataclasses import dataclass

import zmq

ADDED_BYTES = 64
"""More than ZeroMQ adds to a frame: 33 bytes with CURVE (https://rfc.zeromq.org/spec/26/), 10 to a subscription."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """Keys for an encrypted connection (ZeroMQ CURVE), each 40 characters of Z85.

    The end that binds is the server and needs only its own pair; the end that connects also needs the
    server's public key. Every peer that has that public key gets in.

    Attributes:
        public: This end's public key.
        secret: This end's secret key.
        server: The public key of the end that binds; None at that end.
    """

    public: bytes
    secret: bytes
    server: bytes | None = None

    @classmethod
    def generate(cls, server: bytes | None = None) -> CurveKeys:
        """Make a new pair, for an end that connects to ``server`` or, without it, for one that binds."""
        public, secret = zmq.curve_keypair()
        return cls(public=public, secret=secret, server=server)

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r}, secret=<hidden>, server={self.server!r})"


def limit_frames(socket: zmq.Socket[bytes], nbytes: int) -> None:
    """Let ZeroMQ hang up on peers that send a larger frame; it counts frames as they are encrypted."""
    socket.setsockopt(zmq.MAXMSGSIZE, nbytes + ADDED_BYTES)
