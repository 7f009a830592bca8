"""Engines in lockstep, their coordinator and clients: waves, and pauses at the same step, without a hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from peers import Peers, pack, places, published
from served_engine import LOOPBACK, Engine, Serving, ask, collected, here_and_there, served, until

from aioshm.engine import DPCoordinator, EngineKeys, EngineZmqAddresses
from aioshm.engine.protocol.messages import PauseMode
from aioshm.errors import RequestAborted

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]

MODES: list[PauseMode] = ["finish", "abort", "keep"]


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
    """An engine that works in lockstep; counts the steps and dummy batches that have begun."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__()
        self.agreement = agreement
        self.turns = 0
        self.dummies = 0
        self.waits = False

    def step(self) -> Any:
        self.turns += 1
        return super().step()

    def execute_dummy_batch(self) -> None:
        self.turns += 1
        self.dummies += 1

    async def has_unfinished_dp(self, unfinished: bool) -> bool:
        self.waits = True
        try:
            return await self.agreement.reach(unfinished)
        finally:
            self.waits = False


def coordinated(coordinator: DPCoordinator, addresses: EngineZmqAddresses | None = None) -> EngineZmqAddresses:
    addresses = addresses or here_and_there()
    addresses.coordinator_input, addresses.coordinator_output = coordinator.get_engine_socket_addresses()
    addresses.frontend_stats_publish_address = coordinator.get_stats_publish_address()
    return addresses


@asynccontextmanager
async def in_lockstep(n_engines: int, n_clients: int = 1) -> AsyncIterator[tuple[Serving, list[Rank], Peers]]:
    """Serve engines in lockstep; the peers are at the address of counts."""
    agreement = Agreement(n_engines)
    ranks = [Rank(agreement) for _ in range(n_engines)]
    async with await DPCoordinator.start(n_engines) as coordinator:
        addresses = coordinated(coordinator, here_and_there(n_clients))
        async with served(*ranks, addresses=addresses, n_clients=n_clients) as serving:
            with Peers(places(coordinator)) as peers:
                yield serving, ranks, peers
        assert not coordinator.last_lines("DPCoordinator")


async def test_requests_are_served_wave_after_wave() -> None:
    async with asyncio.timeout(60), in_lockstep(3) as (serving, ranks, peers):
        engines = serving.client._link.engines
        for number in range(6):  # each to one engine, while all are paused
            # Counts are published late: the counts of the last request would change the choice.
            await until(lambda: engines.published and not any(each.load for each in engines))
            outputs = await collected(serving.client.submit(ask(f"r{number}")))
            assert [output["token"] for output in outputs] == [0, 1, 2]
        assert sorted(len(each.seen) for each in ranks) == [2, 2, 2]
        assert all(each.dummies for each in ranks)
        streams = [collected(serving.client.submit(ask(f"s{number}", 20))) for number in range(30)]
        assert [len(outputs) for outputs in await asyncio.gather(*streams)] == [20] * 30
        front_end = await peers.front_end()
        paused = False
        while not paused:
            counts, wave, running = await published(front_end)
            paused = not running and counts == [[0, 0, 0.0]] * 3
        assert wave > 0


async def test_keys_admit_engines_and_clients_over_tcp() -> None:
    """The coordinator's sockets, too: engines subscribe and report with theirs, the client gets counts with its own."""
    agreement = Agreement(2)
    keys = EngineKeys.generate()
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(
            await DPCoordinator.start(2, local_engines=False, local_front_ends=False, keys=keys)
        )
        addresses = coordinated(coordinator, EngineZmqAddresses([LOOPBACK], [LOOPBACK]))
        serving = await stack.enter_async_context(
            served(Rank(agreement), Rank(agreement), addresses=addresses, handshake=LOOPBACK, keys=keys)
        )
        for number in range(4):  # each to one engine, while both are paused
            async with asyncio.timeout(20):
                assert len(await collected(serving.client.submit(ask(f"r{number}")))) == 3
        engines = serving.client._link.engines
        await until(lambda: engines.published and not any(each.load for each in engines))
        await until(lambda: serving.client._link.wave > 0)
        told = places(coordinator)
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
    async with (
        await DPCoordinator.start(2) as coordinator,
        served(full, empty, addresses=coordinated(coordinator)) as serving,
    ):
        engines = serving.client._link.engines
        for fuller in (0, 1):
            await until(lambda: [each.usage for each in engines] == [int(10 * full.usage), int(10 * empty.usage)])
            for number in range(2):  # one by one: the counts stay equal
                stream = serving.client.submit(ask(f"{fuller} {number}"))
                assert stream.engine == 1 - fuller
                await collected(stream)
                await until(lambda: not any(each.load for each in engines))
            full.usage, empty.usage = empty.usage, full.usage
            await serving.client.call("report")  # an engine that does nothing tells nothing


# Pauses


async def check_paused(ranks: list[Rank]) -> None:
    """Check that all have stopped after the same step, and that none waits for another one."""
    before = [rank.turns for rank in ranks]
    assert not any(rank.waits for rank in ranks)
    assert not ranks[0].agreement.votes
    await asyncio.sleep(0.03)
    assert before == [rank.turns for rank in ranks]


@pytest.mark.parametrize("mode", MODES)
async def test_all_pause_at_the_same_step_and_resume(mode: PauseMode) -> None:
    async with asyncio.timeout(60), in_lockstep(3) as (serving, ranks, _):
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
    async with asyncio.timeout(60), in_lockstep(2, 2) as (serving, ranks, _):
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
    async with asyncio.timeout(60), in_lockstep(2) as (serving, ranks, peers):
        client = serving.client
        await client.pause()
        front_end = await peers.front_end()
        await published(front_end)
        await front_end.send(pack([1, 0]))
        # All of them take part, and leave their collective.
        await until(lambda: [(rank.turns, rank.waits) for rank in ranks] == [(1, False)] * 2)
        await check_paused(ranks)
        await client.resume()
        assert len(await collected(client.submit(ask("a")))) == 3
