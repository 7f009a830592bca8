"""The native encoder against its twin: the same bytes, or it leaves the batch to the twin; and nothing leaks."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples

from aioshm.errors import CodecError
from aioshm.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEventBatch, UnknownEvent
from aioshm.events.protocol import encoding
from aioshm.events.protocol.encoding import BatchEncoder

from .test_encoding import EVENTS, JSONISH

pytestmark = pytest.mark.skipif(
    encoding.NativeEncoder is None, reason="the native encoder was not built, or is not wanted"
)


class Derived(BlockRemoved):
    """An event of the caller's own."""


class Wide(EventBatch, array_like=True, omit_defaults=True):
    """A batch of the caller's own."""

    extra: int = 3


def stored(**fields: Any) -> BlockStored:
    return msgspec.structs.replace(BlockStored([1], None, [2], 1, None, "GPU"), **fields)


def outcome(work: Callable[[], bytes]) -> bytes | str:
    try:
        return work()
    except CodecError as error:
        return str(error)


def check(batch: EventBatch, rank: int | None = 7) -> None:
    """Both say the same, bytes or error."""
    both = [BatchEncoder(native=native) for native in (True, False)]
    assert both[0]._native is not None
    found = [outcome(partial(each.encode, batch, rank)) for each in both]
    assert found[0] == found[1]


def is_native(events: list[Any]) -> bool:
    native = BatchEncoder()._native
    assert native is not None
    return native.encode(1.0, events, 0) is not None


@given(events=EVENTS, ts=st.floats() | st.integers(-(2**63), 2**64 - 1), rank=st.none() | st.integers(-5, 2**64))
@settings(max_examples=examples(100), deadline=None)
def test_known_events(events: list[Any], ts: float, rank: int | None) -> None:
    check(EventBatch(ts, events, rank))
    check(KVEventBatch(ts, events), rank)


@given(values=st.lists(JSONISH, min_size=15, max_size=15))
@settings(max_examples=examples(50), deadline=None)
def test_fields_of_any_type(values: list[Any]) -> None:
    check(EventBatch(1.0, [BlockStored(*values), BlockRemoved(*values[:5])]))


@pytest.mark.parametrize("length", [0, 1, 15, 16, 31, 32, 255, 256, 65_535, 65_536, 70_000])
def test_lengths(length: int) -> None:
    numbers = [n * 37 % 131_072 for n in range(length)]
    events = [stored(block_hashes=[b"h" * length], token_ids=numbers, medium="m" * length, lora_name="\u00e9" * length)]
    assert is_native(events)
    check(EventBatch(1.0, events))
    check(EventBatch(1.0, [AllBlocksCleared()] * length))


def test_numbers_of_every_size() -> None:
    edges = {n for bits in range(65) for n in (2**bits - 1, 2**bits, 2**bits + 1)}
    fitting = sorted(n for n in edges if n < 2**64)
    assert is_native([BlockRemoved(fitting, None)])  # type: ignore[arg-type]
    for number in edges | {-n for n in edges}:
        check(EventBatch(1.0, [BlockRemoved([number], None)]))
    check(EventBatch(1.0, [BlockRemoved([int("0"), 10**18 - 10**18], None)]))  # a zero that was computed


@pytest.mark.parametrize(
    ("event", "native"),
    [
        (stored(extra_keys=[("image", 1.5, True, False, b"x"), None, ("nested", [[1], (2,)])]), True),
        (stored(extra_keys=[({"a": 1},)]), False),
        (stored(group_idx=-1), False),
        (stored(session_id="\ud800"), False),
        (stored(token_ids=range(3)), False),
        (stored(lookahead_token_ids=[[[[[[[[[[1]]]]]]]]]]), False),
        (stored(medium=type("Text", (str,), {})("GPU")), False),
        (stored(token_ids=type("List", (list,), {})([1])), False),
        (Derived([1], None), False),
        (UnknownEvent("X", ["X", 1]), False),
        (["AllBlocksCleared"], False),
    ],
)
def test_events_left_to_the_twin(event: Any, native: bool) -> None:
    assert is_native([event]) is native
    check(EventBatch(1.0, [stored(), event, AllBlocksCleared()]))


def test_odd_batches() -> None:
    check(Wide(1.0, [stored()], None, 4))
    check(EventBatch(1.0, (stored(),)))  # type: ignore[arg-type]
    incomplete = stored()
    del incomplete.token_ids
    check(EventBatch(1.0, [incomplete]))
    endless: list[Any] = []
    endless.append(endless)
    assert not is_native([stored(extra_keys=endless)])


def test_nothing_leaks() -> None:
    text, number, token_ids = "t" * 100, 2**63, [2**40] * 100
    good = EventBatch(1.0, [stored(medium=text, block_hashes=[number], token_ids=token_ids)] * 50)
    unknown = EventBatch(1.0, [*good.events, stored(extra_keys=[({},)])])
    watched: list[Any] = [text, number, token_ids, good.events[0]]

    def work() -> None:
        for _ in range(100):
            native = BatchEncoder()._native
            assert native is not None
            assert native.encode(good.ts, good.events, 0) is not None
            assert native.encode(unknown.ts, unknown.events, 0) is None
            assert encoding.NativeEncoder is not None
            with pytest.raises(TypeError):
                encoding.NativeEncoder(((BlockStored, b"", ("token_ids", "__doc__"), (b"", b""), 0),))

    def held() -> tuple[list[int], int]:
        gc.collect()  # exceptions and their frames
        return [*map(sys.getrefcount, watched)], tracemalloc.get_traced_memory()[0]

    tracemalloc.start()  # every object and every block of an encoder is known to it
    try:
        work()
        counts, size = held()
        for _ in range(3):
            work()
        counts_then, size_then = held()
        assert counts_then == counts
        assert size_then - size < 1000  # after 300 more batches
    finally:
        tracemalloc.stop()
