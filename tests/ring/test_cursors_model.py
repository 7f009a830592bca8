"""Any order of claim, commit, abandon, peek, release and evict, against a plain list."""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rings import CORES, PORTABLE, Cores, look
from support import examples

from aioshm.ring import Layout, RingReader, RingWriter, ShmRingBuffer

contents = st.binary(max_size=64)
places = st.integers(0, 3)


class RingAgainstAList(RuleBasedStateMachine):
    """The model: every message sent so far, and how many of them each reader has finished with."""

    cores: ClassVar[Cores] = PORTABLE

    @initialize(
        n_reader=st.integers(1, 4),
        room=st.integers(1, 64),
        chunks=st.integers(1, 4),
        slots=st.integers(1, 4),
        inline_bytes=st.integers(0, 64),
    )
    def create(self, n_reader: int, room: int, chunks: int, slots: int, inline_bytes: int) -> None:
        sizes = Layout.of(n_reader, room, chunks, slots, inline_bytes)
        self.ring = ShmRingBuffer(n_reader, room, chunks, slots=slots, inline_bytes=inline_bytes)
        self.seen_by_readers = ShmRingBuffer.from_fd(sizes, os.dup(self.ring.fd), self.ring.queue_id)
        self.writer = RingWriter(sizes, self.ring.view, self.cores.writer)
        self.readers = [
            RingReader(sizes, self.seen_by_readers.view, index, self.cores.reader) for index in range(n_reader)
        ]
        self.sizes = sizes
        self.sent: list[bytes] = []
        self.finished = [0] * n_reader
        self.evicted: set[int] = set()
        self.claimed = False

    def teardown(self) -> None:
        if hasattr(self, "ring"):
            for end in (self.writer, *self.readers, self.ring, self.seen_by_readers):
                end.close()

    def behind(self, nbytes: int = 0) -> list[int]:
        """Return the readers that still have the slot which comes next, or the chunk that a message needs."""
        sizes = self.sizes
        blocker = len(self.sent) - sizes.slots
        if nbytes > sizes.inline_bytes:
            slowest = min(self.finished[i] if i not in self.evicted else len(self.sent) for i in range(sizes.n_reader))
            large = [n for n in range(slowest, len(self.sent)) if len(self.sent[n]) > sizes.inline_bytes]
            if len(large) >= sizes.max_chunks:
                blocker = max(blocker, large[len(large) - sizes.max_chunks])
        return [i for i, count in enumerate(self.finished) if i not in self.evicted and count <= blocker]

    def waits(self, reader: int) -> bool:
        return reader not in self.evicted and self.finished[reader] < len(self.sent)

    def parked_readers(self) -> list[int]:
        return [i for i, flag in enumerate(self.writer.readers_parked) if flag]

    @rule(garbage=st.integers(0, 255), nbytes=st.integers(0, 64))
    def claim(self, garbage: int, nbytes: int) -> None:
        nbytes = min(nbytes, self.sizes.max_chunk_bytes)
        slot = self.writer.claim(nbytes)
        assert (slot is None) == bool(self.behind(nbytes))
        if slot is not None:
            self.claimed = True
            large = nbytes > self.sizes.inline_bytes
            assert len(slot.body) == (self.sizes.max_chunk_bytes if large else self.sizes.inline_bytes)
            slot.body[:] = bytes([garbage]) * len(slot.body)
            slot.header[:] = bytes([garbage]) * 64

    @precondition(lambda self: self.claimed)
    @rule(content=contents)
    def fill_and_commit(self, content: bytes) -> None:
        content = content[: self.sizes.max_chunk_bytes]
        slot = self.writer.claim(len(content))
        assert (slot is None) == bool(self.behind(len(content))), "a slot that was claimed can be claimed again"
        if slot is None:
            return
        slot.body[: len(content)] = content
        slot.header[:8] = len(content).to_bytes(8, "little")
        assert self.writer.commit() == bool(self.parked_readers())
        self.sent.append(content)
        self.claimed = False

    @precondition(lambda self: self.claimed)
    @rule()
    def abandon(self) -> None:
        self.claimed = False

    @rule(place=places)
    def peek(self, place: int) -> None:
        reader = place % len(self.readers)
        expected = self.sent[self.finished[reader]] if self.waits(reader) else None
        assert look(self.readers[reader]) == expected

    @rule(place=places)
    def release(self, place: int) -> None:
        reader = place % len(self.readers)
        if self.waits(reader):
            assert look(self.readers[reader]) == self.sent[self.finished[reader]]
            assert self.readers[reader].release() == bool(self.writer.parked[0])
            self.finished[reader] += 1

    @rule(place=places, flag=st.booleans())
    def park_reader(self, place: int, flag: bool) -> None:
        reader = place % len(self.readers)
        if reader not in self.evicted:
            self.readers[reader].parked[0] = flag

    @rule(flag=st.booleans())
    def park_writer(self, flag: bool) -> None:
        self.writer.parked[0] = flag

    @precondition(lambda self: len(self.sent) > 3)
    @rule(place=places)
    def evict(self, place: int) -> None:
        reader = place % len(self.readers)
        self.writer.evict(reader)
        self.evicted.add(reader)
        assert reader not in self.parked_readers()

    @invariant()
    def the_ends_agree_with_the_model(self) -> None:
        if not hasattr(self, "ring"):
            return
        large = self.sizes.max_chunk_bytes
        assert self.writer.free() == (not self.behind())
        if large > self.sizes.inline_bytes:
            assert self.writer.free(1, [large]) == (not self.behind(large))
        if not self.claimed:
            assert self.writer.laggards() == self.behind()
            if large > self.sizes.inline_bytes:
                assert self.writer.laggards(1, [large]) == self.behind(large)
        assert [reader.ready() for reader in self.readers] == [self.waits(i) for i in range(len(self.readers))]
        assert self.writer.seq == self.readers[0].messages_written() == len(self.sent)
        assert [self.writer.messages_read(i) for i in range(len(self.readers))] == self.finished


@pytest.mark.parametrize("kind", [kind for kind in CORES if kind != "ordered"])  # which only fences more
def test_any_order_of_calls(kind: str) -> None:
    run_state_machine_as_test(
        type(f"{kind}_ring", (RingAgainstAList,), {"cores": CORES[kind]}),
        settings=settings(
            max_examples=examples(80),
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
