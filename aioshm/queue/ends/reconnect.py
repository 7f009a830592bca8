"""A reader's search for its writer, and for each successor of the writer."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

from aioshm.codec import Codec
from aioshm.errors import (
    AioshmError,
    HandleError,
    LimitReached,
    MessagesLost,
    PeerClosed,
    PeerDied,
    QueueGone,
    QueueRestarted,
    copy_error,
)
from aioshm.queue.handle import Handle
from aioshm.queue.source import Source, nothing
from aioshm.queue.state import EndState
from aioshm.queue.stats import QueueStats
from aioshm.wait.limits import seconds

if TYPE_CHECKING:
    from aioshm.queue.ends.reader import Reader
    from aioshm.queue.names.registry import NamedWriters

logger: logging.Logger = logging.getLogger("aioshm.queue")

# Pauses between searches, each of which is one `stat` call.
FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05
PAUSE_GROWTH = 1.3

Connect: TypeAlias = Callable[[Handle, Callable[[AioshmError], None]], tuple[Source, Codec]]
"""Creates the source for a writer's handle, and the codec; the callback gets an error that prevents attaching."""


class SameWriter:
    """The writers of one identity: every new writer has the same handle."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def find(self) -> Handle | None:
        return self._handle

    def left(self) -> None:
        """Do nothing: the next writer has the same handle."""

    def awaited(self) -> str:
        return f"no writer answers at {self._handle.remote and self._handle.remote.control}"


class NoWriter(Source):
    """The source of a reader that has no writer: searches for a writer."""

    def __init__(self, reconnect: Reconnect) -> None:
        self._reconnect = reconnect
        self._pause_s = FIRST_PAUSE_S
        self._timer: asyncio.TimerHandle | None = None
        # The start of the search, by the monotonic clock.
        self.since: float = monotonic()
        self.receive = nothing

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self.since = monotonic()
            self._search_after(0, loop)

    def _search_after(self, pause_s: float, loop: asyncio.AbstractEventLoop) -> None:
        # The loop holds the source only weakly: a forgotten reader stops searching.
        self._timer = loop.call_later(pause_s, _search, weakref.ref(self), loop)

    def search(self, loop: asyncio.AbstractEventLoop) -> None:
        """Search once, and again later if there is no writer."""
        if not self._reconnect.find_writer() and self._timer is not None:
            self._search_after(self._pause_s, loop)
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * PAUSE_GROWTH)

    def too_late(self) -> Exception:
        search = self._reconnect
        waited = seconds(monotonic() - self.since)
        hint = f"waited {waited}; timeout= of attach() and of calls sets how long, None: for ever"
        return TimeoutError(f"{search.state!r}: {search.writers.awaited()} ({hint})")

    def report_waiting(self, waited_s: float) -> None:
        search = self._reconnect
        text = "%r, rank %d: waited %s: %s"
        logger.warning(text, search.state, search.rank, seconds(waited_s), search.writers.awaited())

    def stats(self) -> QueueStats:
        return self._reconnect.state.new_stats("reader", self._reconnect.rank)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def detach_after_fork(self) -> None:
        self._timer = None  # in a forked child: the timer belongs to the parent's loop


def _search(weak_source: weakref.ref[NoWriter], loop: asyncio.AbstractEventLoop) -> None:
    source = weak_source()
    if source is not None:
        source.search(loop)


def _leave_if_idle(weak_reconnect: weakref.ref[Reconnect]) -> None:
    reconnect = weak_reconnect()
    if reconnect is not None:
        reconnect.leave_if_idle()


class Reconnect:
    """Attaches a reader to its writer, and to each successor of the writer."""

    _reader: Reader

    def __init__(
        self,
        state: EndState,
        rank: int,
        writers: SameWriter | NamedWriters,
        connect: Connect,
        *,
        repeat: bool,
        patience_s: float | None = None,
    ) -> None:
        self.state = state
        self.rank = rank
        self.writers = writers
        self._connect = connect
        # Whether to continue with the next writer.
        self._repeat = repeat
        # For calls without a timeout; None: wait for ever.
        self._patience_s = patience_s
        # Pid and error of the former writer, until a call has raised `QueueRestarted`.
        self._ended: tuple[int, AioshmError] | None = None
        # The error that prevented attaching, until a call has raised it.
        self._obstacle: AioshmError | None = None
        self._leaving: asyncio.Handle | None = None  # when to look whether the reader is idle and its writer gone
        self._finishing: set[asyncio.Task[None]] = set()
        # Restarts that were reported to the caller.
        self.restarts: int = 0

    def begin(self, reader: Reader) -> None:
        """Serve this reader."""
        self._reader = reader
        if self._repeat:
            self.state.on_interrupt = self._on_interrupt

    # Errors for the next call

    @property
    def unreported(self) -> bool:
        """True while no call has raised `QueueRestarted` for the latest change of writers."""
        return self._ended is not None

    @property
    def has_news(self) -> bool:
        """True if `pop_news` has something to return."""
        return self._obstacle is not None or (self._ended is not None and self.state.ready)

    def pop_news(self) -> AioshmError | None:
        """Return the error that the next call raises first, and forget it; None: there is none."""
        obstacle = self._pop_obstacle()
        if obstacle is not None or self._ended is None or not self.state.ready:
            return obstacle
        old_pid, error = self._ended
        self._ended = None
        self.restarts += 1
        self.state.reopen()
        restarted = QueueRestarted(self.state.name, old_pid, self._reader.source.writer_pid, error)
        restarted.__cause__ = error
        return restarted

    def _pop_obstacle(self) -> AioshmError | None:
        obstacle = self._obstacle
        self._obstacle = None
        return obstacle

    def check_attaching(self) -> None:
        """Raise the error that prevents attaching; search for the next writer if the present writer is gone."""
        gone = self._reader.source.gone
        if gone is not None:
            self._failed(gone())
        obstacle = self._pop_obstacle()
        if obstacle is not None:
            raise obstacle
        self.state.check_refusal()

    def writer_deadline(self, began: float) -> float | None:
        """Return when a call without a timeout, begun then, stops waiting for a writer; None: never."""
        source = self._reader.source
        if not isinstance(source, NoWriter) or self._patience_s is None:
            return None
        return max(began, source.since) + self._patience_s

    # Leaving a writer

    def leave_writer(self, error: AioshmError) -> None:
        """Search for the next writer, now that the present writer is gone and drained, or raise ``error``."""
        if not self._reconnects_after(error):
            raise error
        if self.state.ready and self._ended is None:
            self._ended = (self._reader.source.writer_pid, error)
        self.writers.left()
        self._start_search()

    def _reconnects_after(self, error: AioshmError) -> bool:
        return self._repeat and isinstance(error, (PeerDied, PeerClosed, MessagesLost, QueueGone))

    def _on_interrupt(self) -> None:
        state = self.state
        idle = state.refusal is None and self._leaving is None
        if idle and self._reader.source.gone is not None and state.loop is not None:
            # Later: the source is in the middle of handling the departure.
            self._leaving = state.loop.call_soon(_leave_if_idle, weakref.ref(self))

    def leave_if_idle(self) -> None:
        """Leave a writer that is gone and drained, although no call waits; look again while there are messages."""
        self._leaving = None
        state = self.state
        source = self._reader.source
        gone = source.gone
        if gone is None or state.refusal is not None or state.loop is None:
            return
        if state.lock.calls or source.poll():
            self._leaving = state.loop.call_later(LONGEST_PAUSE_S, _leave_if_idle, weakref.ref(self))
            return
        with suppress(AioshmError):  # the next call raises it
            self.leave_writer(gone())

    def _start_search(self, *, paused: bool = False) -> None:
        state = self.state
        old = self._reader.source
        assert state.loop is not None
        messages, nbytes = old.earlier
        earlier = (messages + old.progress, nbytes + old.stats().bytes)
        old.announce_close()
        state.part(lambda: self._ended is not None)
        old.close()
        if not old.finished():
            finishing = state.loop.create_task(old.finish())
            self._finishing.add(finishing)
            finishing.add_done_callback(self._finishing.discard)
        source = NoWriter(self)
        source.earlier = earlier
        self._reader.use(source, None, None)
        if not paused:
            source.start(state.loop)
        state.interrupt()

    # Attaching to the next writer

    def find_writer(self) -> bool:
        """Attach to the present writer; return False to be called again later."""
        try:
            handle = self.writers.find()
            return handle is not None and self._attach(handle)
        except AioshmError as error:
            self._failed(error)
        except (MemoryError, OSError):
            logger.debug("%r: cannot search for a writer now; trying again", self.state, exc_info=True)
        return False

    def _attach(self, handle: Handle) -> bool:
        """Attach to the writer of a handle; return whether the writer was there."""
        state = self.state
        assert state.loop is not None
        try:
            source, codec = self._connect(handle, self._failed)
        except QueueGone:
            self.writers.left()
            return False
        except (AioshmError, MemoryError, OSError):
            raise
        except Exception as error:  # the reader's arguments do not suit this writer, or its codec cannot be made
            raise HandleError(f"{state!r}: {error}") from error
        source.earlier = self._reader.source.earlier
        self._reader.source.close()
        self._reader.use(source, handle, codec)
        try:
            source.start(state.loop)
        except AioshmError as error:
            self._failed(error)
        state.interrupt()
        return True

    def _failed(self, error: AioshmError) -> None:
        """Search for the next writer, keep the error for the next call, or make every call raise it."""
        source = self._reader.source
        paused = False
        if self._reconnects_after(error) or isinstance(error, QueueGone):
            self.writers.left()
        elif self._repeat or isinstance(error, LimitReached):
            self._obstacle = error
            paused = not isinstance(error, LimitReached)
        else:
            source.close()
            self.state.refuse(partial(copy_error, error))
            return
        if not isinstance(source, NoWriter):
            self._start_search(paused=paused)
        elif paused:
            source.close()
        self.state.interrupt()

    # Closing

    @property
    def finished(self) -> bool:
        """True once all earlier writers know that the reader has left."""
        return not self._finishing

    async def finish(self) -> None:
        """Wait until `finished`."""
        if self._finishing and self.state.loop is asyncio.get_running_loop():
            await asyncio.wait(self._finishing)
