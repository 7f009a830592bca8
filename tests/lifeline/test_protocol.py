"""What passes over a lifeline, and that nothing else than a greeting passes for one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aioshm.errors import HandleError
from aioshm.lifeline import protocol
from aioshm.lifeline.protocol import (
    MAX_GREETING_BYTES,
    Hello,
    Welcome,
    pack,
    take_frame,
    unpack_answer,
    unpack_hello,
)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Replace the check of the other tests: nothing is opened or started here."""


pack_text = msgspec.msgpack.encode

hellos = st.builds(
    Hello,
    version=st.integers(0, 2**31),
    queue_id=st.binary(max_size=32),
    token=st.binary(max_size=64),
    rank=st.integers(-(2**31), 2**31),
    pid=st.integers(0, 2**31),
)
welcomes = st.builds(
    Welcome,
    pid=st.integers(0, 2**31),
    secret=st.binary(max_size=64),
    segment=st.booleans(),
    bells=st.booleans(),
)

# Well-formed msgpack that a typed decoder may stumble over.
DEEP = b"\x82" + pack_text("type") + pack_text("hello") + pack_text("more") + b"\x91" * 3500 + b"\xc0"
DEEP_ANSWER = DEEP.replace(pack_text("hello"), pack_text("welcome"))
NO_TEXT = b"\x81" + pack_text("type") + b"\xa2\xff\xfe"
NO_TEXT_KEY = b"\x81\xa2\xff\xfe\xc0"
NO_TEXT_REASON = b"\x82" + pack_text("type") + pack_text("refusal") + pack_text("reason") + b"\xa2\xff\xfe"


class TestFrames:
    @given(st.lists(hellos, min_size=1, max_size=3), st.data())
    def test_arrive_in_any_pieces(self, greetings: list[Hello], data: st.DataObject) -> None:
        stream = b"".join(map(pack, greetings)) + protocol.WAKE
        received, found = bytearray(), []
        while stream:
            size = data.draw(st.integers(1, len(stream)))
            received += stream[:size]
            stream = stream[size:]
            while len(found) < len(greetings) and (body := take_frame(received)) is not None:
                found.append(unpack_hello(body))
        assert found == greetings
        assert received == protocol.WAKE, "what follows stays"

    @pytest.mark.parametrize("length", [MAX_GREETING_BYTES + 1, 2**31, 2**32 - 1])
    def test_of_impossible_lengths_are_refused_at_once(self, length: int) -> None:
        with pytest.raises(HandleError, match=f"at most {protocol.MAX_GREETING_BYTES} bytes, not {length}"):
            take_frame(bytearray(length.to_bytes(4, "big")))


class TestGarbage:
    @given(st.binary(max_size=500))
    @example(b"")
    @example(DEEP)
    @example(DEEP_ANSWER)
    @example(NO_TEXT)
    @example(NO_TEXT_KEY)
    @example(NO_TEXT_REASON)
    @example(b"\x80")
    @example(pack_text({"type": "welcome"}))
    def test_bytes(self, garbage: bytes) -> None:
        for unpack in (unpack_hello, unpack_answer):
            with pytest.raises(HandleError):
                unpack(garbage)

    def test_one_kind_of_greeting_is_not_the_other(self) -> None:
        hello = msgspec.msgpack.encode(Hello(1, b"", b"", 0, 0))
        welcome = msgspec.msgpack.encode(Welcome(1, b"", True, True))
        with pytest.raises(HandleError, match="undecodable answer"):
            unpack_answer(hello)
        with pytest.raises(HandleError, match="undecodable greeting"):
            unpack_hello(welcome)
