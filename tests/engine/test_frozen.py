"""Engines and workers in a frozen cgroup are named as stopped, are not killed, and come back."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from served_engine import Engine, ask, begun, collected, until
from supervised import pids, serve

from aioshm import Options
from aioshm.engine import ClientOptions, EngineLayout, EngineSupervisor, Restart, WorkerGroup

WARNING_S = 0.6
OPTIONS = Options(stall_warning_s=WARNING_S)
HANG = Restart(hang_s=2 * WARNING_S)
ROOTS = (Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup"))  # version 1, version 2

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime_dir")]


class Freezer:
    """A cgroup of either version."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._old = (path / "freezer.state").exists()

    def add(self, pid: int) -> None:
        (self._path / "cgroup.procs").write_text(str(pid))

    def freeze(self, *, frozen: bool = True) -> None:
        if self._old:
            (self._path / "freezer.state").write_text("FROZEN" if frozen else "THAWED")
        else:
            (self._path / "cgroup.freeze").write_text(str(int(frozen)))


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    """Make a cgroup; skip the test where that is not allowed."""
    for root in ROOTS:
        path = root / f"aioshm-test-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        made = Freezer(path)
        if (path / "freezer.state").exists() or (path / "cgroup.freeze").exists():
            break
        path.rmdir()
    else:
        pytest.skip("this process may not make a cgroup with a freezer")
    yield made
    with suppress(OSError):
        made.freeze(frozen=False)
    path.rmdir()


async def test_frozen_engine_and_worker_are_stopped_and_come_back(
    freezer: Freezer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "aioshm.engine")
    layout = EngineLayout(coordinator=False)
    async with (
        EngineSupervisor(serve, 2, restart=HANG, client=ClientOptions(options=OPTIONS), layout=layout) as supervisor,
        WorkerGroup(Engine, 2, restart=HANG, options=OPTIONS) as group,
    ):
        engines = pids(supervisor)
        workers = group.pids
        _open = await begun(supervisor.client, "a", engine=0)
        freezer.add(engines[0])
        freezer.add(workers[0])
        freezer.freeze()
        try:
            for pid in (engines[0], workers[0]):
                await until(lambda pid=pid: f"(pid {pid}) is stopped: no progress for" in caplog.text)
            for each in (supervisor.engines[0], group.workers[0]):
                assert each.state == "stopped"
                assert "frozen" in each.where
            assert [supervisor.client.submit(ask(f"{number}")).engine for number in range(3)] == [1] * 3
            assert [await group.call_any("add", number) for number in range(3)] == [1, 2, 3]
        finally:
            freezer.freeze(frozen=False)
        await until(lambda: supervisor.engines[0].state == group.workers[0].state == "running")
        assert (pids(supervisor), group.pids) == (engines, workers)
        assert len(await collected(supervisor.client.submit(ask("b"), engine=0))) == 3
        assert await group.call(0, "add", 1) == 2
