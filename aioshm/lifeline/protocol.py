"""What passes over a lifeline: one greeting each way, then single bytes. No socket, no loop.

    reader                                writer
      Hello (version, queue, token, rank)   ->
                                            <-   Welcome (+ descriptors), or Refusal and end of file
      PROVEN: the ring is mapped            ->
                                            <-   GO: every reader is attached and proven; not if Welcome said it
                                            <-   OVERFLOW (+ a descriptor), again and again
                                            <-   SUBSCRIBE: messages begin to come over ZeroMQ, too
      WAKE (where there is no eventfd)     <->   WAKE
                                            <-   EVICTED: the queue goes on without this reader, which hangs up
      PING: does your event loop run?       ->
                                            <-   PONG, by that loop
      BYE: leaving on purpose              <->   BYE

Either end ignores signals that it does not know: they are a newer release's.

A greeting is a 4-byte big-endian length and that many bytes of msgpack.
"""

from __future__ import annotations

import hmac
import struct

import msgspec

from aioshm.errors import HandleError, NoPlaceVacant, PeerClosed

MAX_GREETING_BYTES = 4096

PROVEN, GO, OVERFLOW, SUBSCRIBE, WAKE, BYE = b"P", b"G", b"A", b"S", b"W", b"B"
PING, PONG = b"?", b"!"
EVICTED = b"E"

ANY_RANK = -1
"""In a greeting: whichever place the writer gives."""

_LENGTH = struct.Struct("!I")


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """What a reader says first.

    Attributes:
        version: Of the segment's layout, as the reader's code has it.
        queue_id: Which queue it wants.
        token: The secret from the handle.
        rank: Which of the handle's local reader ranks it is; `ANY_RANK`: one that no reader has.
        pid: Its process id as it sees itself.
        slow: What becomes of it when it is too slow, as `Options.slow_reader`.
        history: How many of the latest messages it wants first.
    """

    version: int
    queue_id: bytes
    token: bytes
    rank: int
    pid: int
    slow: str = "block"
    history: int = 0


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """What an admitted reader is told.

    Attributes:
        pid: The writer's process id as it sees itself.
        secret: What the header of a message that did not fit its chunk repeats, so that no damaged one is taken for it,
            and what to subscribe to where such messages come over ZeroMQ.
        segment: Whether the first descriptor that comes along is the segment.
        bells: Whether the next two are eventfds: the reader's and the writer's.
        slow: Whether it heeds `Hello.slow`.
        rank: Which reader this is.
        first: The number of its first message.
        going: Whether all readers that are waited for are there: there will be no `GO`.
    """

    pid: int
    secret: bytes
    segment: bool
    bells: bool
    slow: bool = False
    rank: int = ANY_RANK
    first: int = 0
    going: bool = False


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why a reader is not admitted.

    Attributes:
        reason: In words.
        closed: Whether that is because the writer has closed the queue.
        full: Whether it is because all places have readers.
    """

    reason: str
    closed: bool = False
    full: bool = False


CLOSED = Refusal("the writer has closed the queue", closed=True)


_encode = msgspec.msgpack.encode
_hello_decoder = msgspec.msgpack.Decoder(Hello)
_answer_decoder: msgspec.msgpack.Decoder[Welcome | Refusal] = msgspec.msgpack.Decoder(Welcome | Refusal)

# What msgspec raises on arbitrary bytes: besides its own errors, those of UTF-8 and of nesting without end.
_GARBAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def pack(greeting: Hello | Welcome | Refusal) -> bytes:
    """Return a greeting as it goes over the wire."""
    body = _encode(greeting)
    return _LENGTH.pack(len(body)) + body


def take_frame(received: bytearray) -> bytes | None:
    """Remove one greeting's body from the front of what was received; None while it is incomplete.

    Raises:
        HandleError: It claims to be longer than any greeting is.
    """
    if len(received) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(received)
    if length > MAX_GREETING_BYTES:
        raise HandleError(f"a greeting of {length} bytes is no greeting")
    end = _LENGTH.size + length
    if len(received) < end:
        return None
    body = bytes(received[_LENGTH.size : end])
    del received[:end]
    return body


def unpack_hello(body: bytes) -> Hello:
    """Decode a reader's greeting.

    Raises:
        HandleError: It is none.
    """
    try:
        return _hello_decoder.decode(body)
    except _GARBAGE as error:
        raise HandleError(f"undecodable greeting: {error}") from None


def unpack_answer(body: bytes) -> Welcome:
    """Decode the writer's answer.

    Raises:
        PeerClosed: The writer has closed the queue.
        NoPlaceVacant: All places have readers.
        HandleError: It is another refusal, or no answer at all.
    """
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
    """Admit a greeting or say why not.

    Raises:
        HandleError: Another version or queue, or not the handle's token.
    """
    if hello.version != version:
        raise HandleError(f"the reader has layout version {hello.version}, the writer {version}")
    if hello.queue_id != queue_id:
        raise HandleError("the handle is of another queue")
    if not hmac.compare_digest(hello.token, token):
        raise HandleError("the handle's token is wrong")
