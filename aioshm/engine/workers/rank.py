"""The record of one worker: its processes one by one, its queues, its state and its calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from aioshm.engine.workers.messages import Message
from aioshm.errors import AioshmError
from aioshm.process.proc import HUNG_STATES, process_state
from aioshm.process.restart import Life, RankInfo, Restart
from aioshm.process.watch import ProcessExit
from aioshm.queue import MessageQueue

if TYPE_CHECKING:
    from aioshm.engine.workers.processes import WorkerProcess
    from aioshm.engine.workers.schedule import Call


class Rank(Life):
    """The worker of one rank."""

    requests: MessageQueue  # with the calls of this worker only; while it is present
    replies: MessageQueue  # with all of its answers; while it is present

    def __init__(
        self, rank: int, name: str, restart: Restart, on_change: Callable[[RankInfo], object] | None = None
    ) -> None:
        super().__init__(rank, restart, on_change)
        self.name: str = name
        self.process: WorkerProcess | None = None  # after a death the dead process, until its replacement
        self.incarnation: int = 0  # how many of its processes are gone
        self.present: bool = False  # whether its process takes calls
        self.leaving: bool = False  # whether scaling down removes this worker
        # Of the present process
        self.after: int = 0  # the last call of all workers that was sent before the process was ready
        self.n_requests: int = 0  # calls sent by `requests`
        self.calls: int = 0  # in flight
        self.streams: int = 0
        self.idle_since: int = 0
        self.queue: deque[Call] = deque()  # calls of this worker that are not assigned yet

    @property
    def exit(self) -> ProcessExit:
        """The exit of its dead process."""
        assert self.process is not None
        return self.process.exited.result()

    @property
    def idle(self) -> bool:
        """Whether a call of any worker may be sent to this worker."""
        return self.present and self.state == "running" and not (self.leaving or self.calls or self.streams)

    def take_process(self, process: WorkerProcess) -> None:
        """Note the process that is to become this worker."""
        self.process = process
        self.pid = process.pid

    def arrive(self, requests: MessageQueue, replies: MessageQueue, after: int) -> None:
        """Take calls, by the queues of a new process."""
        self.requests = requests
        self.replies = replies
        self.after = after
        self.n_requests = 0
        self.present = True
        self.enter("running")

    async def post(self, message: Message) -> None:
        """Send a message other than a call, unless the worker is gone."""
        with suppress(AioshmError):
            await self.requests.enqueue(message)

    def describe(self) -> str:
        """Name the worker, with its state if it makes no progress or cannot run."""
        if self.process is None:
            return f"{self.name}, which is being started"
        known = [f"pid {self.pid}"]
        if self.state in ("stalled", "stopped"):
            known += filter(None, (self.state, self.where))
        elif (state := process_state(self.process.pid)) in HUNG_STATES:
            known.append(state)
        return f"{self.process.name} ({', '.join(known)})"
