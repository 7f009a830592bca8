"""Frames recorded from the real publishers of every schema generation of vLLM.

``golden.json`` was recorded by loading ``vllm/distributed/kv_events.py`` of each version from its wheel,
publishing the same events through its own ``ZmqEventPublisher`` (topic ``kv``) and storing what its PUB and
replay sockets sent.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioshm.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from aioshm.events.protocol import wire
from aioshm.events.protocol.encoding import BatchDecoder, BatchEncoder

GOLDEN: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("golden.json").read_text())
WITH_TOPIC_IN_REPLIES = {"0.33.0"}


def value(stored: Any) -> Any:
    if isinstance(stored, dict):
        return bytes.fromhex(stored["hex"])
    return [value(item) for item in stored] if isinstance(stored, list) else stored


def event(kind: str, fields: dict[str, Any]) -> KVEvent:
    values = {name: value(item) for name, item in fields.items()}
    if values.get("extra_keys"):
        values["extra_keys"] = [None if item is None else tuple(item) for item in values["extra_keys"]]
    if kind == "stored":
        return BlockStored(**{"medium": None} | values)
    return BlockRemoved(**{"medium": None} | values) if kind == "removed" else AllBlocksCleared()


@pytest.fixture(params=GOLDEN)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def frames(version: str, port: str) -> list[list[bytes]]:
    return [[bytes.fromhex(frame) for frame in message] for message in GOLDEN[version][port]]


def expected(version: str) -> list[KVEventBatch]:
    rank = 0 if version == "0.9.1" else 3
    events = [event(*item) for item in GOLDEN[version]["events"]]
    return [KVEventBatch(1700000000.25, events, rank), KVEventBatch(1700000001.5, [], rank)]


def test_recordings_have_one_event_of_each_length() -> None:
    assert [len(entry["fields"]) for entry in GOLDEN.values()] == [5, 5, 6, 7, 8, 9, 11, 11, 15]


def test_live_frames(version: str) -> None:
    decoder = BatchDecoder()
    live = [wire.parse_live(message) for message in frames(version, "live")]
    assert [(topic, seq) for topic, seq, _ in live] == [(b"kv", 0), (b"kv", 1)]
    assert [decoder.decode(payload) for _, _, payload in live] == expected(version)


def test_replay_frames(version: str) -> None:
    *replies, end = [wire.parse_reply(message) for message in frames(version, "replay")]
    assert end is None
    topic = b"kv" if version in WITH_TOPIC_IN_REPLIES else None
    live = [wire.parse_live(message) for message in frames(version, "live")]
    assert [tuple(reply or ()) for reply in replies] == [(topic, seq, payload) for _, seq, payload in live]


def test_replies_are_written_as_they_were_recorded(version: str) -> None:
    form: wire.ReplayFormat = "topic" if version in WITH_TOPIC_IN_REPLIES else "legacy"
    live = [wire.parse_live(message) for message in frames(version, "live")]
    written = [wire.reply(b"kv", seq, payload, form) for _, seq, payload in live]
    assert [*written, wire.end_reply(form)] == frames(version, "replay")


@pytest.mark.parametrize("native", [True, False])
def test_map_payloads_are_written_byte_for_byte(native: bool) -> None:
    payloads = [wire.parse_live(message).payload for message in frames("0.33.0", "live")]
    encoder = BatchEncoder("map", native=native)
    assert [encoder.encode(batch, None) for batch in expected("0.33.0")] == payloads


def test_map_payloads_say_the_same_keys_in_the_same_order() -> None:
    """0.24's maps have fewer than 16 fields at most, so their header is a shorter one."""
    real = msgspec.msgpack.decode(wire.parse_live(frames("0.24.0", "live")[0]).payload)
    ours = msgspec.msgpack.decode(BatchEncoder("map").encode(expected("0.24.0")[0], None))
    assert ours == real
    assert [list(one) for one in ours[1]] == [list(one) for one in real[1]]


def test_array_payloads_of_a_full_event_are_written_byte_for_byte() -> None:
    """Releases without trailing nils; later releases wrote nils, which this library omits."""
    batch = expected("0.13.0")[0]
    assert BatchEncoder("array").encode(batch, None) == wire.parse_live(frames("0.13.0", "live")[0]).payload
