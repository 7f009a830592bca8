"""What a manager keeps of processes that it has no more."""

from __future__ import annotations

import sys

import pytest
from support import until

from aioshm.process.manager import Job, ProcessManager


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@pytest.mark.slow_on_uvloop
async def test_processes_that_are_discarded_leave_nothing() -> None:
    async with ProcessManager(say, [Job("first", ("hello",))]) as manager:
        process = manager.start_more(Job("standby_0", ("here",)))
        await until(lambda: process.exitcode is not None and manager.last_lines(process.name) == ["here"])
        manager.discard(process)
        with pytest.raises(ValueError, match="name must be the name of a process"):
            manager.last_lines(process.name)
        assert [*manager._jobs] == ["first"]
        assert manager._relay is not None
        assert [*manager._relay._named] == ["first"]
        child = manager.start_more(Job("standby_0", ("again",)))
        await manager.stop(child.name)
        assert [*manager._jobs] == ["first"]
