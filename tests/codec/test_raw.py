from __future__ import annotations

import array
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from codec_helpers import encode
from hypothesis import given
from hypothesis import strategies as st

from aioshm.codec import Codec, get_codec
from aioshm.errors import CodecError

Carry = Callable[[Codec, Any], Any]
RAW = get_codec("raw")


@pytest.mark.parametrize(
    "obj",
    [
        b"",
        b"bytes",
        bytearray(b"bytearray"),
        bytearray(),
        pytest.param(memoryview(b"a view")[2:], id="memoryview"),
        pytest.param(memoryview(b"abcdef").cast("B", (2, 3)), id="memoryview of two dimensions"),
        array.array("d", [1.0, 2.0]),
        np.arange(12).reshape(3, 4),
        np.array(7),
        np.zeros((0, 3)),
        np.zeros(3, [("a", "u1"), ("b", ">i4")]),
        np.arange(3, dtype=">u2"),
    ],
    ids=repr,
)
def test_arrives_as_bytes(carry: Carry, obj: Any) -> None:
    result = carry(RAW, obj)
    assert type(result) is bytes
    assert result == memoryview(obj).tobytes()


@given(st.binary())
def test_any_bytes_both_ways(data: bytes) -> None:
    main, buffers = encode(RAW, bytearray(data))
    assert RAW.decode(memoryview(main), buffers) == data
    assert RAW.decode(memoryview(data), ()) == data


def test_encoding_does_not_copy() -> None:
    source = bytearray(b"before" * 1000)
    main, buffers = encode(RAW, source)
    assert isinstance(main, memoryview)
    assert (main.format, main.ndim, buffers) == ("B", 1, ())
    source[:] = b"after!" * 1000
    assert bytes(main) == b"after!" * 1000
    data = b"same"
    assert encode(RAW, data)[0] is data


def test_a_small_message_is_copied_at_once() -> None:
    source = bytearray(b"before")
    encoded = RAW.encode(source)
    source[:] = b"after!"
    assert encoded == b"before"


def test_the_view_keeps_its_memory_alive() -> None:
    with mmap.mmap(-1, 4096) as memory:
        main, _ = encode(RAW, memory)
        assert len(main) == 4096
        del main
    main, _ = encode(RAW, np.full(100_000, 7, np.uint8))
    np.zeros(100_000, np.uint8)
    assert bytes(main) == b"\7" * 100_000


@pytest.mark.parametrize(
    ("obj", "name"), [("text", "str"), (1, "int"), (None, "NoneType"), ([1], "list"), (torch.zeros(3), "Tensor")]
)
def test_objects_that_are_not_bytes_like_are_refused(obj: Any, name: str) -> None:
    with pytest.raises(CodecError, match=f"bytes-like objects, not {name}$"):
        encode(RAW, obj)


@pytest.mark.parametrize(
    ("obj", "name"),
    [(memoryview(b"abcdef")[::2], "memoryview"), (np.zeros((3, 4)).T, "ndarray"), (np.zeros((3, 4))[:, 1], "ndarray")],
)
def test_memory_that_is_not_contiguous_is_refused(obj: Any, name: str) -> None:
    with pytest.raises(CodecError, match=f"a {name} that is not C-contiguous"):
        encode(RAW, obj)


def test_objects_without_memory_are_refused() -> None:
    released = memoryview(b"gone")
    released.release()
    with pytest.raises(CodecError, match="memoryview"):
        encode(RAW, released)
    with pytest.raises(CodecError, match="ndarray"):
        encode(RAW, np.zeros(3, "M8[s]"))


def test_message_with_buffers_is_refused() -> None:
    with pytest.raises(CodecError, match="1 buffers with a raw message"):
        RAW.decode(memoryview(b"main"), [memoryview(b"buffer")])
