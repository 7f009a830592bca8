from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aioshm.ring import layout as at
from aioshm.ring.layout import LINE, PAGE, PREAMBLE, SLOT_HEADER_BYTES, Layout, round_up


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Replace the check of the other tests: nothing is opened or started here."""


layouts = st.builds(Layout, st.integers(1, 300), st.integers(1, 100_000), st.integers(1, 50))


def parts(layout: Layout) -> list[tuple[str, int, int]]:
    """Return every part of a segment in the documented order: what, first byte, size."""
    readers, chunks = range(layout.n_reader), range(layout.max_chunks)
    return [
        ("preamble", 0, PREAMBLE.size),
        ("writer line", at.WRITER_LINE, at.PID + 4),
        ("writer parked", at.WRITER_PARKED, 1),
        ("readers parked", at.READERS_PARKED, layout.n_reader),
        *((f"line of reader {i}", layout.reader_line(i), at.PID + 4) for i in readers),
        *((f"slot {i}", layout.slot(i), SLOT_HEADER_BYTES + layout.max_chunk_bytes) for i in chunks),
        *((f"flags {i}", layout.flags(i), layout.flag_bytes) for i in chunks),
        ("end", layout.total_bytes, 0),
    ]


@given(layouts)
@example(Layout(1, 1, 1))
@example(Layout(64, 64, 1))
@example(Layout(65, 65, 2))
@example(Layout(1, 24 * 1024 * 1024, 10))
def test_parts_stand_in_their_order_and_do_not_overlap(layout: Layout) -> None:
    for (_, start, size), (what, next_start, _) in pairwise(parts(layout)):
        assert start + size <= next_start, f"{what} begins inside of what stands before it"


@given(layouts)
def test_every_part_begins_on_its_own_cache_line(layout: Layout) -> None:
    begin = {what: start for what, start, _ in parts(layout) if not what.startswith("flags") or what == "flags 0"}
    assert all(start % LINE == 0 for start in begin.values())
    assert len(set(begin.values())) == len(begin)


@given(layouts)
def test_pages(layout: Layout) -> None:
    assert layout.header_bytes % PAGE == 0
    assert layout.metadata_offset % PAGE == 0, "the slots can be mapped in their own way"
    assert layout.total_bytes % PAGE == 0
    assert layout.total_bytes - layout.flags(layout.max_chunks) < PAGE, "nothing is wasted beyond the last page"


@given(layouts)
def test_chunks_are_one_after_the_other_and_flags_too(layout: Layout) -> None:
    assert layout.slot(0) == layout.header_bytes
    assert 0 <= layout.metadata_offset - layout.slot(layout.max_chunks) < PAGE
    assert layout.flags(0) == layout.metadata_offset
    assert layout.flag_bytes == 1 + layout.n_reader
    for index in range(layout.max_chunks):
        assert layout.slot(index + 1) - layout.slot(index) == layout.slot_bytes
        assert layout.flags(index + 1) - layout.flags(index) == layout.flag_bytes


@given(layouts, st.binary(min_size=16, max_size=16))
def test_the_preamble_says_it_all(layout: Layout, queue_id: bytes) -> None:
    preamble = layout.preamble(queue_id)
    assert len(preamble) == PREAMBLE.size <= LINE
    assert preamble.startswith(b"aioshm\r\n")
    sizes = (layout.n_reader, layout.max_chunk_bytes, layout.max_chunks)
    assert PREAMBLE.unpack(preamble) == (at.MAGIC, at.VERSION, *sizes, queue_id)


def test_a_slot_costs_its_chunk_and_one_line() -> None:
    assert Layout(1, 4096, 1).slot_bytes == 4096 + 64
    assert Layout(1, 1, 1).slot_bytes == 64 + 64


@given(st.integers(0, 10**9), st.integers(1, 10**5))
def test_round_up(value: int, unit: int) -> None:
    rounded = round_up(value, unit)
    assert rounded % unit == 0
    assert value <= rounded < value + unit
