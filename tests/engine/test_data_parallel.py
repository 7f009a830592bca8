"""Engines in lockstep, their coordinator and a client together: nobody but the coordinator can wake who is paused."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from peers import Peers, published
from served_engine import Engine, ask, collected, here_and_there, served

from aioshm.engine import DPCoordinator, EngineZmqAddresses
from aioshm.engine.coordination import CoordinatorAddresses

pytestmark = pytest.mark.usefixtures("runtime_dir")


class Agreement:
    """What an all-reduce is to engines in one loop: it takes all of them."""

    def __init__(self, engines: int) -> None:
        self.engines = engines
        self.votes: list[bool] = []
        self.agreed: asyncio.Future[bool] | None = None

    async def reach(self, unfinished: bool) -> bool:
        if self.agreed is None:
            self.agreed = asyncio.get_running_loop().create_future()
        agreed = self.agreed
        self.votes.append(unfinished)
        if len(self.votes) == self.engines:
            agreed.set_result(any(self.votes))
            self.votes, self.agreed = [], None
        return await asyncio.shield(agreed)


class Rank(Engine):
    """An engine that works in lockstep."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__()
        self.agreement = agreement
        self.dummies = 0

    def execute_dummy_batch(self) -> None:
        self.dummies += 1

    async def has_unfinished_dp(self, unfinished: bool) -> bool:
        return await self.agreement.reach(unfinished)


def coordinated(coordinator: DPCoordinator) -> EngineZmqAddresses:
    addresses = here_and_there()
    addresses.coordinator_input, addresses.coordinator_output = coordinator.get_engine_socket_addresses()
    addresses.frontend_stats_publish_address = coordinator.get_stats_publish_address()
    return addresses


@pytest.mark.parametrize("kv_cache_usage", [True, False])
async def test_requests_are_served_wave_after_wave(kv_cache_usage: bool) -> None:
    agreement = Agreement(3)
    ranks = [Rank(agreement) for _ in range(3)]
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(await DPCoordinator.start(3, kv_cache_usage=kv_cache_usage))
        serving = await stack.enter_async_context(served(*ranks, addresses=coordinated(coordinator)))
        for number in range(6):  # each to one engine, while all are paused
            async with asyncio.timeout(20):
                outputs = await collected(serving.client.submit(ask(f"r{number}")))
            assert [output["token"] for output in outputs] == [0, 1, 2]
        assert sorted(len(each.seen) for each in ranks) == [2, 2, 2]
        assert all(each.dummies for each in ranks)
        async with asyncio.timeout(20):
            streams = [collected(serving.client.submit(ask(f"s{number}", 20))) for number in range(30)]
            assert [len(outputs) for outputs in await asyncio.gather(*streams)] == [20] * 30
        with Peers(CoordinatorAddresses(coordinator.get_stats_publish_address(), "", "")) as peers:
            front_end, paused = await peers.front_end(), False
            while not paused:
                counts, wave, running = await published(front_end)
                paused = not running and counts == [[0, 0, 0.0] if kv_cache_usage else [0, 0]] * 3
            assert wave > 0
        assert not coordinator.last_lines("DPCoordinator")
