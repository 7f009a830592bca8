"""Events of other engines, the largest accepted batches, and the memory of hostile batches."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioshm.errors import CodecError
from aioshm.events import BlockRemoved, BlockStored, EventBatch, UnknownEvent
from aioshm.events.config import OPEN_MAX_PAYLOAD_BYTES
from aioshm.events.protocol.encoding import MIN_EVENT_BYTES, BatchDecoder, BatchEncoder

# An event in the form of an array, up to its tokens.
STORED = b"\x97\xabBlockStored\x91\x01\xc0"
ROOT = Path(__file__).parents[3]
pack = msgspec.msgpack.encode


def array(length: int) -> bytes:
    return b"\xdd" + length.to_bytes(4, "big")


def trtllm(token_ids: list[Any], **more: Any) -> dict[str, Any]:
    """Return an event as TensorRT-LLM's publishers write it: a map, without the fields that it does not know."""
    return {
        "type": "BlockStored",
        "block_hashes": [-5],
        "parent_block_hash": None,
        "token_ids": token_ids,
        "block_size": len(token_ids),
        "lora_id": None,
        **more,
    }


def decode_one(event: Any) -> Any:
    (found,) = BatchDecoder().decode(pack([1.0, [event], 0])).events
    return found


class TestEngines:
    def test_text_among_token_ids_is_kept(self) -> None:
        event = trtllm([1, "mm:ab", 3], medium="GPU")
        assert decode_one(event) == BlockStored([-5], None, [1, "mm:ab", 3], 3, None, "GPU")

    def test_keys_of_media_are_kept_and_written_again(self) -> None:
        keys = [[{"type": "mm_key", "hash": "ab", "start_offset": 0}]]
        payload = pack([1.0, [trtllm([1, 2], mm_keys=keys)], 0])
        batch = BatchDecoder().decode(payload)
        assert batch.events[-1] == BlockStored([-5], None, [1, 2], 2, None, None, mm_keys=keys)
        again = msgspec.msgpack.decode(BatchEncoder("map").encode(batch, None))
        assert again[1][-1]["mm_keys"] == keys

    @pytest.mark.parametrize("medium", [[], ["GPU"]])
    def test_array_with_signed_hashes_and_pairs_of_tokens_is_read(self, medium: list[str]) -> None:
        event = ["BlockStored", [-5], -(1 << 63), [[1, 2], [2, 3]], 2, None, *medium]
        found = decode_one(event)
        assert found == BlockStored([-5], -(1 << 63), [(1, 2), (2, 3)], 2, None, *(medium or [None]))
        again = msgspec.msgpack.decode(BatchEncoder("array").encode(EventBatch(1.0, [found], 0), None))
        assert again == [1.0, [[*event[:6], *(medium or [None])]], 0]

    @pytest.mark.parametrize("form", ["array", "map"])
    def test_batch_that_is_a_map_is_read(self, form: Any) -> None:
        events = msgspec.msgpack.decode(BatchEncoder(form).encode(EventBatch(1.0, [BlockRemoved([1], "GPU")]), 0))[1]
        batch = BatchDecoder().decode(pack({"ts": 1.5, "events": events, "data_parallel_rank": 3}))
        assert (batch.ts, batch.events, batch.data_parallel_rank) == (1.5, [BlockRemoved([1], "GPU")], 3)

    def test_removal_with_counts_of_copies_is_read_and_written_again(self) -> None:
        event = {"type": "BlockRemoved", "block_hashes": [1, 2], "medium": "GPU", "remaining_copy_counts": [1, 0]}
        found = decode_one(event)
        assert found == BlockRemoved([1, 2], "GPU", remaining_copy_counts=[1, 0])
        assert msgspec.msgpack.decode(BatchEncoder("map").encode(EventBatch(1.0, [found], 0), None))[1] == [event]

    @pytest.mark.parametrize(
        ("event", "reason"),
        [
            (["BlockStored", [1], None, [2, None], 1, None], "Expected `int | str | array`, got `None` - at `$[3][1]`"),
            (trtllm([1.5]), "Expected `int | str | array`, got `float` - at `$.token_ids[0]`"),
            (["BlockRemoved", ["x"], "GPU"], "Expected `int | bytes`, got `str` - at `$[1][0]`"),
            (trtllm([1], extra_keys=[7]), "Expected `array | null`, got `int`"),
            (["BlockStored", [1], None], "Expected `array` of at least length 5, got 3"),
        ],
    )
    def test_malformed_event_names_the_field(self, event: Any, reason: str) -> None:
        found = BatchDecoder().decode(pack([1.0, [event], 0])).events[-1]
        assert isinstance(found, UnknownEvent)
        assert found.reason.startswith(f"malformed: {reason}")
        assert found.data == event


class TestLargestLegalBatches:
    """The largest batches that pass each limit of the decoder."""

    def test_largest_payload_may_have_keys_of_media_at_each_block(self) -> None:
        size = OPEN_MAX_PAYLOAD_BYTES
        rng = random.Random(1)
        blocks = size // 184
        keys: list[Any] = [[[f"{rng.getrandbits(256):064x}", block % 16], "salt"] for block in range(blocks)]
        more: dict[str, Any] = {"extra_keys": keys, "lookahead_token_ids": [[128_000]] * blocks}
        tokens = [rng.randrange(1 << 17) for _ in range(16 * blocks)]
        stored = BlockStored([rng.randbytes(32) for _ in range(blocks)], None, tokens, 16, None, "GPU", **more)
        payload = BatchEncoder().encode(EventBatch(1.0, [stored]), 0)
        assert size * 0.95 < len(payload) <= size
        (found,) = BatchDecoder(size).decode(payload).events
        assert isinstance(found, BlockStored)
        assert len(found.block_hashes) == blocks

    @pytest.mark.parametrize("maps", [False, True])
    def test_largest_payload_may_hold_the_shortest_events(self, maps: bool) -> None:
        shortest = pack({"type": "BlockRemoved", "block_hashes": []} if maps else ["BlockRemoved", []])
        assert maps or len(shortest) == MIN_EVENT_BYTES
        count = (OPEN_MAX_PAYLOAD_BYTES - 16) // len(shortest)
        payload = b"\x93\x01" + array(count) + shortest * count + b"\xc0"
        assert OPEN_MAX_PAYLOAD_BYTES - 100 < len(payload) <= OPEN_MAX_PAYLOAD_BYTES
        assert len(BatchDecoder(OPEN_MAX_PAYLOAD_BYTES).decode(payload).events) == count

    def test_larger_payload_and_more_events_are_refused_by_name(self) -> None:
        with pytest.raises(CodecError, match="a payload of 101 bytes, at most 100 are taken: max_payload_bytes"):
            BatchDecoder(100).decode(bytes(101))
        count = OPEN_MAX_PAYLOAD_BYTES // MIN_EVENT_BYTES
        decoder = BatchDecoder(OPEN_MAX_PAYLOAD_BYTES)
        batch = decoder.decode(b"\x93\x01" + array(count) + b"\xc0" * count + b"\xc0")
        assert {(type(event), event.reason) for event in batch.events} == {(UnknownEvent, "no type")}
        with pytest.raises(CodecError, match=f"a batch of {count + 1} events, at most {count}"):
            decoder.decode(b"\x93\x01" + array(count + 1) + b"\xc0" * (count + 1) + b"\xc0")


# The repeated bytes of hostile batches.
HOSTILE = {"maps in maps": b"\x81\xc0" * 100 + b"\xc0", "empty maps": b"\x80"}
PROGRAM = """
import resource, sys
from aioshm.events.protocol.encoding import BatchDecoder
from tests.events.protocol.test_decoding import payload_of
payload = payload_of(sys.argv[1], sys.argv[2])
status = lambda key: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
decoder, before = BatchDecoder(), status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
batch = decoder.decode(payload)
print((status("VmHWM") - before) * 1024 / len(payload))
"""


def payload_of(place: str, kind: str) -> bytes:
    """Return a batch of 1 MiB, filled with one kind of value."""
    unit = HOSTILE[kind]
    room = (1 << 20) - 200
    if place == "event":  # of an unknown type
        count = room // len(unit)
        return b"\x93\x01\x91\x92\xa1X" + array(count) + unit * count + b"\xc0"
    if place == "events":  # of an unknown type, each small
        each = b"\x92\xa1X" + array(1000) + unit * 1000
        count = room // len(each)
        return b"\x93\x01" + array(count) + each * count + b"\xc0"
    count = room // len(unit)
    event = b"\x99" + STORED[1:] + array(0) + b"\x01\xc0\xc0\xc0\x91" + array(count) + unit * count
    return b"\x93\x01\x91" + event + b"\xc0"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("place", "kind"), [("extra_keys", "maps in maps"), ("event", "maps in maps"), ("events", "empty maps")]
)
def test_memory_of_hostile_batch_is_bounded(place: str, kind: str) -> None:
    """At most 112 bytes for each byte of the payload, as SECURITY.md says."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, place, kind], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 112.5
