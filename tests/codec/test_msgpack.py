from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import gc
import mmap
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
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


INLINE = b"\xff\xff\xff\xff"


class Item(msgspec.Struct):
    callback: Any


@dataclasses.dataclass
class Batch:
    requests: list[Any]


class Typed(msgspec.Struct):
    array: np.ndarray
    tensor: torch.Tensor
    data: bytes


class Subclass(torch.Tensor):
    pass


def deep(depth: int) -> list[Any]:
    result: list[Any] = []
    for _ in range(depth):
        result = [result]
    return result


def ext(code: int, data: bytes) -> bytes:
    return msgspec.msgpack.encode([msgspec.msgpack.Ext(code, data)])


def array_ext(head: Any, memory: bytes = b"", index: bytes = INLINE) -> bytes:
    packed = msgspec.msgpack.encode(head)
    return ext(102, index + len(packed).to_bytes(2, "little") + packed + memory)


class TestEncodeErrors:
    @pytest.mark.parametrize(
        ("obj", "text"),
        [
            (print, r"builtin_function_or_method: objects of type builtin_function_or_method are not supported"),
            ({"requests": [1, 2, 3, Item(print)]}, r"dict: objects of type builtin_function_or_method are not"),
            (Batch([{"a b": (1j,)}]), r"Batch: objects of type complex are not supported"),
            ([2**64], r"list: .*2\*\*64"),
            ({"a": np.array([None])}, r"dict: arrays of dtype object cannot be encoded"),
            ([np.zeros(3, [("a", "f4")])], r"list: arrays of dtype .*'a'"),
            ([torch.zeros(3).as_subclass(Subclass)], r"list: objects of type Subclass"),
            ([torch.zeros(3).to_sparse()], r"list: tensors of torch.float32, torch.sparse_coo on cpu"),
            ([torch.zeros(3, device="meta")], r"list: .*meta"),
            (["\ud800"], r"list: .*surrogates"),
            (memoryview(b"x" * LARGE)[::2], r"memoryview: .*contiguous"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_names_the_type(self, obj: Any, text: str) -> None:
        codec = MsgpackCodec()
        with pytest.raises(CodecError, match=f"^cannot encode {text}") as caught:
            codec.encode(obj)
        assert caught.value.__cause__ is not None
        assert codec.encode([1]) == b"\x91\x01"

    def test_circles_and_depth(self) -> None:
        loop: dict[str, Any] = {"a": [1]}
        loop["a"].append({"b": loop})
        with pytest.raises(CodecError, match=r"dict: .*recursion"):
            MSGPACK.encode(loop)
        source = deep(20_000)
        with pytest.raises(CodecError, match=r"list: .*recursion"):
            MSGPACK.encode(source)
        while source:  # one by one: freeing them all at once would recurse too
            source = source[0]


class TestDamaged:
    @pytest.mark.parametrize(
        "head",
        [
            (0, "O", (1,), "C"),
            (0, [["a", "|O8"]], (1,), "C"),
            (0, "no such", (1,), "C"),
            (0, [["a", "<f4"], ["a", "<f4"]], (1,), "C"),
            (0, "<f4", (2**40,), "C"),
            (0, "<f4", (-1,), "C"),  # NumPy would infer a length of -1
            (0, "<f4", (2**63,), "C"),
            (0, "<f4", (1,) * 100, "C"),
            (0, "<f4", "shape", "C"),
            (0, "<M8[fortnight]", (1,), "C"),
            (0, "|V999999999", (1,), "C"),
            (1, "float99", (1,), "C"),
            (1, "float32", (2**40,), "C"),
            (1, "int64", (0,), "C", True),  # no gradient of whole numbers
            (1, "float32", (1,), "C", False, False, "no such device"),
            (2, "<f4", (1,), "C"),
            (0, "<f4", (1,), "A"),
            {},
        ],
        ids=repr,
    )
    def test_head_of_no_array_is_refused_without_memory_for_it(self, head: Any) -> None:
        tracemalloc.start()
        try:
            with pytest.raises(CodecError, match="cannot decode a msgpack message: "):
                MSGPACK.decode(array_ext(head, bytes(4)), ())
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize(
        "main",
        [
            *(b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 9999),
            *(
                b"\xc9\xff\xff\xff\xff\x66",
                ext(102, b""),
                ext(102, INLINE + b"\xff\xff"),
                ext(102, INLINE),
                ext(102, b"\1\0\0\0\0\0"),
            ),
            *(b"\x01trailing", b"\xa1\xff", b"\x81\x80\x01"),
        ],
        ids=lambda main: repr(main[:10]),
    )
    def test_only_codec_error(self, main: bytes) -> None:
        with pytest.raises(CodecError, match="cannot decode a msgpack message: "):
            MSGPACK.decode(memoryview(main), ())

    def test_buffers(self) -> None:
        main, buffers = encode(MSGPACK, [np.ones(LARGE), np.zeros(LARGE)])
        one = memoryview(b"one more")
        head = encode(MSGPACK, [np.zeros(LARGE)])[0][1:]
        for damaged, given_buffers, text in (
            (main, buffers[:1], "buffer 1 of 1"),
            (main, [*buffers, one], "more buffers than it uses"),
            (b"\xc0", [one], "more buffers than it uses"),
            (main, [*buffers[:1], buffers[1][:100]], "too small"),
            (b"\x92" + 2 * head, buffers[:1], "buffer 0 twice"),
        ):
            for decode in (MSGPACK.decode, MSGPACK.view):
                with pytest.raises(CodecError, match=text):
                    decode(memoryview(damaged), given_buffers)
        assert MSGPACK.decode(memoryview(main), buffers)[0].sum() == LARGE

    @given(st.binary(max_size=300), st.integers(0, 2))
    def test_garbage(self, data: bytes, n_buffers: int) -> None:
        decode_anything(data, n_buffers)
        decode_anything(ext(102, data), n_buffers)
        decode_anything(ext(102, INLINE + data), n_buffers)

    @given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4), st.integers(0, 4))
    def test_flipped(self, changes: list[tuple[int, int]], n_buffers: int) -> None:
        records = np.zeros(3, "M8[s]")
        source = Typed(np.zeros(LARGE), torch.ones(3).bfloat16(), b"x" * LARGE)
        more = [records, torch.nn.Parameter(torch.ones(LARGE))]
        main, _ = encode(MSGPACK, [source, *more] if n_buffers % 2 else source)
        damaged = bytearray(main)
        for at, value in changes:
            damaged[at % len(damaged)] = value
        decode_anything(bytes(damaged), n_buffers)


def decode_anything(data: bytes, n_buffers: int) -> None:
    buffers = [memoryview(bytes(LARGE * 8))] * n_buffers
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for codec in (MSGPACK, MsgpackCodec(type=Typed)):
            with contextlib.suppress(CodecError):
                codec.decode(memoryview(data), buffers)
            with contextlib.suppress(CodecError):
                codec.view(memoryview(data), buffers)


@pytest.mark.parametrize("kind", ["decode", "view"])
@pytest.mark.parametrize("codec", [MsgpackCodec(), MsgpackCodec(type=Typed)], ids=["untyped", "typed"])
def test_an_error_holds_no_memory(codec: MsgpackCodec, kind: str) -> None:
    main, buffers = encode(codec, [np.zeros(LARGE), torch.zeros(LARGE), b"x" * LARGE])
    memory = mmap.mmap(-1, buffers[0].nbytes)
    gc.disable()  # nothing here may depend on the collector
    try:
        view = memoryview(memory).toreadonly()
        with pytest.raises(CodecError) as caught:
            getattr(codec, kind)(memoryview(main), [view, buffers[1][:8]])
        view.release()
        memory.close()
    finally:
        gc.enable()
    assert caught.value.__cause__ is not None
