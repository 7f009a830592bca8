"""What is said of an engine's death, and that it is said once."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from support import until

from aioshm.engine.client.liveness import Liveness
from aioshm.errors import EngineDead


class Elsewhere:
    """The process of an engine on another host, of which it is told late that it has exited."""

    exitcode, host = None, "10.0.0.6"

    def __init__(self, rank: int, pid: int) -> None:
        self.name, self.pid = f"EngineCore_{rank}", pid
        self.sentinel, self._open = os.pipe()

    def end(self) -> None:
        os.close(self._open)


def manager_of(processes: list[Elsewhere]) -> Any:
    return SimpleNamespace(processes=processes)


async def test_an_exit_that_is_known_late_is_no_second_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioshm.engine.client.liveness.NAME_WITHIN_S", 0.01)
    deaths: list[EngineDead] = []
    link: Any = SimpleNamespace(lose=lambda _: None, die=deaths.append)
    liveness = Liveness(link)
    first, second, third, other = processes = [Elsewhere(*each) for each in ((1, 1), (1, 2), (1, 3), (2, 4))]
    try:
        liveness.watch(manager_of([first, other]), ())
        liveness.connected(1, 10, "10.0.0.6")
        liveness.disconnected(10)
        await until(lambda: deaths)
        first.end()
        other.end()
        await until(lambda: len(deaths) == 2)
        liveness.watch(manager_of([second]), ())
        liveness.connected(1, 11, "10.0.0.6")
        second.end()
        await until(lambda: len(deaths) == 3)
        liveness.watch(manager_of([third]), ())  # dies before it has connected
        third.end()
        await until(lambda: len(deaths) == 4)
        assert [str(each) for each in deaths] == [
            "engine 1 (10.0.0.6) is gone: its connection has ended",
            "engine 2 (pid 4 on 10.0.0.6) exited; its exit code is not known",
            "engine 1 (pid 2 on 10.0.0.6) exited; its exit code is not known",
            "engine 1 (pid 3 on 10.0.0.6) exited; its exit code is not known",
        ]
    finally:
        liveness.stop()
        for each in processes:
            os.close(each.sentinel)
