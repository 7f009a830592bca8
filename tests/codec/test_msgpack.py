from __future__ import annotations

import collections
import datetime
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from codec_helpers import encode
from hypothesis import given
from hypothesis import strategies as st

from aioshm.codec import Codec, MsgpackCodec, get_codec
from aioshm.codec.base import OUT_OF_BAND_BYTES
from aioshm.codec.msgpack import count_values
from aioshm.errors import CodecError

Carry = Callable[[Codec, Any], Any]
MSGPACK = get_codec("msgpack")
LARGE = 3 * OUT_OF_BAND_BYTES

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.binary(min_size=1, max_size=3).map(lambda data: data * OUT_OF_BAND_BYTES),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(-(2**63), 2**64 - 1), inner),
    max_leaves=20,
)


class Part(msgspec.Struct, tag=True, array_like=True, frozen=True):
    data: bytes
    more: bytearray = bytearray()


class Other(msgspec.Struct, tag=True, array_like=True):
    number: int


class Request(msgspec.Struct, rename="camel"):
    request_id: int
    payload: bytes
    parts: list[Part | Other]
    by_name: dict[str, bytes]
    when: datetime.datetime


class TestPlain:
    @given(plain)
    def test_round_trip(self, obj: Any) -> None:
        main, buffers = encode(MSGPACK, obj)
        assert MSGPACK.decode(memoryview(main), buffers) == obj
        if not buffers:
            assert MSGPACK.loads(bytes(main)) == obj

    def test_sequences_and_subclasses(self, carry: Carry) -> None:
        point = collections.namedtuple("point", "x y")
        source = [(1, 2), {3}, point(4, 5), collections.OrderedDict(a=1), collections.defaultdict(list, b=[2])]
        assert carry(MSGPACK, source) == [[1, 2], [3], [4, 5], {"a": 1}, {"b": [2]}]


class TestTyped:
    def test_with_large_parts(self, carry: Carry) -> None:
        large = Request(
            1,
            b"p" * LARGE,
            [Part(b"q" * LARGE, bytearray(b"r" * LARGE)), Other(1), Part(b"small")],
            {"a": b"1", "b": b"2" * LARGE},
            datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
        )
        result = carry(MsgpackCodec(type=Request), large)
        assert result == large
        assert type(result.parts[0].more) is bytearray

    @pytest.mark.parametrize("size", [3, LARGE])
    def test_the_wrong_type_is_refused(self, size: int) -> None:
        codec = MsgpackCodec(type=Request)
        for source in ({"requestId": "text", "payload": b"x" * size}, [b"x" * size]):
            main, buffers = encode(codec, source)
            with pytest.raises(CodecError, match=r"cannot decode a msgpack message: ValidationError: Expected"):
                codec.decode(memoryview(main), buffers)

    def test_a_hook_may_encode_with_the_same_codec(self, carry: Carry) -> None:
        codec = MsgpackCodec(enc_hook=lambda obj: len(codec.encode([np.ones(LARGE), obj.real])[1]))
        for _ in range(2):
            first, number, second = carry(codec, [np.zeros(LARGE), 3 + 0j, np.ones(LARGE)])
            assert (first.sum(), number, second.sum()) == (0, 1, LARGE)


# Counting of values


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + count(item) for item in value.values())
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


@given(plain)
def test_count_equals_that_of_the_decoded_values(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    assert count_values(data, 1 << 20) == count(value)
    assert count_values(memoryview(data), count(value)) == count(value)


@pytest.mark.parametrize("size", [0, 1, 2, 4, 8, 15, 16, 255, 256, 65_535, 65_536])
def test_lengths_of_every_width_are_stepped_over(size: int) -> None:
    for value in ("x" * size, b"x" * size, msgspec.msgpack.Ext(1, b"x" * size)):
        assert count_values(msgspec.msgpack.encode([value, 1]), 10) == 3
    for values in ([1] * size, dict.fromkeys(range(size), 1)):
        assert count_values(msgspec.msgpack.encode(values), 1 << 20) == count(values)
