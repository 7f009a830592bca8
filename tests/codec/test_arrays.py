from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from codec_helpers import encode
from hypothesis import given
from hypothesis import strategies as st

from aioshm.codec import Codec, get_codec
from aioshm.codec.base import OUT_OF_BAND_BYTES
from aioshm.errors import CodecError

Carry = Callable[[Codec, Any], Any]
PICKLE = get_codec("pickle")
MSGPACK = get_codec("msgpack")
SMALL, LARGE = 24, 4096  # elements
both_codecs: Any = pytest.mark.parametrize("codec", [PICKLE, MSGPACK], ids=["pickle", "msgpack"])


class Tagged(np.ndarray):
    """A subclass: its own reduction."""


def check_equal(result: Any, source: Any) -> None:
    assert type(result) is type(source)
    assert result.dtype == source.dtype
    assert result.shape == source.shape
    assert result.tobytes() == source.tobytes() or (result == source).all()
    if not source.dtype.hasobject:
        assert result.flags.writeable


DTYPES = [
    *("?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "g", "c8", "c16", ">f4", ">i8", "S5", "U3", "V6"),
    *("M8[ns]", "m8[us]", "M8[D]"),
]
STRUCTURED = [
    np.dtype([("a", "i4"), ("b", "f8")]),
    np.dtype([("a", "u1"), ("b", ">f8")], align=True),
    np.dtype([("when", "M8[s]"), ("inner", [("x", "f4", (2, 3)), ("name", "U4")])]),
    np.dtype([(("a title", "a"), "i4")]),
]


def filled(size: int, dtype: Any) -> np.ndarray[Any, Any]:
    dtype = np.dtype(dtype)
    return np.frombuffer((np.arange(size * dtype.itemsize) % 2).astype("u1").tobytes(), dtype).copy()


def check_both_ways(carry: Carry, codec: Codec, source: Any) -> None:
    """An array arrives equal as a message of its own, and inside of another object."""
    check_equal(carry(codec, source), source)
    check_equal(carry(codec, {"k": [source]})["k"][0], source)


@pytest.mark.parametrize("size", [SMALL, LARGE])
class TestValues:
    @both_codecs
    @pytest.mark.parametrize("dtype", DTYPES + STRUCTURED, ids=str)
    def test_dtypes(self, carry: Carry, codec: Codec, dtype: Any, size: int) -> None:
        source = filled(size, "u1").astype("i8").astype(dtype) if dtype in ("S5", "U3") else filled(size, dtype)
        if source.dtype.fields is None or codec is PICKLE:
            check_both_ways(carry, codec, source)
            return
        with pytest.raises(CodecError, match="arrays of dtype"):
            carry(codec, source)

    @both_codecs
    @pytest.mark.parametrize(
        "view",
        [
            lambda a: a.reshape(4, -1).T,
            lambda a: np.asfortranarray(a.reshape(2, 3, -1)),
            lambda a: a.reshape(2, 2, -1).transpose(1, 2, 0),
            lambda a: a[::2],
            lambda a: a[::-1],
            lambda a: a.reshape(4, -1)[:, 1:3],
            lambda a: a[3:],
            lambda a: np.broadcast_to(a, (3, a.size)),
        ],
        ids=["F", "F 3d", "permuted", "strided", "reversed", "columns", "tail", "broadcast"],
    )
    def test_layouts(self, carry: Carry, codec: Codec, view: Callable[[Any], Any], size: int) -> None:
        check_both_ways(carry, codec, view(np.arange(size * 6, dtype="f8")))
        check_both_ways(carry, codec, view(np.arange(size * 6).astype("M8[s]")))

    @both_codecs
    def test_read_only(self, carry: Carry, codec: Codec, size: int) -> None:
        for source in (np.arange(size), np.arange(size).astype("M8[s]"), np.asfortranarray(np.ones((2, size)))):
            source.flags.writeable = False
            check_both_ways(carry, codec, source)
        check_both_ways(carry, codec, np.frombuffer(bytes(size), "u1"))

    def test_objects(self, carry: Carry, size: int) -> None:
        source = np.array([{"a": 1}, None, "text", [1]] * size, dtype=object)
        result = carry(PICKLE, source)
        assert result.dtype == object
        assert result.tolist() == source.tolist()
        records = np.array([(1, "x")] * size, [("n", "i4"), ("o", object)])
        assert carry(PICKLE, records).tolist() == records.tolist()

    def test_strings_of_any_length(self, carry: Carry, size: int) -> None:
        string_type = getattr(np.dtypes, "StringDType", None)
        if string_type is None:
            pytest.skip("this NumPy has no StringDType")
        source = np.array(["short", "long" * 100] * size, dtype=string_type())
        assert carry(PICKLE, source).tolist() == source.tolist()

    def test_subclasses(self, carry: Carry, size: int) -> None:
        source = np.arange(size).view(Tagged)
        check_equal(carry(PICKLE, source), source)
        masked = np.ma.masked_less(np.arange(size), 5)
        result = carry(PICKLE, masked)
        assert type(result) is type(masked)
        assert result.tolist() == masked.tolist()


class TestShapes:
    @pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2), (1,), (1, 1, 1)])
    @pytest.mark.parametrize("dtype", ["f4", "M8[s]", ">i2", "O"])
    def test_empty_and_single(self, carry: Carry, shape: tuple[int, ...], dtype: str) -> None:
        source = np.zeros(shape, dtype)
        check_both_ways(carry, PICKLE, source)
        if dtype != "O":
            check_both_ways(carry, MSGPACK, source)

    @given(
        st.sampled_from(["i1", "f4", "c16", "M8[s]", ">u2"]),
        st.lists(st.integers(0, 9), max_size=4),
        st.randoms(use_true_random=False),
    )
    def test_any_shape_and_order(self, dtype: str, shape: list[int], random: Any) -> None:
        axes = list(range(len(shape)))
        random.shuffle(axes)
        steps = tuple(slice(None, None, random.choice((1, 2, -1))) for _ in shape)
        source = filled(int(np.prod(shape)), dtype).reshape(shape).transpose(axes)[steps]
        for codec in (PICKLE, MSGPACK):
            main, buffers = encode(codec, [np.asarray(source)])
            check_equal(codec.decode(memoryview(main), buffers)[0], np.asarray(source))


class TestHowTheyTravel:
    @pytest.mark.parametrize("source", [np.zeros(LARGE), np.zeros((64, 64)).T, np.zeros(LARGE, "M8[s]")])
    def test_contiguous_memory_is_not_copied(self, source: Any) -> None:
        _, [buffer] = encode(PICKLE, source)
        source.view("i8" if source.dtype.kind == "M" else source.dtype)[...] = 1
        assert any(buffer)

    def test_small_ones_inside_of_other_objects_are_in_the_stream(self) -> None:
        size = OUT_OF_BAND_BYTES // 8
        assert len(encode(PICKLE, [np.zeros(size)])[1]) == 1
        assert len(encode(PICKLE, [np.zeros(size - 1)])[1]) == 0
