"""The protocol of a lifeline: one greeting each way, then single bytes. No socket, no loop.

    reader                                writer
      Hello (version, queue, token, rank)   ->
                                            <-   Welcome (+ descriptors), or Refusal and end of file
      PROVEN: the ring is mapped            ->
                                            <-   GO: every reader is attached and proven; not if Welcome said it
                                            <-   OVERFLOW (+ a descriptor), again and again
      WAKE (where there is no eventfd)     <->   WAKE
                                            <-   EVICTED: the queue goes on without this reader, which hangs up
      PING: does your event loop run?       ->
                                            <-   PONG, by that loop
      BYE: leaving on purpose              <->   BYE

Either end ignores unknown signals, which newer releases may send.

A greeting is a 4-byte big-endian length and that many bytes of msgpack.
"""

from __future__ import annotations

import hmac
import struct

import msgspec

from aioshm.errors import HandleError, NoPlaceVacant, PeerClosed

MAX_GREETING_BYTES = 4096

PROVEN = b"P"
GO = b"G"
OVERFLOW = b"A"
WAKE = b"W"
BYE = b"B"
PING = b"?"
PONG = b"!"
EVICTED = b"E"

ANY_RANK = -1
"""In a greeting: any vacant rank."""

_LENGTH = struct.Struct("!I")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A reader's greeting."""

    # The version of the segment's layout.
    version: int
    queue_id: bytes
    token: bytes
    # `ANY_RANK`: any vacant rank.
    rank: int
    pid: int
    slow: str = "block"
    # Number of the latest messages to receive first.
    history: int = 0


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The writer's answer to an admitted reader."""

    pid: int
    # Overflow messages repeat it in their header; also the topic of overflow over ZeroMQ.
    secret: bytes
    # Whether the first descriptor is the segment.
    segment: bool
    # Whether the next two descriptors are eventfds: the reader's and the writer's.
    bells: bool
    rank: int = ANY_RANK
    # The number of the reader's first message.
    first: int = 0
    # Whether all expected readers are attached; no `GO` follows then.
    going: bool = False


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The writer's reason for not admitting a reader."""

    reason: str
    closed: bool = False
    full: bool = False


CLOSED = Refusal("the writer has closed the queue", closed=True)


_encode = msgspec.msgpack.encode
_hello_decoder = msgspec.msgpack.Decoder(Hello)
_answer_decoder: msgspec.msgpack.Decoder[Welcome | Refusal] = msgspec.msgpack.Decoder(Welcome | Refusal)

# Errors that msgspec raises on arbitrary bytes.
_GARBAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def pack(greeting: Hello | Welcome | Refusal) -> bytes:
    """Encode a greeting for the wire."""
    body = _encode(greeting)
    return _LENGTH.pack(len(body)) + body


def take_frame(received: bytearray) -> bytes | None:
    """Remove the first greeting from the received bytes, and return its body; None while incomplete."""
    if len(received) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(received)
    if length > MAX_GREETING_BYTES:
        raise HandleError(f"a greeting has at most {MAX_GREETING_BYTES} bytes, not {length}")
    end = _LENGTH.size + length
    if len(received) < end:
        return None
    body = bytes(received[_LENGTH.size : end])
    del received[:end]
    return body


def unpack_hello(body: bytes) -> Hello:
    """Decode a reader's greeting."""
    try:
        return _hello_decoder.decode(body)
    except _GARBAGE as error:
        raise HandleError(f"undecodable greeting: {error}") from None


def unpack_answer(body: bytes) -> Welcome:
    """Decode the writer's answer; raise an error for a refusal."""
    try:
        answer = _answer_decoder.decode(body)
    except _GARBAGE as error:
        raise HandleError(f"undecodable answer from the writer: {error}") from None
    if isinstance(answer, Refusal):
        if answer.closed:
            raise PeerClosed(answer.reason)
        if answer.full:
            raise NoPlaceVacant(answer.reason)
        raise HandleError(f"the writer refused this reader: {answer.reason}")
    return answer


def check_hello(hello: Hello, version: int, queue_id: bytes, token: bytes) -> None:
    """Raise `HandleError` for a greeting of another version or queue, or with a wrong token."""
    if hello.version != version:
        raise HandleError(f"the reader has layout version {hello.version}, the writer {version}")
    if hello.queue_id != queue_id:
        raise HandleError("the handle belongs to another queue")
    if not hmac.compare_digest(hello.token, token):
        raise HandleError("the handle's token is wrong")
