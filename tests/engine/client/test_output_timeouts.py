"""Time limits of single outputs: a timeout aborts nothing and loses nothing, and names the request."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import Any

import pytest
from served_engine import Engine, Slow, ask, collected, served, until

from aioshm.errors import EngineDead, RequestAborted, RoleError

pytestmark = pytest.mark.usefixtures("runtime_dir")

SILENCE_S = 0.005
LONG_S = 30.0


class Steady(Engine):
    """Takes a step as often as a consumer's limit expires."""

    async def step(self) -> list[Any]:  # type: ignore[override]
        await asyncio.sleep(SILENCE_S)
        return self._step()


async def test_next_after_a_timeout_returns_the_output_and_aborts_nothing() -> None:
    async with served(Slow()) as serving:
        engine = serving.engines[0]
        stream = serving.client.submit(ask("a", 3))
        for token in range(3):
            for _ in range(2):
                with pytest.raises(TimeoutError, match=r"^request 'a': no output within 0\.005 s from engine 0$"):
                    await stream.next(timeout=SILENCE_S)
            assert not stream.inbox.interrupted
            engine.may_go_on.set()
            assert (await stream.next(LONG_S))["token"] == token
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
        serving.engines[0].may_go_on.set()
        assert [output["token"] for output in await collected(stream)] == [0]
        assert serving.engines[0].aborted == []


async def test_iteration_with_a_limit_continues_after_its_timeout() -> None:
    async with served(Slow()) as serving:
        engine = serving.engines[0]
        stream = serving.client.submit(ask("a", 4), timeout=SILENCE_S)
        tokens: list[int] = []
        timeouts = 0
        while len(tokens) < 4:
            try:
                async for output in stream:
                    tokens.append(output["token"])
            except TimeoutError:
                timeouts += 1
                engine.may_go_on.set()
        assert tokens == [0, 1, 2, 3]
        assert timeouts >= 4
        assert await collected(stream) == []
        assert engine.aborted == []


async def test_stream_that_is_dropped_after_a_timeout_aborts() -> None:
    async with served(Engine()) as serving:
        for way in ("dropped", "aclose"):
            stream = serving.client.submit(ask(way, None), timeout=SILENCE_S)
            with pytest.raises(TimeoutError):
                await collected(stream)
            assert way not in serving.engines[0].aborted
            if way == "aclose":
                await stream.aclose()
                with pytest.raises(RequestAborted):
                    await stream.next(SILENCE_S)
            del stream
            await until(lambda way=way: way in serving.engines[0].aborted)


@pytest.mark.parametrize("first", ["output", "timeout"])
async def test_output_in_the_iteration_of_the_timeout_is_returned(first: str) -> None:
    async with served(Engine()) as serving:
        stream = serving.client.submit(ask("a", None))
        await stream.next()
        loop = asyncio.get_running_loop()
        waiting = asyncio.create_task(stream.next(timeout=0.02))
        await asyncio.sleep(0)
        loop.call_later(0.01 if first == "output" else 0.03, stream.inbox.put, "planted")
        time.sleep(0.05)  # both timers have expired when the loop runs again
        assert await waiting == "planted"


async def test_outputs_around_the_limit_come_in_order() -> None:
    async with served(Steady()) as serving:
        stream = serving.client.submit(ask("a", 60))
        tokens: list[int] = []
        number = 0
        while len(tokens) < 60:
            number += 1
            with suppress(TimeoutError):
                tokens.append((await stream.next(SILENCE_S * (0.9 + number % 5 / 20)))["token"])
        assert tokens == [*range(60)]
        assert serving.engines[0].aborted == []


@pytest.mark.parametrize("way", ["timeout", "wait_for"])
async def test_limit_from_outside_cancels_the_wait_and_loses_nothing(way: str) -> None:
    async with served(Slow()) as serving:
        stream = serving.client.submit(ask("a", 2), timeout=LONG_S)
        for token in range(2):
            with pytest.raises(TimeoutError) as caught:
                if way == "wait_for":
                    await asyncio.wait_for(anext(stream), SILENCE_S)
                else:
                    async with asyncio.timeout(SILENCE_S):
                        await anext(stream)
            assert "no output" not in str(caught.value)
            assert stream.inbox.interrupted
            serving.engines[0].may_go_on.set()
            assert (await stream.next(LONG_S))["token"] == token
            assert not stream.inbox.interrupted


async def test_output_in_the_iteration_of_a_cancellation_is_returned_next() -> None:
    async with served(Engine()) as serving:
        stream = serving.client.submit(ask("a", None))
        await stream.next()
        waiting = asyncio.create_task(stream.next(LONG_S))
        await asyncio.sleep(0)
        stream.inbox.put("planted")
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert await stream.next(LONG_S) == "planted"


async def test_task_that_ends_after_a_cancelled_wait_with_a_limit_aborts() -> None:
    async with served(Engine()) as serving:
        stream = serving.client.submit(ask("a", None))
        await stream.next()
        waiting = asyncio.create_task(stream.next(LONG_S))

        async def give_up() -> None:
            await asyncio.wait_for(stream.next(LONG_S), SILENCE_S)

        waiting.cancel()
        await asyncio.wait([waiting])
        waiting = asyncio.create_task(give_up())
        await asyncio.wait([waiting])
        assert isinstance(waiting.exception(), TimeoutError)
        with pytest.raises(RequestAborted):
            await stream.next(LONG_S)
        await until(lambda: serving.engines[0].aborted == ["a"])


async def test_second_task_is_refused_and_the_first_keeps_its_limit() -> None:
    async with served(Engine()) as serving:
        stream = serving.client.submit(ask("a", None))
        await stream.next()
        waiting = asyncio.create_task(stream.next(0.05))
        await asyncio.sleep(0)
        for limit in (SILENCE_S, None):
            with pytest.raises(RoleError, match="another task or thread waits for outputs of request 'a'"):
                await stream.next(limit)
        with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
            await waiting


@pytest.mark.parametrize(
    ("timeout", "kind"),
    [
        (0, ValueError),
        (-1, ValueError),
        (math.nan, ValueError),
        (math.inf, ValueError),
        ("1", TypeError),
        (True, TypeError),
    ],
)
async def test_limit_that_makes_no_sense_is_refused_by_name(timeout: Any, kind: type[Exception]) -> None:
    async with served(Engine()) as serving:
        with pytest.raises(kind, match="timeout must be"):
            serving.client.submit(ask("a"), timeout=timeout)
        assert serving.client.in_flight == 0
        stream = serving.client.submit(ask("b"))
        with pytest.raises(kind, match="timeout must be"):
            stream.next(timeout)
        stream.timeout = timeout
        with pytest.raises(kind, match="timeout must be"):
            await anext(stream)
        stream.timeout = None
        assert len(await collected(stream)) == 3
        assert serving.engines[0].seen == ["b"]


async def test_death_during_a_wait_with_a_limit_is_raised() -> None:
    async with served(Engine()) as serving:
        stream = serving.client.submit(ask("a", None))
        await stream.next(LONG_S)
        waiting = asyncio.create_task(stream.next(LONG_S))
        await asyncio.sleep(0)
        serving.running[0].cancel()
        with pytest.raises(EngineDead, match="engine 0"):
            await waiting
        with pytest.raises(EngineDead, match="engine 0"):
            await stream.next(LONG_S)


async def test_resubmitted_request_continues_within_its_limit_and_names_its_new_engine() -> None:
    async with served(Slow(), Slow(), on_engine_death="continue", resubmit="unstarted") as serving:
        stream = serving.client.submit(ask("a", 2), engine=0)
        with pytest.raises(TimeoutError, match="from engine 0"):
            await stream.next(SILENCE_S)
        waiting = asyncio.create_task(stream.next(LONG_S))
        await asyncio.sleep(0)
        serving.running[0].cancel()
        await until(lambda: stream.engine == 1)
        serving.engines[1].may_go_on.set()
        assert (await waiting)["token"] == 0
        with pytest.raises(TimeoutError, match="from engine 1"):
            await stream.next(SILENCE_S)
        serving.engines[1].may_go_on.set()
        assert (await stream.next(LONG_S))["token"] == 1
