"""Passing a ring on: pickles, copies, descriptors, names; and what is left where its memory cannot be reached."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest
from rings import NewRing, answer, content, fds, look, put

from aioshm.errors import SharedMemoryError
from aioshm.ring import Layout, RingHandle, ShmRingBuffer, buffer
from aioshm.ring import layout as at

spawn = get_context("spawn")


def through_pickle(ring: ShmRingBuffer) -> ShmRingBuffer:
    return pickle.loads(pickle.dumps(ring))  # type: ignore[no-any-return]


def through_a_copy(ring: ShmRingBuffer) -> ShmRingBuffer:
    return copy.copy(ring)


def through_the_descriptor(ring: ShmRingBuffer) -> ShmRingBuffer:
    return ShmRingBuffer.from_fd(ring.layout, os.dup(ring.fd), ring.queue_id)


def through_the_name(ring: ShmRingBuffer) -> ShmRingBuffer:
    assert ring.name is not None
    return ShmRingBuffer.from_name(ring.layout, ring.name, ring.queue_id)


def through_the_constructor(ring: ShmRingBuffer) -> ShmRingBuffer:
    sizes = ring.layout
    return ShmRingBuffer(sizes.n_reader, sizes.max_chunk_bytes, sizes.max_chunks, ring.name, slots=sizes.slots)


class TestTwoObjectsOverOneSegment:
    @pytest.mark.parametrize(
        ("backing", "reopen"),
        [
            ("memfd", through_pickle),
            ("memfd", through_a_copy),
            ("memfd", through_the_descriptor),
            ("named", through_pickle),
            ("named", through_a_copy),
            ("named", through_the_descriptor),
            ("named", through_the_name),
            ("named", through_the_constructor),
        ],
    )
    def test_carry_messages(
        self, new_ring: NewRing, backing: str, reopen: Callable[[ShmRingBuffer], ShmRingBuffer]
    ) -> None:
        before = fds()
        ring = new_ring(2, backing=backing)
        other = reopen(ring)
        assert (other.layout, other.queue_id) == (ring.layout, ring.queue_id)
        writer, readers = ring.writer(), [other.reader(0), ring.reader(1)]
        for number in range(10):
            assert put(writer, content(number, 100)) is not None
            for reader in readers:
                assert look(reader) == content(number, 100)
                reader.release()
        for end in (writer, *readers, other):
            end.close()
        assert bytes(ring.room(0)) != bytes(100), "closing one leaves the other"
        ring.close()
        assert fds() == before

    def test_the_handle_names_it(self, new_ring: NewRing) -> None:
        memfd, named = new_ring(2), new_ring(2, backing="named")
        assert memfd.handle() == RingHandle(2, 100, 3, 3, 100, memfd.queue_id, None, os.getpid(), memfd.fd)
        assert named.handle() == RingHandle(2, 100, 3, 3, 100, named.queue_id, named.name, os.getpid(), named.fd)

    def test_queue_ids_differ(self, new_ring: NewRing) -> None:
        rings = [new_ring(1) for _ in range(20)]
        assert len({ring.queue_id for ring in rings}) == 20
        assert {len(ring.queue_id) for ring in rings} == {at.QUEUE_ID_BYTES}


class TestUnpickledWhereItsMemoryIsGone:
    def refuses(self, ring: ShmRingBuffer) -> None:
        assert (ring.layout, len(ring.queue_id)) == (Layout.of(2, 100, 3, 3), 16)
        for use in (
            lambda: ring.view,
            lambda: ring.fd,
            lambda: ring.name,
            lambda: ring.room(0),
            lambda: ring.flags(0),
            lambda: ring.prefault(1, write=True),
            ring.writer,
            lambda: ring.reader(0),
            ring.handle,
            lambda: pickle.dumps(ring),
        ):
            with pytest.raises(SharedMemoryError, match="cannot be reached from here: "):
                use()
        ring.unlink()
        ring.close()
        ring.close()

    @pytest.mark.parametrize("backing", ["memfd", "named"])
    def test_closed(self, new_ring: NewRing, backing: str) -> None:
        ring = new_ring(backing=backing)
        data = pickle.dumps(ring)
        ring.close()
        self.refuses(pickle.loads(data))

    def test_unlinked(self, new_ring: NewRing) -> None:
        ring = new_ring(backing="named")
        data = pickle.dumps(ring)
        ring.unlink()
        self.refuses(pickle.loads(data))
        assert bytes(ring.room(0)) == bytes(100), "mappings live on"

    def test_the_descriptor_is_a_pipe_by_now(self, new_ring: NewRing) -> None:
        ring = new_ring()
        number, data = ring.fd, pickle.dumps(ring)
        ring.close()
        read_end, write_end = os.pipe()
        try:
            os.dup2(read_end, number)
            self.refuses(pickle.loads(data))
        finally:
            for fd in {read_end, write_end, number}:
                os.close(fd)

    def test_the_descriptor_is_a_file_by_now(self, new_ring: NewRing, tmp_path: Path) -> None:
        ring = new_ring()
        number, data = ring.fd, pickle.dumps(ring)
        size = ring.layout.total_bytes
        ring.close()
        path = tmp_path / "innocent"
        path.write_bytes(b"i" * size)
        file = os.open(path, os.O_RDONLY)
        try:
            os.dup2(file, number)
            self.refuses(pickle.loads(data))
        finally:
            for fd in {file, number}:
                os.close(fd)
        assert path.read_bytes() == b"i" * size

    def test_the_descriptor_is_another_ring_by_now(self, new_ring: NewRing) -> None:
        ring, other = new_ring(), new_ring()
        number, data = ring.fd, pickle.dumps(ring)
        ring.close()
        os.dup2(other.fd, number)
        try:
            unpickled = pickle.loads(data)
            with pytest.raises(SharedMemoryError, match="queue id"):
                _ = unpickled.view
        finally:
            os.close(number)

    def test_the_process_is_gone(self, new_ring: NewRing) -> None:
        handle = new_ring().handle()._replace(pid=2**22 + 1)  # beyond every pid_max (proc(5))
        self.refuses(buffer._reopen(handle))

    def test_nothing_stays_open(self, new_ring: NewRing) -> None:
        first, second = new_ring(), new_ring(backing="named")
        wrong = [ring.handle()._replace(queue_id=bytes(16)) for ring in (first, second)]
        before = fds()
        for handle in wrong:
            self.refuses(buffer._reopen(handle))
        assert fds() == before


class TestOtherProcesses:
    @pytest.mark.parametrize("backing", ["memfd", "named"])
    def test_a_spawned_process_sees_and_writes_the_same_bytes(self, new_ring: NewRing, backing: str) -> None:
        ring = new_ring(backing=backing)
        ring.room(0)[:5] = b"hello"
        process = spawn.Process(target=answer, args=(ring,))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert bytes(ring.room(1)[:5]) == b"olleh"
