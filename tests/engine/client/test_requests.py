"""Streams of requests: time limits of single outputs, which lose nothing, and ids that are used again."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import zmq
from peers import BareEngine
from served_engine import Engine, Gated, ask, begun, clients_of, collected, here_and_there, served, until
from support import cancelled

from aioshm.engine import EngineClient
from aioshm.engine.client import requests
from aioshm.engine.protocol.messages import MarkedOutputs, mark, pop_mark
from aioshm.errors import RequestAborted, RoleError

pytestmark = pytest.mark.usefixtures("runtime_dir")

SILENCE_S = 0.005
LONG_S = 30.0


class Slow(Gated):
    """Takes one step each time that ``gate`` is set."""

    async def step(self) -> list[Any]:
        outputs = await super().step()
        self.gate.clear()
        return outputs


@pytest.mark.parametrize("way", ["next", "iteration", "wait_for", "timeout"])
async def test_outputs_after_timeouts_are_complete(way: str) -> None:
    own = way in ("next", "iteration")
    async with served(Slow()) as serving:
        engine = serving.engines[0]
        stream = serving.client.submit(ask("a", 4))
        tokens: list[int] = []
        timeouts = 0
        while len(tokens) < 4:
            try:
                if way == "next":
                    tokens.append((await stream.next(timeout=SILENCE_S))["token"])
                elif way == "iteration":
                    stream.timeout = SILENCE_S
                    async for output in stream:
                        tokens.append(output["token"])
                elif way == "wait_for":
                    tokens.append((await asyncio.wait_for(anext(stream), SILENCE_S))["token"])
                else:
                    async with asyncio.timeout(SILENCE_S):
                        tokens.append((await anext(stream))["token"])
            except TimeoutError as error:
                timeouts += 1
                named = str(error) == "request 'a': no output within 0.005 s from engine 0"
                # The last output may have come in the same iteration of the loop: then there is nothing to leave.
                interrupted = not own and not stream.inbox.ended
                assert (named, stream.inbox.interrupted) == (own, interrupted)
                engine.gate.set()
        assert tokens == [0, 1, 2, 3]
        assert timeouts >= 4
        for timeout in (None, LONG_S):
            with pytest.raises(StopAsyncIteration):
                await stream.next(timeout)
        assert engine.aborted == []


async def test_stream_kept_after_a_timeout_outlives_its_task() -> None:
    async with served(Slow()) as serving:
        stream = serving.client.submit(ask("a", 1))

        async def give_up() -> None:
            with suppress(TimeoutError):
                await stream.next(timeout=SILENCE_S)

        await asyncio.create_task(give_up())
        serving.engines[0].gate.set()
        assert [output["token"] for output in await collected(stream)] == [0]
        assert serving.engines[0].aborted == []


async def test_stream_that_is_dropped_after_a_timeout_aborts() -> None:
    async with served(Engine()) as serving:
        stream = serving.client.submit(ask("a", None), timeout=SILENCE_S)
        with pytest.raises(TimeoutError):
            await collected(stream)
        assert serving.engines[0].aborted == []
        del stream
        await until(lambda: serving.engines[0].aborted == ["a"])


@pytest.mark.parametrize("first", ["output", "timeout"])
async def test_output_in_the_iteration_of_the_timeout_is_returned(first: str) -> None:
    async with served(Engine()) as serving:
        stream = await begun(serving.client, "a")
        loop = asyncio.get_running_loop()
        waiting = asyncio.create_task(stream.next(timeout=0.02))
        await asyncio.sleep(0)
        loop.call_later(0.01 if first == "output" else 0.03, stream.inbox.put, "planted")
        time.sleep(0.05)  # both timers have expired when the loop runs again
        assert await waiting == "planted"


async def test_output_in_the_iteration_of_a_cancellation_is_returned_next() -> None:
    async with served(Engine()) as serving:
        stream = await begun(serving.client, "a")
        waiting = asyncio.create_task(stream.next(LONG_S))
        await asyncio.sleep(0)
        stream.inbox.put("planted")
        await cancelled(waiting)
        assert await stream.next(LONG_S) == "planted"


async def test_second_task_is_refused_and_the_first_keeps_its_limit() -> None:
    async with served(Engine()) as serving:
        stream = await begun(serving.client, "a")
        waiting = asyncio.create_task(stream.next(0.05))
        await asyncio.sleep(0)
        for limit in (SILENCE_S, None):
            with pytest.raises(RoleError, match="another task or thread waits for outputs of request 'a'"):
                await stream.next(limit)
        with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
            await waiting


async def test_invalid_limit_is_refused_by_name() -> None:
    limits: list[tuple[Any, type[Exception]]] = [(0, ValueError), (math.nan, ValueError), ("1", TypeError)]
    async with served(Engine()) as serving:
        stream = serving.client.submit(ask("b"))
        for timeout, kind in limits:
            with pytest.raises(kind, match="timeout must be"):
                serving.client.submit(ask("a"), timeout=timeout)
            with pytest.raises(kind, match="timeout must be"):
                await stream.next(timeout)
            stream.timeout = timeout
            with pytest.raises(kind, match="timeout must be"):
                await anext(stream)
        stream.timeout = None
        assert len(await collected(stream)) == 3
        assert serving.engines[0].seen == ["b"]


# Ids that are used again


class Wordy(Engine):
    """Says a request's words, one in each step."""

    async def step(self) -> list[Any]:
        await asyncio.sleep(0.001)
        outputs = []
        for request_id, request in list(self.requests.items()):
            output = {"request_id": request_id, "word": request["words"].pop(0)}
            if not request["words"]:
                output["finish_reason"] = "stop"
                del self.requests[request_id]
            outputs.append(output)
        return outputs


def saying(request_id: str, words: str) -> dict[str, Any]:
    return {"request_id": request_id, "words": words.split()}


async def words(stream: Any) -> str:
    return " ".join([output["word"] async for output in stream])


async def leave(client: EngineClient, stream: Any, way: str) -> None:
    if way == "aclose":
        await stream.aclose()
    elif way == "abort":
        await client.abort(stream.request_id)
    elif way == "wait_for":
        with pytest.raises(TimeoutError):
            while True:  # until no output is ready
                await asyncio.wait_for(anext(stream), 1e-9)
    else:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                while True:
                    await anext(stream)


@pytest.mark.parametrize("way", ["aclose", "abort", "wait_for", "timeout"])
async def test_id_used_again_at_once_gets_its_own_outputs(way: str) -> None:
    async with served(Wordy(), Wordy()) as serving:
        client = serving.client
        for number in range(12):
            former = client.submit(saying("a", "1 2 3 4 5 6 7 8 " * 40), engine=0 if number % 3 == 0 else None)
            for _ in range(number % 4):
                await anext(former)
            await leave(client, former, way)
            assert await words(client.submit(saying("a", "x y z"))) == "x y z"
            with pytest.raises(RequestAborted, match="request 'a' was aborted before its last output"):
                await words(former)
        await until(lambda: not any(engine.requests for engine in serving.engines))
        assert client.in_flight == 0
        assert client.stats().failed == 0


async def test_id_of_a_request_that_somebody_waits_for_is_refused() -> None:
    async with served(Engine()) as serving:
        stream = await begun(serving.client, "a")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="another request in flight"):
            serving.client.submit(ask("a"))
        await cancelled(waiting)


async def test_request_of_a_restarted_front_end_replaces_that_of_its_life_before() -> None:
    async with served(Engine()) as serving:
        client = serving.client
        engine = serving.engines[0]
        former = mark([msgspec.msgpack.encode(ask("a", None))], 7)
        # As if sent before a restart that the engine has not noticed.
        client._link.send(client._link.engines[0], b"\x00", former)
        await until(lambda: engine.given.get("a"))
        assert [output["token"] for output in await collected(client.submit(ask("a", 3)))] == [0, 1, 2]
        assert engine.aborted == ["a"]


class Remote(BareEngine):
    """An engine that speaks of generations."""

    async def hears_request(self) -> int:
        """Return the generation of the next request."""
        kind, *frames = await self.hears()
        assert kind == b"\x00"
        return pop_mark(frames)

    def says(self, *outputs: Any, **more: Any) -> None:
        self.push.send(msgspec.msgpack.encode(MarkedOutputs(0, [*outputs], **more)))


def said(word: str, **more: Any) -> dict[str, Any]:
    return {"request_id": "a", "word": word, **more}


async def test_outputs_and_ends_of_other_generations_reach_no_request() -> None:
    async with clients_of(here_and_there(), 1, 1) as serving:
        client = serving.client
        with zmq.Context() as context, Remote(context, client) as engine:
            await client.wait_until_ready(30)
            former = client.submit(ask("a"))
            first = await engine.hears_request()
            await former.aclose()
            stream = client.submit(ask("a"))
            assert (await engine.hears())[0] == b"\x01"
            second = await engine.hears_request()
            assert second != first
            engine.says(said("old"), generations=[first])
            engine.says(said("of the life before", finish_reason="stop"), generations=[7], finished_requests={"a"})
            engine.says(finished_requests={"a"}, generations=[])  # the abort is confirmed
            engine.says(said("new"), generations=[second])
            engine.says(said("without a generation"))
            engine.says(said("last", finish_reason="stop"), generations=[second], finished_requests={"a"})
            assert await words(stream) == "new last"
            assert client.late_outputs == 3


async def test_generations_that_do_not_fit_their_outputs_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async with served(Engine()) as serving:
        with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
            stranger.connect(serving.client.addresses.outputs[0])
            stranger.send(msgspec.msgpack.encode(MarkedOutputs(0, [said("x")], generations=[1, 2])))
            await until(lambda: "2 generations for 1 outputs" in caplog.text)
            stranger.close(linger=0)
        assert len(await collected(serving.client.submit(ask("a")))) == 3


async def test_engine_of_vllm_never_sees_generations_and_aborted_ids_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with clients_of(here_and_there(), 1, 1) as serving:
        client = serving.client
        with zmq.Context() as context, Remote(context, client, vllm_version="0.33.0") as engine:
            await client.wait_until_ready(30)
            stream = client.submit(ask("a"))
            assert await engine.hears() == [b"\x00", msgspec.msgpack.encode(ask("a"))]
            await stream.aclose()
            with pytest.raises(ValueError, match=r"an aborted request at engine 0.*use another id, or wait for 60 s"):
                client.submit(ask("a"))
            assert client.in_flight == 0
            monkeypatch.setattr(requests, "REUSE_AFTER_S", 0.0)
            stream = client.submit(ask("a"))
            engine.says(said("own", finish_reason="stop"))
            assert await words(stream) == "own"
