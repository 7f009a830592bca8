"""Names, endpoints and frames that vLLM's publishers and subscribers have, too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshm.errors import CodecError
from aioshm.events import ZmqEventPublisher
from aioshm.events.config import SubscriberSettings, check_endpoint, for_rank, passed_on, publisher_binds
from aioshm.events.protocol import wire
from aioshm.zeromq import hosts

from ..helpers import Ends


class TestNames:
    def test_class_attributes_equal_those_of_vllm(self) -> None:
        assert ZmqEventPublisher.END_SEQ == b"\xff" * 8
        assert ZmqEventPublisher.SHUTDOWN_TIMEOUT == 1.0
        assert ZmqEventPublisher.offset_endpoint_port("tcp://*:5557", 2) == "tcp://*:5559"
        assert ZmqEventPublisher.offset_endpoint_port(None, 2) is None
        with pytest.raises(ValueError, match="port 65536, above 65535"):
            ZmqEventPublisher.offset_endpoint_port("tcp://*:65535", 1)

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
        assert publisher.connect_endpoint == hosts.connectable(publisher.endpoint)
        assert "0.0.0.0" not in publisher.connect_endpoint + publisher.connect_replay_endpoint
        config = publisher.get_publisher_config()
        assert config.endpoint == publisher.connect_endpoint
        assert config.replay_endpoint == publisher.connect_replay_endpoint
        fixed = ends.publisher(replay=None)
        assert fixed.connect_endpoint == fixed.get_publisher_config().endpoint == fixed.endpoint
        assert fixed.connect_replay_endpoint is None


class TestEndpoints:
    @pytest.mark.parametrize(
        ("endpoint", "rank", "expected"),
        [
            ("tcp://*:5557", 0, "tcp://*:5557"),
            ("tcp://*:5557", 3, "tcp://*:5560"),
            ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
            ("tcp://host:0", 4, "tcp://host:0"),
            ("tcp://host:*", 4, "tcp://host:*"),
            ("inproc://kv", 2, "inproc://kv_dp2"),
            ("ipc:///run/tcp.sock", 2, "ipc:///run/tcp.sock_dp2"),
        ],
    )
    def test_ranks_move_endpoints(self, endpoint: str, rank: int, expected: str) -> None:
        assert for_rank(endpoint, rank) == expected

    @pytest.mark.parametrize(
        "endpoint",
        ["", "kv", "tcp://", "tcp://host", "tcp://:1", "tcp://host:x", "tcp://h:65536", "udp://h:1", "tcp://h:²"],
    )
    def test_nonsense_is_named(self, endpoint: str) -> None:
        with pytest.raises(ValueError, match="endpoint"):
            check_endpoint(endpoint)

    def test_ranks_are_not_negative_and_endpoints_are_text(self) -> None:
        with pytest.raises(ValueError, match="-1"):
            for_rank("tcp://host:1", -1)
        with pytest.raises(TypeError, match="bytes"):
            check_endpoint(b"tcp://host:1")  # type: ignore[arg-type]

    @given(st.text(max_size=20), st.integers(0, 100))
    def test_any_text_is_an_endpoint_or_a_value_error(self, text: str, rank: int) -> None:
        try:
            moved = for_rank(text, rank)
        except ValueError:
            return
        check_endpoint(moved)

    def test_binding_by_endpoint(self) -> None:
        binding = ["tcp://*:1", "tcp://[::]:1", "ipc:///x", "inproc://x"]
        assert [publisher_binds(endpoint) for endpoint in [*binding, "tcp://host:1"]] == [True] * 4 + [False]
        settings = SubscriberSettings(topic="")
        assert [settings.binds(endpoint) for endpoint in binding] == [True, False, False, False]


class TestFrames:
    def test_topic_that_is_too_long_to_be_kept_is_refused(self) -> None:
        longest = bytes(wire.MAX_TOPIC_BYTES)
        assert wire.parse_live([longest, wire.pack_seq(5), b"p"]).topic == longest
        assert wire.parse_reply([b"", longest, wire.pack_seq(5), b"p"]) == (longest, 5, b"p")
        for parse in (wire.parse_live, lambda frames: wire.parse_reply([b"", *frames])):
            with pytest.raises(CodecError, match="at most 512 bytes; got 513"):
                parse([longest + b"t", wire.pack_seq(5), b"p"])

    @given(st.lists(st.binary(max_size=10), max_size=5))
    def test_garbage_is_refused_or_understood(self, frames: list[bytes]) -> None:
        for parse in (wire.parse_live, wire.parse_request, wire.parse_reply):
            try:
                parse(frames)
            except CodecError:
                continue
