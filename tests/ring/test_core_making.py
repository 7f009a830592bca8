"""Making a core of garbage, and unmaking it: nothing crashes, nothing leaks. One class for every kind of core."""

from __future__ import annotations

import gc
import mmap
import os
import sys
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs_of_cores import PLAIN, NewPair, open_gate
from rings import NATIVE, Cores
from support import examples

from aioshm.ring import Layout
from aioshm.ring.layout import Sizes
from aioshm.ring.record import ReaderRecord, WriterRecord

GOOD = Layout.of(2, 100, 3, 3, 36)
NUMBERS = [*Sizes._fields, "line", "histogram"]
HOSTILE = [0, 1, 7, 64, 65, 4096, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 64, (1 << 64) - 1]

POOL = GOOD.pools[0]

needs_native = pytest.mark.skipif(NATIVE is None, reason="the native core was not built")


def of_numbers(view: Any, **changes: Any) -> Iterator[Any]:
    """Make native bases; what is refused, is so with a typed error."""
    assert NATIVE is not None
    sizes = tuple(changes.get(name, getattr(GOOD, name)) for name in Sizes._fields)
    pools = changes.get("pools", GOOD.pools)
    records = WriterRecord(GOOD.sizes, GOOD.pools).memory, ReaderRecord(GOOD.sizes).memory
    for reader in (None, 0, 1):
        make: Any = NATIVE.module.WriterBase if reader is None else NATIVE.module.ReaderBase
        ends: tuple[Any, ...] = ()
        if reader is not None:
            line, histogram = GOOD.reader_line(reader), GOOD.histogram(reader)
            ends = reader, changes.get("line", line), changes.get("histogram", histogram)
        try:
            yield make(sizes, pools, view, changes.get("record", records[reader is not None]), *ends)
        except (ValueError, TypeError, OverflowError, MemoryError, IndexError, BufferError):
            continue


def use(core: Any) -> None:
    """Do what a core can do, whatever it answers."""
    core.bind(bytes, 0, True, None)
    open_gate(core)
    calls = {"spin": [10], "send": [b""], "put": [bytes(5000)], "take_many": [5], "claim_slot": [90], "finished": [7]}
    for name in ("spin", "send", "receive", "put", "take", "take_many", "claim_slot", "commit", "finished", "release"):
        if hasattr(core, name):
            getattr(core, name)(*calls.get(name, []))


class TestMaking:
    def test_memory(self, new_pair: NewPair) -> None:
        pair = new_pair(2)
        sizes = pair.ring.layout
        for make, rest in ((pair.cores.writer, ()), (pair.cores.reader, (1,))):
            with pytest.raises(ValueError, match="smaller than the layout says"):
                make(sizes, memoryview(bytearray(sizes.total_bytes - 1)), *rest)  # type: ignore[call-arg]
            with pytest.raises(BufferError):
                make(sizes, memoryview(bytes(sizes.total_bytes)), *rest)  # type: ignore[call-arg]


@needs_native
class TestHostileLayouts:
    @given(
        st.fixed_dictionaries(
            {},
            optional={
                **{name: st.sampled_from(HOSTILE) | st.integers(0, 9000) for name in NUMBERS},
                "pools": st.lists(
                    st.lists(st.sampled_from([*HOSTILE, *POOL]) | st.integers(0, 9000), max_size=6).map(tuple)
                ).map(tuple),
            },
        )
    )
    @settings(max_examples=examples(60), deadline=None)
    def test_any_fields(self, changes: dict[str, Any]) -> None:
        memory = bytearray(GOOD.total_bytes)
        for core in of_numbers(memory, **changes):
            use(core)
            core.close()

    def test_unaligned_memory(self) -> None:
        memory = memoryview(bytearray(GOOD.total_bytes + 8))
        made = [len(list(of_numbers(memory[start:]))) for start in range(8)]
        assert sorted(made) == [0] * 7 + [3]
        assert list(of_numbers(memoryview(bytearray(2 * GOOD.total_bytes))[::2])) == [], "with gaps"

    def test_never_made(self) -> None:
        assert NATIVE is not None
        for kind in (NATIVE.module.WriterBase, NATIVE.module.ReaderBase):
            core: Any = kind.__new__(kind)
            open_gate(core)
            with pytest.raises(ValueError, match="closed"):
                use(core)
            core.close()


class TestMemory:
    @pytest.mark.parametrize("by", ["code", "parked", "runs"])
    def test_cycle_with_the_memory_that_an_end_stands_on_is_collected(self, cores: Cores, by: str) -> None:
        layout = Layout.of(1, 100, 3, 3)
        forgotten = []
        for _ in range(10):
            memory = mmap.mmap(-1, layout.total_bytes)
            view = memoryview(memory)
            for core in (cores.writer(layout, view), cores.reader(layout, view, 0)):
                cycle = {"memory": memory, "view": view, "core": core}
                callbacks = {"code": bytes, "parked": None, "runs": None, by: lambda *_, cycle=cycle: cycle}
                core.bind(callbacks["code"], PLAIN, False, callbacks["parked"])
                core.belong(callbacks["runs"])
                forgotten.append(weakref.ref(core))
            del memory, view, core, cycle, callbacks
            gc.collect()
        assert not any(core() for core in forgotten)

    @needs_native
    @pytest.mark.parametrize("cores", ["native"], indirect=True)
    def test_counts_stay(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 4, raw=False)
        writer, reader, slots = pair.writer, pair.reader, pair.slots
        text, message, code = "a text of its own", b"bytes of its own", lambda obj: message
        bad: Any = object()
        writer.bind(code, PLAIN, False, None)
        EMPTY, SLOW_PATH = pair.cores.module.EMPTY, pair.cores.module.SLOW_PATH  # noqa: N806
        watched = (text, message, code, bad, slots, EMPTY, SLOW_PATH, True, False, None)
        process = psutil.Process()

        def rounds(amount: int) -> None:
            many = [message] * 3
            for _ in range(amount):
                assert writer.send(text) is None
                assert reader.take() == "bytes of its own"
                assert reader.receive() is EMPTY
                assert writer.put_many(many, 0) == 3
                assert len(reader.take_many(2)) == 2
                assert reader.peek() is not None
                assert reader.release() is False
                writer.blocker(1, [50]), writer.claim(50)
                while reader.ready():
                    reader.release()
                assert writer.claim() is not None
                writer.passes(), reader.passes(), writer.free(2)
                for call in (lambda: writer.put(bad), lambda: writer.evict(bad), lambda: reader.take_many(bad)):
                    try:
                        call()
                    except TypeError:
                        continue

        rounds(500)
        gc.collect()
        counts, resident = [*map(sys.getrefcount, watched)], process.memory_info().rss
        tracemalloc.start()
        rounds(1000)
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        rounds(3000)  # about 40,000 calls
        changes = [after - before for after, before in zip(map(sys.getrefcount, watched), counts, strict=True)]
        assert changes[:-3] == [0] * (len(watched) - 3)
        if sys.version_info < (3, 12):  # True, False and None are immortal since then: their counts mean nothing
            assert all(abs(change) < 300 for change in changes[-3:]), "a leak at every call shows in thousands"
        assert traced < 50_000
        if "PYTHONMALLOC" not in os.environ:  # else the address sanitizer keeps what was freed, to see it used again
            assert process.memory_info().rss - resident < 8 << 20
