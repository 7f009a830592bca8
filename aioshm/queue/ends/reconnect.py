"""A reader's search for its writer, and for the next one."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Protocol, TypeAlias

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
)
from aioshm.queue.handle import Handle
from aioshm.queue.source import Source, nothing
from aioshm.queue.state import EndState
from aioshm.queue.stats import QueueStats
from aioshm.wait.limits import seconds

logger: logging.Logger = logging.getLogger("aioshm.queue")

FIRST_PAUSE_S, LONGEST_PAUSE_S, PAUSE_GROWTH = 0.001, 0.05, 1.3
"""How often to look for a writer: a look is one ``stat``, so that even the longest pause costs next to nothing."""


class Writers(Protocol):
    """Finds the writers of a reader, one after the other."""

    def look(self) -> Handle | None:
        """Return the handle of the present writer; None if none runs, or only the one marked as gone."""

    def left(self) -> None:
        """Mark the writer of the latest handle as gone."""

    def awaited(self) -> str:
        """Describe the awaited writer for log lines and errors."""


class SameWriter:
    """The writers of one identity: every new writer has the same handle."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def look(self) -> Handle | None:
        return self._handle

    def left(self) -> None:
        """Do nothing: the next writer has the same handle."""

    def awaited(self) -> str:
        return f"no writer answers at {self._handle.remote and self._handle.remote.control}"


class NoWriter(Source):
    """Stands for a source while there is no writer: looks for a writer."""

    def __init__(
        self,
        state: EndState,
        rank: int,
        writers: Writers,
        found: Callable[[Handle], bool],
        failed: Callable[[AioshmError], None],
    ) -> None:
        self._state = state
        self._rank = rank
        self._writers = writers
        # Gets the handle; returns whether the reader can use the writer.
        self._found = found
        self._failed = failed
        self._pause_s = FIRST_PAUSE_S
        self._timer: asyncio.TimerHandle | None = None
        # The start of the search, by the monotonic clock.
        self.since: float = monotonic()
        self.receive = nothing

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_later(0, _look, weakref.ref(self), loop)  # an end that is forgotten looks no more

    def look_now(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look once; retry later if there is nothing."""
        try:
            handle = self._writers.look()
            if handle is not None and self._found(handle):
                return
        except AioshmError as error:
            self._failed(error)
        except (MemoryError, OSError):
            logger.debug("%r: cannot look for a writer now; trying again", self._state, exc_info=True)
        if self._timer is not None:
            self._timer = loop.call_later(self._pause_s, _look, weakref.ref(self), loop)
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * PAUSE_GROWTH)

    def too_late(self) -> Exception:
        return TimeoutError(f"{self._state!r}: {self._writers.awaited()}")

    def report_waiting(self, waited_s: float) -> None:
        logger.warning(
            "%r, rank %d: waited %s: %s", self._state, self._rank, seconds(waited_s), self._writers.awaited()
        )

    def stats(self) -> QueueStats:
        return self._state.new_stats("reader", self._rank)

    def close(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def detach_after_fork(self) -> None:
        self._timer = None  # after a fork, it belongs to the parent's loop


def _look(looking: weakref.ref[NoWriter], loop: asyncio.AbstractEventLoop) -> None:
    source = looking()
    if source is not None:
        source.look_now(loop)


Connect: TypeAlias = Callable[[Handle, Callable[[AioshmError], None]], tuple[Source, Codec]]
"""Makes the source for a writer's handle, and the codec; the callback gets the error that keeps it from attaching."""


class Following:
    """Attaches a reader to its writer, and to the next writer when that one is gone."""

    source: Source
    _use: Callable[[Source, Handle | None, Codec | None], None]

    def __init__(
        self,
        state: EndState,
        rank: int,
        writers: Writers,
        connect: Connect,
        *,
        reconnect: bool,
        patience_s: float | None = None,
    ) -> None:
        self._state = state
        self._rank = rank
        self._writers = writers
        self._connect = connect
        self._reconnect = reconnect
        # For calls without a timeout; None: wait for ever.
        self._patience_s = patience_s
        self._ended: tuple[int, AioshmError] | None = (
            None  # pid and error of the writer before this one, until a call has raised `QueueRestarted`
        )
        self._obstacle: AioshmError | None = None  # the error that prevented attaching, until a call has raised it
        self._finishing: set[asyncio.Task[None]] = set()
        # Messages and bytes from the writers before this one.
        self.received: int = 0
        self.received_bytes: int = 0
        # Restarts that were reported to the caller.
        self.restarts: int = 0

    def begin(self, source: Source | None, use: Callable[[Source, Handle | None, Codec | None], None]) -> Source:
        """Return the first source; ``use`` gets each later source, handle and codec."""
        self._use = use
        self.source = self._no_writer() if source is None else source
        if self._reconnect:
            self._state.on_interrupt = self._news_has_come
        return self.source

    def _no_writer(self) -> NoWriter:
        return NoWriter(self._state, self._rank, self._writers, self._found, self._failed)

    # Errors for the next call

    @property
    def telling(self) -> bool:
        """True while the caller has not been notified of a new writer."""
        return self._ended is not None

    @property
    def has_news(self) -> bool:
        """True if `tell` has something to return."""
        return self._obstacle is not None or (self._ended is not None and self._state.ready)

    def tell(self) -> AioshmError | None:
        """Return the error that the next call raises first, and forget it; None: there is none."""
        obstacle, self._obstacle = self._obstacle, None
        if obstacle is not None or self._ended is None or not self._state.ready:
            return obstacle
        (old_pid, error), self._ended = self._ended, None
        self.restarts += 1
        self._state.reopen()
        restarted = QueueRestarted(self._state.name, old_pid, self.source.writer_pid, error)
        restarted.__cause__ = error
        return restarted

    def check_attaching(self) -> None:
        """Raise the error that prevents attaching; look for the next writer if this one is gone."""
        gone = self.source.gone
        if gone is not None:
            self._failed(gone())
        obstacle, self._obstacle = self._obstacle, None
        if obstacle is not None:
            raise obstacle
        self._state.check_refusal()

    def writer_deadline(self, began: float) -> float | None:
        """Return when a call without a timeout, begun then, stops waiting for a writer; None: never."""
        source = self.source
        if not isinstance(source, NoWriter) or self._patience_s is None:
            return None
        return max(began, source.since) + self._patience_s

    # Leaving a writer

    def reconnect_after(self, error: AioshmError) -> None:
        """Wait for the next writer, now that this one is gone and drained, or raise ``error``."""
        if not self._reconnects_after(error):
            raise error
        if self._state.ready and self._ended is None:
            self._ended = self.source.writer_pid, error
        self._writers.left()
        self._look_for_writer()

    def _reconnects_after(self, error: AioshmError) -> bool:
        """Return whether the error ends a writer whose successor is awaited."""
        return self._reconnect and isinstance(error, (PeerDied, PeerClosed, MessagesLost, QueueGone))

    def _news_has_come(self) -> None:
        state = self._state
        if self.source.gone is not None and state.loop is not None and state.refusal is None:
            state.loop.call_soon(self._go_on_if_idle)  # the source, whose news that is, has yet to finish with it

    def _go_on_if_idle(self) -> None:
        """Look for the next writer without a waiting call, if this one is gone and drained."""
        state, source = self._state, self.source
        gone = source.gone
        if gone is None or state.refusal is not None or state.lock.calls or source.look():
            return
        with suppress(AioshmError):  # the next call raises it
            self.reconnect_after(gone())

    def _look_for_writer(self, *, at_once: bool = True) -> None:
        state, old = self._state, self.source
        assert state.loop is not None
        self.received += old.progress
        self.received_bytes += old.stats().bytes
        old.say_goodbye()
        state.part(lambda: self._ended is not None)
        old.close()
        if not old.finished():
            finishing = state.loop.create_task(old.finish())
            self._finishing.add(finishing)
            finishing.add_done_callback(self._finishing.discard)
        self.source = self._no_writer()
        self._use(self.source, None, None)
        if at_once:
            self.source.start(state.loop)
        state.interrupt()

    # Having the next one

    def _found(self, handle: Handle) -> bool:
        """Attach to the writer of a handle; return whether it was there."""
        state = self._state
        assert state.loop is not None
        try:
            source, codec = self._connect(handle, self._failed)
        except QueueGone:
            self._writers.left()
            return False
        except AioshmError:
            raise
        except ValueError as error:  # what is wrong with the arguments is known only now
            raise HandleError(f"{state!r}: {error}") from None
        self.source.close()
        self.source = source
        self._use(source, handle, codec)
        try:
            source.start(state.loop)
        except AioshmError as error:
            self._failed(error)
        state.interrupt()
        return True

    def _failed(self, error: AioshmError) -> None:
        """Look for the next writer, keep the error for the next call, or refuse every call."""
        looks_on = True
        if self._reconnects_after(error) or isinstance(error, QueueGone):
            self._writers.left()
        elif self._reconnect or isinstance(error, LimitReached):
            self._obstacle = error
            looks_on = isinstance(error, LimitReached)
        else:
            self.source.close()
            self._state.refuse(lambda: error)
            return
        if not isinstance(self.source, NoWriter):
            self._look_for_writer(at_once=looks_on)
        elif not looks_on:
            self.source.close()
        self._state.interrupt()

    # Closing

    @property
    def finished(self) -> bool:
        """True once all earlier writers know that the reader has left."""
        return not self._finishing

    async def finish(self) -> None:
        """Wait until `finished`."""
        if self._finishing and self._state.loop is asyncio.get_running_loop():
            await asyncio.wait(self._finishing)
