"""Which release of vLLM a publisher writes like, and the names that vLLM's publisher has."""

from __future__ import annotations

from typing import Any

import pytest

from aioshm.events import (
    EventPublisher,
    ThreadedEventPublisher,
    ZmqEventPublisher,
)
from aioshm.events.config import passed_on
from aioshm.events.protocol import wire
from aioshm.zeromq import hosts

from ..helpers import ANY, Ends


class TestWire:
    @pytest.mark.parametrize(
        ("options", "formats"),
        [
            ({}, ("map", "topic")),
            ({"wire": "vllm-0.24"}, ("map", "legacy")),
            ({"wire": "vllm-0.9"}, ("array", "legacy")),
            ({"wire": "vllm-0.9", "encoding": "map", "replay_format": "topic"}, ("map", "topic")),
        ],
        ids=str,
    )
    def test_wire_names_the_formats_unless_these_are_given(self, options: Any, formats: tuple[str, str]) -> None:
        assert wire.resolve_wire(**options) == formats

    @pytest.mark.parametrize("name", ["wire", "encoding", "replay_format"])
    async def test_bad_names(self, name: Any) -> None:
        with pytest.raises(ValueError, match=f"{name} must be one of .*, not 'vllm-1'"):
            ZmqEventPublisher(0, ANY, bind=True, **{name: "vllm-1"})


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
