"""One ring as an object: what it refuses, what closing leaves, what prefaulting touches."""

from __future__ import annotations

import os
import pickle
import secrets
from typing import Any

import pytest
from rings import NewRing, fds, put

from aioshm.errors import HandleError, SharedMemoryError
from aioshm.ring import Layout, RingReader, RingWriter, ShmRingBuffer
from aioshm.ring import layout as at
from aioshm.ring.cores import ReaderCore, WriterCore


class TestAStrangeSegment:
    @pytest.mark.parametrize(
        ("field", "offset"),
        [
            ("magic", 0),
            ("magic", 7),
            ("layout version", 8),
            ("n_reader", 12),
            ("max_chunk_bytes", 16),
            ("max_chunks", 24),
            ("slots", 32),
            ("inline_bytes", 40),
            ("queue id", 48),
            ("queue id", 63),
        ],
    )
    def test_each_field_is_looked_at(self, new_ring: NewRing, field: str, offset: int) -> None:
        ring = new_ring(backing="named")
        assert ring.name is not None
        ring.view[offset] ^= 1
        before = fds()
        with pytest.raises(HandleError, match=f"{field} is .*, not .*"):
            ShmRingBuffer.from_fd(ring.layout, os.dup(ring.fd), ring.queue_id)
        with pytest.raises(HandleError, match=f"{field} is .*, not .*"):
            ShmRingBuffer.from_name(ring.layout, ring.name, ring.queue_id)
        assert fds() == before

    @pytest.mark.parametrize(
        ("sizes", "field"),
        [
            (Layout.of(1, 100, 3, 3), "n_reader is 2, not 1"),
            (Layout.of(3, 100, 3, 3), "n_reader is 2, not 3"),
            (Layout.of(2, 99, 3, 3), "max_chunk_bytes is 100, not 99"),
            (Layout.of(2, 100, 2, 3), "max_chunks is 3, not 2"),
            (Layout.of(2, 100, 3, 2), "slots is 3, not 2"),
        ],
    )
    def test_other_sizes(self, new_ring: NewRing, sizes: Layout, field: str) -> None:
        ring = new_ring(backing="named")
        with pytest.raises(HandleError, match=field):
            ShmRingBuffer.from_fd(sizes, os.dup(ring.fd), ring.queue_id)
        with pytest.raises(HandleError, match=field):
            ShmRingBuffer(
                sizes.n_reader,
                sizes.max_chunk_bytes,
                sizes.max_chunks,
                ring.name,
                slots=sizes.slots,
                inline_bytes=sizes.inline_bytes,
            )

    def test_another_queue(self, new_ring: NewRing) -> None:
        ring = new_ring()
        with pytest.raises(HandleError, match=r"queue id is .*, not .*"):
            ShmRingBuffer.from_fd(ring.layout, os.dup(ring.fd), secrets.token_bytes(16))

    def test_one_that_is_too_small(self) -> None:
        sizes = Layout.of(2, 100, 3, 3)
        fd = os.memfd_create("small")
        os.ftruncate(fd, sizes.total_bytes - 1)
        with pytest.raises(
            HandleError, match=f"has {sizes.total_bytes - 1} bytes, its layout needs {sizes.total_bytes}"
        ):
            ShmRingBuffer.from_fd(sizes, fd, bytes(16))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    def test_one_of_zeros(self) -> None:
        sizes = Layout.of(2, 100, 3, 3)
        fd = os.memfd_create("zeros")
        os.ftruncate(fd, sizes.total_bytes)
        with pytest.raises(HandleError, match="magic"):
            ShmRingBuffer.from_fd(sizes, fd, bytes(16))

    def test_a_name_of_nothing(self) -> None:
        for open_it in (
            lambda: ShmRingBuffer(1, 1, 1, "aioshm-nothing"),
            lambda: ShmRingBuffer.from_name(Layout.of(1, 1, 1, 1), "aioshm-nothing", bytes(16)),
        ):
            with pytest.raises(HandleError, match="'aioshm-nothing' cannot be opened: No such file"):
                open_it()


class TestClosing:
    @pytest.mark.parametrize("backing", ["memfd", "named"])
    def test_once_is_enough(self, new_ring: NewRing, backing: str) -> None:
        before = fds()
        ring = new_ring(backing=backing)
        ring.close()
        assert fds() == before
        ring.close()
        ring.unlink()

    def test_using_it_afterwards(self, new_ring: NewRing) -> None:
        ring = new_ring(inline_bytes=0)
        ring.close()
        for use in (
            lambda: ring.view,
            lambda: ring.fd,
            lambda: ring.name,
            lambda: ring.chunk(0),
            lambda: ring.room(0),
            lambda: ring.flags(0),
            lambda: ring.prefault(0, write=True),
            ring.writer,
            lambda: ring.reader(0),
            ring.handle,
            lambda: pickle.dumps(ring),
        ):
            with pytest.raises(SharedMemoryError, match="the ring was closed"):
                use()

    def test_views_that_live_on_are_safe(self, new_ring: NewRing) -> None:
        ring = new_ring()
        room = ring.room(1)
        ring.close()
        room[:4] = b"safe"  # unmapped already, this would be a SIGSEGV
        assert bytes(room[:4]) == b"safe"

    def test_whatever_holds_the_whole_view_is_safe(self, new_ring: NewRing) -> None:
        before = fds()
        ring = new_ring()
        holder = pickle.PickleBuffer(ring.view)  # holds the view itself, which then cannot be released
        ring.close()
        assert memoryview(holder)[:8] == at.MAGIC
        holder.release()
        del holder
        assert fds() == before
        with pytest.raises(SharedMemoryError, match="the ring was closed"):
            _ = ring.view

    def test_forgetting_it_is_told_and_leaks_no_descriptor(self, new_ring: NewRing) -> None:
        ring = new_ring()
        before = fds()
        with pytest.warns(ResourceWarning, match="was not closed"):
            pickle.loads(pickle.dumps(ring))
        assert fds() == before


class TestArguments:
    def test_a_chunk_cannot_be_empty(self) -> None:
        for name in ("max_chunk_bytes", "max_chunks", "slots"):
            with pytest.raises(ValueError, match=f"{name} must be .* not 0"):
                ShmRingBuffer(**{"n_reader": 1, "max_chunk_bytes": 1, "max_chunks": 1, name: 0})

    @pytest.mark.parametrize("name", ["n_reader", "max_chunk_bytes", "max_chunks", "slots", "inline_bytes"])
    @pytest.mark.parametrize(
        ("value", "error"), [(-1, ValueError), (1.0, TypeError), ("1", TypeError), (True, TypeError)]
    )
    def test_sizes(self, name: str, value: object, error: type[Exception]) -> None:
        sizes: dict[str, Any] = {"n_reader": 1, "max_chunk_bytes": 1, "max_chunks": 1, name: value}
        with pytest.raises(error, match=f"{name} must be .* not {value!r}"):
            ShmRingBuffer(**sizes)

    @pytest.mark.parametrize(
        ("value", "error"), [(2, ValueError), (-1, ValueError), ("0", TypeError), (None, TypeError), (False, TypeError)]
    )
    def test_readers(self, new_ring: NewRing, value: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=f"reader must be .* not {value!r}"):
            new_ring(2).reader(value)

    def test_backing(self) -> None:
        with pytest.raises(ValueError, match=r"backing must be .* not 'disk'"):
            ShmRingBuffer(1, 1, 1, backing="disk").close()  # type: ignore[arg-type]

    @pytest.mark.parametrize("index", [3, -1, 1000])
    def test_slots(self, new_ring: NewRing, index: int) -> None:
        ring = new_ring(inline_bytes=0)
        with pytest.raises(ValueError, match=f"{index}"):
            ring.chunk(index)
        with pytest.raises(ValueError, match=f"{index}"):
            ring.room(index)
        with pytest.raises(ValueError, match=f"{index}"):
            ring.flags(index)


class TestPrefault:
    def committed(self, ring: ShmRingBuffer) -> int:
        return os.fstat(ring.fd).st_blocks * 512

    @pytest.mark.parametrize("write", [True, False])
    def test_touches_what_is_used_first_and_no_more(self, new_ring: NewRing, write: bool) -> None:
        ring = new_ring(1, 1 << 20, 8, slots=1024)
        view = bytes(ring.view)
        fresh = new_ring(1, 1 << 20, 8, slots=1024)
        before = self.committed(fresh)
        fresh.prefault(8 * 65536, write=write)
        grown = self.committed(fresh) - before
        assert 8 * 65536 <= grown <= 8 * 65536 + 16 * 4096
        assert bytes(fresh.view[at.LINE :]) == view[at.LINE :], "nothing was changed"

    @pytest.mark.parametrize("nbytes", [7, 200_000])
    def test_is_where_the_first_messages_go(self, new_ring: NewRing, nbytes: int) -> None:
        ring = new_ring(1, 1 << 20, 8, slots=1024)
        ring.prefault(8 * 65536, write=True)
        before = self.committed(ring)
        put(ring.writer(), b"m" * nbytes)
        assert self.committed(ring) == before

    @pytest.mark.parametrize("write", [True, False])
    def test_nothing(self, new_ring: NewRing, write: bool) -> None:
        ring = new_ring(1, 1 << 20, 8)
        before = self.committed(ring)
        ring.prefault(0, write=write)
        ring.prefault(-5, write=write)
        assert self.committed(ring) == before

    @pytest.mark.parametrize("write", [True, False])
    def test_on_an_older_kernel(self, new_ring: NewRing, write: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("_MADV_POPULATE_READ", "_MADV_POPULATE_WRITE"):
            monkeypatch.setattr(f"aioshm.ring.segment.{name}", 9999)  # EINVAL (madvise(2))
        ring = new_ring(1, 1 << 20, 2)
        before = self.committed(ring)
        ring.prefault(2 * 65536, write=write)
        assert self.committed(ring) - before >= 2 * 65536


def test_cursors_have_the_cores_of_this_machine(new_ring: NewRing) -> None:
    ring = new_ring(1)
    writer, reader = ring.writer(), ring.reader(0)
    assert (type(writer), type(reader)) == (RingWriter, RingReader)
    assert (type(writer.core), type(reader.core)) == (WriterCore, ReaderCore)


def test_views_of_slots(new_ring: NewRing) -> None:
    ring = new_ring(2, 100, 3, inline_bytes=16)
    writer = ring.writer()
    put(writer, b"message")
    put(writer, b"a message of more than that")
    assert bytes(ring.room(0)[:7]) == b"message"
    assert bytes(ring.chunk(0)[:9]) == b"a message"
    assert [chunk.nbytes for chunk in map(ring.chunk, range(3))] == [100] * 3
    assert [room.nbytes for room in map(ring.room, range(3))] == [16] * 3
    assert [bytes(flags) for flags in map(ring.flags, range(3))] == [b"\1\0\0", b"\1\0\0", bytes(3)]
