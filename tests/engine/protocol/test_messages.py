"""Requests, outputs and calls as bytes: vLLM's, ours as read by vLLM, and garbage."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioshm.engine.protocol.messages import (
    EngineCoreOutputs,
    EnvelopeDecoder,
    SchedulerStats,
    StartWave,
    UtilityOutput,
    error_output,
    is_finished,
    request_id_of,
)
from aioshm.engine.protocol.payloads import (
    INLINE_BYTES,
    MAX_STRANGE_FRAMES,
    MAX_STRANGE_OBJECTS,
    PayloadDecoder,
    PayloadEncoder,
    check_stranger,
)
from aioshm.errors import CodecError, MessageTooLarge

GOLDEN = json.loads(Path(__file__).with_name("golden_data_path.json").read_text())

pytestmark = pytest.mark.opens_nothing


def field(name: str) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in GOLDEN["from_the_field"][name]]


def encoded(payload: Any, max_bytes: int = 1 << 30) -> list[Any]:
    return PayloadEncoder(max_bytes).encode(payload)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


class FieldRequest(msgspec.Struct, array_like=True):
    """The fields of vLLM's request that these tests use."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: Any = None
    sampling_params: Any = None
    pooling_params: Any = None
    arrival_time: float = 0.0
    lora_request: Any = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: torch.Tensor | None = None
    prompt_is_token_ids: list[bool] | None = None
    client_index: int = 0
    current_wave: int = 0


class FieldOutput(msgspec.Struct, array_like=True):
    """The fields of vLLM's output that these tests use."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: torch.Tensor | None = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    trace_headers: Any = None
    prefill_stats: Any = None
    routed_experts: np.ndarray | None = None


class Inner(msgspec.Struct, frozen=True):
    some: Any
    array: np.ndarray | None = None


class Outer(msgspec.Struct):
    inners: dict[str, Inner]


EMBEDS = torch.arange(128, dtype=torch.float32).reshape(4, 32)
HALVES = torch.arange(256, dtype=torch.bfloat16).reshape(16, 16)
EXPERTS = np.arange(6, dtype=np.int16).reshape(2, 3)


class TestFromTheField:
    @pytest.mark.parametrize("type_", [FieldRequest, None])
    @pytest.mark.parametrize(
        ("name", "embeds"),
        [
            ("request", None),
            ("request with a large tensor", EMBEDS),
            ("request with a small tensor", EMBEDS[:1, :4].to(torch.bfloat16)),
        ],
    )
    def test_requests(self, name: str, embeds: Any, type_: Any) -> None:
        request = PayloadDecoder(type_).decode(field(name))
        fields = list(request) if type_ is None else list(msgspec.structs.astuple(request))
        assert fields[1] == [1, 2, 300]
        assert fields[5] == 12.5
        assert same(fields[9], embeds)
        assert request_id_of(request).startswith("req-")
        if name == "request":
            assert fields[11:13] == [1, 3]

    def test_plain_messages(self) -> None:
        decode = PayloadDecoder().decode
        assert decode(field("abort")) == ["req-1", "req-2"]
        assert decode(field("call")) == [1, 77, "collective_rpc", ["echo", 1.5, None, ["x"], {"k": True}]]
        assert msgspec.convert(decode(field("start wave")), StartWave) == (4, 1)
        assert msgspec.convert(decode(field("start wave, nobody excluded")), StartWave) == (4, None)

    @pytest.mark.parametrize("type_", [FieldOutput, None])
    def test_outputs(self, type_: Any) -> None:
        decode = EnvelopeDecoder(type_).decode
        envelope = decode(field("outputs"))
        assert (envelope.engine_index, envelope.timestamp, envelope.finished_requests) == (1, 99.5, {"req-2"})
        assert [request_id_of(output) for output in envelope.outputs] == ["req-1", "req-2"]
        assert [is_finished(output) for output in envelope.outputs] == [False, True]
        [refused] = decode(field("refused request")).outputs
        assert is_finished(refused)
        [output] = decode(field("outputs with tensors")).outputs
        fields = output if type_ is None else msgspec.structs.astuple(output)
        assert same(fields[4], HALVES)
        assert same(fields[12], EXPERTS)

    def test_answers(self) -> None:
        decode = EnvelopeDecoder().decode
        assert decode(field("answer")).utility_output == UtilityOutput(77, None, (None, {"a": [1, None]}))
        assert decode(field("answer None")).utility_output == UtilityOutput(78, None, (None, None))
        assert decode(field("failed call")).utility_output == UtilityOutput(79, "Call to x method failed: no")

    def test_reports_to_coordinators(self) -> None:
        decode = EnvelopeDecoder().decode
        stats = msgspec.convert(decode(field("counts")).scheduler_stats, SchedulerStats)
        assert stats == SchedulerStats(3, 4, 5, 6, 0.5)
        assert decode(field("wave complete")).wave_complete == 6
        assert decode(field("start of a wave")).start_wave == 7


class TestReadByTheField:
    """These bytes were given to vLLM's own decoder when they were captured; they must not change."""

    @pytest.mark.parametrize(
        ("name", "payload"),
        [
            ("request", FieldRequest("req-1", [1, 2, 300], arrival_time=12.5, client_index=1, current_wave=3)),
            (
                "request with a large tensor",
                FieldRequest("req-2", [1, 2, 300], arrival_time=12.5, prompt_embeds=EMBEDS),
            ),
            (
                "outputs with tensors",
                EngineCoreOutputs(0, [["req-1", [1], None, None, HALVES, 1, *[None] * 6, EXPERTS]], timestamp=99.5),
            ),
            (
                "outputs",
                EngineCoreOutputs(
                    1,
                    [["req-1", [5]], ["req-2", [6, 7], None, None, None, 0, 7]],
                    timestamp=99.5,
                    finished_requests={"req-2"},
                ),
            ),
            (
                "answer",
                EngineCoreOutputs(timestamp=99.5, utility_output=UtilityOutput(77, None, (None, {"a": [1, None]}))),
            ),
            ("failed call", EngineCoreOutputs(timestamp=99.5, utility_output=UtilityOutput(79, "no"))),
            ("counts", EngineCoreOutputs(2, timestamp=99.5, scheduler_stats=SchedulerStats(3, 4, 5, 6, 0.5))),
            ("wave complete", EngineCoreOutputs(0, timestamp=99.5, wave_complete=6)),
            ("start of a wave", EngineCoreOutputs(2, timestamp=99.5, start_wave=7)),
        ],
    )
    def test_bytes(self, name: str, payload: Any) -> None:
        golden = [bytes.fromhex(frame) for frame in GOLDEN["read_by_the_field"][name]]
        frames = [bytes(frame) for frame in encoded(payload)]
        if name.startswith("request"):  # the struct that was captured had fewer fields' types, not other bytes
            assert msgspec.msgpack.decode(frames[0]) == msgspec.msgpack.decode(golden[0])
            assert frames[1:] == golden[1:]
        else:
            assert frames == golden


class TestArrays:
    @pytest.mark.parametrize(
        "value",
        [
            np.arange(1000.0).reshape(10, 100)[:, ::2],
            np.asfortranarray(np.arange(1000).reshape(10, 100)),
            np.array(5, ">i4"),
            np.zeros((0, 3), np.float16),
            np.array(["ab", "c"]),
            np.array(["2020-01-01"], "datetime64[D]"),
            torch.tensor(2.5),
            torch.zeros(3, 0),
            torch.ones(700, dtype=torch.float8_e4m3fn).reshape(7, 100).t(),
        ],
        ids=str,
    )
    def test_there_and_back(self, value: Any) -> None:
        frames = [bytes(frame) for frame in encoded({"a": [value, {"b": value}], "c": ["<f4", [1], "no array"]})]
        assert (len(frames) > 1) == (value.nbytes >= 256)
        decoded = PayloadDecoder().decode(frames)
        for arrived in (decoded["a"][0], decoded["a"][1]["b"]):
            if isinstance(value, torch.Tensor):
                assert torch.equal(arrived.float(), value.float())
                assert arrived.dtype == value.dtype
            else:
                assert same(arrived, value)
                assert arrived.flags.writeable
            assert arrived.shape == value.shape
        assert decoded["c"] == ["<f4", [1], "no array"]

    def test_in_structs(self) -> None:
        array = np.arange(100)
        for value in (array, array[:2]):
            frames = encoded(Outer({"a": Inner({"deep": [value]}, value)}))
            inner = PayloadDecoder(Outer).decode(frames).inners["a"]
            assert same(inner.some["deep"][0], value)
            assert same(inner.array, value)

    def test_output_of_another_type_leaves_the_other_outputs_readable(self) -> None:
        class Sliced(msgspec.Struct, array_like=True):
            request_id: str
            part: slice
            halves: torch.Tensor
            number: float

        outputs = [["a", 5], ["b", slice(1, 2), HALVES, np.float32(1.5)]]
        envelope = EnvelopeDecoder(Sliced).decode(encoded(EngineCoreOutputs(3, outputs, finished_requests={"b"})))
        unreadable, output = envelope.outputs
        assert (unreadable.request_id, unreadable.finished) == ("a", False)
        assert (output.part, output.number) == (slice(1, 2, None), 1.5)
        assert same(output.halves, HALVES)
        assert (envelope.engine_index, envelope.finished_requests) == (3, {"b"})

    @pytest.mark.parametrize(
        "value",
        [object(), np.array([object()]), np.zeros(2, "i4,f4"), torch.ones(3).to_sparse(), torch.ones(2, device="meta")],
        ids=lambda value: type(value).__name__,
    )
    def test_values_that_cannot_be_encoded_are_refused(self, value: Any) -> None:
        encoder = PayloadEncoder(1 << 30)
        with pytest.raises(CodecError, match="cannot encode list"):
            encoder.encode([np.zeros(1000), value])
        assert len(encoder.encode(1)) == 1  # nothing is left of what failed
        with pytest.raises(MessageTooLarge, match="more than 4000"):
            encoded(np.zeros(4000, np.uint8), 4000)

    @pytest.mark.parametrize(
        "array",
        [
            ["<f4", [2], 1],  # 8 bytes, and the frame has 512
            ["<f4", [128], 2],
            ["float33", [128], 1],
            ["|O", [64], 1],
            ["<f4", [2**62, 2], 1],
            ["<f4", [-128], 1],
        ],
    )
    def test_list_that_is_no_array_stays_a_list(self, array: list[Any]) -> None:
        request = ["req", [1, 2, 300], None, None, None, 1.0, None, None, None, array]
        frames = [msgspec.msgpack.encode(request), bytes(512)]
        assert PayloadDecoder().decode(frames)[9] == array
        with pytest.raises(CodecError, match="cannot decode"):
            PayloadDecoder(FieldRequest).decode(frames)

    def test_more_arrays_than_frames_travel_inside_the_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aioshm.engine.protocol.payloads.MAX_FRAMES", 50)
        array = np.arange(INLINE_BYTES, dtype="u1")
        frames = PayloadEncoder(1 << 30).encode([array] * 60)
        assert len(frames) == 50
        found = PayloadDecoder().decode(frames)
        assert len(found) == 60
        with pytest.raises(CodecError, match="frames"):
            PayloadDecoder().decode([b"\x90"] * 51)
        assert all((each == array).all() for each in found)

    def test_most_objects_and_frames_of_a_peer_without_keys_pass(self) -> None:
        most = msgspec.msgpack.encode([0x9090] * (MAX_STRANGE_OBJECTS - 1))
        check_stranger([most] + [b""] * (MAX_STRANGE_FRAMES - 1))
        with pytest.raises(CodecError, match=f"more than {MAX_STRANGE_FRAMES} frames"):
            check_stranger([most] + [b""] * MAX_STRANGE_FRAMES)
        with pytest.raises(CodecError, match=f"more than {MAX_STRANGE_OBJECTS} objects"):
            check_stranger([msgspec.msgpack.encode([0] * MAX_STRANGE_OBJECTS)])
        check_stranger([msgspec.msgpack.encode([b"\x90" * 10_000_000, "\x7f" * 10_000_000])])


class TestIds:
    def test_places(self) -> None:
        for payload in ({"request_id": "a"}, ["a"], FieldRequest("a", None)):
            assert request_id_of(payload) == "a"
        for payload in ({}, [], [1], 5, None, {"request_id": 5}):
            with pytest.raises(CodecError, match="request_id"):
                request_id_of(payload)

    def test_finished(self) -> None:
        for last in (
            {"finish_reason": "stop"}, {"finished": True}, ["a", [], 0, 0, 0, 0], error_output("a", "b"),
            FieldOutput("a", [], finish_reason=0),
        ):  # fmt: skip
            assert is_finished(last)
        unfinished = {"finish_reason": None, "finished": False}
        for more in ({}, unfinished, ["a", [], 0, 0, 0, None], ["a"], FieldOutput("a", [])):
            assert not is_finished(more)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=4,
)


class TestGarbage:
    @given(plain)
    def test_plain_data_arrives_as_it_is(self, payload: Any) -> None:
        assert PayloadDecoder().decode(encoded(payload)) == payload

    @given(st.lists(st.binary(max_size=60), min_size=1, max_size=3))
    def test_bytes(self, frames: list[bytes]) -> None:
        for decoder in (PayloadDecoder(FieldRequest), PayloadDecoder(), EnvelopeDecoder(FieldOutput)):
            with suppress(CodecError):
                decoder.decode(frames)

    @given(st.lists(plain, max_size=7), st.lists(st.binary(max_size=60), max_size=1))
    def test_envelopes(self, fields: list[Any], more: list[bytes]) -> None:
        frames = [msgspec.msgpack.encode(fields), *more]
        with suppress(CodecError):
            EnvelopeDecoder(FieldOutput).decode(frames)
