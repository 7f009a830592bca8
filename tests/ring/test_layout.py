"""The layout of a ring, in Python and in the header of the C code."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aioshm.codec import frames
from aioshm.ring import layout
from aioshm.ring import layout as at
from aioshm.ring.layout import CHUNK_HEADER_BYTES, LINE, PAGE, PREAMBLE, SLOT_HEADER_BYTES, Layout, chunk_at, pool_for
from tools import layout_header

pytestmark = pytest.mark.opens_nothing


layouts = st.builds(
    Layout.of,
    st.integers(1, 300),
    st.integers(1, 1_000_000),
    st.integers(1, 50),
    st.integers(1, 50) | st.none(),
    st.integers(0, 5000) | st.none(),
    st.booleans(),
)


def parts(layout: Layout) -> list[tuple[str, int, int]]:
    """Return every part of a segment in the documented order: what, first byte, size."""
    readers, slots = range(layout.n_reader), range(min(layout.slots, 50))
    last = layout.slots - 1
    chunks = [(pool, n) for pool in layout.pools for n in {*range(min(pool.chunks, 50)), pool.chunks - 1}]
    return [
        ("preamble", 0, PREAMBLE.size),
        ("writer line", at.WRITER_LINE, at.CREATED + 8),
        ("writer parked", at.WRITER_PARKED, 1),
        ("readers parked", at.READERS_PARKED, layout.n_reader),
        *((f"line of reader {i}", layout.reader_line(i), at.LATENCY_NS + 8) for i in readers),
        *((f"histogram of reader {i}", layout.histogram(i), 8 * at.LATENCY_BUCKETS) for i in readers),
        ("name", layout.name_at, at.NAME_BYTES),
        *((f"slot {i}", layout.slot(i), SLOT_HEADER_BYTES + layout.inline_bytes) for i in sorted({*slots, last})),
        *((f"chunk {p.first + n}", p.start + n * p.stride, CHUNK_HEADER_BYTES + p.room) for p, n in chunks),
        *((f"flags {i}", layout.flags(i), layout.flag_bytes) for i in sorted({*slots, last})),
        ("end", layout.total_bytes, 0),
    ]


@given(layouts)
@example(Layout.of(1, 1, 1))
@example(Layout.of(64, 64, 1, 1, 0))
@example(Layout.of(65, 65, 2, 2, 1))
@example(Layout.of(1, 24 * 1024 * 1024, 10))
def test_parts_stand_in_their_order_on_cache_lines_and_pages_of_their_own(layout: Layout) -> None:
    found = parts(layout)
    for (_, start, size), (what, next_start, _) in pairwise(found):
        assert start + size <= next_start, f"{what} begins inside of what stands before it"
    begin = {what: start for what, start, _ in found if not what.startswith("flags") or what == "flags 0"}
    assert all(start % LINE == 0 for start in begin.values())
    assert len(set(begin.values())) == len(begin)
    assert layout.header_bytes % PAGE == 0
    assert layout.metadata_offset % PAGE == 0, "the slots can be mapped in their own way"
    assert layout.total_bytes % PAGE == 0
    assert layout.total_bytes - layout.flags(layout.slots) < PAGE, "nothing is wasted beyond the last page"


@given(layouts, st.binary(min_size=16, max_size=16))
def test_the_preamble_says_it_all(layout: Layout, queue_id: bytes) -> None:
    preamble = layout.preamble(queue_id)
    assert len(preamble) == PREAMBLE.size <= LINE
    assert preamble.startswith(b"aioshm\r\n")
    sizes = (layout.n_reader, layout.max_chunk_bytes, layout.max_chunks, layout.slots, layout.inline_bytes)
    assert PREAMBLE.unpack(preamble) == (at.MAGIC, at.VERSION, *sizes, layout.traced, queue_id)


@given(layouts)
def test_a_trace_context_costs_a_line_and_nothing_where_nobody_asked(layout: Layout) -> None:
    plain = Layout(layout.n_reader, layout.max_chunk_bytes, layout.max_chunks, layout.slots, layout.inline_bytes)
    assert plain.trace_at == 0
    assert layout.slot_bytes - plain.slot_bytes == (LINE if layout.traced else 0)
    if layout.traced:
        assert SLOT_HEADER_BYTES + layout.inline_bytes <= layout.trace_at
        assert layout.trace_at + at.TRACE_BYTES <= layout.slot_bytes


class TestPools:
    def test_wanted_size_comes_first_and_others_have_no_more_chunks_than_slots(self) -> None:
        pool = Layout.of(1, 5000, 7).pools[0]
        assert (pool.room, pool.chunks, pool.first) == (5000, 7, 0)
        assert [(pool.room, pool.chunks) for pool in Layout.of(1, 100, 7).pools] == [(100, 7)]
        assert [pool.chunks for pool in Layout.of(1, 1 << 20, 5, 3).pools] == [5, 3, 3]

    @given(layouts, st.integers(0, 1_000_001))
    def test_a_message_takes_the_smallest_with_room(self, layout: Layout, nbytes: int) -> None:
        fitting = [pool for pool in layout.pools if pool.room >= nbytes]
        assert pool_for(layout.pools, nbytes) == min(fitting, key=lambda pool: pool.room, default=layout.pools[0])

    @given(layouts)
    def test_every_chunk_has_a_number(self, layout: Layout) -> None:
        numbers = [pool.first + n for pool in layout.pools for n in range(pool.chunks)]
        assert numbers == list(range(len(numbers)))
        for pool in layout.pools:
            for n in (0, pool.chunks - 1):
                assert chunk_at(layout.pools, pool.first + n) == (pool.start + n * pool.stride, pool.room)
        assert chunk_at(layout.pools, len(numbers)) is None
        assert chunk_at(layout.pools, -1) is None

    @pytest.mark.parametrize(
        ("messages", "large", "held"),
        [(8, [], True), (9, [], False), (3, [5000] * 3, True), (4, [5000] * 4, False), (4, [16] * 4, False)],
    )
    def test_what_the_empty_ring_holds(self, messages: int, large: list[int], held: bool) -> None:
        assert Layout.of(1, 5000, 3, 8, 15).holds(messages, large) is held


def test_layout_header_in_the_tree_has_the_constants_of_the_python_code() -> None:
    assert layout_header.HEADER.read_text() == layout_header.text(), "run python -m tools.layout_header"


def test_kind_of_overflowing_messages_is_that_of_the_frames() -> None:
    assert layout.OVERFLOW_KIND == frames.OVERFLOW
