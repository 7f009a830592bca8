"""The engine's loop: invalid frames, steps, a coordinator, a pause that holds requests, and the end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from contextlib import closing, suppress
from typing import Any

import msgspec
import pytest
import zmq
from loops import turns
from peers import BareFrontEnd, pack
from served_engine import Engine, Serving, ask, begun, collected, here_and_there, served, until
from startups import tasks
from support import cancelled

from aioshm import Options
from aioshm.engine import (
    CoreEngine,
    EngineClient,
    EngineStartupCoordinator,
    EngineZmqAddresses,
    get_engine_client_zmq_addr,
    run_engine_core,
)
from aioshm.engine.core.sockets import LINGER_MS, RECONNECT_S, FrontEnd
from aioshm.engine.protocol.messages import PAUSE
from aioshm.errors import CallFailed, EngineDead, RequestAborted, RequestFailed

pytestmark = pytest.mark.usefixtures("runtime_dir")


class Stepless(Engine):
    step = None  # type: ignore[assignment]


class TestBadFrames:
    @pytest.mark.parametrize(
        ("kind", "frames"),
        [
            (b"", []),
            (b"\x00", []),
            (b"\x00", [b""]),
            (b"\x00", [pack({"no": "id"})]),
            (b"\x00", [b"\x91" * 3000]),
            (b"\x01", [pack("a")]),
            (b"\x01", [pack([1, None, "nobody's"])]),
            (b"\x02", [pack([5, 0])]),
            (b"\x03", [pack([0, "id", "add", []])]),
            (b"\x03", [b"\x94\x00\x01\xa1\xff\x90"]),  # a name that is no UTF-8
            (b"\x03", [b"\x94\x00\x01\xa1a" + b"\x91" * 200_000]),
            (b"\x09", [b""]),
            (b"\x00" * 50, [b""]),
        ],
    )
    async def test_are_dropped_and_reported_once(
        self, kind: bytes, frames: list[bytes], caplog: pytest.LogCaptureFixture
    ) -> None:
        async with served(Engine()) as serving:
            for _ in range(5):
                serving.client._link.sockets.send(b"\0\0", kind, list(frames))
            assert len(await collected(serving.client.submit(ask("a")))) == 3
            assert await serving.client.call("add", 1) == [2]
            warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
            assert len(warnings) == (0 if frames == [pack([1, None, "nobody's"])] else 1)

    async def test_an_output_that_cannot_be_encoded_fails_its_request_only(self) -> None:
        class Mumbling(Engine):
            def add_request(self, request: Any) -> None:
                super().add_request(request)
                if "finished" in request:
                    output = {**request, "what": object()}
                    self.requests[request["request_id"]] = {"output": output}

        async with served(Mumbling()) as serving:
            good = serving.client.submit(ask("good", 5))
            for finished in (True, False):
                with pytest.raises(RequestFailed, match="cannot encode"):
                    await collected(serving.client.submit(ask(f"{finished}", finished=finished)))
            assert len(await collected(good)) == 5
            assert len(await collected(serving.client.submit(ask("next")))) == 3

    async def test_failure_of_any_text_or_kind_fails_its_call_or_request_only(self) -> None:
        class Mute(Exception):
            def __str__(self) -> str:
                raise LookupError

        ways: dict[str, tuple[BaseException, str]] = {
            "surrogate": (ValueError("no file: \udcff"), r"no file: \\udcff$"),
            "surrogates": (ValueError("\udcff" * (2 << 20)), r"(\\udcff){3900}"),
            "long": (ValueError("x" * (2 << 20)), "x{3900}"),
            "mute": (Mute(), "the text is not available: LookupError$"),
            "cancelled": (asyncio.CancelledError(), "CancelledError: $|the engine has cancelled the call$"),
        }

        class Failing(Engine):
            def add_request(self, request: Any) -> None:
                super().add_request(request)
                if "way" in request:
                    self.fail(request["way"])

            def fail(self, way: str) -> None:
                raise ways[way][0]

            async def fail_later(self, way: str) -> None:
                self.fail(way)

        async with served(Failing(), options=Options(max_message_bytes=1 << 16)) as serving, asyncio.timeout(30):
            for way, (_, text) in ways.items():
                for method in ("fail", "fail_later"):
                    with pytest.raises(CallFailed, match=text):
                        await serving.client.call(method, way)
                with pytest.raises(RequestFailed, match=text):
                    await collected(serving.client.submit(ask(way, way=way)))
            assert await serving.client.call("add", 1) == [2]

    @pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
    async def test_failing_abort_is_logged(self, error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
        class Stubborn(Engine):
            def abort_requests(self, ids: list[str]) -> None:
                raise error

        async with served(Stubborn()) as serving:
            stream = serving.client.submit(ask("a", None))
            await stream.aclose()
            assert len(await collected(serving.client.submit(ask("b")))) == 3
            assert "could not abort ['a']" in caplog.text


class TestEndings:
    async def test_a_step_that_fails(self) -> None:
        engine = Engine()
        async with served(engine, Engine(), n_clients=2) as serving:
            kept = [client.submit(ask(f"kept {id(client)}", None), engine=1) for client in serving.clients]
            failing = serving.client.submit(ask("a", crash="at last"), engine=0)
            for stream in (failing, *kept):
                with pytest.raises(EngineDead, match=r"engine 0 .*said that it ends"):
                    await collected(stream)
            with pytest.raises(RuntimeError, match="at last"):
                await serving.running[0]
            assert engine.shut_down

    async def test_initialise_may_fail(self, path: str) -> None:
        class Broken(Engine):
            async def initialize(self, metadata: Any) -> Any:
                raise MemoryError("too small")

        engine = Broken()
        async with EngineClient(here_and_there(), 1) as client:
            with pytest.raises(ExceptionGroup) as caught:
                async with asyncio.TaskGroup() as group:
                    group.create_task(run_engine_core(engine, path, 0))
                    group.create_task(_greet(path, client.addresses))
            assert caught.group_contains(MemoryError, match="too small")
        assert engine.shut_down

    async def test_sigterm_ends_the_engine_without_an_error(self) -> None:
        async with served(Engine()) as serving:
            stream = await begun(serving.client, "a")
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(EngineDead):
                await anext(stream)
            await asyncio.wait(serving.running)
            assert serving.running[0].exception() is None
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    async def test_a_call_that_answers_its_cancellation_sends_nothing_over_closed_sockets(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Stubborn(Engine):
            async def never(self) -> None:
                with suppress(asyncio.CancelledError):
                    await super().never()

        async with served(Stubborn()) as serving:
            calls = [asyncio.ensure_future(serving.client.call("never")) for _ in range(20)]
            assert await serving.client.call("add", 1) == [2]
            serving.running[0].cancel()
            await asyncio.wait(serving.running)
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, EngineDead)
        assert [record.message for record in caplog.records if record.name == "asyncio"] == []

    async def test_engine_whose_client_has_left_ends_immediately(self) -> None:
        engine = Engine()
        async with served(engine) as serving:
            await anext(serving.client.submit(ask("a", None)))
            await serving.client.aclose()
            await until(lambda: not engine.requests)
            await asyncio.sleep(3 * RECONNECT_S)  # the engine would serve the next client at these addresses
            began = time.monotonic()
            serving.running[0].cancel()
            await asyncio.wait(serving.running)
            assert time.monotonic() - began < LINGER_MS / 1000

    async def test_cancelled_at_any_moment_of_its_start(self) -> None:
        for moment in range(0, 64, 4):
            handshake = get_engine_client_zmq_addr(True, "")
            addresses = here_and_there()
            async with EngineClient(addresses, 1):
                async with EngineStartupCoordinator(handshake, [CoreEngine(0)], addresses):
                    engine = asyncio.create_task(run_engine_core(Engine(is_async=True), handshake, 0))
                    await turns(moment)
                    await cancelled(engine)

    async def test_addresses_that_make_no_sense(self, path: str) -> None:
        addresses = EngineZmqAddresses(["ipc:///x/in"], [])
        async with tasks(_greet(path, addresses)):
            with pytest.raises(ValueError, match="as many inputs as outputs"):
                await run_engine_core(Engine(), path, 0)


async def _greet(path: str, addresses: EngineZmqAddresses) -> None:
    """Answer one HELLO."""
    with zmq.Context() as context, closing(BareFrontEnd(context, path, b"\0\0")) as front:
        await front.hears()
        front.says(pack({"addresses": addresses, "parallel_config": {}}))
        front.router.close(linger=1000)


class TestNeeds:
    @pytest.mark.parametrize(
        ("engine", "text"),
        [
            (object(), "which has no initialize(), no add_request(), no abort_requests(), no step()$"),
            (Stepless(), "which has no step()$"),
            (Engine, "engine must be an object with initialize, add_request, abort_requests, step, not <class"),
        ],
    )
    async def test_engine_without_a_needed_method_is_refused_before_it_says_hello(self, engine: Any, text: str) -> None:
        with pytest.raises(TypeError, match=text.replace("(", r"\(").replace(")", r"\)")):
            async with asyncio.timeout(5):  # no front end is there
                await run_engine_core(engine, get_engine_client_zmq_addr(True, ""), 0)


class Parts(Engine):
    """Takes a request in parts: the last one has ``tokens``."""

    def add_request(self, request: Any) -> None:
        former = self.requests.get(request["request_id"])
        if former is None:
            super().add_request(request)
        else:
            former["tokens"] = request["tokens"]
            self.given[request["request_id"]] = 0


def send(serving: Serving, kind: bytes, payload: Any, client: int = 1) -> None:
    """Send a message as a front end of another maker does."""
    serving.clients[client]._link.sockets.send(b"\0\0", kind, [pack(payload)])


async def handled(serving: Serving, client: int = 1) -> None:
    """Wait until the engine has handled all messages of a client."""
    await serving.clients[client].call("report")


class TestHeld:
    async def test_aborted_requests_are_dropped(self) -> None:
        engine = Engine()
        async with served(engine, n_clients=3) as serving:
            one, other, third = serving.clients
            await one.pause("keep")
            streams = [other.submit(ask(each, 2)) for each in "abc"]  # this client does not know of the pause
            await streams[1].aclose()
            await handled(serving)
            await one.resume()
            assert len(await collected(streams[0])) == len(await collected(streams[2])) == 2
            await one.pause("keep")
            stream = third.submit(ask("d"))
            await handled(serving, 2)
            await one.pause("abort")
            with pytest.raises(RequestAborted, match="paused"):
                await collected(stream)
            await handled(serving, 2)
            await one.resume()
            assert len(await collected(one.submit(ask("e")))) == 3
            assert engine.seen == ["a", "c", "e"]

    async def test_request_of_a_client_that_is_gone_is_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine = Engine()
        gone: list[int] = []
        # Nothing else shows that the engine has noticed.
        monkeypatch.setattr(FrontEnd, "connect_again", lambda front_end, _: gone.append(front_end.client))
        async with served(engine, n_clients=2) as serving:
            one, other = serving.clients
            await one.pause()
            send(serving, b"\x00", ask("a"))
            send(serving, b"\x00", ask("b"), client=0)
            await handled(serving)
            await handled(serving, 0)
            await other.aclose()
            await until(lambda: gone == [1])
            await one.resume()
            assert len(await collected(one.submit(ask("c")))) == 3
            assert engine.seen == ["b", "c"]

    async def test_part_of_an_open_request_is_not_held(self) -> None:
        engine = Parts()
        async with served(engine, n_clients=2) as serving:
            one = serving.client
            await collected(one.submit(ask("first")))
            send(serving, b"\x00", ask("a", None))
            await until(lambda: "a" in engine.seen)
            await one.pause("keep")
            send(serving, b"\x00", ask("a", 2))
            await handled(serving)
            assert engine.seen == ["first", "a"]
            await one.pause("finish")  # the request ends
            assert not engine.requests
            await one.resume()

    async def test_request_of_another_client_with_the_same_id_is_refused_after_the_pause(self) -> None:
        engine = Engine()
        async with served(engine, n_clients=2) as serving:
            one, other = serving.clients
            stream = one.submit(ask("a", None))  # without an end: the request is open during the pause
            assert await anext(stream)
            await one.pause("keep")
            send(serving, b"\x00", ask("a"))
            await handled(serving)
            late = other.late_outputs
            await one.resume()
            await until(lambda: other.late_outputs == late + 1)
            assert engine.seen == [*engine.requests] == ["a"]


class TestOrders:
    async def test_old_order_changes_nothing_and_is_answered_with_the_newest(self) -> None:
        engine = Engine()
        async with served(engine) as serving:
            await serving.client.pause()
            newest = serving.client.pause_order()
            assert await serving.client.call(PAUSE, 1, 0, "", engine=0) == [*newest]
            stream = serving.client.submit(ask("a"))
            assert await serving.client.call("report") == [{**(await serving.client.call("report"))[0], "seen": 0}]
            await serving.client.resume()
            assert len(await collected(stream)) == 3

    async def test_invalid_order_is_ignored(self, caplog: pytest.LogCaptureFixture) -> None:
        async with served(Engine()) as serving:
            for args in ([], [1, 0, "sleep"], ["1", 0, ""], [-1, 0, ""]):
                send(serving, b"\x03", [0, 5, PAUSE, args], client=0)
            assert len(await collected(serving.client.submit(ask("a")))) == 3
            assert "no PauseOrder" in caplog.text

    async def test_requests_of_a_front_end_of_vllm_end_with_an_error_output(self) -> None:
        engine = Engine()
        async with served(engine, n_clients=2) as serving:
            one, other = serving.clients
            send(serving, b"\x00", ask("a", None))
            await until(lambda: other.late_outputs == 1)
            outputs = []
            take = other._link.pending.take

            def taken(frames: list[Any], sender: int | None = None) -> list[Any]:
                outputs.extend(msgspec.msgpack.decode(frames[0])[1])
                return take(frames, sender)

            other._link.pending.take = taken  # type: ignore[method-assign]
            await one.pause("abort")
            await until(lambda: outputs)
            assert outputs == [
                {"request_id": "a", "finish_reason": "error", "error": "aborted: the engines were paused"}
            ]
            assert engine.aborted == ["a"]
            send(serving, b"\x00", ask("b", 1))
            await handled(serving)
            assert engine.seen == ["a"]
            await one.resume()
            await until(lambda: engine.seen == ["a", "b"])
            assert other.paused is None
