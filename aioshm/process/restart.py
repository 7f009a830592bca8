"""How often, and how soon, a dead process is restarted."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from aioshm.arguments import check_bool, check_int, check_limit, check_seconds

MAX_RESTARTS = 5
WITHIN_S = 60.0
BACKOFF_S = 0.1
BACKOFF_MAX_S = 10.0

logger: logging.Logger = logging.getLogger("aioshm.engine")

_SHOWN_CAUSES = 8  # the latest deaths of a crash loop, in the text of an error
_MAX_DOUBLINGS = 64  # a policy of a million restarts would overflow a float


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The restart policy of a supervisor.

    The first restart comes immediately. The next restart within ``within_s`` comes after ``backoff_s``, and each
    further restart after twice the delay before, up to ``backoff_max_s``. More than ``max_restarts`` restarts within
    ``within_s`` are a crash loop: then the process stays dead, and the whole launch or group fails as without a policy.

    Attributes:
        max_restarts: Restarts of one process within ``within_s``; 0: none.
        within_s: Seconds that a restart counts; those in which a replacement starts, and is not ready yet, are not
            among them.
        backoff_s: Seconds before the second restart.
        backoff_max_s: Seconds before any restart, at most.
        hang_s: Seconds without progress, see `progress.expect`, after which a process is killed: with SIGABRT, so that
            its standard error has its stacks, and with SIGKILL. Its exit is a death as any other, and its error names
            the line of Python. None: never; a stalled process is only reported.
        kill_stopped: Whether ``hang_s`` holds for stopped processes, too: SIGSTOP, a debugger, a frozen cgroup.

    Raises:
        TypeError, ValueError: A value is invalid; the text names it.
    """

    max_restarts: int = MAX_RESTARTS
    within_s: float = WITHIN_S
    backoff_s: float = BACKOFF_S
    backoff_max_s: float = BACKOFF_MAX_S
    hang_s: float | None = None
    kill_stopped: bool = False

    def __post_init__(self) -> None:
        check_int("max_restarts", self.max_restarts, minimum=0)
        check_limit("hang_s", self.hang_s)
        check_bool("kill_stopped", self.kill_stopped)
        for name in ("within_s", "backoff_s", "backoff_max_s"):
            check_seconds(name, getattr(self, name))


ProcessPhase: TypeAlias = Literal["running", "stalled", "stopped", "waiting", "starting", "stopping", "exited"]

Health: TypeAlias = Literal["running", "stalled", "stopped"]

ALIVE: frozenset[ProcessPhase] = frozenset({"running", "stalled", "stopped"})
"""States of a process that is ready, and has not exited."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """An engine of a supervisor, a worker of a group, or an API server.

    Attributes:
        rank: The rank.
        pid: The process id of its current process, or of the last process; None before the first.
        state: ``"running"``; ``"stalled"``: without progress for ``stall_warning_s``; ``"stopped"``: the same, because
            somebody has stopped the process; ``"waiting"`` for its restart, see `Restart`; ``"starting"`` until it is
            ready; ``"stopping"``, after a request for fewer, or for a restart of this one; or, of an API server, and of
            a worker without ``restart``, ``"exited"`` for good.
        restarts: The number of restarts.
        cause: The cause of the last death; empty before the first death.
        where: What a stalled or stopped process does, with its line of Python if known; empty otherwise.
    """

    rank: int
    pid: int | None
    state: ProcessPhase
    restarts: int
    cause: str
    where: str = ""


class RestartHistory:
    """The deaths of one process under a restart policy. No I/O, no clock."""

    def __init__(self, policy: Restart) -> None:
        self._policy = policy
        self._recent: deque[tuple[float, str]] = deque()  # time and cause of each death
        self.restarts: int = 0  # in all

    def died(self, now: float, cause: str) -> float | None:
        """Note a death; return the seconds to wait before the restart, or None for a crash loop."""
        policy = self._policy
        while self._recent and now - self._recent[0][0] > policy.within_s:
            self._recent.popleft()
        before = len(self._recent)
        self._recent.append((now, cause))
        if before >= policy.max_restarts:
            return None
        self.restarts += 1
        if not before:
            return 0.0
        doublings = min(before - 1, _MAX_DOUBLINGS)
        return min(policy.backoff_s * 2.0**doublings, policy.backoff_max_s)

    def started(self, seconds: float) -> None:
        """Leave out the time of a start, whether it succeeded or failed: otherwise slow failures were no crash loop."""
        self._recent = deque((time + seconds, cause) for time, cause in self._recent)

    @property
    def number(self) -> str:
        """The number of the next restart, and how many the policy allows."""
        return f"{len(self._recent)} of {self._policy.max_restarts}"

    @property
    def story(self) -> str:
        """The deaths that count now, for the text of an error."""
        policy = self._policy
        shown = [cause for _, cause in self._recent][-_SHOWN_CAUSES:]
        earlier = len(self._recent) - len(shown)
        if earlier:
            shown.insert(0, f"{earlier} earlier deaths")
        return (
            f"{len(self._recent)} deaths within {policy.within_s:g} s, and Restart(max_restarts={policy.max_restarts}) "
            f"allows no further restart: {'; '.join(shown)}"
        )


class Life:
    """The processes of one rank, one by one; see `RankInfo`. With ``pid`` the first process runs already."""

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
        self.where: str = ""
        self.task: asyncio.Task[None] | None = None  # starts the next process
        self._on_change = on_change

    @property
    def info(self) -> RankInfo:
        """The state for users."""
        return RankInfo(self.rank, self.pid, self.state, self.history.restarts, self.cause, self.where)

    def enter(self, state: ProcessPhase, where: str = "") -> None:
        """Note a state, and report a change."""
        if (state, where) != (self.state, self.where):
            self.state = state
            self.where = where
            if self._on_change is not None:
                self._on_change(self.info)

    @property
    def is_alive(self) -> bool:
        """Whether its process is ready, and has not exited."""
        return self.state in ALIVE

    def note_health(self, health: Health, where: str) -> None:
        """Note that a process that is ready has stalled, was stopped, or makes progress again."""
        if self.is_alive:
            self.enter(health, where)

    async def bring_back(self, cause: str, start: Callable[[], Awaitable[str]]) -> bool:
        """Start a process until it runs, and log each restart; return False for a crash loop.

        ``cause`` is the death before, empty for the first start. ``start`` returns the cause of a failure, or "".
        """
        loop = asyncio.get_running_loop()
        while True:
            if cause:
                delay = self.history.died(loop.time(), cause)
                if delay is None:
                    return False
                logger.warning("%s; restarting it (%s)", cause, self.history.number)
                self.cause = cause
                self.enter("waiting")
                await asyncio.sleep(delay)
            began = loop.time()
            cause = await start()
            self.history.started(loop.time() - began)
            if not cause:
                return True
