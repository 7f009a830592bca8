"""What a manager keeps of processes that it has no more."""

from __future__ import annotations

import asyncio
import sys

import pytest

from aioshm.process.manager import Job, ProcessManager


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@pytest.mark.slow_on_uvloop
async def test_processes_that_are_discarded_leave_nothing() -> None:
    async with ProcessManager(say, [Job("first", ("hello",))]) as manager:
        for number in range(3):
            process = manager.start_more(Job(f"standby_{number}", (f"I was {number}",)))
            async with asyncio.timeout(30):
                while process.exitcode is None or not manager.last_lines(process.name):
                    await asyncio.sleep(0.01)
            assert manager.last_lines(process.name) == [f"I was {number}"]
            manager.discard(process)
            with pytest.raises(ValueError, match="name must be the name of a process"):
                manager.last_lines(process.name)
            assert [*manager._jobs] == ["first"]
            assert manager._relay is not None
            assert [*manager._relay._named] == ["first"]
        child = manager.start_more(Job("standby_0", ("again",)))
        await manager.stop(child.name)
        assert [*manager._jobs] == ["first"]
