"""Deaths of engines with on_engine_death="continue": failed and moved requests, replacements, late reports."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from served_engine import Engine, Gated, Serving, ask, begun, collected, served, served_by_processes, stop, until
from startups import starting, tasks

from aioshm.engine import ClientOptions, CoreEngine, EngineCoreOutputs, run_engine_core
from aioshm.engine.client import liveness
from aioshm.errors import EngineDead, RequestAborted, copy_error

pytestmark = pytest.mark.usefixtures("runtime_dir")


@asynccontextmanager
async def back(serving: Serving, rank: int, engine: Engine) -> AsyncIterator[None]:
    """Let an engine of this rank shake hands with the clients, and serve them."""
    async with starting(engines=[CoreEngine(rank)], where=serving.client.addresses) as startup:
        async with tasks(run_engine_core(engine, startup.handshake_address, rank)):
            await startup.wait(30)
            for client in serving.clients:
                await client.wait_until_ready(30)
            yield


async def end(serving: Serving, rank: int) -> None:
    """End an engine that runs in this loop, and wait until the clients know."""
    serving.running[rank].cancel()
    for client in serving.clients:
        await until(lambda client=client: rank in client.deaths)


async def test_death_fails_only_requests_and_calls_of_the_dead_engine() -> None:
    async with served(Engine(), Engine(), on_engine_death="continue") as serving:
        client = serving.client
        streams = [await begun(client, f"{rank}", engine=rank) for rank in (0, 1)]
        waiting = [asyncio.create_task(client.call("never", engine=rank)) for rank in (0, 1)]
        await asyncio.sleep(0)
        await end(serving, 1)

        with pytest.raises(EngineDead) as caught:
            await anext(streams[1])
        assert caught.value.engine == 1
        with pytest.raises(EngineDead):
            await waiting[1]
        assert not waiting[0].done()
        assert client.in_flight == 1
        for number in range(6):
            stream = client.submit(ask(f"later {number}", 2))
            assert stream.engine == 0
            assert len(await collected(stream)) == 2
        assert await client.call("add", 1, 2) == [3]
        for attempt in (lambda: client.submit(ask("x"), engine=1), lambda: client.call("add", 1, engine=1)):
            with pytest.raises(EngineDead, match="engine 1"):
                result = attempt()
                await result  # type: ignore[misc]
        with pytest.raises(TimeoutError, match=r"engines 1 have not registered after 0\.01 s; engine 1 .*ends"):
            await client.wait_until_ready(0.01)
        await client.abort("0")
        with pytest.raises(RequestAborted):
            await anext(streams[0])
        waiting[0].cancel()


async def test_engine_that_comes_back_gets_requests() -> None:
    async with served(Engine(), Engine(), n_clients=2, on_engine_death="continue") as serving:
        for _ in range(2):
            await end(serving, 0)
            successor = Engine()
            async with back(serving, 0, successor):
                for client in serving.clients:
                    assert not client.deaths
                    assert len(await collected(client.submit(ask("a", 3), engine=0))) == 3
                    assert await client.call("add", 1, 2) == [3, 3]
                # Half of what comes now is the successor's.
                many = [serving.client.submit(ask(str(number), 1)) for number in range(20)]
                assert sum(stream.engine == 0 for stream in many) == 10
                for stream in many:
                    assert len(await collected(stream)) == 1
            for client in serving.clients:
                await until(lambda client=client: 0 in client.deaths)


@pytest.mark.parametrize("resubmit", [None, "unstarted"])
async def test_requests_without_output_move_if_they_may(resubmit: Any) -> None:
    slow = Gated()
    async with served(slow, Engine(), on_engine_death="continue", resubmit=resubmit) as serving:
        client = serving.client
        slow.gate.set()
        started = await begun(client, "started", engine=0)
        slow.gate.clear()
        waiting = [client.submit(ask(str(number), 3), engine=0) for number in range(5)]
        await end(serving, 0)
        with pytest.raises(EngineDead):
            await anext(started)
        for stream in waiting:
            if resubmit is None:
                with pytest.raises(EngineDead):
                    await anext(stream)
            else:
                assert stream.engine == 1
                assert [output["token"] for output in await collected(stream)] == [0, 1, 2]
        assert client.in_flight == 0
        assert [each.in_flight for each in client._link.engines] == [0, 0]


async def test_a_request_is_given_to_each_engine_once_at_most() -> None:
    engines = Gated(), Gated()
    async with served(*engines, on_engine_death="continue", resubmit="unstarted") as serving:
        stream = serving.client.submit(ask("a", 3), engine=0)
        await end(serving, 0)
        assert stream.engine == 1
        async with back(serving, 0, Gated()):
            serving.running[1].cancel()
            with pytest.raises(EngineDead) as caught:
                await anext(stream)  # engine 0 had it: late output of its first process may still come
            assert caught.value.engine == 1


@pytest.mark.parametrize("x", [np.zeros((40, 40))[:, ::2], torch.zeros(1000)], ids=["strided", "tensor"])
async def test_resubmitted_request_carries_what_was_submitted(x: Any) -> None:
    class Summing(Gated):
        def add_request(self, request: Any) -> None:
            sum_ = float(request["x"].sum())
            super().add_request(ask(request["request_id"], output={"request_id": "a", "sum": sum_, "finished": True}))

    engines = Summing(), Summing()
    async with served(*engines, on_engine_death="continue", resubmit="unstarted") as serving:
        x[:] = 0
        stream = serving.client.submit({"request_id": "a", "x": x}, engine=0)
        assert stream.inbox.request is not None
        x[:] = 1
        await end(serving, 0)
        engines[1].gate.set()
        assert [output["sum"] for output in await collected(stream)] == [0.0]
        assert (stream.engine, stream.inbox.request) == (1, None), "kept until the first output"


async def test_calls_without_any_engine_name_the_deaths_until_engines_are_back() -> None:
    async with served(Engine(), Engine(), on_engine_death="continue") as serving:
        client = serving.client
        await end(serving, 1)
        await end(serving, 0)
        for attempt in (lambda: client.submit(ask("x")), lambda: client.call("add", 1)):
            with pytest.raises(EngineDead, match=r"no engine is left: engine 0 .*; engine 1 ") as caught:
                result = attempt()
                await result  # type: ignore[misc]
            assert caught.value.engine == 1
        waiting = asyncio.create_task(client.wait_until_ready(30))
        async with starting(engines=2, where=client.addresses) as startup:
            async with tasks(*(run_engine_core(Engine(), startup.handshake_address, rank) for rank in (0, 1))):
                await waiting
                assert len(await collected(client.submit(ask("y", 2)))) == 2


async def test_dead_engine_whose_request_has_moved_is_idle_and_its_late_output_reaches_no_request() -> None:
    engines = Gated(), Gated()
    async with served(*engines, on_engine_death="continue", resubmit="unstarted") as serving:
        client = serving.client
        stream = client.submit(ask("a", 2), engine=0)
        draining = asyncio.create_task(client._link.drain(client._link.engines[0]))
        await asyncio.sleep(0)
        await end(serving, 0)
        assert stream.engine == 1
        async with asyncio.timeout(20):
            await draining
        with zmq.Context() as context, context.socket(zmq.PUSH) as late:
            late.connect(client.addresses.outputs[0])
            output = {"request_id": "a", "token": 99, "finish_reason": "length"}
            late.send(msgspec.msgpack.encode(EngineCoreOutputs(0, [output], finished_requests={"a"})))
            await until(lambda: client.late_outputs == 1)
        engines[1].gate.set()
        assert [output["token"] for output in await collected(stream)] == [0, 1]


@pytest.mark.parametrize("count", [1, 2])
async def test_late_report_of_a_replaced_engine_ends_no_engine(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "NAME_WITHIN_S", 0.01)
    async with served(*(Engine() for _ in range(count)), on_engine_death="continue") as serving:
        client = serving.client
        await end(serving, 0)
        async with back(serving, 0, Engine()):
            with zmq.Context() as context, context.socket(zmq.PUSH) as late:
                late.connect(client.addresses.outputs[0])
                late.send(b"ENGINE_CORE_DEAD")
                late.send(msgspec.msgpack.encode(EngineCoreOutputs(0, [{"request_id": "nobody's"}])))
                await until(lambda: client.late_outputs)
            await asyncio.sleep(2 * liveness.LAST_WORDS_S)
            assert not client.deaths
            assert len(await collected(client.submit(ask("a", 2), engine=0))) == 2


async def test_everything_that_a_dead_engine_has_sent_is_received() -> None:
    async with served_by_processes(1, on_engine_death="continue") as serving:
        assert serving.manager is not None
        stream = serving.client.submit(ask("long", 1000))
        await anext(stream)
        time.sleep(1.0)  # the loop is late: outputs and death wait in its sockets
        stop(serving.manager.processes[0].pid or 0)
        time.sleep(0.2)
        assert [output["token"] for output in await collected(stream)] == list(range(1, 1000))


def test_invalid_options_are_refused() -> None:
    for options, text in (
        ({"on_engine_death": "ignore"}, "on_engine_death must be 'fail' or 'continue', not 'ignore'"),
        ({"resubmit": "unstarted"}, "resubmit must be None, or 'unstarted' with on_engine_death='continue'"),
        ({"membership_address": "ipc:///x"}, "membership_address needs on_engine_death='continue'"),
    ):
        with pytest.raises(ValueError, match=text):
            ClientOptions(**options)


class Elsewhere(SimpleNamespace):
    """The process of an engine on another host."""

    __hash__ = object.__hash__


async def test_exit_on_another_host_that_is_known_late_is_no_second_death() -> None:
    ends = [os.pipe() for _ in range(2)]
    processes = [
        Elsewhere(name=f"EngineCore_{rank}", pid=7, sentinel=sentinel, exitcode=None, host="10.0.0.6")
        for rank, (sentinel, _) in enumerate(ends)
    ]
    manager: Any = SimpleNamespace(processes=processes)
    async with served(Engine(), Engine(), on_engine_death="continue") as serving:
        client = serving.client
        client.watch(manager)
        await end(serving, 0)
        for _, alive in ends:
            os.close(alive)
        await until(lambda: 1 in client.deaths)
        assert [str(client.deaths[rank]).partition(")")[2] for rank in range(2)] == [
            " has said that it ends",
            " exited; its exit code is not known",
        ]
        assert client.stats().deaths == 2
    for sentinel, _ in ends:
        os.close(sentinel)


async def test_call_of_all_engines_fails_if_one_was_just_lost() -> None:
    async with served(Engine(), Engine()) as serving:
        serving.running[1].cancel()
        await until(lambda: serving.client._link.engines[1].timer)  # the death is reported later
        with pytest.raises(EngineDead, match="engine 1"):
            await serving.client.call("add", 1, 2)


async def test_abort_reaches_living_engines_if_one_was_just_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "LAST_WORDS_S", 30)  # the death is reported later
    async with served(Gated(), Gated(), on_engine_death="continue") as serving:
        streams = [serving.client.submit(ask(f"{rank}", None), engine=rank) for rank in (0, 1)]
        await until(lambda: serving.engines[1].requests)
        serving.running[0].cancel()
        await until(lambda: serving.client._link.engines[0].connection is None)
        await serving.client.abort(["0", "1"])
        for stream in streams:
            with pytest.raises(RequestAborted):
                await anext(stream)
        serving.engines[1].gate.set()  # an engine takes aborts between steps
        await until(lambda: serving.engines[1].aborted == ["1"])


def test_note_on_a_raised_error_is_on_no_other_copy() -> None:
    error = EngineDead("engine 1 was killed", engine=1)
    error.add_note("of the callback")
    copy_error(error).add_note("of a request")
    assert copy_error(error).__notes__ == ["of the callback"]
    assert (copy_error(error).engine, str(copy_error(error))) == (1, "engine 1 was killed")
