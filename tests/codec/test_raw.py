from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from codec_helpers import encode

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


def test_encoding_does_not_copy() -> None:
    source = bytearray(b"before" * 1000)
    main, buffers = encode(RAW, source)
    assert isinstance(main, memoryview)
    assert (main.format, main.ndim, buffers) == ("B", 1, ())
    source[:] = b"after!" * 1000
    assert bytes(main) == b"after!" * 1000
    data = b"same"
    assert encode(RAW, data)[0] is data


RELEASED = memoryview(b"gone")
RELEASED.release()


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        ("text", "bytes-like objects, not str$"),
        (None, "bytes-like objects, not NoneType$"),
        (torch.zeros(3), "bytes-like objects, not Tensor$"),
        (np.zeros(3, "M8[s]"), "bytes-like objects, not ndarray$"),
        (RELEASED, "bytes-like objects, not memoryview$"),
        (memoryview(b"abcdef")[::2], "a memoryview that is not C-contiguous"),
        (np.zeros((3, 4)).T, "a ndarray that is not C-contiguous"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_objects_without_contiguous_bytes_are_refused(obj: Any, text: str) -> None:
    with pytest.raises(CodecError, match=text):
        encode(RAW, obj)


def test_message_with_buffers_is_refused() -> None:
    with pytest.raises(CodecError, match="1 buffers with a raw message"):
        RAW.decode(memoryview(b"main"), [memoryview(b"buffer")])
