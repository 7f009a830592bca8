"""Callbacks that are coroutine functions: run where they notify, refused where nothing would await them."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from served_engine import Engine, served, stop, until
from startups import engine, starting, tasks
from supervised import MANY, pids, serve

from aioshm import MsgpackCodec, register_codec
from aioshm.engine import (
    APIServerProcessManager,
    CoreEngineActorManager,
    CoreEngineProcManager,
    EngineSupervisor,
    ProcessManager,
    WorkerGroup,
    launch_core_engines,
    report_usage_stats,
    run_engine_core,
)
from aioshm.events import EventPublisherFactory

pytestmark = [pytest.mark.usefixtures("runtime_dir"), pytest.mark.slow_on_uvloop]

Callback = Callable[..., Any]


@asynccontextmanager
async def progress(path: str, callback: Callback) -> AsyncIterator[None]:
    async with starting(path, on_progress=callback) as startup:
        async with tasks(engine(path, 0)):
            await startup.wait(30)
            yield


@asynccontextmanager
async def engine_change(path: str, callback: Callback) -> AsyncIterator[None]:
    async with served(Engine(), Engine(), on_engine_death="continue", on_engine_change=callback) as serving:
        serving.running[1].cancel()
        yield


@asynccontextmanager
async def supervisor_change(path: str, callback: Callback) -> AsyncIterator[None]:
    async with EngineSupervisor(serve, 1, restart=MANY, on_change=callback) as supervisor:
        stop(pids(supervisor)[0])
        yield


@pytest.mark.parametrize("notifying", [progress, engine_change, supervisor_change])
async def test_coroutine_function_that_is_notified_runs(notifying: Callable[..., Any], path: str) -> None:
    ran = []

    async def callback(*arguments: Any) -> None:
        await asyncio.sleep(0)
        ran.append(arguments)

    async with notifying(path, callback):
        await until(lambda: ran)


@pytest.mark.parametrize("is_async", [True, False])
async def test_callback_that_fails_is_logged_and_ends_nothing(
    is_async: bool, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_arguments: Any) -> None:
        raise ArithmeticError("nobody catches this")

    async def fail_later(*_arguments: Any) -> None:
        fail()

    with caplog.at_level(logging.ERROR, "asyncio"):
        async with progress(path, fail_later if is_async else fail):
            await until(lambda: len(caplog.records) == 2)  # one for HELLO, one for READY
    assert all("has failed" in each.message and each.exc_info for each in caplog.records)
    assert "fail" in caplog.text
    assert "nobody catches this" in caplog.text


async def later(*_arguments: Any, **_options: Any) -> Any:
    raise AssertionError


class Later:
    async def __call__(self, *_arguments: Any) -> Any:
        raise AssertionError


class LateCounts(Engine):
    async def request_counts(self) -> tuple[int, int]:
        raise AssertionError


async def launched() -> None:
    async with launch_core_engines(later, 1):
        pass


ANY: Any = None
REFUSING: dict[str, Callable[[], Any]] = {
    "target": lambda: ProcessManager(later, []),
    "target_fn": lambda: CoreEngineProcManager(later, 1),
    "target_fn of actors": lambda: CoreEngineActorManager(later, 1, 1),
    "target_fn of a supervisor": lambda: EngineSupervisor(later),
    "target_fn of a launch": lambda: launched(),
    "target_server_fn": lambda: APIServerProcessManager(later, "", None, ANY, 1, ["ipc:///a"], ["ipc:///b"]),
    "loop_factory": lambda: WorkerGroup(Engine, 1, loop_factory=later),  # type: ignore[arg-type]
    "enc_hook": lambda: MsgpackCodec(enc_hook=later),
    "dec_hook": lambda: MsgpackCodec(dec_hook=functools.partial(later, 1)),
    "factory": lambda: register_codec("late", Later()),  # type: ignore[arg-type]
    "ctor": lambda: EventPublisherFactory.register_publisher("late", later),
    "to": lambda: report_usage_stats({}, to=later),
    "request_counts": lambda: run_engine_core(LateCounts(), "ipc:///nowhere", 0),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSING)
async def test_coroutine_function_that_nothing_would_await_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name.split()[0]} must be a plain function: nothing would await"):
        made = REFUSING[name]()
        if asyncio.iscoroutine(made):
            await made
