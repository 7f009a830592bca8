"""The base of a reader's sources: the ring, the network, and the search for a writer."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable
from threading import get_ident
from typing import Any

from aioshm.errors import AioshmError
from aioshm.lifeline.sockets import Doorbell
from aioshm.process.proc import HUNG_STATES
from aioshm.queue.closing import Closable
from aioshm.queue.handle import Answers
from aioshm.ring import RingReader
from aioshm.ring.cores import EMPTY
from aioshm.wait.limits import seconds


class OpenedMessage:
    """A message that was opened when the block began."""

    def __init__(self, value: Any, close: Callable[[bool], None] | None = None) -> None:
        self._value = value
        # Finishes with the message, or leaves it in place if its argument is true; None: taken.
        self._close = close
        self.taken: bool = close is None

    def pop(self) -> Any:
        """Return the value, once."""
        value = self._value
        self._value = None  # `Leases` would count a second reference as a holder
        return value

    def close(self, *, undo: bool) -> None:
        if self._close is not None:
            self._close(undo)


class NoRing:
    """The core of an end without a ring, with the attributes of a ring's core that `EndState` uses."""

    def __init__(self) -> None:
        self.open: bool = False
        self.spin_yields: bool = False
        self.budget: int = 0
        self.budget_ends_ns: int = 0
        self.published_ns: int = 0
        self.spin_ns: int = 0
        self.spins: int = 0
        self.hits: int = 0
        self.spun_ns: int = 0
        self.copied: int = 0
        self.garbled: int = 0
        self._thread = -1
        self._runs: Callable[[], object] | None = bool

    def passes(self) -> bool:
        """Return whether this thread may pass."""
        if not self.open or self.budget <= 0:
            return False
        return self._runs is None or (get_ident() == self._thread and bool(self._runs()))

    def belong(self, runs: Callable[[], object] | None, /) -> None:
        """Admit only this thread, while ``runs()`` is true; None: admit any thread."""
        self._thread = get_ident()
        self._runs = runs

    def share(self, _turn: Any, /) -> None:
        """Admit any thread."""
        self.belong(None)

    def spin(self, _budget_ns: int, /) -> bool:
        """Return False: there is no memory to poll."""
        return False


def nothing() -> Any:
    """Return `EMPTY`, in place of a message."""
    return EMPTY


class Source(Closable):
    """A source of a reader's messages, used by one task at a time; this base never has any."""

    ring: RingReader | None = None
    # Messages and bytes from former writers: replaced with the source in one step, as other threads read statistics.
    earlier: tuple[int, int] = (0, 0)
    # Receives the next message; set when the source is attached.
    receive: Callable[[], Any]

    @property
    def gone(self) -> Callable[[], AioshmError] | None:
        """Once the writer is gone: creates the error to raise after its last message."""
        return None

    # Attaching

    @abstractmethod
    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start to attach in the background. Idempotent."""

    @abstractmethod
    def too_late(self) -> Exception:
        """Return the error of a wait for peers that timed out."""

    # Receiving

    def has_message(self) -> bool:
        """Return whether a message, or a part of one, has arrived; cheap, without side effects."""
        return False

    def poll(self) -> bool:
        """Return whether a message, or a part of one, has arrived; also poll sockets."""
        return False

    def take(self) -> Any:
        """Return the next message, `EMPTY`, or `SLOW_PATH` if incomplete; skip a damaged one."""
        return EMPTY

    def take_many(self, _most: int, /) -> list[Any]:
        """Return available messages up to a special one, which may be the first."""
        return []

    def open_block(self, *, decoded: bool) -> OpenedMessage | None:
        """Return the next message for a block, decoded or as bytes; None if incomplete."""
        raise NotImplementedError

    def settle(self) -> None:
        """Release the slot of the latest lease, if the slot is still held, so that the writer can use it again."""

    def lost(self) -> AioshmError:
        """Return the error if the writer is gone and the next message arrived only in part."""
        raise NotImplementedError

    def traces(self, _most: int, /) -> list[bytes]:
        """Return the trace contexts of the latest messages, as `RingReader.traces`."""
        return []

    # The peers

    @property
    def writer_pid(self) -> int:
        """The writer's process id as the writer sees it; 0: unknown."""
        return 0

    @property
    def progress(self) -> int:
        """Number of messages that the reader has finished with."""
        return 0

    def ask_writer(self) -> bool:
        """Ask whether the writer's event loop runs; return whether an answer may come."""
        return False

    @abstractmethod
    def report_waiting(self, waited_s: float) -> None:
        """Log how long a reader has waited, and the state of the writer."""

    @property
    def doorbell(self) -> Doorbell | None:
        """The eventfd that the writer writes to; None: it sends bytes over the lifeline."""
        return None

    def other_ends(self) -> list[int]:
        """Return the pids of ends that share CPUs with this end; 0: unknown."""
        return []

    def wake_writer(self) -> None:
        """Wake a parked writer that can continue; call it again after an interruption."""

    # Closing

    def announce_close(self) -> None:
        """Notify the writer that this reader leaves, where the writer needs the notice immediately."""


def findings(who: str, state: str, silent_s: float | None, answers: Answers) -> tuple[int, str]:
    """Return log level and text about a writer; ``silent_s``: None if no answer is due."""
    is_ = ""
    also = ""
    if state:
        is_ = f" is {state}"
        also = f" is {state} and"
    if state in HUNG_STATES:
        return logging.WARNING, f"{who}{is_}"
    if silent_s is None and answers == "by a thread":
        text = "answers by a thread of its own: whether the program that uses the queue hangs is not known here"
        return logging.WARNING, f"{who}{also} {text}"
    if silent_s is None:
        return logging.INFO, f"{who}{also} answers: its event loop runs, and there is nothing to read"
    text = f"its event loop has not answered for {seconds(silent_s)}: it is blocked, or busy without a pause"
    if state:
        return logging.WARNING, f"{who}{is_}, but {text}"
    return logging.WARNING, f"{who}: {text}"
