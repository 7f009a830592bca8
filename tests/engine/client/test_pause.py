"""Engines that pause and resume: each mode, several clients, timeouts, cancellation, waiting requests, and deaths."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from peers import BareEngine, pack
from served_engine import Engine, Gated, ask, begun, clients_of, collected, here_and_there, served, until
from support import cancelled

from aioshm.engine.protocol.messages import PauseMode
from aioshm.errors import CallFailed, EngineDead, QueueClosed, RequestAborted, RoleError

pytestmark = pytest.mark.usefixtures("runtime_dir")

MODES: list[PauseMode] = ["finish", "abort", "keep"]


class Model(Gated):
    """Says the weights of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate.set()
        self.weights = "old"
        self.restless = False

    def has_work(self) -> bool:
        return self.restless

    async def step(self) -> list[Any]:  # type: ignore[override]
        return [{**output, "weights": self.weights} for output in await super().step()]

    def load(self, weights: str) -> str:
        assert not self.inside
        self.weights = weights
        return weights


async def stands(*engines: Model) -> bool:
    """Return whether engines take no step while clients can call."""
    before = [engine.steps for engine in engines]
    await asyncio.sleep(0.02)
    return before == [engine.steps for engine in engines] and not any(engine.inside for engine in engines)


class TestModes:
    async def test_finish_lets_requests_end_and_new_ones_wait(self) -> None:
        engines = [Model(), Model()]
        async with served(*engines) as serving:
            client = serving.client
            streams = [client.submit(ask(f"{number}", 50)) for number in range(4)]
            pausing = asyncio.create_task(client.pause())
            await until(lambda: client.paused)
            late = [client.submit(ask(f"late {number}", 2)) for number in range(4)]
            assert {stream.engine for stream in late} == {-1}
            await pausing
            assert client.paused == client.stats().paused == "finish"
            assert await stands(*engines)
            assert not any(engine.requests for engine in engines)
            for stream in streams:
                assert len(await collected(stream)) == 50
            assert await client.call("load", "new") == ["new", "new"]
            assert client.in_flight == 4
            await client.resume()
            assert client.paused is client.stats().paused is None
            for stream in late:
                assert [output["weights"] for output in await collected(stream)] == ["new", "new"]
            order = [each for engine in engines for each in engine.seen if each.startswith("late")]
            assert order == ["late 0", "late 2", "late 1", "late 3"]

    async def test_keep_stops_steps_and_requests_continue(self) -> None:
        engines = [Model(), Model()]
        async with served(*engines) as serving:
            client = serving.client
            for engine in engines:
                engine.pace_s = 0.002  # no request ends before the order arrives
            streams = [await begun(serving.client, each, 300, engine=rank) for rank, each in enumerate("ab")]
            await client.pause("keep")
            for engine in engines:
                engine.pace_s = 0.0
            assert await stands(*engines)
            assert [len(engine.requests) for engine in engines] == [1, 1]
            late = client.submit(ask("late", 2))
            await client.call("load", "new")
            await client.resume()
            assert len(await collected(late)) == 2
            for stream in streams:
                outputs = await collected(stream)
                assert [output["token"] for output in outputs] == list(range(1, 300))
                assert (outputs[0]["weights"], outputs[-1]["weights"]) == ("old", "new")

    @pytest.mark.parametrize("mode", MODES)
    async def test_engine_in_a_step_is_waited_for(self, mode: PauseMode) -> None:
        engine = Model()
        async with served(engine) as serving:
            engine.gate.clear()
            stream = serving.client.submit(ask("a", 2))
            await until(lambda: engine.inside)
            pausing = asyncio.create_task(serving.client.pause(mode))
            await asyncio.sleep(0.02)
            assert not pausing.done()
            engine.gate.set()
            await pausing
            assert not engine.inside
            assert await stands(engine)
            await serving.client.resume()
            if mode == "abort":
                with pytest.raises(RequestAborted, match=r"'a' was aborted before.*engines were paused") as caught:
                    await collected(stream)
                assert (caught.value.engine, engine.aborted) == (0, ["a"])
            else:
                assert len(await collected(stream)) == 2
            engine.restless = True  # has work without requests
            await serving.client.call("report")
            before = engine.steps
            await until(lambda: engine.steps > before)
            await serving.client.pause(mode)
            assert await stands(engine)
            await serving.client.resume()
            before = engine.steps
            await until(lambda: engine.steps > before)

    async def test_another_mode_replaces_the_first(self) -> None:
        engine = Model()
        async with served(engine) as serving:
            client = serving.client
            stream = await begun(serving.client, "a", 100)
            await client.pause("keep")
            waiting = client.submit(ask("b", 2))
            await client.pause("finish")  # lets the kept request end
            assert len(await collected(stream)) == 99
            assert client.paused == "finish"
            await client.pause("finish")
            await client.resume()
            assert len(await collected(waiting)) == 2
            stream = await begun(serving.client, "c")
            await client.pause("keep")
            waiting = client.submit(ask("d", 2))
            await client.pause("abort")
            with pytest.raises(RequestAborted, match="paused"):
                await collected(stream)
            await client.resume()
            assert len(await collected(waiting)) == 2

    async def test_wrong_arguments(self) -> None:
        async with served(Engine()) as serving:
            with pytest.raises(ValueError, match="mode must be 'finish', 'abort' or 'keep', not 'wait'"):
                await serving.client.pause("wait")  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="timeout"):
                await serving.client.pause(timeout=-1)
            assert serving.client.paused is None
        with pytest.raises(QueueClosed):
            await serving.client.pause()


class TestWaits:
    async def test_timeout_names_the_engines_and_leaves_them_pausing(self) -> None:
        engines = [Model(), Model()]
        async with served(*engines) as serving:
            client = serving.client
            _open = await begun(client, "a", engine=1)

            async def refused() -> str:
                with pytest.raises(TimeoutError, match=r"engines (0, )?1 have not paused after 0\.05 s") as caught:
                    await client.pause("finish", timeout=0.05)
                return str(caught.value)

            while not (await refused()).startswith("engines 1 "):
                pass  # a slow machine takes longer for the answer of the idle engine
            assert client.paused == "finish"
            waiting = client.submit(ask("b", 1))
            await client.abort("a")
            await client.pause("finish", timeout=20)
            assert waiting.engine == -1
            await client.resume()
            assert len(await collected(waiting)) == 1

    async def test_cancelled_pause_leaves_engines_pausing(self) -> None:
        engine = Model()
        async with served(engine) as serving:
            client = serving.client
            stream = await begun(serving.client, "a")
            pausing = asyncio.create_task(client.pause())
            await until(lambda: client.paused)
            await cancelled(pausing)
            assert client.paused == "finish"
            waiting = client.submit(ask("b"))
            await stream.aclose()
            await client.pause(timeout=20)
            assert await stands(engine)
            resuming = asyncio.create_task(client.resume())
            await asyncio.sleep(0)
            await cancelled(resuming)
            assert client.paused is None
            assert len(await collected(waiting)) == 3

    async def test_pause_that_is_undone_meanwhile_raises(self) -> None:
        engine = Model()
        async with served(engine) as serving:
            stream = await begun(serving.client, "a")
            pausing = [asyncio.create_task(serving.client.pause()) for _ in range(2)]
            await until(lambda: serving.client.paused)
            await serving.client.resume()
            for each in pausing:
                with pytest.raises(RoleError, match="were resumed before pause"):
                    await each
            await stream.aclose()

    async def test_engine_that_dies_is_not_waited_for_and_its_waiting_request_fails(self) -> None:
        engines = [Model(), Model()]
        async with served(*engines, on_engine_death="continue") as serving:
            client = serving.client
            streams = [await begun(serving.client, each, engine=rank) for rank, each in enumerate("ab")]
            pausing = asyncio.create_task(client.pause())
            await until(lambda: client.paused)
            await client.abort("a")
            lost = client.submit(ask("lost"), engine=1)
            waiting = client.submit(ask("waiting"))
            serving.running[1].cancel()
            await pausing
            await client.resume()
            for stream in (streams[1], lost):
                with pytest.raises(EngineDead, match="engine 1"):
                    await collected(stream)
            assert len(await collected(waiting)) == 3

    async def test_death_of_all_ends_the_pause_with_an_error(self) -> None:
        engines = [Model(), Model()]
        async with served(*engines) as serving:
            streams = [await begun(serving.client, each, engine=rank) for rank, each in enumerate("ab")]
            pausing = asyncio.create_task(serving.client.pause())
            await until(lambda: serving.client.paused)
            waiting = serving.client.submit(ask("c"))
            serving.running[1].cancel()
            for each in (pausing, *map(collected, (*streams, waiting)), serving.client.resume()):
                with pytest.raises(EngineDead, match="engine 1"):
                    await each


class TestWaitingRequests:
    @pytest.mark.parametrize("how", ["abort", "aclose", "drop"])
    async def test_aborted_one_is_never_sent(self, how: str) -> None:
        engine = Engine()
        async with served(engine) as serving:
            client = serving.client
            await client.pause()
            stream = client.submit(ask("a"))
            kept = client.submit(ask("b", 1))
            with pytest.raises(ValueError, match="'a' is that of another request in flight"):
                client.submit(ask("a"))
            if how == "abort":
                await client.abort(["a"])
            elif how == "aclose":
                await stream.aclose()
            if how == "drop":
                del stream
            else:
                with pytest.raises(RequestAborted) as caught:
                    await anext(stream)
                assert caught.value.engine is None
            assert client.in_flight == 1
            again = client.submit(ask("a", 2))
            await client.resume()
            assert len(await collected(kept)) == 1
            assert len(await collected(again)) == 2
            assert engine.seen == ["b", "a"]

    async def test_arrays_may_be_changed_after_submit(self) -> None:
        class Summing(Engine):
            def add_request(self, request: Any) -> None:
                super().add_request({**request, "output": ask(request["request_id"], int(request["data"].sum()))})

        async with served(Summing()) as serving:
            await serving.client.pause()
            data = np.ones(100_000, dtype=np.int64)
            stream = serving.client.submit(ask("a", data=data))
            data[:] = 0
            await serving.client.resume()
            assert (await anext(stream))["tokens"] == 100_000
            assert stream.engine == 0
            await stream.aclose()


class TestSeveralClients:
    async def test_pause_by_one_holds_for_all(self) -> None:
        engines = [Model(), Model()]
        async with served(*engines, n_clients=3) as serving:
            one, other, quiet = serving.clients
            streams = [one.submit(ask("a", 60)), other.submit(ask("b", 60)), other.submit(ask("c", 60))]
            for stream in streams:
                await anext(stream)
            await one.pause()
            assert not any(engine.requests for engine in engines)
            await until(lambda: other.paused == "finish")
            held = quiet.submit(ask("d", 2))  # not even notified: the engine holds the request
            waiting = other.submit(ask("e", 2))
            assert await stands(*engines)
            assert (quiet.paused, waiting.engine) == (None, -1)
            await quiet.resume()  # any client may
            assert len(await collected(held)) == 2
            assert len(await collected(waiting)) == 2
            await until(lambda: one.paused is None)
            assert [len(await collected(stream)) for stream in streams] == [59] * 3

    async def test_client_that_closes_leaves_the_pause(self) -> None:
        engine = Model()
        async with served(engine, n_clients=2) as serving:
            one, other = serving.clients
            await collected(other.submit(ask("a")))
            await one.pause("keep")
            await one.aclose()
            waiting = other.submit(ask("b"))
            assert await stands(engine)
            assert other.paused == "keep"
            await other.resume()
            assert len(await collected(waiting)) == 3

    async def test_last_order_holds_everywhere(self) -> None:
        """Both pause and resume without waiting; nothing is lost, and the state is the same at all of them."""
        engines = [Model(), Model(), Model()]
        async with served(*engines, n_clients=2) as serving:
            for client in serving.clients:
                await collected(client.submit(ask(f"first {client}")))
            streams = []
            tasks = []
            for number in range(12):
                client = serving.clients[number * 5 % 3 % 2]
                streams.append(client.submit(ask(f"{number}", 3)))
                order = client.resume() if number % 3 == 0 else client.pause(MODES[number % 2 * 2])
                tasks.append(asyncio.create_task(order))
                await asyncio.sleep(0.001 * (number % 3))
            await serving.client.pause()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: len({client.pause_order() for client in serving.clients}) == 1)
            assert await stands(*engines)
            await serving.client.resume()
            for stream in streams:
                assert len(await collected(stream)) == 3


class TestEnginesOfVllm:
    async def test_pause_uses_calls_of_vllm(self) -> None:
        async with clients_of(here_and_there(), 1, 1) as serving:
            client = serving.client
            with zmq.Context() as context, BareEngine(context, client, vllm_version="0.33.0") as engine:
                await client.wait_until_ready(30)
                pauses = [asyncio.create_task(client.pause(mode)) for mode in MODES]
                for mode in ("wait", "abort", "keep"):
                    assert await answered(engine) == ["pause_scheduler", [mode]]
                await asyncio.gather(*pauses)
                resuming = asyncio.create_task(client.resume())
                assert await answered(engine) == ["resume_scheduler", []]
                await resuming
                pausing = asyncio.create_task(client.pause())
                await answered(engine, failure="Call to pause_scheduler method failed: no attribute")
                with pytest.raises(CallFailed, match="pause_scheduler") as caught:
                    await pausing
                assert caught.value.engine == 0


async def answered(engine: BareEngine, failure: str | None = None) -> list[Any]:
    """Answer the next call; return its method and arguments."""
    kind, payload = await engine.hears()
    assert kind == b"\x03"
    _, call_id, *call = msgspec.msgpack.decode(payload)
    engine.push.send(pack([0, [], None, 0.0, [call_id, failure, None]]))
    return call
