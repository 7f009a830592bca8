"""The same calls on native and portable cores over the same garbage: the same answers, and the same bytes after."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs_of_cores import PLAIN, decode, encode, open_gate
from rings import NATIVE, TWINS, Cores
from support import examples

from aioshm.ring import Layout
from aioshm.ring import layout as at
from aioshm.ring.slot import Slot, Slots

pytestmark = pytest.mark.skipif(NATIVE is None, reason="the native core was not built")

numbers = st.integers(-2, 5)


def is_even(number: int) -> bool:
    return number % 2 == 0


WRITES = st.one_of(
    st.tuples(st.sampled_from(["claim", "commit", "passes"])),
    st.tuples(st.just("claim"), st.integers(-1, 12)),
    st.tuples(st.sampled_from(["free", "blocker", "spin_for"]), numbers, st.lists(st.integers(-1, 12), max_size=4)),
    st.tuples(st.just("put"), st.binary(max_size=12)),
    st.tuples(st.just("send"), st.text(max_size=4) | st.binary(max_size=12) | st.none()),
    st.tuples(st.just("put_many"), st.lists(st.binary(max_size=12) | st.none(), max_size=5), numbers),
    st.tuples(st.sampled_from(["free", "spin_for", "evict", "spin"]), numbers),
    st.tuples(st.just("admit"), numbers, numbers, st.sampled_from([None, bool, is_even])),
)
READS = st.one_of(
    st.tuples(st.sampled_from(["ready", "peek", "release", "skip", "take", "receive", "passes"])),
    st.tuples(st.sampled_from(["give_back", "take_many", "spin", "start_at"]), numbers),
)
STEPS = st.one_of(
    st.tuples(st.just("writer"), WRITES),
    st.tuples(st.integers(0, 2), READS),
    st.tuples(st.just("poke"), st.tuples(st.integers(0, 1 << 16), st.integers(0, 255))),
    st.tuples(st.just("flag"), st.tuples(st.integers(0, 1 << 16), st.sampled_from([0, 1, 1, 2, 255]))),
    st.tuples(st.just("parked"), st.tuples(st.integers(0, 1 << 16), st.integers(0, 1))),
)


def fill(layout: Layout, seed: int) -> bytes:
    """Return a segment of garbage, or of what almost could be a ring."""
    chance = random.Random(seed)
    memory = bytearray(chance.randbytes(layout.total_bytes))
    if chance.random() < 0.8:
        for index in range(layout.slots):
            kinds = ([0], [0, 1], [1], [0, 1, 2, 255])
            row = [chance.choice(chance.choice(kinds)) for _ in range(layout.flag_bytes)]
            memory[layout.flags(index) : layout.flags(index) + layout.flag_bytes] = bytes(row)
            what, seq = chance.choice([PLAIN, PLAIN, PLAIN, 0]), index + chance.choice([0, 0, 0, layout.slots])
            size = chance.choice([0, 1, layout.max_chunk_bytes, layout.max_chunk_bytes + 1, 1 << 63, (1 << 64) - 1])
            chunk = chance.choice([0, 0, 1, 2, layout.max_chunks, layout.max_chunks + 1, 1 << 63, (1 << 64) - 1])
            struct.pack_into("<5Q", memory, layout.slot(index), what, seq, 5, size, chunk)
        for pool in layout.pools:
            for number in range(pool.chunks):
                struct.pack_into("<Q", memory, pool.start + number * pool.stride, 1 + chance.choice([0, number]))
    return bytes(memory)


class Side:
    """One kind of core over a segment of its own, in memory that ends with it."""

    def __init__(self, cores: Cores, layout: Layout, content: bytes) -> None:
        self.layout, self.cores = layout, cores
        self.memory = bytearray(content)
        self.told = 0
        view = memoryview(self.memory)
        slots = Slots(layout, view)
        self.writer: Any = cores.writer(layout, view, slots)
        self.readers: list[Any] = [cores.reader(layout, view, slots, index) for index in range(layout.n_reader)]
        for core in (self.writer, *self.readers):
            core.bind(encode if core is self.writer else decode, PLAIN, False, self.tell)
            open_gate(core, 20)

    def tell(self) -> None:
        self.told += 1

    def step(self, who: Any, what: Any) -> object:
        sizes = self.layout
        if who == "poke":
            self.memory[what[0] % len(self.memory)] = what[1]
        elif who == "flag":
            self.memory[sizes.flags(0) + what[0] % (sizes.slots * sizes.flag_bytes)] = what[1]
        elif who == "parked":
            place = what[0] % (1 + sizes.n_reader)
            self.memory[at.READERS_PARKED + place - 1 if place else at.WRITER_PARKED] = what[1]
        else:
            core = self.writer if who == "writer" else self.readers[who % len(self.readers)]
            name, *arguments = what
            try:
                answer = getattr(core, name)(*arguments)
            except Exception as error:
                return type(error)
            if isinstance(answer, Slot):
                return "slot", answer.index
            module: Any = self.cores.module
            return "EMPTY" if answer is module.EMPTY else "SLOW_PATH" if answer is module.SLOW_PATH else answer
        return None

    def state(self) -> list[object]:
        cores = (self.writer, *self.readers)
        return [(core.seq, core.budget, core.open, core.spins, core.hits) for core in cores] + [self.told]

    def bytes_but_times(self) -> bytes:
        memory = bytearray(self.memory)
        for index in range(self.layout.slots):
            memory[self.layout.slot(index) + 16 : self.layout.slot(index) + 24] = bytes(8)
        for reader in range(self.layout.n_reader):
            line, histogram = self.layout.reader_line(reader), self.layout.histogram(reader)
            memory[line + at.LATENCY_NS : line + at.LATENCY_NS + 8] = bytes(8)
            memory[histogram : histogram + 8 * at.LATENCY_BUCKETS] = bytes(8 * at.LATENCY_BUCKETS)
        return bytes(memory)


@pytest.mark.parametrize("kind", TWINS)
@given(
    layout=st.builds(
        Layout.of,
        st.sampled_from([1, 2, 3, 9, 17]),
        st.integers(1, 10),
        st.integers(1, 4),
        st.integers(1, 4),
        st.integers(0, 10),
    ),
    seed=st.integers(0, 1 << 32),
    steps=st.lists(STEPS, max_size=40),
)
@settings(max_examples=examples(120), deadline=None)
def test_any_calls_on_any_garbage(kind: str, layout: Layout, seed: int, steps: list[tuple[Any, Any]]) -> None:
    assert NATIVE is not None
    content = fill(layout, seed)
    native, twin = Side(NATIVE, layout, content), Side(TWINS[kind], layout, content)
    for step in steps:
        assert native.step(*step) == twin.step(*step), step
        assert native.state() == twin.state(), step
    assert native.bytes_but_times() == twin.bytes_but_times()
