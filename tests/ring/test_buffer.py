"""One ring as an object: refusals, closing, prefaulting, and passing it to other processes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable

import pytest
from rings import NewRing, content, fds

from aioshm.errors import HandleError, SharedMemoryError
from aioshm.ring import Layout, ShmRingBuffer
from aioshm.ring import layout as at


class TestAStrangeSegment:
    @pytest.mark.parametrize(
        ("field", "offset"),
        [
            ("magic", 7),
            ("layout version", 8),
            ("n_reader", 12),
            ("max_chunk_bytes", 16),
            ("max_chunks", 24),
            ("slots", 32),
            ("inline_bytes", 40),
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

    @pytest.mark.parametrize(("missing", "text"), [(1, "bytes, its layout needs"), (0, "magic")])
    def test_segment_that_is_too_small_or_zeros_is_refused_and_closed(self, missing: int, text: str) -> None:
        sizes = Layout.of(2, 100, 3, 3)
        fd = os.memfd_create("strange")
        os.ftruncate(fd, sizes.total_bytes - missing)
        with pytest.raises(HandleError, match=text):
            ShmRingBuffer.from_fd(sizes, fd, bytes(16))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)

    def test_a_name_of_nothing(self) -> None:
        with pytest.raises(HandleError, match="'aioshm-nothing' cannot be opened: No such file"):
            ShmRingBuffer.from_name(Layout.of(1, 1, 1, 1), "aioshm-nothing", bytes(16))


class TestClosing:
    @pytest.mark.parametrize("backing", ["memfd", "named"])
    def test_closed_ring_refuses_every_use(self, new_ring: NewRing, backing: str) -> None:
        before = fds()
        ring = new_ring(inline_bytes=0, backing=backing)
        for _ in range(2):
            ring.close()
            ring.unlink()
        assert fds() == before
        for use in (
            lambda: ring.view,
            lambda: ring.fd,
            lambda: ring.name,
            lambda: ring.prefault(1, write=True),
            ring.writer,
            lambda: ring.reader(0),
        ):
            with pytest.raises(SharedMemoryError, match="the ring was closed"):
                use()

    def test_views_that_live_on_are_safe(self, new_ring: NewRing) -> None:
        before = fds()
        ring = new_ring()
        room = ring.view[-8:]
        holder = pickle.PickleBuffer(ring.view)  # holds the view itself, which then cannot be released
        ring.close()
        room[:4] = b"safe"  # unmapped already, this would be a SIGSEGV
        assert bytes(room[:4]) == b"safe"
        assert memoryview(holder)[:8] == at.MAGIC
        holder.release()
        assert fds() == before

    def test_forgotten_ring_warns_and_leaks_no_descriptor(self, new_ring: NewRing) -> None:
        ring = new_ring()
        before = fds()
        with pytest.warns(ResourceWarning, match="was not closed"):
            through_the_descriptor(ring)
        assert fds() == before


class TestPrefault:
    def committed(self, ring: ShmRingBuffer) -> int:
        return os.fstat(ring.fd).st_blocks * 512

    @pytest.mark.parametrize("write", [True, False])
    def test_touches_what_is_used_first_and_no_more(self, new_ring: NewRing, write: bool) -> None:
        ring = new_ring(1, 1 << 20, 8, slots=1024)
        view = bytes(ring.view)
        fresh = new_ring(1, 1 << 20, 8, slots=1024)
        before = self.committed(fresh)
        fresh.prefault(0, write=write)
        assert self.committed(fresh) == before
        fresh.prefault(8 * 65536, write=write)
        grown = self.committed(fresh) - before
        assert 8 * 65536 <= grown <= 8 * 65536 + 16 * 4096
        assert bytes(fresh.view[at.LINE :]) == view[at.LINE :], "nothing was changed"

    def test_is_where_the_first_messages_go(self, new_ring: NewRing) -> None:
        ring = new_ring(1, 1 << 20, 8, slots=1024)
        ring.prefault(8 * 65536, write=True)
        before = self.committed(ring)
        writer = ring.writer()
        writer.bind(bytes, 1, True, None)
        for nbytes in (7, 200_000):
            assert writer.put(b"m" * nbytes)
        assert self.committed(ring) == before


def through_the_descriptor(ring: ShmRingBuffer) -> ShmRingBuffer:
    return ShmRingBuffer.from_fd(ring.layout, os.dup(ring.fd), ring.queue_id)


def through_the_name(ring: ShmRingBuffer) -> ShmRingBuffer:
    assert ring.name is not None
    return ShmRingBuffer.from_name(ring.layout, ring.name, ring.queue_id)


@pytest.mark.parametrize(("backing", "reopen"), [("memfd", through_the_descriptor), ("named", through_the_name)])
def test_two_objects_over_one_segment_carry_messages(
    new_ring: NewRing, backing: str, reopen: Callable[[ShmRingBuffer], ShmRingBuffer]
) -> None:
    before = fds()
    ring = new_ring(2, backing=backing)
    other = reopen(ring)
    assert (other.layout, other.queue_id) == (ring.layout, ring.queue_id)
    writer, readers = ring.writer(), [other.reader(0), ring.reader(1)]
    for end in (writer, *readers):
        end.bind(bytes, 1, True, None)
    for number in range(10):
        assert writer.put(content(number, 100))
        assert [reader.take() for reader in readers] == [content(number, 100)] * 2
    for end in (writer, *readers, other):
        end.close()
    assert ring.reader(0).messages_written() == 10, "closing one leaves the other"
    ring.close()
    assert fds() == before
