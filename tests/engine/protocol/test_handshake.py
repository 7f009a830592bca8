"""The handshake without sockets: bytes, order, refusals."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aioshm.engine import (
    CoreEngine,
    CoreEngineState,
    EngineHandshake,
    EngineHandshakeMetadata,
    EngineZmqAddresses,
    FrontEndHandshake,
)
from aioshm.engine.protocol.handshake import MAX_INIT_BYTES, MAX_PAYLOAD_BYTES
from aioshm.errors import HandshakeError

NEW, CONNECTED, READY = CoreEngineState
encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode

pytestmark = pytest.mark.opens_nothing

# The bytes of vLLM's releases, built from their definitions.
HELLO_0_9_1 = b"\x82\xa6status\xa5HELLO\xa5local\xc3"
HELLO_LATER = b"\x83\xa6status\xa5HELLO\xa5local\xc3\xa8headless\xc2"
HELLO_HEADLESS = b"\x83\xa6status\xa5HELLO\xa5local\xc2\xa8headless\xc3"
READY_0_9_1 = b"\x83\xa6status\xa5READY\xa5local\xc3\xaenum_gpu_blocks\xcd\x04\xd2"
READY_0_11 = (
    b"\x86\xa6status\xa5READY\xa5local\xc3\xa8headless\xc2\xaenum_gpu_blocks\xcd\x04\xd2"
    b"\xb0dp_stats_address\xc0\xb4parallel_config_hash\xa4c0de"
)
READY_0_33 = b"\x83\xa6status\xa5READY\xa5local\xc3\xa8headless\xc2"
INIT_0_9_1 = (
    b"\x82\xa9addresses\x84\xa6inputs\x91\xaaipc:///a/i\xa7outputs\x91\xaaipc:///a/o"
    b"\xb1coordinator_input\xc0\xb2coordinator_output\xc0"
    b"\xafparallel_config\x83\xb7data_parallel_master_ip\xa9127.0.0.1"
    b"\xb9data_parallel_master_port\xcds<\xb2data_parallel_size\x02"
)
INIT_0_33 = (
    b"\x82\xa9addresses\x85\xa6inputs\x91\xaaipc:///a/i\xa7outputs\x91\xaaipc:///a/o"
    b"\xb1coordinator_input\xc0\xb2coordinator_output\xc0\xbefrontend_stats_publish_address\xc0"
    b"\xafparallel_config\x85\xb7data_parallel_master_ip\xa9127.0.0.1"
    b"\xb9data_parallel_master_port\xcds<\xbf_data_parallel_master_port_list\x91\xcds="
    b"\xb1_coord_store_port\x00\xb2data_parallel_size\x02"
)
INIT_0_12 = b"\x83" + INIT_0_33[1:] + b"\xb4parallel_config_hash\xa4c0de"
INIT_INDEPENDENT = INIT_0_33[: INIT_0_33.index(b"\xafparallel_config")] + b"\xafparallel_config\x80"

ADDRESSES = EngineZmqAddresses(["ipc:///a/i"], ["ipc:///a/o"])
PARALLEL = {
    "data_parallel_master_ip": "127.0.0.1",
    "data_parallel_master_port": 29500,
    "_data_parallel_master_port_list": [29501],
    "_coord_store_port": 0,
    "data_parallel_size": 2,
}


def front_end(*engines: CoreEngine, **options: Any) -> FrontEndHandshake:
    return FrontEndHandshake(engines or (CoreEngine(0), CoreEngine(1)), copy.deepcopy(ADDRESSES), PARALLEL, **options)


def hello(local: bool = True, **fields: Any) -> list[bytes]:
    return [encode({"status": "HELLO", "local": local, **fields})]


def ready(local: bool = True, **fields: Any) -> list[bytes]:
    return [encode({"status": "READY", "local": local, **fields})]


def at(state: CoreEngineState, *engines: CoreEngine, **options: Any) -> FrontEndHandshake:
    """Return a front end whose engine 1 is in this state."""
    front = front_end(*engines, **options)
    if state is not NEW:
        front.receive(b"\x01\0", hello())
    if state is READY:
        front.receive(b"\x01\0", ready())
    return front


class TestWire:
    def test_both_ends_write_vllm_s_bytes(self) -> None:
        engine = EngineHandshake(0)
        assert engine.hello() == HELLO_LATER
        assert front_end().receive(b"\0\0", [HELLO_LATER]) == [b"\0\0", INIT_0_33]
        engine.receive([INIT_0_33])
        fields = {"num_gpu_blocks": 1234, "dp_stats_address": None, "parallel_config_hash": "c0de"}
        assert engine.ready(fields) == READY_0_11
        assert EngineHandshake(0, local=False, headless=True).hello() == HELLO_HEADLESS

    def test_the_hash_travels_in_init_where_the_front_end_has_one(self) -> None:
        assert front_end(config_hash="c0de").receive(b"\0\0", [HELLO_LATER]) == [b"\0\0", INIT_0_12]

    def test_front_end_reads_every_release(self) -> None:
        front = front_end(*map(CoreEngine, range(3)))
        for rank, second in enumerate((READY_0_9_1, READY_0_11, READY_0_33)):
            identity = bytes([rank, 0])
            assert front.receive(identity, [HELLO_LATER if rank else HELLO_0_9_1]) is not None
            assert not front.complete
            assert front.receive(identity, [second]) is None
        assert front.complete
        assert front.num_gpu_blocks == 2 * 1234

    def test_engine_reads_every_release(self) -> None:
        for init, parallel in (
            (INIT_0_9_1, {name: value for name, value in PARALLEL.items() if not name.startswith("_")}),
            (INIT_0_12, PARALLEL),
            (INIT_0_33, PARALLEL),
            (INIT_INDEPENDENT, {}),
        ):
            assert EngineHandshake(0).receive([init]) == EngineHandshakeMetadata(ADDRESSES, parallel)

    def test_objects_with_the_fields_attributes(self) -> None:
        config = SimpleNamespace(**PARALLEL, tensor_parallel_size=8, _other=object())
        front = FrontEndHandshake([CoreEngine(0)], ADDRESSES, config)
        assert front.receive(b"\0\0", hello()) == [b"\0\0", INIT_0_33]
        front = FrontEndHandshake([CoreEngine(0)], ADDRESSES, None)
        assert front.receive(b"\0\0", hello()) == [b"\0\0", INIT_INDEPENDENT]


class TestFrontEnd:
    def test_unknown_fields_are_kept(self) -> None:
        front = front_end(CoreEngine(0))
        front.receive(b"\0\0", hello(new={"in": [2040]}))
        fields = {"max_model_len": 4096, "parallel_config_hash": "x", "dp_stats_address": "tcp://s"}
        front.receive(b"\0\0", ready(**fields))
        assert front.hello[0]["new"] == {"in": [2040]}
        assert front.ready[0] == {"status": "READY", "local": True, **fields}
        assert (front.parallel_config_hash, front.stats_address) == ("x", "tcp://s")
        front = at(READY)
        assert (front.num_gpu_blocks, front.parallel_config_hash, front.stats_address) == (None, None, None)

    @pytest.mark.parametrize(
        "config", [{"data_parallel_hybrid_lb": True}, SimpleNamespace(data_parallel_external_lb=1)]
    )
    def test_headless_as_the_balancing_says(self, config: object) -> None:
        for options, headless in (
            ({}, True),
            ({"parallel_config": config}, False),
            ({"parallel_config": config, "remote_headless": True}, True),
            ({"remote_headless": False}, False),
        ):
            for says in (True, False):
                engine = CoreEngine(0, local=False)
                front = FrontEndHandshake([engine], ADDRESSES, **options)  # type: ignore[arg-type]
                if says is headless:
                    assert front.receive(b"\0\0", hello(local=False, headless=says)) is not None
                    continue
                with pytest.raises(HandshakeError, match="headless"):
                    front.receive(b"\0\0", hello(local=False, headless=says))
                assert engine.state is NEW

    def test_invalid_arguments_are_refused(self) -> None:
        with pytest.raises(ValueError, match="two have 4"):
            front_end(CoreEngine(4), CoreEngine(4))
        with pytest.raises(TypeError, match="parallel_config cannot be sent"):
            FrontEndHandshake([], ADDRESSES, {"lock": object()})


# The state of engine 1, its message, and the text of the error.
REFUSED: list[tuple[CoreEngineState, list[bytes], str]] = [
    (NEW, hello(local=False), "HELLO says that it is remote, expected a local one"),
    (NEW, ready(), "READY came, expected HELLO"),
    (CONNECTED, hello(), "HELLO came again, expected READY; have two engines the same rank?"),
    (READY, hello(), "HELLO came again, expected nothing more"),
    (READY, ready(), "READY came again, expected nothing more"),
    (CONNECTED, ready(local=False), "READY says that it is remote"),
    (NEW, [], "a message of 0 payload frames, expected one"),
    (CONNECTED, [b"", *ready()], "a message of 2 payload frames, expected one"),
    (NEW, [hello()[0] + b"\0"], "undecodable payload: .*expected HELLO"),
    (NEW, [hello()[0][:-1]], "undecodable payload"),
    (CONNECTED, [b"\x81\xa1x" + b"\x91" * 10_000 + b"\xc0"], "undecodable payload.*expected READY"),
    (NEW, hello(pad=bytes(MAX_PAYLOAD_BYTES)), "a payload of 1048606 bytes, more than 1048576"),
    (NEW, [encode({"local": True})], "`status`"),
    (NEW, [encode({"status": "HELLO"})], "`local`"),
    (NEW, [encode({"status": "BYE", "local": True})], "'BYE'"),
    (NEW, [encode({"status": "HELLO", "local": 1})], r"\$.local"),
    (NEW, hello(headless="yes"), r"\$.headless"),
    (CONNECTED, ready(num_gpu_blocks=-1), r"\$.num_gpu_blocks"),
    (CONNECTED, ready(dp_stats_address=5), r"\$.dp_stats_address"),
]


def test_hello_of_a_local_successor_starts_anew_after_the_death_of_its_predecessor() -> None:
    front = at(READY)
    front.allow_restarts()
    with pytest.raises(HandshakeError, match="HELLO came again, expected nothing more; have two engines the same rank"):
        front.receive(b"\x01\0", hello())
    front.forget(1)
    for _ in range(2):  # the process of the first HELLO may have died since
        assert front.receive(b"\x01\0", hello()) is not None


@pytest.mark.parametrize("state", [CONNECTED, READY])
def test_hello_from_another_host_starts_anew_unless_its_rank_serves(state: CoreEngineState) -> None:
    front = front_end(CoreEngine(1, local=False))
    hello_there = hello(local=False, headless=True)
    for frames in (hello_there, ready(local=False, headless=True))[: 1 if state is CONNECTED else 2]:
        front.receive(b"\x01\0", frames)
    with pytest.raises(HandshakeError, match="HELLO came again"):
        front.receive(b"\x01\0", hello_there)
    front.allow_restarts()
    front.serves = lambda rank: rank == 1
    if state is READY:
        assert front.receive(b"\x01\0", hello_there) is None
        assert front.released() == {}
        front.serves = lambda _: False
        assert front.released() == {1: hello_there}
        assert front.released() == {}
    front.serves = lambda _: False
    with pytest.raises(HandshakeError, match="says that it is local"):
        front.receive(b"\x01\0", hello())
    assert front.engines[1].state is state
    assert front.receive(b"\x01\0", hello_there) is not None
    assert front.engines[1].state is CONNECTED


class TestRefusals:
    def test_refusal_names_engine_state_and_expectation_and_changes_nothing(self) -> None:
        for state, frames, text in REFUSED:
            front = at(state)
            states = [engine.state for engine in front.engines.values()]
            with pytest.raises(HandshakeError, match=text) as caught:
                front.receive(b"\x01\0", frames)
            error = caught.value
            assert (error.engine, error.state) == (1, state.name)
            assert str(error).startswith(f"engine 1 in state {state.name}: ")
            assert f"expected {error.expected}" in str(error)
            assert len(str(error)) < 600
            assert [engine.state for engine in front.engines.values()] == states

    def test_message_of_an_unknown_sender_is_refused(self) -> None:
        for identity, rank in ((b"\x07\0", 7), (b"\0abcd", None)):
            text = rf"identity {identity.hex()}.*expected one of engines 0, 1"
            with pytest.raises(HandshakeError, match=text) as caught:
                front_end().receive(identity, hello())
            assert (caught.value.engine, caught.value.state) == (rank, None)

    def test_hashes_differ(self) -> None:
        front = at(CONNECTED)
        front.receive(b"\0\0", hello())
        front.receive(b"\0\0", ready(parallel_config_hash="aaaa"))
        text = r"engine 1 in state CONNECTED: .*'bbbb', expected 'aaaa', that of engine 0"
        with pytest.raises(HandshakeError, match=text):
            front.receive(b"\x01\0", ready(parallel_config_hash="bbbb"))
        assert front.receive(b"\x01\0", ready(parallel_config_hash="aaaa")) is None
        assert front.parallel_config_hash == "aaaa"

    def test_long_values_are_cut_in_errors(self) -> None:
        front = at(CONNECTED, config_hash="a" * 100_000)
        with pytest.raises(HandshakeError) as caught:
            front.receive(b"\x01\0", ready(parallel_config_hash="b" * 100_000))
        assert len(str(caught.value)) < 1000
        many = FrontEndHandshake(map(CoreEngine, range(1000)), ADDRESSES)
        with pytest.raises(HandshakeError, match=r"0, 1, .*15, \.\.\.") as caught:
            many.receive(b"\xff\xff", hello())


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(0, 5), inner, max_size=3)
    ),
    max_leaves=4,
)
names = st.sampled_from(
    ["status", "local", "headless", "num_gpu_blocks", "dp_stats_address", "parallel_config_hash", "addresses",
     "parallel_config", "more"]
)  # fmt: skip
likely = st.dictionaries(names, st.sampled_from(["HELLO", "READY", True, False, None, 3]) | anything, max_size=6)
payloads = st.binary(max_size=200) | anything.map(encode) | likely.map(encode)
identities = st.sampled_from([b"\0\0", b"\x01\0"]) | st.binary(max_size=6)


class TestGarbage:
    @given(st.lists(st.tuples(identities, st.lists(payloads, max_size=2)), max_size=4))
    @example([(b"\0\0", [b"\x81\x81\x01\x02\x03"])])  # a map whose key is a map
    @example([(b"\0\0", [b"\x82\xa5local\xc3\x91\x01\x02"])])  # a key that is an array
    @example([(b"\0\0", [b"\xdf\xff\xff\xff\xff"])])  # a map that claims to be huge
    def test_a_front_end_accepts_or_refuses_and_nothing_else(self, messages: list[tuple[bytes, list[bytes]]]) -> None:
        front = front_end()
        order = list(CoreEngineState)
        for identity, frames in messages:
            before = [order.index(engine.state) for engine in front.engines.values()]
            try:
                reply = front.receive(identity, frames)
            except HandshakeError:
                assert [order.index(engine.state) for engine in front.engines.values()] == before
                continue
            after = [order.index(engine.state) for engine in front.engines.values()]
            assert sum(after) == sum(before) + 1
            assert (reply is None) == (decode(frames[0])["status"] == "READY")
        assert front.complete == (len(front.ready) == 2)

    @given(st.lists(payloads, max_size=2))
    def test_an_engine_accepts_or_refuses_and_nothing_else(self, frames: list[bytes]) -> None:
        engine = EngineHandshake(3)
        engine.hello()
        try:
            metadata = engine.receive(frames)
        except HandshakeError:
            assert engine.state is NEW
        else:
            assert engine.state is CONNECTED
            assert isinstance(metadata.addresses, EngineZmqAddresses)


class TestEngine:
    @pytest.mark.parametrize(
        ("frames", "text"),
        [
            ([INIT_0_33, b""], "a message of 2 payload frames"),
            ([b"\xc1"], "undecodable payload"),
            ([b"\x80"], "`addresses`"),
            ([encode({"addresses": {"inputs": []}, "parallel_config": {}})], "`outputs`"),
            ([encode({"addresses": {"inputs": [], "outputs": [1]}, "parallel_config": {}})], r"\$.addresses.outputs"),
            ([encode({"addresses": {"inputs": [], "outputs": []}})], "`parallel_config`"),
            ([bytes(MAX_INIT_BYTES + 1)], "more than"),
        ],
    )
    def test_invalid_init_is_refused(self, frames: list[bytes], text: str) -> None:
        engine = EngineHandshake(1)
        engine.hello()
        with pytest.raises(HandshakeError, match=text) as caught:
            engine.receive(frames)
        assert (caught.value.engine, caught.value.state) == (1, "NEW")
        assert engine.state is NEW

    def test_the_order_is_kept(self) -> None:
        engine = EngineHandshake(1)
        with pytest.raises(HandshakeError, match="expected INIT"):
            engine.ready()
        engine.hello()
        engine.receive([INIT_0_33])
        with pytest.raises(HandshakeError, match="after INIT, expected none"):
            engine.receive([INIT_0_33])
        engine.ready()
        with pytest.raises(HandshakeError, match="expected nothing more"):
            engine.ready()

    @pytest.mark.parametrize(
        ("fields", "error", "text"),
        [
            ({"local": 1, "headless": 2}, ValueError, "headless, local"),
            ({"lock": object()}, TypeError, "cannot be sent"),
            ({"big": 2**64}, TypeError, "cannot be sent"),
            ({"pad": bytes(MAX_PAYLOAD_BYTES)}, ValueError, "must fit"),
        ],
    )
    def test_fields_that_cannot_be_sent(self, fields: dict[str, Any], error: type[Exception], text: str) -> None:
        engine = EngineHandshake(1)
        engine.hello()
        engine.receive([INIT_0_33])
        with pytest.raises(error, match=text):
            engine.ready(fields)
        assert engine.ready({"num_gpu_blocks": 1}), "the engine may try again"
