"""Engines that are added to a client, and removed."""

from __future__ import annotations

import asyncio

import pytest
from served_engine import Engine, ask, served

from aioshm.errors import EngineDead

pytestmark = pytest.mark.usefixtures("runtime_dir")

WITHIN_S = 30


@pytest.mark.parametrize("first", ["times out", "is cancelled"])
async def test_engine_that_two_tasks_remove_is_removed_for_both(first: str) -> None:
    async with served(Engine(), Engine()) as serving:
        client = serving.client
        stream = client.submit(ask("a", None), engine=1)
        await anext(stream)
        timeout = 0.01 if first == "times out" else None
        removals = [asyncio.create_task(client.remove_engine(1, timeout=each)) for each in (timeout, None)]
        await asyncio.sleep(0)
        if first == "is cancelled":
            removals[0].cancel()
            await asyncio.wait([removals[0]])
            with pytest.raises(EngineDead, match="engine 1 is being taken out of service"):
                client.submit(ask("b"), engine=1)
            await stream.aclose()
        async with asyncio.timeout(WITHIN_S):
            await removals[1]
        assert client.ranks == [0]


async def test_no_engine_is_added_while_one_is_being_removed() -> None:
    async with served(Engine(), Engine()) as serving:
        client = serving.client
        stream = client.submit(ask("a", None), engine=1)
        await anext(stream)
        removal = asyncio.create_task(client.remove_engine(1))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="engine 1 is being removed"):
            client.add_engine(2)
        await stream.aclose()
        await removal
        assert client.ranks == [0]
        client.add_engine(1)
        assert client.ranks == [0, 1]
