"""Messages of the coordinator: vLLM's bytes, and garbage."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshm.engine.protocol.control import (
    MAX_REPORT_BYTES,
    decode_from_front_end,
    decode_report,
    encode,
    encode_start,
)
from aioshm.engine.protocol.messages import SchedulerStats, StartWave
from aioshm.engine.protocol.waves import Published

# Reports of engines to the coordinator, written by the encoder of vLLM 0.33.0.
STATS = bytes.fromhex(
    "990190de0012b06e756d5f72756e6e696e675f7265717303b06e756d5f77616974696e675f7265717304b86e756d5f736b6970706564"
    "5f77616974696e675f7265717300ba6e756d5f6b765f66657463685f726571735f62795f737461676580ac737465705f636f756e7465"
    "7207ac63757272656e745f7761766502ae6b765f63616368655f7573616765cb3fd0000000000000b1697465726174696f6e5f646574"
    "61696c73c0b27072656669785f63616368655f737461747388a57265736574c2a8726571756573747300a77175657269657300a46869"
    "747300b2707265656d707465645f726571756573747300b1707265656d707465645f7175657269657300ae707265656d707465645f68"
    "69747300ae686974735f62795f736f7572636580bc636f6e6e6563746f725f7072656669785f63616368655f7374617473c0b86b765f"
    "63616368655f6576696374696f6e5f6576656e747390b3737065635f6465636f64696e675f7374617473c0b26b765f636f6e6e656374"
    "6f725f7374617473c0b265635f636f6e6e6563746f725f7374617473c0b577616974696e675f6c6f72615f616461707465727380b572"
    "756e6e696e675f6c6f72615f616461707465727380af6375646167726170685f7374617473c0aa706572665f7374617473c0cb402900"
    "0000000000c0c0c0c0c0"
)
COMPLETE = bytes.fromhex("990090c0cb4029000000000000c0c005c0c0")
START = bytes.fromhex("990190c0cb4029000000000000c0c0c006c0")


def pack(value: Any) -> list[bytes]:
    return [msgspec.msgpack.encode(value)]


class TestReports:
    @pytest.mark.parametrize(
        ("frame", "report"),
        [
            (STATS, (1, SchedulerStats(3, 4, 7, 2, 0.25), None, None)),
            (COMPLETE, (0, None, 5, None)),
            (START, (1, None, None, 6)),
        ],
        ids=["counts", "complete", "start"],
    )
    def test_of_vllm(self, frame: bytes, report: Any) -> None:
        found = decode_report([frame])
        assert (found.engine_index, found.scheduler_stats, found.wave_complete, found.start_wave) == report

    def test_missing_fields_have_defaults(self) -> None:
        report = decode_report(pack([3, [], {"num_running_reqs": 1}]))
        assert report.scheduler_stats == SchedulerStats(num_running_reqs=1)

    @pytest.mark.parametrize(
        ("frames", "reason"),
        [
            ([], "payload frames"),
            ([STATS, b""], "payload frames"),
            ([b""], "undecodable"),
            ([b"\xc1"], "undecodable"),
            ([b"\x91" * 50_000], "undecodable"),
            ([STATS[:-30]], "undecodable"),
            ([bytes(MAX_REPORT_BYTES + 1)], "bytes, more than"),
            (pack({"engine_index": 0}), "undecodable"),
            (pack([-1]), "undecodable"),
            (pack([65536]), "undecodable"),
            (pack([0, [], {"num_running_reqs": -1}]), "undecodable"),
            (pack([0, [], {"kv_cache_usage": float("nan")}]), "engine 0 uses nan"),
            (pack([0, [], None, 0.0, None, None, -1]), "undecodable"),
            (pack([0, [], None, 0.0, None, None, None, 1 << 63]), "undecodable"),
            (pack([7, [["request", [1]]]]), "engine 7 has sent outputs"),
            (pack([7, [], None, 0.0, [1, None, None]]), "engine 7 has sent outputs"),
        ],
    )
    def test_others_are_refused(self, frames: list[bytes], reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            decode_report(frames)


class TestFrontEnds:
    def test_new_number_of_engines_and_request_to_paused_engines(self) -> None:
        assert decode_from_front_end(pack(("SCALE_ELASTIC_EP", 4))) == 4
        for exclude in (None, 3):
            assert decode_from_front_end(pack((exclude, 7))) == StartWave(7, exclude)

    @pytest.mark.parametrize(
        "message",
        [
            ("SCALE_ELASTIC_EP", 0),
            ("SCALE_ELASTIC_EP", 65537),
            ("SCALE", 3),
            (-1, 0),
            (1, -1),
            (1,),
            None,
        ],
    )
    def test_others_are_refused(self, message: Any) -> None:
        with pytest.raises(ValueError, match=r"engines|undecodable"):
            decode_from_front_end(pack(message))


@given(st.lists(st.binary(max_size=40) | st.sampled_from([STATS, START]).map(lambda good: good[:9]), max_size=3))
def test_garbage_is_a_value_error(frames: list[bytes]) -> None:
    for decode in (decode_report, decode_from_front_end):
        try:
            decode(frames)
        except ValueError:
            continue


class TestSent:
    def test_to_engines(self) -> None:
        assert encode_start(StartWave(5, exclude=1)) == [b"\x02", b"\x92\x05\x01"]
        assert encode_start(StartWave(5, exclude=None)) == [b"\x02", b"\x92\x05\xc0"]

    def test_to_front_ends(self) -> None:
        published = Published([[1, 2, 0.5], [0, 0, 0.0]], 3, True)
        assert encode(published).hex() == "9392930102cb3fe0000000000000930000cb000000000000000003c3"
        assert encode(Published(None, 4, False)) == b"\x93\xc0\x04\xc2"
