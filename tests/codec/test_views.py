"""Decoding in place, for leases: views of the given memory, and their writability."""

from __future__ import annotations

import gc
import mmap
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from codec_helpers import encode
from tensor_helpers import check_equal

from aioshm.codec import Codec, MsgpackCodec, get_codec
from aioshm.codec.frames import body_bytes, split_body, write_body
from aioshm.errors import CodecError

LARGE = 10_000
CODECS = ["pickle", "msgpack"]


class Typed(msgspec.Struct):
    array: np.ndarray
    tensor: torch.Tensor
    view: memoryview
    data: bytes


def lent(codec: Codec, obj: Any) -> tuple[Any, bytearray]:
    main, buffers = encode(codec, obj)
    slot = bytearray(body_bytes(len(main), [len(buffer) for buffer in buffers]))
    write_body(memoryview(slot), [main], buffers)
    main_view, views = split_body(memoryview(slot), len(buffers), len(main))
    return codec.view(main_view, views), slot


def read_only(source: Any) -> Any:
    source.flags.writeable = False
    return source


@pytest.mark.parametrize("name", CODECS)
class TestInPlace:
    @pytest.mark.parametrize(
        "source",
        [np.ones(LARGE), read_only(np.asfortranarray(np.ones((100, 100)))), np.ones(LARGE, "M8[s]")],
        ids=["C", "F read-only", "dates"],
    )
    def test_arrays(self, name: str, source: Any) -> None:
        for obj in (source, [source]):
            result, slot = lent(get_codec(name), obj)
            if isinstance(obj, list):
                [result] = result
            assert (result.dtype, result.shape, result.flags.writeable) == (source.dtype, source.shape, False)
            assert result.flags.f_contiguous == source.flags.f_contiguous
            assert result.tobytes() == source.tobytes()
            slot[-source.nbytes :] = bytes(source.nbytes)
            assert not any(result.tobytes())

    @pytest.mark.parametrize(
        "source",
        [
            torch.ones(LARGE).bfloat16(),
            torch.nn.Parameter(torch.ones(LARGE), False),
            torch.ones(LARGE).to(torch.float8_e4m3fn).view(4, -1).T,
        ],
        ids=["carried", "parameter", "F"],
    )
    def test_tensors(self, name: str, source: Any) -> None:
        [result], slot = lent(get_codec(name), [source])
        check_equal(result, source)
        slot[-source.nbytes :] = bytes(source.nbytes)
        assert not result.float().any()

    def test_small_ones_are_copies(self, name: str) -> None:
        result, slot = lent(get_codec(name), [np.ones(3), torch.ones(3), b"small", "text"])
        slot[:] = bytes(len(slot))
        assert (result[0].sum(), result[1].sum(), *result[2:]) == (3, 3, b"small", "text")

    def test_cycles_are_collected(self, name: str) -> None:
        for source in (np.ones(LARGE), read_only(np.ones(LARGE)), torch.ones(LARGE)):
            cycle: list[Any] = [lent(get_codec(name), [source]), encode(get_codec(name), [source])]
            cycle.append(cycle)
            del cycle
        gc.collect()  # a crash here is a memoryview that exports to another


def test_typed() -> None:
    codec = MsgpackCodec(type=Typed)
    source = Typed(np.ones(LARGE), torch.ones(LARGE), memoryview(b"v" * LARGE), b"d" * LARGE)
    result, slot = lent(codec, source)
    slot[:] = bytes(len(slot))
    assert (result.array.sum(), result.tensor.sum(), bytes(result.view)) == (0, 0, bytes(LARGE))
    assert result.data == source.data, "bytes are copies"


def test_raw() -> None:
    memory = mmap.mmap(-1, 4096)
    view = get_codec("raw").view(memoryview(memory)[:5], ())
    assert (type(view), view.readonly) == (memoryview, True)
    memory[:5] = b"hello"
    assert view == b"hello"
    with pytest.raises(CodecError, match="buffers with a raw message"):
        get_codec("raw").view(view, [view])
