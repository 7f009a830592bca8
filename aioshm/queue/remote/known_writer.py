"""What a remote reader knows of its writer, and reports while it waits."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from time import monotonic

from aioshm.errors import AioshmError, PeerDied
from aioshm.queue.handle import Handle, RemoteAddress
from aioshm.queue.remote import wire
from aioshm.queue.remote.reader_sockets import ReaderSockets
from aioshm.queue.source import findings
from aioshm.queue.state import EndState
from aioshm.wait.limits import seconds

logger: logging.Logger = logging.getLogger("aioshm.queue")


class KnownWriter:
    """The writer, as far as it is known."""

    def __init__(self, state: EndState, handle: Handle, remote: RemoteAddress, rank: int) -> None:
        self._state = state
        self._handle = handle
        self._remote = remote
        self._rank = rank
        self.welcome: wire.Welcome | None = None  # how it has introduced itself, if it has
        self.sockets: ReaderSockets | None = None
        self.proven = False  # whether data has come from it
        self.heard: float = 0.0  # when it said something last, by the monotonic clock
        self.asked: float = 0.0  # when it was last asked whether it is there
        self.why_not_yet: str = ""  # why it has not admitted this reader yet, if it has said so

    @property
    def reachable(self) -> bool:
        """Whether it can be asked something."""
        return self.welcome is not None and self.sockets is not None and self.sockets.control_connection.up

    @property
    def owes_nothing(self) -> bool:
        """Whether it has said something since it was asked."""
        return self.heard >= self.asked

    def death(self, detail: str) -> Callable[[], AioshmError]:
        """Return what makes the error that says how it has died."""
        pid = 0 if self.welcome is None else self.welcome.pid
        where = self._remote.control if self.welcome is None else f"{self.welcome.host}, {self._remote.control}"
        return functools.partial(PeerDied, -1, pid, "writer", f"queue {self._state.name} on {where}: {detail}")

    def why_not_ready(self) -> str:
        """Say what the reader waits for before it is ready."""
        remote, sockets = self._remote, self.sockets
        if sockets is None or not sockets.control_connection.up:
            return f"no connection to {remote.control}: does the writer run there, and is the port open?"
        if self.welcome is None and self.why_not_yet:
            return f"the writer at {remote.control} does not admit it yet: {self.why_not_yet}"
        if self.welcome is None:
            return f"the writer at {remote.control} does not answer: does its event loop run, in wait_until_ready()?"
        if not self.proven:
            return f"nothing comes from {remote.data}: is the port open?"
        return "other readers are missing"

    def report_waiting(self, waited_s: float, seq: int) -> None:
        """Report for how many seconds the reader has waited for a message, or to be ready, and what is known."""
        state, waited = self._state, seconds(waited_s)
        if not state.ready:
            about = "" if self.welcome is None else f"; {self._findings()[1]}"
            logger.warning("%r: waited %s: %s%s", state, waited, self.why_not_ready(), about)
            return
        level, about = self._findings()
        rank = self._rank if self.welcome is None else self.welcome.rank
        logger.log(level, "%r, rank %d: waited %s for message %d: %s", state, rank, waited, seq, about)

    def _findings(self) -> tuple[int, str]:
        """Return at which level to log what is known of it, and the words."""
        welcome, sockets, now = self.welcome, self.sockets, monotonic()
        heard = f", last heard of {seconds(now - self.heard)} ago"
        if welcome is None or sockets is None:
            return logging.WARNING, self.why_not_ready()
        who = f"the writer (pid {welcome.pid} on {welcome.host}{heard})"
        if not (sockets.control_connection.up and sockets.data_connection.up):
            return logging.WARNING, f"no connection to the writer at {self._remote.control}{heard}"
        return findings(who, "", None if self.owes_nothing else now - self.asked, self._handle.answers)

    @property
    def reconnects(self) -> int:
        """How often a connection was lost and came back."""
        if self.sockets is None:
            return 0
        each = (self.sockets.data_connection.connections, self.sockets.control_connection.connections)
        return sum(max(0, connections - 1) for connections in each)
