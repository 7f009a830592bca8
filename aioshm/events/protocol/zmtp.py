"""What a SUB end says and hears on one connection, without I/O: ZMTP 3.0 with the NULL mechanism, and limits.

https://rfc.zeromq.org/spec/23/
"""

from __future__ import annotations

from collections import deque

# A live message has three; others may be garbage, which is counted, but not without an end.
MAX_PARTS = 8
# Commands, topics and numbers beside a payload.
_SLACK_BYTES = 1 << 12

_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING_BYTES = 64
_SIGNATURE_END = 10
_MECHANISM = slice(12, 32)
_NULL = b"NULL".ljust(20, b"\0")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + _NULL + bytes(32)


class Refused(Exception):
    """What the peer sends is not what it may."""


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return a frame on the wire."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | _LONG]) + len(body).to_bytes(8, "big") + body


READY = frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB", _COMMAND)


class SubPeer:
    """One connection from a PUB or XPUB socket.

    Args:
        topic: What is subscribed to.
        max_bytes: The largest frame that is taken.

    Attributes:
        ready: Whether the handshake is over.
        messages: What has come, whole.
    """

    def __init__(self, topic: bytes, max_bytes: int) -> None:
        self.ready: bool = False
        self.messages: deque[list[bytes]] = deque()
        self._topic = topic
        self._max_bytes = max_bytes
        self._greeted = False
        self._buffer = bytearray()
        self._needed = _GREETING_BYTES
        self._parts: list[bytes] = []
        self._parts_bytes = 0

    @property
    def held(self) -> int:
        """Bytes of a message that is not whole yet."""
        return len(self._buffer) + self._parts_bytes

    def feed(self, data: bytes) -> bytes:
        """Take what came, in any pieces; return what is to be sent.

        Raises:
            Refused: It is no ZMTP 3, not from a publisher, or above the limits.
        """
        buffer = self._buffer
        buffer += data
        answer = b""
        at = 0
        if not self._greeted:
            self._check_greeting()
            if len(buffer) < _GREETING_BYTES:
                return b""
            self._greeted = True
            self._needed = 0
            at, answer = _GREETING_BYTES, READY
        size = len(buffer)
        while size - at >= 2 and size >= at + self._needed:
            flags = buffer[at]
            head = 9 if flags & _LONG else 2
            if size - at < head:
                break
            length = int.from_bytes(buffer[at + 1 : at + 9], "big") if flags & _LONG else buffer[at + 1]
            if length > (self._max_bytes if self.ready and not flags & _COMMAND else _SLACK_BYTES):
                raise Refused(f"a frame of {length} bytes")
            if size - at < head + length:
                self._needed = head + length
                break
            self._needed = 0
            answer += self._take(flags, bytes(buffer[at + head : at + head + length]))
            at += head + length
        del buffer[:at]
        return answer

    def _check_greeting(self) -> None:
        buffer = self._buffer
        if (buffer and buffer[0] != 0xFF) or (len(buffer) >= _SIGNATURE_END and not buffer[9] & 1):
            raise Refused("not ZeroMQ")
        if len(buffer) > _SIGNATURE_END and buffer[_SIGNATURE_END] < 3:
            raise Refused("a version of ZeroMQ before 4.0")
        if len(buffer) >= _GREETING_BYTES and buffer[_MECHANISM] != _NULL:
            raise Refused("a mechanism other than NULL")

    def _take(self, flags: int, body: bytes) -> bytes:
        if flags & _COMMAND:
            return self._obey(body)
        if not self.ready:
            raise Refused("a message before the handshake was over")
        self._parts.append(body)
        self._parts_bytes += len(body)
        if len(self._parts) > MAX_PARTS or self._parts_bytes > self._max_bytes + _SLACK_BYTES:
            raise Refused(f"a message of {len(self._parts)} parts and {self._parts_bytes} bytes, and more to come")
        if not flags & _MORE:
            self.messages.append(self._parts)
            self._parts, self._parts_bytes = [], 0
        return b""

    def _obey(self, body: bytes) -> bytes:
        name = body[1 : 1 + body[0]] if body else b""
        if name == b"PING":
            return frame(b"\x04PONG" + body[7:], _COMMAND)
        if name == b"ERROR":
            raise Refused("it says that it refuses this end")
        if not self.ready:
            kind = body.partition(b"\x0bSocket-Type")[2]
            if name != b"READY" or (
                kind[4:] not in (b"PUB", b"XPUB") and not kind[4:].startswith((b"PUB\x08", b"XPUB\x08"))
            ):
                raise Refused("not a publisher")
            self.ready = True
            return frame(b"\x01" + self._topic)
        return b""
