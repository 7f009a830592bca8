from __future__ import annotations

import ctypes
import struct
import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aioshm.codec import frames
from aioshm.codec.frames import ALIGNMENT, MAX_BUFFERS, body_bytes, split_body, write_body
from aioshm.errors import CodecError
from aioshm.ring.layout import SLOT_HEADER_BYTES

messages = st.tuples(st.binary(max_size=300), st.lists(st.binary(max_size=300), max_size=12))
counts = st.integers(-3, 2**33) | st.integers(0, 20)
sizes = st.integers(-3, 2**65) | st.integers(0, 300)


def written(main: bytes, buffers: list[bytes], spare: int = 0) -> bytearray:
    target = bytearray(b"\xee" * (body_bytes(len(main), [len(buffer) for buffer in buffers]) + spare))
    write_body(memoryview(target), [main], buffers)
    return target


def address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class TestHeader:
    def test_bytes_are_the_contract(self) -> None:
        slot = bytearray(SLOT_HEADER_BYTES)
        frames.pack_header(slot, 0, frames.INLINE, 2, 0, 3, 4, 5, 6)
        expected = b"\x01\x02\0\0\x03\0\0\0" + b"".join(number.to_bytes(8, "little") for number in (4, 5, 6))
        assert bytes(slot[: frames.HEADER.size]) == expected


class TestBody:
    @given(messages, st.integers(0, 70))
    def test_round_trip_is_exact_and_aligned(self, message: tuple[bytes, list[bytes]], spare: int) -> None:
        main, buffers = message
        target = written(main, buffers, spare)
        main_view, views = split_body(memoryview(target), len(buffers), len(main))
        assert bytes(main_view) == main
        assert [bytes(view) for view in views] == buffers
        end = len(target) - spare
        assert target[end:] == b"\xee" * spare
        for view in (main_view, *views):
            assert not view.nbytes or (address(view) - address(memoryview(target))) % ALIGNMENT == 0
        if main or any(buffers):
            with pytest.raises(CodecError):
                split_body(memoryview(target)[: end - 1], len(buffers), len(main))

    def test_layout_is_the_contract(self) -> None:
        body = written(b"main", [b"first", b"", b"third"])
        assert body[:24] == struct.pack("<3Q", 5, 0, 5)
        assert body[64:68] == b"main"
        assert body[128:133] == b"first"
        assert body[192:] == b"third"

    def test_too_small_a_target_is_refused(self) -> None:
        with pytest.raises(ValueError, match="different structures"):
            write_body(memoryview(bytearray(9)), [b"ten ", b"bytes!"], ())
        with pytest.raises(ValueError, match="different structures"):
            write_body(memoryview(bytearray(130)), [b"main"], (memoryview(b"first"),))


class TestGarbage:
    @given(st.binary(max_size=1000), counts, sizes)
    @example(b"", 2**32 - 1, 0)
    @example(bytes(64), 1, 0)
    @example(bytes(63), 1, 1)
    @example(b"\xff" * 64, 1, 0)
    @example(b"\xff" * 64, 8, 2**64 - 1)
    @example(bytes(8), 1, -64)
    def test_only_codec_error(self, body: bytes, n_buffers: int, main_bytes: int) -> None:
        try:
            main, buffers = split_body(memoryview(body), n_buffers, main_bytes)
        except CodecError:
            return
        assert main.nbytes == main_bytes
        assert len(buffers) == n_buffers
        assert body_bytes(main_bytes, [buffer.nbytes for buffer in buffers]) <= len(body)

    @pytest.mark.parametrize("n_buffers", [MAX_BUFFERS + 1, 2**20, 2**32 - 1])
    def test_a_chunk_of_zeros_is_not_millions_of_buffers(self, n_buffers: int) -> None:
        body = memoryview(bytes(8 * 1024 * 1024 + 8))
        tracemalloc.start()
        try:
            with pytest.raises(CodecError, match=f"{n_buffers} buffers announced"):
                split_body(body, n_buffers, 0)
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()

    def test_the_text_has_the_numbers(self) -> None:
        with pytest.raises(CodecError, match="101 bytes announced, 100 there"):
            split_body(memoryview(bytes(100)), 0, 101)


def placed(main: bytes, buffers: list[bytes], spare: int = 0) -> bytearray:
    """Return a placed body, with gaps between the buffers."""
    body, places = bytearray(ALIGNMENT), []
    for buffer in buffers:
        body += b"\xdd" * (-len(body) % ALIGNMENT)
        places += [len(body), len(buffer)]
        body += buffer
    table = len(body)
    body += frames.pack_table(table + frames.placed_bytes(len(buffers), 0), places) + main
    body[:8] = frames.pack_place(table)
    return body + b"\xee" * spare


class TestPlaced:
    @given(messages, st.integers(0, 70))
    def test_round_trip(self, message: tuple[bytes, list[bytes]], spare: int) -> None:
        main, buffers = message
        body = memoryview(placed(main, buffers, spare))
        main_view, views = frames.split_placed(body, len(buffers), len(main))
        assert bytes(main_view) == main
        assert [bytes(view) for view in views] == buffers
        assert frames.placed_end(body, len(buffers), len(main)) == len(body) - spare
        assert frames.split(body, frames.PLACED, len(buffers), len(main)) == (main_view, views)

    @given(messages)
    def test_cut_off(self, message: tuple[bytes, list[bytes]]) -> None:
        main, buffers = message
        body = memoryview(placed(main, buffers))
        for cut in (1, len(main) + 1, len(body)):
            with pytest.raises(CodecError):
                frames.split_placed(body[:-cut], len(buffers), len(main))

    @given(st.binary(max_size=300), counts, sizes)
    def test_garbage_is_refused_or_read_within_bounds(self, garbage: bytes, n_buffers: int, main_bytes: int) -> None:
        try:
            main, views = frames.split_placed(memoryview(garbage), n_buffers, main_bytes)
        except CodecError:
            return
        assert len(main) == main_bytes
        assert len(views) == n_buffers
