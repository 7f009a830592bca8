"""The processes of one rank, one after the other, and the loop that starts the next one; of every supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aioshm.process.restart import ProcessPhase, RankInfo, Restart, RestartHistory


class Life:
    """The processes of one rank, one after the other.

    Attributes:
        rank: See `RankInfo`.
        history: The deaths.
        state: See `RankInfo`.
        pid: See `RankInfo`.
        cause: See `RankInfo`.
        task: Starts the next one.
    """

    def __init__(self, rank: int, restart: Restart) -> None:
        self.rank: int = rank
        self.history: RestartHistory = RestartHistory(restart)
        self.state: ProcessPhase = "starting"
        self.pid: int | None = None
        self.cause: str = ""
        self.task: asyncio.Task[None] | None = None

    @property
    def info(self) -> RankInfo:
        """What is told of it."""
        return RankInfo(self.rank, self.pid, self.state, self.history.restarts, self.cause)


async def bring_back(
    history: RestartHistory, cause: str, start: Callable[[], Awaitable[str]], on_wait: Callable[[str], object]
) -> bool:
    """Start a process, as often as its restart policy allows, until it is there.

    Args:
        history: Its deaths.
        cause: How it has died; empty to start it for the first time.
        start: Starts it, and returns why it is not there, when it is known to be none, or an empty string.
        on_wait: Is called with the cause of a death, before the wait for the restart.

    Returns:
        Whether it is there; otherwise it is a crash loop, whose causes the history has.
    """
    loop = asyncio.get_running_loop()
    while True:
        if cause:
            delay = history.died(loop.time(), cause)
            if delay is None:
                return False
            on_wait(cause)
            await asyncio.sleep(delay)
        cause = await start()
        if not cause:
            return True
