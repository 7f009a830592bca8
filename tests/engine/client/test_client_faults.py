"""A client and engines in one loop: refused requests, and invalid frames."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import zmq
from loops import open_fds
from peers import received
from served_engine import LOOPBACK, Engine, ask, clients_of, collected, here_and_there, served, until
from support import eventually
from typed_messages import Output

from aioshm.config import Options
from aioshm.engine import EngineZmqAddresses, get_engine_client_zmq_addr
from aioshm.errors import EngineDead, MessageTooLarge, RequestFailed

pytestmark = pytest.mark.usefixtures("runtime_dir")


UNREADABLE = msgspec.msgpack.Ext(9, b"")


class Unclear(Engine):
    def _step(self) -> list[Any]:
        return [each | {"token": UNREADABLE} if each["request_id"] == "wrong" else each for each in super()._step()]


class Explained(msgspec.Struct):
    """An output that can hold an engine's refusal."""

    request_id: str
    token: int = -1
    finish_reason: str | None = None
    error: str | None = None


class TestRefusals:
    @pytest.mark.parametrize("output_type", [None, Output, Explained])
    async def test_failed_request_raises_and_others_are_served(self, output_type: Any) -> None:
        said = {"request_id": "said", "finish_reason": "error", "error": "out of memory"}
        failing = [
            (ask("refused", refuse="too long"), "^ValueError: too long$"),
            (ask("said", output=said), "^out of memory$"),
            (ask("wrong"), "its output is no"),
            (ask("unreadable", token=UNREADABLE), "extension type 9 is not supported"),
        ]
        async with served(Unclear(), output_type=output_type) as serving:
            good = serving.client.submit(ask("good", 3))
            for request, text in failing:
                with pytest.raises(RequestFailed, match=text) as caught:
                    await collected(serving.client.submit(request))
                assert (caught.value.engine, caught.value.request_id) == (0, request["request_id"])
            assert len(await collected(good)) == 3
            assert serving.client.stats().failed == len(failing)
            await until(lambda: not serving.engines[0].requests)

    async def test_request_that_cannot_be_decoded_fails(self) -> None:
        class Strict(msgspec.Struct):
            request_id: str
            number: int

        async with served(Engine(), request_type=Strict) as serving:
            with pytest.raises(RequestFailed, match="Expected `int`"):
                await collected(serving.client.submit({"request_id": "a", "number": "x"}))

    async def test_error_output_decides_the_last_output_unless_it_fails(self, caplog: pytest.LogCaptureFixture) -> None:
        class Mumbling(Engine):
            def error_output(self, request_id: str, message: str) -> Any:
                if message.endswith("own"):
                    return [request_id, [], None, None, None, 3, message]
                return object() if message.endswith("object") else 1 / 0

        async with served(Mumbling()) as serving:
            last = ["a", [], None, None, None, 3, "ValueError: own"]
            assert await collected(serving.client.submit(ask("a", refuse="own"))) == [last]
            for text in ("object", "error"):
                with pytest.raises(RequestFailed, match=f"^ValueError: {text}$"):
                    await collected(serving.client.submit(ask("a", refuse=text)))
        assert "has no error_output that can be sent" in caplog.text

    async def test_requests_without_an_id_are_refused(self) -> None:
        async with served(Engine()) as serving:
            for request, found in (({}, "None"), ({"request_id": 5}, "5"), (object(), "None"), ([b"a"], "b'a'")):
                text = f'^request needs "request_id", a string; got {found}$'
                with pytest.raises(ValueError, match=text) as caught:
                    serving.client.submit(request)
                assert type(caught.value) is ValueError

    async def test_request_of_the_largest_size_reaches_an_encrypted_engine_and_a_larger_one_is_refused(self) -> None:
        size = 10_000
        request = ask("a", text="x" * 300)
        request["text"] += "x" * (size - len(msgspec.msgpack.encode(request)))
        addresses = EngineZmqAddresses([LOOPBACK], [LOOPBACK])
        options = Options(max_message_bytes=size)
        async with served(Engine(), addresses=addresses, handshake=LOOPBACK, options=options) as serving:
            assert len(await collected(serving.client.submit(request))) == 3
            request["text"] += "x"
            with pytest.raises(MessageTooLarge, match="more than 10000"):
                serving.client.submit(request)
            assert serving.client.in_flight == 0


BAD_OUTPUTS = [
    [b""],
    [b"\xc1"],
    [msgspec.msgpack.encode({"a": 1})],
    [msgspec.msgpack.encode([0, [{"no": "id"}]])],
    [msgspec.msgpack.encode([0, [["nobody's", [1], None, None, None, 1]]])],
    [msgspec.msgpack.encode([0, [["<f4", [2], 9]], None, 1.0]), b"x"],
    [msgspec.msgpack.encode([0, [], None, 1.0, [12345, None, [None, 1]]])],
    [b"ENGINE_CORE_DEAD", b""],
    [b"\x95" + b"\x91" * 2000],
]


class TestBadFrames:
    """What no engine sends is dropped, and logged once in a while; the others' outputs still come."""

    async def test_outputs(self, caplog: pytest.LogCaptureFixture) -> None:
        async with served(Engine(), output_type=Output) as serving:
            with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
                stranger.connect(serving.client.addresses.outputs[0])
                for number, frames in enumerate(BAD_OUTPUTS):
                    for _ in range(3):
                        stranger.send_multipart(frames)
                    assert len(await collected(serving.client.submit(ask(f"{number}", 50)))) == 50
                stranger.close(linger=1000)
            assert len(caplog.records) <= 1

    async def test_counts_of_the_coordinator(self, caplog: pytest.LogCaptureFixture) -> None:
        addresses = here_and_there()
        addresses.frontend_stats_publish_address = get_engine_client_zmq_addr(True, "")
        with zmq.Context() as context, context.socket(zmq.XPUB) as fronts:
            fronts.bind(addresses.frontend_stats_publish_address)
            async with served(Engine(), addresses=addresses) as serving:
                assert await received(fronts) == [b"\x01"]
                for state in ([[[0, 1]], 3, True], [[[1], [2]], 3, True], [[], "x", True], [], 5, [None, 9]):
                    fronts.send(msgspec.msgpack.encode(state))
                fronts.send(b"\xc1")
                fronts.send(msgspec.msgpack.encode([None, 11, False]))
                await until(lambda: serving.client._link.wave == 11)
                assert len(await collected(serving.client.submit(ask("a")))) == 3
        assert "counts from the coordinator are ignored" in caplog.text

    @pytest.mark.parametrize(
        ("identity", "frames"),
        [(b"\0\0", [b"\xc1"]), (b"\0\0", [b"", b""]), (b"\x07\0", [b""]), (b"\0\0", [b"\x80" * (2 << 20)])],
    )
    async def test_registrations(self, identity: bytes, frames: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
        async with clients_of(here_and_there(), 1, 1) as serving:
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.setsockopt(zmq.ROUTING_ID, identity)
                stranger.connect(serving.client.addresses.inputs[0])
                stranger.send_multipart(frames)
                await until(lambda: "a registration of" in caplog.text)
                assert serving.client.ready == {}
                stranger.close(linger=0)
            await asyncio.sleep(0.05)
            with pytest.raises(TimeoutError):
                await serving.client.wait_until_ready(0.01)

    async def test_an_empty_registration_is_one(self) -> None:
        async with clients_of(here_and_there(), 1, 1) as serving:
            with zmq.Context() as context, context.socket(zmq.DEALER) as old:
                old.setsockopt(zmq.ROUTING_ID, b"\0\0")
                old.connect(serving.client.addresses.inputs[0])
                old.send(b"")
                await serving.client.wait_until_ready(10)
                assert serving.client.ready == {0: {}}
                pending = asyncio.create_task(serving.client.call("x", engine=0))
                await asyncio.sleep(0)
                old.close(linger=0)
                with pytest.raises(EngineDead, match=r"engine 0 .*its connection has ended") as caught:
                    await pending
                assert caught.value.engine == 0


async def test_engine_that_is_gone_before_its_registration_is_read_is_dead() -> None:
    """The client reads the registration after the end of the connection."""
    async with clients_of(here_and_there(), 1, 1) as serving:
        before = set(open_fds().values())
        with zmq.Context() as context, context.socket(zmq.DEALER) as engine:  # the loop does not run meanwhile
            engine.setsockopt(zmq.ROUTING_ID, b"\0\0")
            engine.connect(serving.client.addresses.inputs[0])
            engine.send(b"")
            engine.close(linger=10_000)
        eventually(lambda: set(open_fds().values()) <= before, "the end of the connection")
        await until(lambda: serving.client._link.dead)
        with pytest.raises(EngineDead, match=r"engine 0 .*its connection has ended"):
            serving.client.submit(ask("a"))
