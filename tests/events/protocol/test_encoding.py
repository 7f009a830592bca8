"""Both encodings, byte for byte where it matters, and whatever strangers send."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples

from aioshm.errors import CodecError
from aioshm.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KVEventBatch, UnknownEvent
from aioshm.events.protocol.encoding import BatchDecoder, BatchEncoder

pack = msgspec.msgpack.encode
unpack = msgspec.msgpack.decode

HASHES = st.lists(st.integers(0, 2**64 - 1) | st.binary(max_size=32), max_size=3)
MAYBE_TEXT = st.none() | st.text(max_size=5)
SMALL = st.integers(0, 1000)
STORED = st.builds(
    BlockStored,
    HASHES,
    st.none() | st.integers(0, 2**64 - 1) | st.binary(max_size=32),
    st.lists(SMALL, max_size=4),
    SMALL,
    st.none() | SMALL,
    MAYBE_TEXT,
    MAYBE_TEXT,
    st.none() | st.lists(st.none() | st.tuples(st.text(max_size=3), SMALL), max_size=3),
    st.none() | SMALL,
    MAYBE_TEXT,
    st.none() | SMALL,
    MAYBE_TEXT,
    MAYBE_TEXT,
    MAYBE_TEXT,
    st.none() | st.lists(st.lists(SMALL, max_size=2), max_size=2),
)
REMOVED = st.builds(BlockRemoved, HASHES, MAYBE_TEXT, st.none() | SMALL, MAYBE_TEXT, MAYBE_TEXT)
EVENTS = st.lists(STORED | REMOVED | st.builds(AllBlocksCleared), max_size=5)


@pytest.mark.parametrize("encoding", ["array", "map"])
@given(events=EVENTS, ts=st.floats(0, 2e9), rank=st.none() | SMALL)
@settings(max_examples=examples(60), deadline=None)
def test_decoded_batch_equals_the_encoded_batch(encoding: Any, events: list[Any], ts: float, rank: int | None) -> None:
    payload = BatchEncoder(encoding).encode(EventBatch(ts, events, rank), 7)
    assert BatchDecoder().decode(payload) == KVEventBatch(ts, events, 7 if rank is None else rank)


def test_array_writes_six_fields_and_then_up_to_the_last_that_is_set() -> None:
    events = [
        BlockStored([1], None, [5], 1, None, None),
        BlockStored([1], 2, [5], 1, 3, "GPU", group_idx=4),
        BlockStored([1], 2, [5], 1, 3, "GPU", lookahead_token_ids=[[9]]),
        BlockRemoved([b"x"], None),
        BlockRemoved([b"x"], "GPU", ownership="tier"),
        AllBlocksCleared(),
    ]
    assert unpack(BatchEncoder("array").encode(EventBatch(1.5, events), 2)) == [
        1.5,
        [
            ["BlockStored", [1], None, [5], 1, None, None],
            ["BlockStored", [1], 2, [5], 1, 3, "GPU", None, None, 4],
            ["BlockStored", [1], 2, [5], 1, 3, "GPU", *[None] * 8, [[9]]],
            ["BlockRemoved", [b"x"], None],
            ["BlockRemoved", [b"x"], "GPU", None, None, "tier"],
            ["AllBlocksCleared"],
        ],
        2,
    ]


def test_any_mixture_is_understood() -> None:
    stored = ["BlockStored", [1], None, [2], 1, None, "GPU", "later", None, None, None, None, None, None, "s"]
    payload = pack(
        [
            1,
            [
                [*stored, None, "a field from the future", {"x": 1}],
                {"type": "BlockRemoved", "block_hashes": [b"h"], "medium": "CPU", "future": [1]},
                ["BlockMoved", [1], "CPU"],
                {"type": "BlockMoved", "to": "CPU"},
                ["BlockRemoved", ["not a hash"], "GPU"],
                ["BlockStored"],
                {"block_hashes": [1]},
                42,
                None,
                [],
                ["AllBlocksCleared"],
            ],
            3,
            "a batch field from the future",
        ]
    )
    events = BatchDecoder().decode(payload).events
    assert events[0] == BlockStored([1], None, [2], 1, None, "GPU", "later", session_id="s")
    assert events[1] == BlockRemoved([b"h"], "CPU")
    assert [e.type if isinstance(e, UnknownEvent) else e for e in events[2:]] == [
        "BlockMoved", "BlockMoved", "BlockRemoved", "BlockStored", None, None, None, None, AllBlocksCleared(),
    ]  # fmt: skip
    assert isinstance(events[4], UnknownEvent)
    assert "malformed" in events[4].reason
    assert "Expected" in events[4].reason


def test_unknown_events_are_written_as_received() -> None:
    payload = pack([1.0, [["BlockMoved", [1]], {"type": "BlockMoved", "to": 1}], 0])
    decoded = BatchDecoder().decode(payload)
    assert BatchEncoder("array").encode(decoded, None) == payload
    assert BatchEncoder("map").encode(decoded, None) == payload


@pytest.mark.parametrize("payload", [b"", b"\xc1", pack(1), pack([]), pack([1.0]), pack({"ts": 1}), pack(["x", []])])
def test_malformed_batch_raises(payload: bytes) -> None:
    with pytest.raises(CodecError, match="not an event batch"):
        BatchDecoder().decode(payload)


JSONISH = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
TAGGED = st.builds(
    lambda tag, rest: [tag, *rest], st.sampled_from(["BlockStored", "BlockRemoved", "X"]), st.lists(JSONISH)
)


@given(st.lists(JSONISH | TAGGED, max_size=4), st.binary(max_size=3), st.integers(0, 100))
@settings(max_examples=examples(50), deadline=None)
def test_wellformed_nonsense_never_loses_the_good_events(events: list[Any], tail: bytes, cut: int) -> None:
    good = ["BlockRemoved", [77], "GPU"]
    whole = pack([1.0, [*events, good], 0])
    decoded = BatchDecoder().decode(whole).events
    assert len(decoded) == len(events) + 1
    assert decoded[-1] == BlockRemoved([77], "GPU")
    assert [hash(event) for event in decoded] == [hash(event) for event in BatchDecoder().decode(whole).events]
    with suppress(CodecError):
        BatchDecoder().decode(whole[: len(whole) * cut // 100] + tail)


def test_deep_nesting_is_refused_or_unknown() -> None:
    payload = b"\x93" + pack(1.0) + b"\x91" + b"\x91" * 100_000 + b"\xc0" + b"\xc0"
    with suppress(CodecError):
        assert isinstance(BatchDecoder().decode(payload).events[0], UnknownEvent)


@pytest.mark.parametrize(
    "bad",
    [
        BlockRemoved([2**64], "GPU"),
        BlockRemoved([-(2**63) - 1], "GPU"),
        BlockRemoved([object()], "GPU"),  # type: ignore[list-item]
        BlockRemoved([1], "\udc00"),
        object(),
    ],
)
def test_event_that_cannot_be_encoded_raises(bad: Any) -> None:
    with pytest.raises(CodecError, match="cannot encode"):
        BatchEncoder("array").encode(EventBatch(1.0, [bad]), 0)


def test_events_are_hashable_by_value() -> None:
    def make() -> BlockStored:
        return BlockStored([1], b"p", [1, 2], 2, None, "GPU", extra_keys=[("a", [1]), None], lookahead_token_ids=[[3]])

    assert make() == make()
    assert hash(make()) == hash(make())
    assert len({BlockRemoved([1], None), BlockRemoved([1], None), BlockRemoved([1], "GPU"), AllBlocksCleared()}) == 3
    extended = [UnknownEvent("Later", {"x": msgspec.msgpack.Ext(code, b"data")}) for code in (1, 1, 2)]
    assert len(set(extended)) == 2
