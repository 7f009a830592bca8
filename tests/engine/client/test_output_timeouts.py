"""Time limits of single outputs: a timeout aborts nothing and loses nothing, and names the request."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import Any

import pytest
from served_engine import Engine, Gated, ask, collected, served, until

from aioshm.errors import RoleError

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
        stream = serving.client.submit(ask("a", None))
        await stream.next()
        loop = asyncio.get_running_loop()
        waiting = asyncio.create_task(stream.next(timeout=0.02))
        await asyncio.sleep(0)
        loop.call_later(0.01 if first == "output" else 0.03, stream.inbox.put, "planted")
        time.sleep(0.05)  # both timers have expired when the loop runs again
        assert await waiting == "planted"


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
