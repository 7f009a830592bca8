"""Messages that are one array or one tensor: a head, and the elements in one buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from codec_helpers import encode
from hypothesis import given
from hypothesis import strategies as st

from aioshm.codec import Codec, get_codec
from aioshm.codec.array_heads import ARRAY_MARKER, is_array
from aioshm.errors import CodecError

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


class Tagged(np.ndarray[Any, Any]):
    """A subclass."""


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
    with pytest.raises(CodecError, match="Expected `int`"):
        codec.of_type(int).decode(main, buffers)


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
