"""Engines for a supervisor of tests: what their processes run, and when these are started again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import zmq
from served_engine import Engine

from aioshm.engine import (
    APIServerProcessManager,
    ClientOptions,
    EngineClient,
    EngineSupervisor,
    HandshakeOptions,
    Restart,
    die_with_parent,
    run_engine_core,
    shake_hands,
)
from aioshm.engine.protocol.messages import Progress, encode

LOOPBACK = "tcp://127.0.0.1:0"
MANY = Restart(max_restarts=1000, backoff_s=0.001, backoff_max_s=0.01)


class Lockstep(Engine):
    """Needs the others, or says so."""

    def has_unfinished_dp(self, unfinished: bool) -> bool:
        return unfinished


def serve(
    handshake_address: str,
    dp_rank: int,
    local_dp_rank: int,
    crash: str = "",
    stuck: str = "",
    lockstep: bool = False,
    **handshake: Any,
) -> None:
    """Run an engine; once the file ``crash`` is there, end before HELLO, and while ``stuck`` is there, wait there."""
    die_with_parent()
    if crash and os.path.exists(crash):
        raise SystemExit(f"no memory left on device {dp_rank}")
    while stuck and os.path.exists(stuck):
        time.sleep(0.01)
    engine = Lockstep() if lockstep else Engine()
    asyncio.run(run_engine_core(engine, handshake_address, dp_rank, handshake=HandshakeOptions(**handshake)))


def serve_after_death(handshake_address: str, dp_rank: int, local_dp_rank: int, died: str, kill: str) -> None:
    """Run an engine; its first process says READY and dies, unregistered, once ``kill`` is there."""

    async def die_unregistered() -> None:
        await shake_hands(handshake_address, dp_rank, initialize=lambda _: {})
        while not os.path.exists(kill):
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    mark = f"{died}-{dp_rank}"
    if os.path.exists(mark):
        serve(handshake_address, dp_rank, local_dp_rank)
    else:
        with open(mark, "w"):
            pass
        asyncio.run(die_unregistered())


def pids(supervisor: EngineSupervisor) -> list[int]:
    """Return the process ids of the engines, by rank."""
    return [engine.pid or 0 for engine in supervisor.engines]


@asynccontextmanager
async def front_end(supervisor: EngineSupervisor, index: int, **options: Any) -> AsyncIterator[EngineClient]:
    """Open a client as a restarted API server does: the client does not know how many engines there are."""
    launch = supervisor.launch
    chosen = ClientOptions(
        client_index=index, on_engine_death="continue", membership_address=launch.membership_address, **options
    )
    async with EngineClient(launch.addresses, 1, chosen) as client:
        await client.wait_until_ready(30)
        yield client


@contextmanager
def hanging_front_end(supervisor: EngineSupervisor) -> Iterator[None]:
    """Connect a front end that never says which membership it knows."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(supervisor.launch.membership_address or "")
        dealer.send(encode(Progress()))
        yield


def api_servers(
    supervisor: EngineSupervisor, target: Callable[..., object], args: Any, **options: Any
) -> APIServerProcessManager:
    """Start as many API servers as the engines have front ends; dead ones are restarted."""
    launch = supervisor.launch
    inputs = launch.addresses.inputs
    options = {"sock": None, "membership_address": launch.membership_address, "restart": MANY, **options}
    return APIServerProcessManager(
        target, "", options.pop("sock"), args, len(inputs), inputs, launch.addresses.outputs, **options
    )
