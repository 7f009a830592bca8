from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from codec_helpers import encode
from hypothesis import given
from hypothesis import strategies as st

from aioshm.codec import Codec, MsgpackCodec, get_codec
from aioshm.codec.buffers import OUT_OF_BAND_BYTES
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


class Colour(enum.Enum):
    RED = "red"


class Part(msgspec.Struct, tag=True, array_like=True, frozen=True):
    data: bytes
    more: bytearray = bytearray()


class Other(msgspec.Struct, tag=True, array_like=True):
    number: int


class Request(msgspec.Struct, rename="camel", omit_defaults=True):
    request_id: int
    payload: bytes = b""
    parts: list[Part | Other] = []
    by_name: dict[str, bytes] = {}
    when: datetime.datetime | None = None
    price: decimal.Decimal | None = None
    key: uuid.UUID | None = None
    colour: Colour = Colour.RED
    numbers: set[int] = set()
    counts: dict[int, str] = {}


@dataclasses.dataclass(frozen=True)
class Frozen:
    data: bytes
    number: int = 1


@dataclasses.dataclass(slots=True)
class Slotted:
    data: bytes
    inner: Frozen | None = None


FULL = Request(
    1,
    b"small",
    [Part(b"p", bytearray(b"q")), Other(3)],
    {"a": b"1"},
    datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
    decimal.Decimal("1.10"),
    uuid.UUID(int=7),
    Colour.RED,
    {1, 2},
    {5: "five"},
)


class TestPlain:
    @given(plain)
    def test_round_trip(self, obj: Any) -> None:
        main, buffers = encode(MSGPACK, obj)
        assert MSGPACK.decode(memoryview(main), buffers) == obj
        if not buffers:
            assert MSGPACK.loads(bytes(main)) == obj

    def test_small_messages_are_one_piece(self) -> None:
        assert MSGPACK.encode({"a": 1}) == msgspec.msgpack.encode({"a": 1})
        assert type(MSGPACK.encode(list(range(100_000)))) is bytes

    def test_loads_is_the_decoder_itself(self) -> None:
        for codec in (MsgpackCodec(), MsgpackCodec(type=Request)):
            assert type(codec.loads.__self__) is msgspec.msgpack.Decoder

    def test_sequences_and_subclasses(self, carry: Carry) -> None:
        point = collections.namedtuple("point", "x y")
        source = [(1, 2), {3}, point(4, 5), collections.OrderedDict(a=1), collections.defaultdict(list, b=[2])]
        assert carry(MSGPACK, source) == [[1, 2], [3], [4, 5], {"a": 1}, {"b": [2]}]

    def test_extensions_of_others(self, carry: Carry) -> None:
        assert carry(MSGPACK, msgspec.msgpack.Ext(7, b"theirs")) == msgspec.msgpack.Ext(7, b"theirs")


class TestTyped:
    def test_round_trip(self, carry: Carry) -> None:
        assert carry(MsgpackCodec(type=Request), FULL) == FULL
        assert MsgpackCodec(type=Request).loads(bytes(encode(MSGPACK, FULL)[0])) == FULL

    def test_with_large_parts(self, carry: Carry) -> None:
        large = msgspec.structs.replace(
            FULL,
            payload=b"p" * LARGE,
            parts=[Part(b"q" * LARGE, bytearray(b"r" * LARGE)), Other(1), Part(b"small")],
            by_name={"a": b"1", "b": b"2" * LARGE},
        )
        codec = MsgpackCodec(type=Request)
        main, buffers = encode(codec, large)
        assert (len(buffers), len(main) < 300) == (4, True)
        result = carry(codec, large)
        assert result == large
        assert type(result.parts[0].more) is bytearray
        assert large.payload == b"p" * LARGE  # the source has not been touched

    def test_dataclasses(self, carry: Carry) -> None:
        for size in (3, LARGE):
            source = Slotted(b"x" * size, Frozen(b"y" * size, 2))
            assert carry(MsgpackCodec(type=Slotted), source) == source
            assert carry(MSGPACK, source) == dataclasses.asdict(source)

    @pytest.mark.parametrize("size", [3, LARGE])
    def test_the_wrong_type_is_refused(self, size: int) -> None:
        codec = MsgpackCodec(type=Request)
        for source in ({"requestId": "text", "payload": b"x" * size}, [b"x" * size]):
            main, buffers = encode(codec, source)
            with pytest.raises(CodecError, match=r"cannot decode a msgpack message: ValidationError: Expected"):
                codec.decode(memoryview(main), buffers)

    def test_hooks(self, carry: Carry) -> None:
        codec = MsgpackCodec(
            type=dict[str, complex],
            enc_hook=lambda obj: [obj.real, obj.imag],
            dec_hook=lambda _, parts: complex(*parts),
        )
        assert carry(codec, {"a": 1 + 2j}) == {"a": 1 + 2j}

    def test_a_hook_may_encode_with_the_same_codec(self, carry: Carry) -> None:
        codec = MsgpackCodec(enc_hook=lambda obj: len(codec.encode([b"i" * LARGE, obj.real])[1]))
        for _ in range(2):
            assert carry(codec, [b"a" * LARGE, 3 + 0j, b"b" * LARGE]) == [b"a" * LARGE, 1, b"b" * LARGE]


class TestLargeBytes:
    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    @pytest.mark.parametrize("wrap", [lambda data: data, lambda data: {"k": [1, [data, 2]]}], ids=["bare", "deep"])
    def test_beside_the_stream(self, carry: Carry, kind: Any, wrap: Callable[[Any], Any]) -> None:
        for _ in range(2):  # the second message is searched before it is encoded
            main, [buffer] = encode(MSGPACK, wrap(kind(b"x" * OUT_OF_BAND_BYTES)))
            assert len(main) < 100
            assert (buffer.format, buffer.ndim, buffer.nbytes) == ("B", 1, OUT_OF_BAND_BYTES)
        assert encode(MSGPACK, wrap(kind(b"x" * (OUT_OF_BAND_BYTES - 1))))[1] == ()
        result = carry(MSGPACK, wrap(kind(b"x" * LARGE)))
        assert result == msgspec.to_builtins(wrap(b"x" * LARGE), builtin_types=(bytes,))

    def test_not_copied(self) -> None:
        source = bytearray(LARGE)
        _, [buffer] = encode(MSGPACK, [source])
        assert buffer.obj is source

    def test_streams_that_change(self) -> None:
        codec = MsgpackCodec()
        for source in [b"x" * LARGE, *range(20), "text" * LARGE, b"y" * LARGE, [b"z" * LARGE] * 3, list(range(10_000))]:
            main, buffers = encode(codec, source)
            assert codec.decode(memoryview(main), buffers) == source
            assert bool(buffers) == ("b'" in str(source)[:3])

    def test_formatted_memory_arrives_as_its_bytes(self, carry: Carry) -> None:
        numbers = memoryview(bytes(LARGE)).cast("d")
        assert carry(MSGPACK, numbers) == bytes(LARGE)

    def test_more_than_a_body_takes_stay_in_the_stream(self, carry: Carry, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aioshm.codec.msgpack.MAX_BUFFERS", 2)
        sources = [bytes([number]) * LARGE for number in range(4)]
        assert len(encode(MSGPACK, sources)[1]) == 2
        assert carry(MSGPACK, sources) == sources
