"""How often, and how soon, a process that has died is started again."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from aioshm.arguments import check_int, check_seconds

MAX_RESTARTS, WITHIN_S = 5, 60.0
BACKOFF_S, BACKOFF_MAX_S = 0.1, 10.0

logger: logging.Logger = logging.getLogger("aioshm.engine")

_SHOWN_CAUSES = 8  # of a crash loop's deaths, the latest ones, in the text of an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The restart policy of a supervisor.

    The first restart comes at once. Another one within ``within_s`` comes after ``backoff_s``, the next after twice as
    long, and so on up to ``backoff_max_s``. One more than ``max_restarts`` of them within ``within_s`` is a crash loop:
    then the process stays dead, and all that the supervisor has fails as if there were no policy.

    Attributes:
        max_restarts: Restarts of one process within ``within_s``; 0: none.
        within_s: Seconds that a restart counts.
        backoff_s: Seconds before the second restart.
        backoff_max_s: Seconds before any restart, at most.

    Raises:
        TypeError, ValueError: A value makes no sense; the text names it.
    """

    max_restarts: int = MAX_RESTARTS
    within_s: float = WITHIN_S
    backoff_s: float = BACKOFF_S
    backoff_max_s: float = BACKOFF_MAX_S

    def __post_init__(self) -> None:
        check_int("max_restarts", self.max_restarts, minimum=0)
        for name in ("within_s", "backoff_s", "backoff_max_s"):
            check_seconds(name, getattr(self, name))


ProcessPhase: TypeAlias = Literal["running", "waiting", "starting", "stopping", "exited"]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """An engine of a supervisor, a worker of a group, or an API server.

    Attributes:
        rank: Its rank.
        pid: The process id of its process, or of its last one; None before the first.
        state: ``"running"``; ``"waiting"`` for its restart, see `Restart`; ``"starting"`` until it is ready;
            ``"stopping"``, since there are to be fewer; or, of an API server, ``"exited"`` for good.
        restarts: How often it was started again.
        cause: How it has died the last time; empty if it never has.
    """

    rank: int
    pid: int | None
    state: ProcessPhase
    restarts: int
    cause: str


class RestartHistory:
    """The deaths of one process under a restart policy. No I/O, no clock."""

    def __init__(self, policy: Restart) -> None:
        self._policy = policy
        self._recent: deque[tuple[float, str]] = deque()  # when it died, and the cause
        self.restarts: int = 0  # in all

    def died(self, now: float, cause: str) -> float | None:
        """Note a death; return the seconds to wait before the restart, or None for a crash loop."""
        policy, recent = self._policy, self._recent
        while recent and now - recent[0][0] > policy.within_s:
            recent.popleft()
        recent.append((now, cause))
        before = len(recent) - 1
        if before >= policy.max_restarts:
            return None
        self.restarts += 1
        if not before:
            return 0.0
        # Not 2 ** (before - 1) first: a policy of a million restarts would overflow a float.
        doublings = min(before - 1, 64)
        return min(policy.backoff_s * 2.0**doublings, policy.backoff_max_s)

    @property
    def number(self) -> str:
        """Which restart comes next, of those that the policy allows."""
        return f"{len(self._recent)} of {self._policy.max_restarts}"

    @property
    def story(self) -> str:
        """The deaths that count now, for the text of an error."""
        causes = [cause for _, cause in self._recent]
        shown = "; ".join(causes[-_SHOWN_CAUSES:])
        more = f"{len(causes) - _SHOWN_CAUSES} earlier deaths; " if len(causes) > _SHOWN_CAUSES else ""
        policy = self._policy
        return (
            f"{len(causes)} deaths within {policy.within_s:g} s, and Restart(max_restarts={policy.max_restarts}) "
            f"allows no further restart: {more}{shown}"
        )


class Life:
    """The processes of one rank, one after the other; see `RankInfo`. With ``pid`` the first one runs already."""

    def __init__(
        self,
        rank: int,
        restart: Restart,
        on_change: Callable[[RankInfo], object] | None = None,
        pid: int | None = None,
    ) -> None:
        self.rank: int = rank
        self.history: RestartHistory = RestartHistory(restart)
        self.state: ProcessPhase = "starting" if pid is None else "running"
        self.pid: int | None = pid
        self.cause: str = ""
        self.task: asyncio.Task[None] | None = None  # starts the next one
        self._on_change = on_change

    @property
    def info(self) -> RankInfo:
        """Its state for users."""
        return RankInfo(self.rank, self.pid, self.state, self.history.restarts, self.cause)

    def enter(self, state: ProcessPhase) -> None:
        """Note a state, and report a change."""
        if state != self.state:
            self.state = state
            if self._on_change is not None:
                self._on_change(self.info)

    async def bring_back(self, cause: str, start: Callable[[], Awaitable[str]]) -> bool:
        """Start a process until it runs, see `bring_back`; return False for a crash loop."""

        def wait(cause: str) -> None:
            self.cause = cause
            self.enter("waiting")

        return await bring_back(self.history, cause, start, wait)


async def bring_back(
    history: RestartHistory,
    cause: str,
    start: Callable[[], Awaitable[str]],
    on_wait: Callable[[str], object] | None = None,
) -> bool:
    """Start a process until it runs, as often as its restart policy allows; log each restart.

    Args:
        history: The deaths of the process.
        cause: How it died; empty to start it for the first time.
        start: Starts the process; returns the cause if that failed and no process is left, or an empty string.
        on_wait: Called with the cause of a death, before the wait for the restart.

    Returns:
        Whether it runs; False for a crash loop, whose causes the history has.
    """
    loop = asyncio.get_running_loop()
    while True:
        if cause:
            delay = history.died(loop.time(), cause)
            if delay is None:
                return False
            logger.warning("%s; restarting it (%s)", cause, history.number)
            if on_wait is not None:
                on_wait(cause)
            await asyncio.sleep(delay)
        cause = await start()
        if not cause:
            return True
