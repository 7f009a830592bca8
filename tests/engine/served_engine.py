"""An engine to be served, in a task or in a process of its own, and what starts it there."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvloop
from startups import starting, tasks

from aioshm.engine import (
    ClientOptions,
    CoreEngine,
    CoreEngineProcManager,
    EngineClient,
    EngineKeys,
    EngineStartupCoordinator,
    EngineZmqAddresses,
    HandshakeOptions,
    die_with_parent,
    get_engine_client_zmq_addr,
    run_engine_core,
)

LOOPBACK = "tcp://127.0.0.1:0"
NAME_WITHIN_S = 0.2


class Point(msgspec.Struct):
    x: int
    y: int


class Engine:
    """Gives each request as many tokens as it asks for, one in each step; a request says what else it wants to happen.

    ``tokens`` may be None: the request is never finished then.
    """

    def __init__(self, *, is_async: bool = False) -> None:
        self.requests: dict[str, Any] = {}
        self.given: dict[str, int] = {}
        self.seen: list[str] = []
        self.aborted: list[str] = []
        self.shut_down = False
        self.is_async = is_async

    def initialize(self, metadata: Any) -> dict[str, Any]:
        self.metadata = metadata
        return {"num_gpu_blocks": 5}

    def add_request(self, request: Any) -> None:
        if request.get("refuse"):
            raise ValueError(request["refuse"])
        self.seen.append(request["request_id"])
        self.requests[request["request_id"]] = request
        self.given[request["request_id"]] = 0

    def abort_requests(self, ids: list[str]) -> None:
        self.aborted += ids
        for request_id in ids:
            self.requests.pop(request_id, None)

    def step(self) -> Any:
        return self._step_later() if self.is_async else self._step()

    async def _step_later(self) -> list[Any]:
        await asyncio.sleep(0)
        return self._step()

    def _step(self) -> list[Any]:
        outputs = []
        for request_id, request in list(self.requests.items()):
            if request.get("crash"):
                raise RuntimeError(request["crash"])
            if request.get("output") is not None:
                outputs.append(request["output"])
                del self.requests[request_id]
                continue
            wanted, given = request["tokens"], self.given[request_id]
            if wanted is None and given:
                continue
            self.given[request_id] += 1
            output = {"request_id": request_id, "token": given}
            if given + 1 == wanted:
                output["finish_reason"] = "length"
                del self.requests[request_id]
            outputs.append(output)
        return outputs

    def shutdown(self) -> None:
        self.shut_down = True

    # What clients call

    def report(self) -> dict[str, Any]:
        ids = {"aborted": sorted(self.aborted), "open": sorted(self.requests)}
        return {"seen": len(self.seen), "pid": os.getpid(), **ids}

    def add(self, one: float, other: float = 1) -> float:
        return one + other

    def swap(self, point: Point) -> Point:
        assert type(point) is Point
        return Point(point.y, point.x)

    def give(self, value: Any) -> Any:
        return value

    def fail(self, text: str) -> None:
        raise KeyError(text)

    def unspeakable(self) -> object:
        return object()

    def unreadable(self) -> object:
        return msgspec.msgpack.Ext(9, b"")

    async def later(self, value: Any) -> Any:
        await asyncio.sleep(0.01)
        return value

    async def never(self) -> None:
        await asyncio.Event().wait()

    async def interrupted(self) -> None:
        sleep = asyncio.ensure_future(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(sleep.cancel)
        await sleep

    def _private(self) -> None:
        raise AssertionError


class Gated(Engine):
    """Ends a step only while ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.inside = False  # in a step
        self.steps = 0
        self.pace_s = 0.0

    async def step(self) -> list[Any]:  # type: ignore[override]
        self.inside = True
        self.steps += 1
        await self.gate.wait()
        await asyncio.sleep(self.pace_s)
        outputs = self._step()
        self.inside = False
        return outputs


def serve(address: str, loop: str, dp_rank: int, local_dp_rank: int) -> None:
    """Run an engine; the target of a process."""
    die_with_parent()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        runner.run(run_engine_core(Engine(), address, dp_rank))


def here_and_there(n_clients: int = 1) -> EngineZmqAddresses:
    """Return addresses for clients."""
    return EngineZmqAddresses(
        [get_engine_client_zmq_addr(True, "") for _ in range(n_clients)],
        [get_engine_client_zmq_addr(True, "") for _ in range(n_clients)],
    )


@dataclass
class Serving:
    """Clients, and the engines that serve them."""

    clients: list[EngineClient]
    engines: list[Any] = field(default_factory=list)
    running: list[asyncio.Task[Any]] = field(default_factory=list)
    manager: CoreEngineProcManager | None = None

    @property
    def client(self) -> EngineClient:
        return self.clients[0]


@asynccontextmanager
async def clients_of(
    addresses: EngineZmqAddresses, n_engines: Sequence[CoreEngine] | int, n_clients: int, **options: Any
) -> AsyncIterator[Serving]:
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(
                EngineClient(addresses, n_engines, options=ClientOptions(client_index=index, **options))
            )
            for index in range(n_clients)
        ]
        yield Serving(clients)


@asynccontextmanager
async def served(
    *engines: Any,
    n_clients: int = 1,
    addresses: EngineZmqAddresses | None = None,
    handshake: str | None = None,
    request_type: Any = None,
    keys: EngineKeys | None = None,
    secure: bool = True,
    max_pending_bytes: int = 64 << 20,
    **options: Any,
) -> AsyncIterator[Serving]:
    """Let these engines, in this loop, serve clients, which do not wait for a manager to say how one ended: none is."""
    import pytest  # not in the processes that tests start

    addresses = addresses or here_and_there(n_clients)
    security: Any = {"keys": keys, "secure": secure}
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("aioshm.engine.client.liveness.NAME_WITHIN_S", NAME_WITHIN_S)
        clients = clients_of(addresses, len(engines), n_clients, **security, **options)
        serving = await stack.enter_async_context(clients)
        serving.engines = list(engines)
        startup = await stack.enter_async_context(starting(handshake, len(engines), where=addresses, **security))
        work = [
            run_engine_core(
                each, startup.handshake_address, rank, request_type=request_type, options=options.get("options"),
                max_pending_bytes=max_pending_bytes, handshake=HandshakeOptions(**security),
            )
            for rank, each in enumerate(engines)
        ]  # fmt: skip
        serving.running = await stack.enter_async_context(tasks(*work))
        await shaken(serving, startup)
        yield serving


@asynccontextmanager
async def served_by_processes(n_engines: int, *, n_clients: int = 1, **options: Any) -> AsyncIterator[Serving]:
    """Let engines in processes of their own serve clients."""
    addresses = here_and_there(n_clients)
    loop = "uvloop" if isinstance(asyncio.get_running_loop(), uvloop.Loop) else "asyncio"
    async with clients_of(addresses, n_engines, n_clients, **options) as serving:
        async with starting(engines=n_engines, where=addresses) as startup:
            async with CoreEngineProcManager(serve, n_engines, args=(startup.handshake_address, loop)) as manager:
                serving.manager = startup.proc_manager = manager
                await shaken(serving, startup)
                for client in serving.clients:
                    client.watch(manager)
                yield serving


async def shaken(serving: Serving, startup: EngineStartupCoordinator) -> None:
    await startup.wait(30)
    await startup.aclose()
    for client in serving.clients:
        await client.wait_until_ready(30)


def ask(request_id: str, tokens: int | None = 3, **more: Any) -> dict[str, Any]:
    return {"request_id": request_id, "tokens": tokens, **more}


async def begun(client: EngineClient, request_id: str, tokens: int | None = None, **options: Any) -> Any:
    """Submit a request, and return its stream after the first output."""
    stream = client.submit(ask(request_id, tokens), **options)
    await anext(stream)
    return stream


async def collected(stream: Any) -> list[Any]:
    return [output async for output in stream]


async def until(condition: Any, within_s: float = 30.0) -> Any:
    """Wait until something is true, and return it."""
    deadline = time.monotonic() + within_s
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, "it did not come about"
        await asyncio.sleep(0.002)


def stop(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)
