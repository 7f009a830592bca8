"""Engines in lockstep, their coordinator and a client together: only the coordinator wakes paused engines."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from peers import Peers, published
from served_engine import Engine, ask, collected, here_and_there, served, until

from aioshm.engine import (
    DPCoordinator,
    EngineKeys,
    EngineZmqAddresses,
)
from aioshm.engine.dp import CoordinatorAddresses

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]


class Agreement:
    """Stands for an all-reduce of engines in one loop: it ends when all take part."""

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
            self.votes = []
            self.agreed = None
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


def coordinated(coordinator: DPCoordinator, addresses: EngineZmqAddresses | None = None) -> EngineZmqAddresses:
    addresses = addresses or here_and_there()
    addresses.coordinator_input, addresses.coordinator_output = coordinator.get_engine_socket_addresses()
    addresses.frontend_stats_publish_address = coordinator.get_stats_publish_address()
    return addresses


@pytest.mark.parametrize("kv_cache_usage", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_requests_are_served_wave_after_wave(kv_cache_usage: bool) -> None:
    agreement = Agreement(3)
    ranks = [Rank(agreement) for _ in range(3)]
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(await DPCoordinator.start(3, kv_cache_usage=kv_cache_usage))
        serving = await stack.enter_async_context(served(*ranks, addresses=coordinated(coordinator)))
        engines = serving.client._link.engines
        for number in range(6):  # each to one engine, while all are paused
            # Counts are published late: the counts of the last request would change the choice.
            await until(lambda: engines.published and not any(each.load for each in engines))
            async with asyncio.timeout(20):
                outputs = await collected(serving.client.submit(ask(f"r{number}")))
            assert [output["token"] for output in outputs] == [0, 1, 2]
        assert sorted(len(each.seen) for each in ranks) == [2, 2, 2]
        assert all(each.dummies for each in ranks)
        async with asyncio.timeout(20):
            streams = [collected(serving.client.submit(ask(f"s{number}", 20))) for number in range(30)]
            assert [len(outputs) for outputs in await asyncio.gather(*streams)] == [20] * 30
        with Peers(CoordinatorAddresses(coordinator.get_stats_publish_address(), "", "")) as peers:
            front_end = await peers.front_end()
            paused = False
            while not paused:
                counts, wave, running = await published(front_end)
                paused = not running and counts == [[0, 0, 0.0] if kv_cache_usage else [0, 0]] * 3
            assert wave > 0
        assert not coordinator.last_lines("DPCoordinator")


async def test_keys_admit_engines_and_clients_over_tcp() -> None:
    """The coordinator's sockets, too: engines subscribe and report with theirs, the client gets counts with its own."""
    agreement = Agreement(2)
    keys = EngineKeys.generate()
    loopback = "tcp://127.0.0.1:0"
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(
            await DPCoordinator.start(2, local_engines=False, local_front_ends=False, keys=keys)
        )
        addresses = coordinated(coordinator, EngineZmqAddresses([loopback], [loopback]))
        serving = await stack.enter_async_context(
            served(Rank(agreement), Rank(agreement), addresses=addresses, handshake=loopback, keys=keys)
        )
        for number in range(4):  # each to one engine, while both are paused
            async with asyncio.timeout(20):
                assert len(await collected(serving.client.submit(ask(f"r{number}")))) == 3
        engines = serving.client._link.engines
        await until(lambda: engines.published and not any(each.load for each in engines))
        await until(lambda: serving.client._link.wave > 0)
        told = CoordinatorAddresses(coordinator.get_stats_publish_address(), *coordinator.get_engine_socket_addresses())
        assert all(address.startswith("tcp://") for address in told)
        with Peers(told) as strangers, Peers(told, EngineKeys.generate()) as others, Peers(told, keys) as friends:
            unheard = [await peers.front_end() for peers in (strangers, others)]
            await published(await friends.front_end())
            assert not any([await socket.poll(200) for socket in unheard])


class Caching(Engine):
    """An engine that reports the usage of its KV cache."""

    def __init__(self, usage: float) -> None:
        super().__init__()
        self.usage = usage

    def kv_cache_usage(self) -> float:
        return self.usage


async def test_requests_go_where_the_cache_is_emptier() -> None:
    full = Caching(0.9)
    empty = Caching(0.1)
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(await DPCoordinator.start(2))
        serving = await stack.enter_async_context(served(full, empty, addresses=coordinated(coordinator)))
        engines = serving.client._link.engines
        for _ in range(2):
            fuller = int(empty.usage > full.usage)
            await until(lambda: [each.usage for each in engines] == [int(10 * full.usage), int(10 * empty.usage)])
            for number in range(4):  # one by one: the counts stay equal
                stream = serving.client.submit(ask(f"{fuller} {number}"))
                assert stream.engine == 1 - fuller
                await collected(stream)
                await until(lambda: not any(each.load for each in engines))
            full.usage = 0.2
            empty.usage = 0.8
            await serving.client.call("report")  # an engine that does nothing tells nothing
