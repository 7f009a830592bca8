"""What comes over a lifeline: greetings, then signals."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from aioshm.errors import HandleError, NoPlaceVacant, PeerClosed
from aioshm.lifeline import protocol
from aioshm.lifeline.dialer import Lifeline
from aioshm.lifeline.protocol import Hello, Refusal, Welcome
from tools.fuzz.target import Target, attempt

_HELLO = Hello(7, b"q" * 16, b"t" * 32, 0, 4711)


def greetings(data: bytes) -> None:
    """Take greetings off what has come, as both ends do."""
    received = bytearray(data)
    for _ in range(len(data) // 4 + 1):
        body = attempt(HandleError, protocol.take_frame, received)
        if body is None:
            break
        assert len(body) <= protocol.MAX_GREETING_BYTES
        _greeting(body)
    _greeting(data)


def _greeting(body: bytes) -> None:
    hello = attempt(HandleError, protocol.unpack_hello, body)
    if hello is not None:
        attempt(HandleError, protocol.check_hello, hello, _HELLO.version, _HELLO.queue_id, _HELLO.token)
        frame = bytearray(protocol.pack(hello))
        if len(frame) <= protocol.MAX_GREETING_BYTES:
            again = protocol.take_frame(frame)
            assert again is not None
            assert protocol.unpack_hello(again) == hello
            assert not frame
    attempt((HandleError, PeerClosed, NoPlaceVacant), protocol.unpack_answer, body)


_KNOWN = {
    protocol.GO: "on_go",
    protocol.EVICTED: "on_evicted",
    protocol.WAKE: "on_wake",
}


def signals(data: bytes) -> None:
    """Take signals as a reader does; those that are not known do nothing."""
    told: set[str] = set()
    lifeline: Any = object.__new__(Lifeline)  # its sockets have no part in this
    owner = lifeline._owner = SimpleNamespace()
    lifeline._asked, lifeline._asking, lifeline.said_goodbye = 1.0, True, False
    for name in _KNOWN.values():
        setattr(owner, name, lambda name=name: told.add(name))
    for at in range(0, len(data), 3):
        lifeline._signals(data[at : at + 3])
    assert told == {name for signal, name in _KNOWN.items() if signal in data}
    assert lifeline.said_goodbye == (protocol.BYE in data)
    assert lifeline._asking == (protocol.PONG not in data)
    # Not a socket any more that its __del__ could close.
    lifeline._sock = None


def _greeting_seeds() -> Iterator[bytes]:
    for greeting in (
        _HELLO,
        Hello(1, b"", b"", -1, 2**31, "evict", 9),
        Welcome(1, b"s" * 16, segment=True, bells=True, rank=2, first=1 << 40, going=True),
        Refusal("no place", full=True),
        protocol.CLOSED,
    ):
        yield protocol.pack(greeting)
        yield protocol.pack(greeting)[4:]
    yield protocol.pack(_HELLO) * 2
    yield b"\x00\x00\x10\x01"
    yield b"\x82\xa4type\xa5hello\xa4more" + b"\x91" * 900


TARGETS = (
    Target("greetings", greetings, _greeting_seeds),
    Target("signals", signals, lambda: (b"PGASWBE?!", b"", b"zzzz\xff\x00")),
)
