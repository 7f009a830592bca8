"""A client and engines in one loop: streams, calls, aborts, two clients, and their lives."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from iterating import END, WAYS, by_aclosing
from peers import BareEngine
from served_engine import LOOPBACK, Engine, ask, begun, clients_of, collected, here_and_there, served, until
from support import cancelled, cancelled_after
from typed_messages import Output, Request

from aioshm.engine import ClientOptions, CoreEngine, EngineClient, EngineZmqAddresses
from aioshm.engine.client.requests import Inbox
from aioshm.errors import CallFailed, CodecError, EngineDead, QueueClosed, RequestAborted, RequestFailed, RoleError

pytestmark = pytest.mark.usefixtures("runtime_dir")


class TestStreams:
    @pytest.mark.parametrize("is_async", [False, True])
    async def test_outputs_come_in_order_and_end(self, is_async: bool) -> None:
        async with served(Engine(is_async=is_async), output_type=Output) as serving:
            stream = serving.client.submit(ask("a", 3))
            assert (stream.request_id, stream.engine) == ("a", 0)
            await until(lambda: serving.engines[0].seen)  # the request was sent before the first wait
            assert await collected(stream) == [Output("a", 0), Output("a", 1), Output("a", 2, "length")]
            assert serving.client.in_flight == 0
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    async def test_stream_taken_by_a_builtin_gives_outputs_and_the_end(self) -> None:
        async with served(Engine()) as serving:
            for way in WAYS:
                stream = serving.client.submit(ask(way.__name__, 2))
                assert (await way(stream))["token"] == 0
                if way is not by_aclosing:  # which has aborted the request
                    assert (await way(stream))["token"] == 1
                    assert await way(stream) == END

    async def test_arrays_and_tensors_travel(self) -> None:
        class Mirror(Engine):
            def add_request(self, request: Request) -> None:
                assert type(request) is Request
                assert (request.client_index, request.current_wave) == (0, 0)
                halves = torch.arange(300, dtype=torch.bfloat16)
                arrays = {"twice": request.prompt * 2, "small": np.int8([1]), "halves": halves}
                output = {"request_id": request.request_id, "finished": True, **arrays}
                self.requests[request.request_id] = {"output": output}

        async with served(Mirror(), request_type=Request, ) as serving:  # fmt: skip
            prompt = np.arange(1000, dtype=np.float64).reshape(10, 100)
            [output] = await collected(serving.client.submit(Request("a", prompt)))
            assert np.array_equal(output["twice"], prompt * 2)
            output["twice"][0] = 1  # one's own
            assert output["small"].dtype == np.int8
            assert torch.equal(output["halves"], torch.arange(300, dtype=torch.bfloat16))
            given = await serving.client.call("give", {"array": prompt, "tensor": torch.ones(2)}, engine=0)
            assert np.array_equal(given["array"], prompt)
            assert torch.equal(given["tensor"], torch.ones(2))


class TestLeaving:
    async def test_every_way_to_leave_aborts(self) -> None:
        async with served(Engine()) as serving:
            client = serving.client
            engine = serving.engines[0]
            async for _output in client.submit(ask("broken off", None)):
                break
            await until(lambda: engine.aborted == ["broken off"])

            stream = client.submit(ask("closed", None))
            await stream.aclose()
            await stream.aclose()
            with pytest.raises(RequestAborted) as caught:
                await anext(stream)
            assert (caught.value.engine, caught.value.request_id) == (0, "closed")
            await until(lambda: engine.aborted[1:] == ["closed"])

            kept = [client.submit(ask("forgotten", None))]
            thread = threading.Thread(target=kept.clear)
            thread.start()
            thread.join()
            await until(lambda: engine.aborted[2:] == ["forgotten"])

            task = asyncio.create_task(collected(client.submit(ask("cancelled", None))))
            await until(lambda: engine.given.get("cancelled"))
            await cancelled(task)
            await until(lambda: engine.aborted[3:] == ["cancelled"])

            await client.abort(["nobody"])
            stream = await begun(client, "aborted")
            await client.abort("aborted")
            with pytest.raises(RequestAborted, match="request 'aborted' was aborted"):
                await anext(stream)
            await until(lambda: engine.aborted[4:] == ["aborted"])

            stream = await begun(client, "timed out")

            async def give_up(left: Any) -> None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(anext(left), 0.001)

            await asyncio.create_task(give_up(stream))  # the end of the task aborts
            with pytest.raises(RequestAborted, match="request 'timed out' was aborted before its last output"):
                await anext(stream)
            await until(lambda: engine.aborted[5:] == ["timed out"])
            assert client.in_flight == 0
            assert engine.requests == {}

    @pytest.mark.parametrize("error", [RequestAborted, EngineDead])
    async def test_stream_that_the_garbage_collector_drops_while_requests_end(
        self, error: type[Exception], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def collect(inbox: Inbox, why: Any) -> None:
            monkeypatch.undo()
            streams.clear()
            inbox.end(why)

        async with served(Engine()) as serving:
            client = serving.client
            streams = [await begun(client, each) for each in "abc"]
            kept = await begun(client, "d")
            streams.append(await begun(client, "e"))
            monkeypatch.setattr(Inbox, "end", collect)
            if error is RequestAborted:
                await client.abort(np.array([*"abcde"]))
                await until(lambda: sorted(serving.engines[0].aborted) == [*"abcde"])
            else:
                client.give_up(EngineDead("gone", engine=0))
            with pytest.raises(error):
                await kept.next(timeout=5)

    async def test_cancelled_at_any_moment(self) -> None:
        async with served(Engine(), Engine()) as serving:
            client = serving.client
            for number in range(80):
                await cancelled_after(collected(client.submit(ask(f"{number}", number % 7 + 1))), number % 11)
                await cancelled_after(client.call("add", 1), number % 5)
            assert client.in_flight == 0
            assert not client._link.pending.calls
            assert await client.call("add", 1, 2) == [3, 3]
            await until(lambda: not any(engine.requests for engine in serving.engines))

    async def test_id_can_be_used_again_after_its_request(self) -> None:
        async with served(Engine()) as serving:
            stream = serving.client.submit(ask("a"))
            with pytest.raises(ValueError, match="another request in flight"):
                serving.client.submit(ask("a"))
            with pytest.raises(RoleError, match="in the thread of its event loop"):
                await asyncio.to_thread(serving.client.submit, ask("b"))
            assert len(await collected(stream)) == 3
            assert len(await collected(serving.client.submit(ask("a", 2)))) == 2

            class Frozen(msgspec.Struct, frozen=True):
                request_id: str
                tokens: int
                client_index: int = 0

            assert len(await collected(serving.client.submit(Frozen("a", 2)))) == 2


FAILURES: list[tuple[str, list[Any], str]] = [
    ("fail", ["why"], "^Call to fail method failed: 'why'$"),
    ("missing", [], "no method 'missing' that may be called"),
    ("_private", [], "no method '_private'"),
    ("shutdown", [], "no method 'shutdown'"),
    ("add", [1, 2, 3], "takes from 2 to 3 positional arguments"),
    ("swap", [{"x": 1}], "missing required field `y`"),
    ("unspeakable", [], "cannot encode"),
    ("unreadable", [], "the result of the call is not readable: .*extension type 9"),
    ("interrupted", [], "the engine has cancelled the call"),
    ("give", [msgspec.msgpack.Ext(9, b"")], "cannot decode a payload: extension type 9 is not supported"),
]


class TestCalls:
    async def test_results(self) -> None:
        async with served(Engine(), Engine()) as serving:
            call = serving.client.call
            assert await call("add", 1, 2, engine=1) == 3
            assert await call("add", 1) == [2, 2]
            assert await call("swap", {"x": 1, "y": 2}, engine=0) == {"x": 2, "y": 1}
            assert await call("give", None, engine=0) is None
            with pytest.raises(CodecError, match="cannot encode"):
                await call("give", object())
            with pytest.raises(ValueError, match="engine must be the rank of one of"):
                await call("add", 1, engine=7)
            with pytest.raises(TypeError, match="method must be a str, not 5"):
                await call(5)  # type: ignore[arg-type]
            assert not serving.client._link.pending.calls
            later = [call("later", number, engine=number % 2) for number in range(20)]
            assert await asyncio.gather(*later) == [*range(20)]

    async def test_failures(self) -> None:
        async with served(Engine()) as serving:
            for method, args, text in FAILURES:
                with pytest.raises(CallFailed, match=text.replace("(", r"\(")) as caught:
                    await serving.client.call(method, *args, engine=0)
                assert (caught.value.engine, caught.value.method) == (0, method)
                assert await serving.client.call("add", 1, engine=0) == 2

    async def test_first_failure_ends_a_call_of_all_engines(self) -> None:
        class Failing(Engine):
            async def never(self) -> None:
                raise RuntimeError("now")

        async with served(Engine(), Failing()) as serving:
            with pytest.raises(CallFailed, match="now") as caught:
                await serving.client.call("never")
            assert caught.value.engine == 1


class TestTwoClients:
    async def test_id_of_another_client_is_refused_and_cannot_be_aborted(self) -> None:
        async with served(Engine(), n_clients=2) as serving:
            one, other = serving.clients
            stream = await begun(one, "a")
            with pytest.raises(RequestFailed, match="another request in flight"):
                await collected(other.submit(ask("a")))
            other._link.send(other._link.engines[0], b"\x01", [msgspec.msgpack.encode(["a"])])
            await other.call("add", 1)
            assert serving.engines[0].aborted == []
            await stream.aclose()

    async def test_client_that_closes_aborts_its_requests_and_may_have_a_successor(self) -> None:
        async with served(Engine(), n_clients=2) as serving:
            one, other = serving.clients
            stream = one.submit(ask("a", None))
            kept = other.submit(ask("b", None))
            await anext(stream)
            waiting = asyncio.create_task(anext(stream))
            calling = asyncio.create_task(one.call("never"))
            await asyncio.sleep(0)
            await one.aclose()
            await one.aclose()
            for task in (waiting, calling):
                with pytest.raises(QueueClosed):
                    await task
            with pytest.raises(QueueClosed):
                one.submit(ask("x"))
            await until(lambda: serving.engines[0].aborted == ["a"])
            await anext(kept)
            await kept.aclose()
            async with EngineClient(one.addresses, 1) as successor:
                await successor.wait_until_ready(10)
                assert len(await collected(successor.submit(ask("a")))) == 3


class TestRemoval:
    @pytest.mark.parametrize("first", ["times out", "is cancelled"])
    async def test_engine_that_two_tasks_remove_is_removed_for_both_and_none_is_added_meanwhile(
        self, first: str
    ) -> None:
        addresses = EngineZmqAddresses([LOOPBACK], [LOOPBACK])
        async with served(Engine(), Engine(), addresses=addresses, handshake=LOOPBACK) as serving:
            client = serving.client
            stream = await begun(client, "a", engine=1)
            timeout = 0.01 if first == "times out" else None
            removals = [asyncio.create_task(client.remove_engine(1, timeout=each)) for each in (timeout, None)]
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="engine 1 is being removed"):
                client.add_engine(2)
            if first == "is cancelled":
                await cancelled(removals[0])
                with pytest.raises(EngineDead, match="engine 1 is being taken out of service"):
                    client.submit(ask("b"), engine=1)
                await stream.aclose()
            async with asyncio.timeout(30):
                await removals[1]
            assert client.ranks == [0]
            client.add_engine(1)
            assert client.ranks == [0, 1]
            serving.running[1].cancel()  # of the removed one, which says that it ends
            await asyncio.sleep(0.3)
            assert client.stats().deaths == 0


class TestLife:
    async def test_ports_are_the_kernel_s_and_known_at_once(self) -> None:
        addresses = EngineZmqAddresses([LOOPBACK], ["tcp://[::1]:0"])
        async with served(Engine(), addresses=addresses) as serving:
            assert serving.client.addresses is addresses
            assert not addresses.inputs[0].endswith(":0")
            assert not addresses.outputs[0].endswith(":0")
            assert serving.engines[0].metadata.addresses.inputs == addresses.inputs
            assert serving.client.ready == {0: {"num_gpu_blocks": 5}}
            assert len(await collected(serving.client.submit(ask("a")))) == 3

    async def test_calls_before_ready_are_refused(self) -> None:
        client = EngineClient(here_and_there(), 2)
        with pytest.raises(RoleError, match="async with"):
            client.submit(ask("a"))
        async with client:
            with pytest.raises(RoleError, match="wait_until_ready"):
                client.submit(ask("a"))
            with pytest.raises(RoleError, match="wait_until_ready"):
                await client.call("add")
            with pytest.raises(TimeoutError, match=r"engines 0, 1 have not registered after 0\.01 s"):
                await client.wait_until_ready(0.01)
            waiting = asyncio.create_task(client.wait_until_ready())
            await asyncio.sleep(0)
            await client.aclose()
            with pytest.raises(QueueClosed):
                await waiting
            with pytest.raises(RoleError, match="once"):
                client.open()

    async def test_membership_that_does_not_come_is_named(self, path: str) -> None:
        async with clients_of(here_and_there(), 1, 1, on_engine_death="continue", membership_address=path) as serving:
            with zmq.Context() as context, BareEngine(context, serving.client):
                await until(lambda: serving.client.ready)
                with pytest.raises(TimeoutError, match=f"^no membership came from {path} within 0.01 s$"):
                    await serving.client.wait_until_ready(0.01)

    async def test_what_comes_in_the_iteration_of_the_timeout_is_in_time(self) -> None:
        async with served(Engine()) as serving:
            link = serving.client._link
            pausing = asyncio.create_task(serving.client.pause(timeout=0.02))
            await asyncio.sleep(0)
            link.settled.clear()
            ready = asyncio.create_task(serving.client.wait_until_ready(0.02))
            await asyncio.sleep(0)
            for arrive in (link.settled.set, lambda: link.engines[0].order.answer.set_result(None)):
                asyncio.get_running_loop().call_later(0.01, arrive)
            time.sleep(0.05)  # all timers have expired when the loop runs again
            await asyncio.gather(pausing, ready)

    async def test_bad_arguments(self, path: str) -> None:
        for engines, text in ((0, "at least 1"), ([], "some"), ([CoreEngine(1), CoreEngine(1)], "a rank of its own")):
            with pytest.raises(ValueError, match=text):
                EngineClient(here_and_there(), engines)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="client_index must be below 1"):
            EngineClient(here_and_there(), 1, options=ClientOptions(client_index=1))
        with pytest.raises(ValueError, match="client_index must be below 0"):
            EngineClient(EngineZmqAddresses([path], []), 1)
        with pytest.raises(OSError, match="cannot bind"):
            EngineClient(EngineZmqAddresses([path], ["tcp://256.0.0.1:1"]), 1).open()
        assert not Path(path.removeprefix("ipc://")).exists()

    async def test_a_coordinator_that_cannot_be(self, caplog: pytest.LogCaptureFixture) -> None:
        class Passing(Engine):
            def initialize(self, metadata: Any) -> dict[str, Any]:
                return {"dp_stats_address": "tcp://nowhere"}

        async with served(Passing()) as serving:
            assert len(await collected(serving.client.submit(ask("a")))) == 3
            assert "cannot connect to tcp://nowhere" in caplog.text

    async def test_forgetting_to_close_is_reported(self) -> None:
        client = EngineClient(here_and_there(), 1)
        client.open()
        with pytest.warns(ResourceWarning, match="was not closed"):
            del client
            gc.collect()

    async def test_closing_may_be_cancelled(self, runtime_dir: Path) -> None:
        async with served(Engine()) as serving:
            stream = serving.client.submit(ask("a", None))
            closing = asyncio.create_task(serving.client.aclose())
            await asyncio.sleep(0)
            await cancelled(closing)
            with pytest.raises(QueueClosed):
                await anext(stream)
            await until(lambda: not serving.engines[0].requests)
