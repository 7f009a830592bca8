"""Which release of vLLM a publisher writes like, and the names that vLLM's publisher has."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from aioshm.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
    ThreadedEventPublisher,
    ZmqEventPublisher,
)
from aioshm.events.config import passed_on
from aioshm.events.protocol import wire
from aioshm.zeromq import hosts

from ..helpers import ANY, PATIENCE_S, Ends
from ..raw import Raw

EVENTS = [
    BlockStored([2**64 - 1, b"\x01" * 32], 7, [1, 2, 3, 4], 2, None, "GPU", None, [("salt",), None]),
    BlockStored([1], None, [5], 1, 3, None, "adapter", None, 0, "full", None, "LOCAL", "cpu", "s", [[9]]),
    BlockRemoved([b"\x02" * 32], "CPU", 1),
    AllBlocksCleared(),
]


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """The events of vLLM 0.33 with their required fields, as its consumers decode them."""


class Stored(Event, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class Removed(Event, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(Event, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class ArrayStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """The first release, which ignores further items of the array."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class ArrayRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[bytes | int]


class ArrayCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[ArrayStored | ArrayRemoved | ArrayCleared]
    data_parallel_rank: int | None = None


async def published(ends: Ends, raw: Any, **options: Any) -> tuple[list[bytes], list[list[bytes]]]:
    """Return a live message, and the answer of a replay without the empty first frames."""
    publisher = ends.publisher(topic="kv", **options)
    subscriber: Raw = raw(zmq.SUB, publisher.endpoint)
    async with asyncio.timeout(PATIENCE_S):
        while not subscriber.socket.poll(0):
            publisher.publish(EventBatch(1.0, EVENTS))
            await asyncio.sleep(0.01)
    live = await subscriber.receive()
    answer = await raw(zmq.DEALER, publisher.replay_endpoint).ask(b"", bytes(8))
    return live, [frames[1:] for frames in answer]


def kind(event: Any) -> str:
    return type(event).__name__.removeprefix("Array").removeprefix("AllBlocks").removeprefix("Block")


def same(found: Any, expected: Any) -> bool:
    names = found.__struct_fields__
    return kind(found) == kind(expected) and all(getattr(found, name) == getattr(expected, name) for name in names)


class TestWire:
    @pytest.mark.parametrize(
        ("options", "kind", "end"),
        [
            ({}, Batch, [b"", b"\xff" * 8, b""]),
            ({"wire": "vllm-0.24"}, Batch, [b"\xff" * 8, b""]),
            ({"wire": "vllm-0.9"}, ArrayBatch, [b"\xff" * 8, b""]),
            ({"encoding": "array", "replay_format": "topic"}, ArrayBatch, [b"", b"\xff" * 8, b""]),
        ],
        ids=str,
    )
    async def test_consumers_of_each_release_read_live_batches_and_replies(
        self, ends: Ends, raw: Any, options: dict[str, Any], kind: Any, end: list[bytes]
    ) -> None:
        live, answer = await published(ends, raw, **options)
        for *head, seq, payload in [live, *answer[:-1]]:
            assert head in ([], [b"kv"])
            assert len(seq) == 8
            batch = msgspec.msgpack.decode(payload, type=kind)
            assert len(batch.events) == len(EVENTS)
            assert all(map(same, batch.events, EVENTS))
        assert len(answer[0]) == len(end)
        assert answer[-1] == end

    @pytest.mark.parametrize("name", ["wire", "encoding", "replay_format"])
    async def test_bad_names(self, name: Any) -> None:
        with pytest.raises(ValueError, match=f"{name} must be one of .*, not 'vllm-1'"):
            ZmqEventPublisher(0, ANY, bind=True, **{name: "vllm-1"})

    def test_every_wire_was_written_by_a_release(self) -> None:
        assert set(wire.WIRES.values()) == {("array", "legacy"), ("map", "legacy"), ("map", "topic")}


def _vllm() -> Path | None:
    """Find vLLM's files: where AIOSHM_VLLM_FILES says, or in one of the checkout's environments."""
    root = Path(__file__).parents[3]
    places = [Path(os.environ["AIOSHM_VLLM_FILES"])] if "AIOSHM_VLLM_FILES" in os.environ else []
    places += sorted(root.glob(".venv*/lib/python3*/site-packages"))
    return next((at for at in places if (at / "vllm/distributed/kv_events.py").exists()), None)


@pytest.fixture
def kv_events(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own module, without the rest of it."""
    files = _vllm()
    if files is None:
        pytest.skip(
            "vLLM's files are not there: make bench-rivals fetches them, or AIOSHM_VLLM_FILES names their folder"
        )

    def module(name: str, **contents: Any) -> None:
        made = types.ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)

    nothing = types.SimpleNamespace(info=print, warning=print, exception=print)
    network = dict.fromkeys(["get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"], lambda *_: None)
    for name in ("vllm", "vllm.config", "vllm.utils", "vllm.v1", "vllm.v1.core"):
        module(name)
    module("vllm.config.kv_events", KVEventsConfig=dict)
    module("vllm.logger", init_logger=lambda _: nothing)
    module("vllm.utils.network_utils", **network)
    module("vllm.v1.core.kv_cache_utils", ExternalBlockHash=bytes | int)
    spec = importlib.util.spec_from_file_location("aioshm_test_kv_events", files / "vllm/distributed/kv_events.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class TestVllmItself:
    async def test_its_decoder_reads_the_default(self, kv_events: Any, ends: Ends, raw: Any) -> None:
        live, answer = await published(ends, raw)
        decoder = msgspec.msgpack.Decoder(type=kv_events.KVEventBatch)
        for _, _, payload in [live, *answer[:-1]]:
            batch = decoder.decode(payload)
            assert [type(event).__name__ for event in batch.events] == [type(event).__name__ for event in EVENTS]
            assert all(map(same, batch.events, EVENTS))
        assert answer[-1][1] == kv_events.ZmqEventPublisher.END_SEQ

    def test_its_names_say_the_same_here(self, kv_events: Any) -> None:
        theirs, ours = kv_events.ZmqEventPublisher, ThreadedEventPublisher
        assert ours.END_SEQ == theirs.END_SEQ
        assert ours.SHUTDOWN_TIMEOUT == theirs.SHUTDOWN_TIMEOUT
        for endpoint in (None, "", "tcp://*:5557", "tcp://*:0", "tcp://10.0.0.5:5557", "inproc://cache"):
            for rank in (0, 1, 7):
                assert ours.offset_endpoint_port(endpoint, rank) == theirs.offset_endpoint_port(endpoint, rank)


class TestNames:
    @pytest.mark.parametrize("kind", [EventPublisher, ZmqEventPublisher, ThreadedEventPublisher])
    def test_class_attributes_equal_those_of_vllm(self, kind: Any) -> None:
        assert kind.END_SEQ == b"\xff" * 8
        assert kind.SHUTDOWN_TIMEOUT == 1.0
        assert kind.offset_endpoint_port("tcp://*:5557", 2) == "tcp://*:5559"
        assert kind.offset_endpoint_port("tcp://*:0", 2) == "tcp://*:0"
        assert kind.offset_endpoint_port("inproc://cache", 2) == "inproc://cache_dp2"
        assert kind.offset_endpoint_port(None, 2) is None
        with pytest.raises(ValueError, match="above 65535"):
            kind.offset_endpoint_port("tcp://*:65535", 1)

    def test_wildcard_endpoint_is_passed_on_with_the_hosts_address(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hosts, "own_address", lambda: "10.0.0.5")
        for endpoint in ("tcp://*:41234", "tcp://0.0.0.0:41234", "tcp://[::]:41234", "tcp://:::41234"):
            assert hosts.connectable(endpoint) == "tcp://10.0.0.5:41234"
        for endpoint in ("tcp://127.0.0.1:1", "tcp://[fe80::1]:1", "ipc:///x", "inproc://x"):
            assert hosts.connectable(endpoint) == endpoint
        monkeypatch.setattr(hosts, "own_address", lambda: "2001:db8::5")
        assert hosts.connectable("tcp://*:41234") == "tcp://[2001:db8::5]:41234"
        assert passed_on("tcp://*:5557", "tcp://0.0.0.0:5557") == "tcp://0.0.0.0:5557"
        assert passed_on("tcp://*:0", "tcp://0.0.0.0:41234") == "tcp://[2001:db8::5]:41234"

    async def test_a_publisher_at_a_port_of_the_systems_choice(self, ends: Ends) -> None:
        publisher = ends.publisher(endpoint="tcp://*:0", replay="tcp://*:0")
        port = publisher.endpoint.rpartition(":")[2]
        assert publisher.endpoint == f"tcp://0.0.0.0:{port}"
        own = hosts.connectable(publisher.endpoint)
        assert publisher.connect_endpoint == own
        assert "0.0.0.0" not in own
        assert "0.0.0.0" not in publisher.connect_replay_endpoint
        config = publisher.get_publisher_config()
        assert (config.endpoint, config.replay_endpoint) == (own, publisher.connect_replay_endpoint)
        fixed = ends.publisher(replay=None)
        assert fixed.connect_endpoint == fixed.endpoint
        assert fixed.connect_replay_endpoint is None
        assert fixed.get_publisher_config().endpoint == fixed.endpoint
