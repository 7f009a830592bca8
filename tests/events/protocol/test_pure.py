"""Endpoint arithmetic, frames, outbox and replay buffer: no sockets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioshm.errors import CodecError
from aioshm.events.config import SubscriberSettings, check_endpoint, for_rank, publisher_binds
from aioshm.events.protocol import wire
from aioshm.events.protocol.outbox import Outbox, ReplayBuffer

from ..helpers import batch


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

    def test_ports_end_at_65535(self) -> None:
        with pytest.raises(ValueError, match="65536"):
            for_rank("tcp://host:65535", 1)

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


class TestOutbox:
    def test_drop_uses_up_a_number(self) -> None:
        box = Outbox(2)
        assert [box.put(batch(n)) for n in range(4)] == [True, False, False, False]  # wake the sender?
        assert (box.published, len(box.waiting), box.dropped) == (4, 2, 2)
        sent = []
        while (item := box.take()) is not None:
            sent.append((item[0], item[1] is None))
            box.last_sent = item[0]
        assert sent == [(0, False), (1, False), (4, True)]  # the empty batch 4 shows the hole 2 to 3
        assert box.put(batch(5))
        assert box.take() == (5, batch(5))

    def test_a_batch_that_could_not_be_sent_is_a_hole_too(self) -> None:
        box = Outbox(1)
        box.put(batch(0))
        box.take()  # and never sent
        assert box.take() == (1, None)
        assert box.take() is None


class TestReplayBuffer:
    @given(size=st.integers(0, 700), steps=st.lists(st.integers(1, 3), max_size=1500), start=st.integers(0, 5000))
    @settings(max_examples=60, deadline=None)
    def test_buffer_holds_the_last_batches(self, size: int, steps: list[int], start: int) -> None:
        buffer = ReplayBuffer(size)
        model: list[tuple[int, bytes]] = []
        seq = -1
        for step in steps:
            seq += step
            buffer.append(seq, b"%d" % seq)
            model.append((seq, b"%d" % seq))
        model = model[len(model) - min(size, len(model)) :]
        assert len(buffer) == len(model)
        assert list(buffer.since(start)) == [entry for entry in model if entry[0] >= start]
