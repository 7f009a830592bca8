from __future__ import annotations

import array
import copyreg
import dataclasses
import decimal
import enum
import pickle
import weakref
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import pytest
from codec_helpers import Refuses, encode, plain
from hypothesis import given

from aioshm.codec import Codec, get_codec, pickle5
from aioshm.codec.base import HUGE_PAGE_BYTES, OUT_OF_BAND_BYTES
from aioshm.errors import CodecError

Carry = Callable[[Codec, Any], Any]
PICKLE = get_codec("pickle")
LARGE = 3 * OUT_OF_BAND_BYTES


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Request:
    name: str
    payload: Any = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


class Nested:
    """Encodes something of its own while it is being encoded."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __reduce__(self) -> Any:
        try:
            main, buffers = encode(PICKLE, self.inner)
        except CodecError:
            return str, ("refused",)
        return _decode_nested, (main, [bytes(buffer) for buffer in buffers])


def _decode_nested(main: bytes, buffers: list[bytes]) -> Any:
    return PICKLE.decode(memoryview(main), [memoryview(buffer) for buffer in buffers])


class TestRoundTrip:
    @given(plain)
    def test_plain_objects(self, obj: Any) -> None:
        main, buffers = encode(PICKLE, obj)
        assert type(main) is bytes
        assert buffers == ()
        assert PICKLE.decode(memoryview(main), buffers) == obj

    @pytest.mark.parametrize(
        "obj",
        [
            Request("a", Request("b", [1, 2]), {"k": (1, 2.5, None)}),
            Colour.RED,
            decimal.Decimal("1.10"),
            2**5000,
            "\ud800 lone surrogate",
            Request,
            array.array("i", [1, 2, 3]),
            pickle.PicklingError("an error"),
        ],
        ids=repr,
    )
    def test_other_objects(self, carry: Carry, obj: Any) -> None:
        result = carry(PICKLE, obj)
        assert type(result) is type(obj)
        assert result == obj or repr(result) == repr(obj)

    @pytest.mark.parametrize("size", [0, 4095, 65_536, 300_000])
    def test_bytes_stay_bytes(self, carry: Carry, size: int) -> None:
        data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        text = "ä" * size
        result = carry(PICKLE, [data, bytearray(data), text, 1, data])
        assert [type(part) for part in result] == [bytes, bytearray, str, int, bytes]
        assert result == [data, data, text, 1, data]
        assert result[0] is result[4]

    def test_copyreg_is_asked_also_when_registered_later(self, carry: Carry, monkeypatch: pytest.MonkeyPatch) -> None:
        import numpy  # noqa: F401  # so that there is a table of our own

        table = copyreg.dispatch_table
        carry(PICKLE, Request("before"))
        monkeypatch.setitem(table, Request, lambda request: (Request, ("registered",)))
        assert carry(PICKLE, Request("after")) == Request("registered")


class TestBuffers:
    @pytest.mark.parametrize("size", [OUT_OF_BAND_BYTES, 1_000_000, HUGE_PAGE_BYTES])
    def test_large_ones_travel_beside_it(self, size: int) -> None:
        source = bytearray(b"x" * size)
        main, buffers = encode(PICKLE, [PickleBuffer(source), "and more"])
        assert len(main) < 100
        [buffer] = buffers
        assert (buffer.format, buffer.ndim, buffer.c_contiguous, buffer.nbytes) == ("B", 1, True, size)
        assert buffer.obj is source  # not a copy

    @pytest.mark.parametrize("size", [10, LARGE, HUGE_PAGE_BYTES])
    @pytest.mark.parametrize("kind", [bytes, bytearray])
    def test_memory_is_writable_where_the_sources_was(
        self, carry: Carry, size: int, kind: Callable[[bytes], Any]
    ) -> None:
        result = carry(PICKLE, PickleBuffer(kind(b"x" * size)))
        with memoryview(result) as view:
            assert view.readonly is (kind is bytes)
            assert view == b"x" * size

    def test_any_contiguous_memory(self, carry: Carry) -> None:
        numbers = array.array("d", range(5000))
        assert carry(PICKLE, PickleBuffer(numbers)) == numbers.tobytes()
        assert carry(PICKLE, PickleBuffer(memoryview(numbers).cast("B").cast("d", (50, 100)))) == numbers.tobytes()

    def test_memory_with_gaps_is_refused(self) -> None:
        with pytest.raises(CodecError, match=r"PickleBuffer.*contiguous"):
            encode(PICKLE, PickleBuffer(memoryview(bytearray(LARGE))[::2]))

    def test_more_than_a_body_takes_stay_in_the_stream(self, monkeypatch: pytest.MonkeyPatch, carry: Carry) -> None:
        monkeypatch.setattr(pickle5, "MAX_BUFFERS", 3)
        sources = [bytearray([number]) * LARGE for number in range(5)]
        assert len(encode(PICKLE, [PickleBuffer(source) for source in sources])[1]) == 3
        assert carry(PICKLE, [PickleBuffer(source) for source in sources]) == sources

    def test_nothing_is_kept_after_the_message(self) -> None:
        class Memory(bytearray):
            pass

        codec = get_codec("pickle")
        memory = Memory(LARGE)
        gone = weakref.ref(memory)
        main, buffers = encode(codec, [PickleBuffer(memory)])
        del memory
        assert gone() is not None  # the buffers keep it alive until they have been copied
        del main, buffers
        assert gone() is None


class TestReentrancy:
    def test_encoding_while_encoding(self, carry: Carry) -> None:
        inner = {"numbers": list(range(100)), "memory": PickleBuffer(bytearray(b"i" * LARGE))}
        outer = ["before", PickleBuffer(bytearray(b"o" * LARGE)), Nested(inner), "before", b"y" * 100_000]
        result = carry(PICKLE, outer)
        assert result[0] is result[3]
        assert result[1] == b"o" * LARGE
        assert result[2] == {"numbers": list(range(100)), "memory": b"i" * LARGE}
        assert result[4] == outer[4]

    def test_failing_while_encoding(self, carry: Carry) -> None:
        assert carry(PICKLE, ["before", Nested(Refuses()), "after"]) == ["before", "refused", "after"]
        assert carry(PICKLE, "next") == "next"
