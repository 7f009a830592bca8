"""Engines in lockstep that pause: at the same step, without a hang in their collective, and woken by resume."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from peers import Peers, pack, published
from served_engine import Serving, ask, collected, here_and_there, served, until
from test_data_parallel import Agreement, Rank, coordinated

from aioshm.engine import DPCoordinator
from aioshm.engine.dp import CoordinatorAddresses
from aioshm.engine.protocol.messages import PauseMode
from aioshm.errors import RequestAborted

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]

MODES: list[PauseMode] = ["finish", "abort", "keep"]


class Counting(Rank):
    """Counts the steps and dummy batches that have begun."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self.turns = 0
        self.waits = False

    def step(self) -> Any:
        self.turns += 1
        return super().step()

    def execute_dummy_batch(self) -> None:
        self.turns += 1

    async def has_unfinished_dp(self, unfinished: bool) -> bool:
        self.waits = True
        try:
            return await super().has_unfinished_dp(unfinished)
        finally:
            self.waits = False


@asynccontextmanager
async def in_lockstep(n_engines: int, n_clients: int = 1) -> AsyncIterator[tuple[Serving, list[Counting]]]:
    agreement = Agreement(n_engines)
    ranks = [Counting(agreement) for _ in range(n_engines)]
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(await DPCoordinator.start(n_engines))
        addresses = coordinated(coordinator, here_and_there(n_clients))
        yield await stack.enter_async_context(served(*ranks, addresses=addresses, n_clients=n_clients)), ranks


async def check_paused(ranks: list[Counting]) -> None:
    """Check that all have stopped after the same step, and that none waits for another one."""
    before = [rank.turns for rank in ranks]
    assert not any(rank.waits for rank in ranks)
    assert not ranks[0].agreement.votes
    await asyncio.sleep(0.03)
    assert before == [rank.turns for rank in ranks]


@pytest.mark.parametrize("mode", MODES)
async def test_all_pause_at_the_same_step_and_resume(mode: PauseMode) -> None:
    async with asyncio.timeout(60), in_lockstep(3) as (serving, ranks):
        client = serving.client
        for number in range(3):  # one engine has requests, the others take dummy batches
            tokens = {"finish": 40, "abort": None, "keep": 400}[mode]
            stream = client.submit(ask(f"{number}", tokens), engine=number % 3)
            assert (await anext(stream))["token"] == 0
            await client.pause(mode)
            await check_paused(ranks)
            assert any(rank.requests for rank in ranks) == (mode == "keep")
            waiting = client.submit(ask(f"waiting {number}", 2))
            assert await client.call("add", 1) == [2, 2, 2]
            await check_paused(ranks)
            await client.resume()
            if mode == "abort":
                with pytest.raises(RequestAborted, match="paused"):
                    await collected(stream)
            else:
                assert [output["token"] for output in await collected(stream)] == list(range(1, tokens or 0))
            assert len(await collected(waiting)) == 2
        assert len({rank.turns for rank in ranks}) == 1


@pytest.mark.parametrize("mode", MODES)
async def test_requests_of_a_client_that_does_not_know_never_start_a_wave(mode: PauseMode) -> None:
    async with asyncio.timeout(60), in_lockstep(2, 2) as (serving, ranks):
        one, other = serving.clients
        for number in range(6):
            early = [other.submit(ask(f"early {number} {rank}", 3), engine=rank) for rank in (0, 1)]
            pausing = asyncio.create_task(one.pause(mode))
            await asyncio.sleep(0.0005 * number)
            late = [other.submit(ask(f"late {number} {rank}", 3)) for rank in (0, 1)]
            await pausing
            await check_paused(ranks)
            await one.resume()
            for stream in (*early, *late):
                try:
                    assert len(await collected(stream)) == 3
                except RequestAborted:
                    assert mode == "abort"
            await until(lambda: other.paused is None)


async def test_request_of_an_older_front_end_to_paused_engines_starts_no_wave_that_hangs() -> None:
    """Such a front end asks the coordinator to wake all engines but the one that has the request."""
    async with asyncio.timeout(60), in_lockstep(2) as (serving, ranks):
        client = serving.client
        await client.pause()
        stats_address = client.addresses.frontend_stats_publish_address
        assert stats_address is not None
        with Peers(CoordinatorAddresses(stats_address, "", "")) as peers:
            front_end = await peers.front_end()
            await published(front_end)
            await front_end.send(pack([1, 0]))
            # All of them take part, and leave their collective.
            await until(lambda: [(rank.turns, rank.waits) for rank in ranks] == [(1, False)] * 2)
        await check_paused(ranks)
        await client.resume()
        assert len(await collected(client.submit(ask("a")))) == 3
