"""Messages that are one array or one tensor: a head, and the elements in one buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from codec_helpers import encode
from hypothesis import given
from hypothesis import strategies as st

from aioshm.codec import Codec, get_codec
from aioshm.codec.array_heads import ARRAY_MARKER, is_array
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


CODECS = [get_codec("pickle"), get_codec("msgpack")]
NUMBERS = np.arange(24, dtype="f4")
PLAIN = [
    NUMBERS,
    NUMBERS.reshape(2, 3, 4),
    NUMBERS.reshape(4, 6).T,
    NUMBERS[::2],
    np.array(7.5),
    np.zeros((3, 0, 2), "i8"),
    NUMBERS.astype(">f4"),
    NUMBERS.astype("M8[s]"),
    np.array(["one", "three"]),
    np.zeros(3, "V6"),
]


@pytest.fixture(params=CODECS, ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest) -> Codec[Any]:
    own: Codec[Any] = request.param
    encode(own, np.zeros(1))  # NumPy is known from now on
    return own


@pytest.mark.parametrize("array", PLAIN, ids=lambda array: f"{array.dtype}-{array.shape}")
def test_message_of_one_array_is_a_head_and_its_elements(codec: Codec[Any], array: Any) -> None:
    main, buffers = encode(codec, array)
    assert is_array(main)
    assert [each.nbytes for each in buffers] == [array.nbytes]
    assert codec.decode(main, buffers).flags.fnc == array.flags.fnc
    writable = [memoryview(bytearray(each)) for each in buffers]
    assert not codec.view(memoryview(main), writable).flags.writeable  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "array",
    [
        np.array([None, 1], object),
        np.zeros(3, [("a", "i4")]),
        NUMBERS.view(Tagged),
        NUMBERS.astype(np.dtype("f4", metadata={"unit": "m"})),
    ],
    ids=["objects", "fields", "subclass", "metadata"],
)
def test_array_with_more_than_its_elements_is_pickled(array: Any) -> None:
    main, buffers = encode(CODECS[0], array)
    assert not is_array(main)
    result = CODECS[0].decode(main, buffers)
    assert (type(result), result.dtype.metadata) == (type(array), array.dtype.metadata)


def test_dtype_that_has_the_name_of_a_void_is_kept_or_refused() -> None:
    rational = pytest.importorskip("numpy._core._rational_tests").rational  # as are bfloat16 and others of ml_dtypes
    array = np.array([rational(1, 2)] * LARGE)
    assert PICKLE.decode(*encode(PICKLE, array)).dtype == array.dtype
    with pytest.raises(CodecError, match="arrays of dtype rational cannot be encoded"):
        encode(MSGPACK, array)


def test_tensor_with_gradient_or_attributes_is_pickled() -> None:
    named = torch.zeros(3)
    named.origin = "sender"
    for tensor in (torch.zeros(3, requires_grad=True), torch.nn.Parameter(torch.zeros(3)), named):
        main, buffers = encode(CODECS[0], tensor)
        assert not is_array(main)
        received = CODECS[0].decode(main, buffers)
        assert (received.requires_grad, received.__dict__) == (tensor.requires_grad, tensor.__dict__)


def test_typed_messages_are_checked() -> None:
    codec: Any = CODECS[1]
    encode(codec, np.zeros(1))
    main, buffers = encode(codec, NUMBERS)
    assert codec.of_type(np.ndarray).decode(main, buffers)[3] == 3
    for kind, name in ((int, "int"), (msgspec.defstruct("Step", [("ndim", int, 0)]), "object")):
        with pytest.raises(CodecError, match=f"Expected `{name}`"):
            codec.of_type(kind).decode(main, buffers)


@pytest.mark.parametrize(
    "buffers", [[], [bytes(8)], [bytes(96), b""], [bytes(97)]], ids=["none", "short", "two", "long"]
)
def test_buffers_of_another_size_are_refused(codec: Codec[Any], buffers: list[bytes]) -> None:
    main, _ = encode(codec, NUMBERS)
    with pytest.raises(CodecError):
        codec.decode(main, [memoryview(each) for each in buffers])


@given(garbage=st.binary(max_size=60), size=st.integers(0, 64))
def test_garbage_behind_the_marker_is_an_array_or_a_codec_error(garbage: bytes, size: int) -> None:
    for codec in CODECS:
        try:
            received = codec.decode(ARRAY_MARKER + garbage, [memoryview(bytes(size))])
        except CodecError:
            continue
        assert received.nbytes == size


def test_scalars_are_numbers_in_messagepack(carry: Callable[[Any, Any], Any]) -> None:
    source = [np.float32(1.5), np.int64(3), np.bool_(True), np.float64(0.5), np.uint64(2**64 - 1)]
    assert carry(CODECS[1], source) == [1.5, 3, True, 0.5, 2**64 - 1]
