"""What both ends of a queue share: whose they are, turns, waiting in line, closing."""

from __future__ import annotations

import asyncio
import os
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import current_thread, get_ident
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING

from aioshm.config import Options, check_bool, check_timeout, shown
from aioshm.errors import AioshmError, QueueClosed, RoleError
from aioshm.lifeline.bell import Bell
from aioshm.process.limits import abandon_when_forked
from aioshm.queue.base import MessageQueue
from aioshm.queue.stats import QueueStats
from aioshm.wait.blocking import BlockingLoop, BlockingPoller
from aioshm.wait.cpus import usable_cpus
from aioshm.wait.line import Line
from aioshm.wait.poller import Poller, WaitStats
from aioshm.wait.predictor import Predictor
from aioshm.wait.stall import Stall

if TYPE_CHECKING:
    from aioshm.ring import RingReader, RingWriter
    from aioshm.ring.atomics import ReaderCore, WriterCore

TURN_MESSAGES = 64
TURN_NS = 1_000_000
"""A task that never has to wait yields to the loop after this many messages, or this long."""

BLOCKING_TURN_MESSAGES = 1024
BLOCKING_TURN_NS = 10_000_000
"""The same for an end whose loop has nobody else to serve."""

LOCAL_TURN_NS = 250_000_000
"""The same where that loop has no network either, and only tells what became of other ends: between messages that are
milliseconds apart, running it takes as long as all the rest of sending one."""

LOOP_POLL_S = 0.05
"""How often closing from another thread looks whether the loop that is to do it still runs."""


class NotAttached:
    """Stands for the core of an end that has no ring yet: nothing passes its gate."""

    def __init__(self) -> None:
        self.open = False
        self.user = 0
        self.owes = self.quiet = False
        self.turn = self.turn_ends_ns = self.seq = self.published_ns = self.spins = self.hits = self.spun_ns = 0

    def passes(self) -> bool:
        """Refuse."""
        return False

    def belong(self, runs: Callable[[], object] | None) -> None:
        """Remember only who uses this: the true core will be told the rest."""
        self.user = get_ident()


_others: weakref.WeakKeyDictionary[End, set[int]] = weakref.WeakKeyDictionary()
"""The processes at the other ends of this process' queues, of those whose calls block."""


class End(MessageQueue, ABC):
    """One end of a queue.

    The hot calls go straight to the ring's core, whose gate (see ``ring/_portable.py``) is open while this end is
    ready, healthy, and nobody waits in line. Whatever is wrong shuts it, and the slow path says what it is.
    """

    _core: WriterCore | ReaderCore

    _blocking_turn_ns = LOCAL_TURN_NS

    linger_ns = 0
    """How long a blocking call that finds nothing should `linger` before it waits."""

    def linger(self, _left: float | None) -> bool:
        """Wait for a message that comes soon, handing the CPU on after each look; return whether one did.

        Args:
            _left: For so many seconds at most; not checked so far.
        """
        return False

    def watch(self, _left: float | None) -> None:
        """Wait, outside of the loop, for the message that `WindowBegins` told of, for so many seconds at most."""

    def __init__(self, queue_id: bytes, options: Options) -> None:
        self._name = queue_id.hex()[:8]
        self._options = options
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = -1
        self._loop_runs: Callable[[], bool] = bool  # False, until there is a loop
        self._blocks = False
        self._poller: Poller | None = None
        self._watcher: Callable[[], None] | None = None  # what else waits for whatever wakes this end
        self._line = Line()
        self._in_line = 0
        self._holder: object = None  # whose block has a slot
        self._refusal: Callable[[], AioshmError] | None = None
        self._ready = False
        self._closed = False
        self._dismantled = False
        self._inherited = False  # whether this is a forked child's copy
        self._overflows = 0
        self.leaves = False  # whether the call that waits leaves the loop when a message is due (see `WindowBegins`)
        self.undo = False  # whether a block that is being left is to leave the message where it is
        abandon_when_forked(self)

    # What each end provides

    @abstractmethod
    def _interrupt(self) -> None:
        """Let every waiting call look at the refusal."""

    @abstractmethod
    def _say_goodbye(self) -> None:
        """Tell the other side that this end closes."""

    @abstractmethod
    def _dismantle(self) -> None:
        """Give everything back; called once, when no call uses the ring any more. Needs no loop."""

    @abstractmethod
    def _abandon(self) -> None:
        """Let go, in a forked child, of what would hide the parent's death."""

    @abstractmethod
    def _current_stats(self) -> QueueStats:
        """Return the statistics while the ring is mapped."""

    def _finished(self) -> bool:
        """Return whether `_finish` has nothing to do."""
        return True

    async def _finish(self) -> None:
        """Do what closing needs that takes time."""

    def _own_ring_or_none(self) -> RingReader | None:
        """Return the ring that this end reads, if it reads one by now."""
        return None

    def tell_parked(self) -> None:
        """Wake the ends that are parked and can go on; may be interrupted, and then has to be called again."""

    # Closing

    async def aclose(self) -> None:
        if self._inherited:  # the other ends, and the loop, are the parent's
            self._closed = True
            return
        loop = self._loop
        if loop is None or loop is asyncio.get_running_loop() or not loop.is_running():
            await self._close_here()
        else:
            await self._close_there(loop)

    async def _close_here(self) -> None:
        if self._loop is not None and self._loop.is_closed():
            self._in_line = 0  # the calls that waited there will never go on
        try:
            self._begin_closing()
            if self._in_line:
                await asyncio.sleep(0)  # the waiting calls raise while the ring is still mapped
        finally:
            self._dismantle_unless_used()
        await self._finish()

    async def _close_there(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close on the loop that this end belongs to, which another thread runs; here if that ends before."""
        done: Future[None] = Future()
        finishing: list[asyncio.Task[None]] = []

        def close() -> None:
            try:
                self._begin_closing()
                self._dismantle_unless_used()
                if self._finished():  # as a rule; a task might be forgotten where the loop ends now
                    done.set_result(None)
                else:
                    finishing.append(loop.create_task(self._finish()))
                    finishing[0].add_done_callback(lambda _: done.set_result(None))
            except Exception as error:
                done.set_exception(error)

        try:
            loop.call_soon_threadsafe(close)
        except RuntimeError:  # it is closed by now
            await self._close_here()
            return
        waiting = asyncio.wrap_future(done)
        while not done.done() and loop.is_running():
            await asyncio.wait({waiting}, timeout=LOOP_POLL_S)
        if done.done():
            done.result()
        else:
            await self._close_here()

    def _begin_closing(self) -> None:
        if not self._closed:
            self._closed = True
            self.refuse_closed()
            self._say_goodbye()

    def refuse_closed(self) -> None:
        """Let every call, the waiting ones too, raise `QueueClosed` from now on; the first step of closing."""
        self._refuse(lambda: QueueClosed(f"{self!r}: this end was closed"))

    def _refuse(self, refusal: Callable[[], AioshmError]) -> None:
        """Answer every call, the waiting ones too, with an error from now on."""
        self._refusal = refusal
        self._core.open = False
        if self._loop is None or not self._loop.is_closed():
            self._interrupt()

    def _dismantle_unless_used(self) -> None:
        if not self._dismantled and not self._in_line:
            self._last_stats = self._current_stats()
            self._dismantled = True
            self._take_apart()

    def _take_apart(self) -> None:
        if self._poller is not None:
            self._poller.close()
        self._dismantle()

    def abandon_in_child(self) -> None:
        """Refuse every call, and let the parent's end go on."""
        self._inherited = True
        if not self._dismantled:
            self._refusal = lambda: RoleError(f"{self!r} belongs to the process that this one was forked from")
            self._core.open = False
            self._last_stats = self._current_stats()
            self._dismantled = True
            self._abandon()

    def __del__(self) -> None:
        if getattr(self, "_dismantled", True):  # also when __init__ has failed
            return
        try:
            warnings.warn(f"{self!r} was not closed: use `async with`, or await aclose()", ResourceWarning, 2, self)
        finally:  # the warning may be an error
            self._dismantled = True
            self._take_apart()

    # Whose this end is

    def _bind(self) -> asyncio.AbstractEventLoop:
        """Belong to the running loop from now on, or refuse to be used from another one."""
        loop = asyncio.get_running_loop()
        if self._loop is None and self._refusal is None:
            self._loop, self._thread = loop, get_ident()
            if not self._blocks:
                self._loop_runs = loop.is_running
            self._belong()
        self._check_usable()
        return loop

    def _belong(self) -> None:
        """Tell the core whose it is, on the thread that it is to belong to."""
        self._core.belong(None if self._blocks else self._loop_runs)

    def block(self) -> None:
        """Belong to threads, one at a time, whose loop runs only while a call waits; said before anything else."""
        self._blocks = True
        self._loop_runs = _always

    def check_refusal(self) -> None:
        """Raise whatever forbids using this end at all."""
        if self._refusal is not None:
            raise self._refusal()

    def _check_usable(self) -> None:
        """Raise whatever forbids using this end, here or at all."""
        self.check_refusal()
        if self._loop is None:
            raise RoleError(f"{self!r} is not ready: await wait_until_ready() first")
        if get_ident() != self._thread and not self._blocks:
            raise RoleError(f"{self!r} belongs to another thread than {current_thread().name}")
        if not self._loop_runs():
            raise RoleError(f"{self!r} belongs to another event loop than this one")

    def _check_nowait(self) -> None:
        """Raise whatever forbids a ``_nowait`` call; another task in line does not."""
        self._check_usable()
        if not self._ready:
            raise RoleError(f"{self!r} is not ready: await wait_until_ready() first")

    # Turns and lines

    def _reopen(self) -> None:
        """Open the fast path, if nothing forbids it."""
        self._core.open = self._ready and not self._in_line and self._refusal is None

    def _new_turn(self) -> None:
        """Count from here: the other tasks of the loop have just had theirs."""
        # Where calls block, the loop only has to learn now and then what became of the others.
        self._core.turn = BLOCKING_TURN_MESSAGES if self._blocks else TURN_MESSAGES
        self._core.turn_ends_ns = monotonic_ns() + (self._blocking_turn_ns if self._blocks else TURN_NS)

    async def _yield_turn(self) -> None:
        """Let the other tasks run, if this end has had its turn."""
        if self._core.turn <= 0 or monotonic_ns() >= self._core.turn_ends_ns:
            await asyncio.sleep(0)
            self._new_turn()
        self._reopen()

    async def _enter(self, deadline: float | None, cancel: asyncio.Event | None = None) -> None:
        """Wait for this task's turn at the ring; each `_enter` needs a `_leave`."""
        if self._holder is not None and self._holder is self._whoever_calls():
            raise RoleError(f"{self!r}: called inside of a block that has its slot, and so would wait for itself")
        self._in_line += 1
        self._core.open = False
        try:
            await self._line.join(deadline, cancel)
        except BaseException:
            self._left()
            raise

    def _hold(self) -> None:
        """Note that a block has the slot until `_leave`, and whose block."""
        self._holder = self._whoever_calls()

    def _whoever_calls(self) -> object:
        """Return what cannot wait for itself: the task; where calls block, all are one thread's."""
        return True if self._blocks else asyncio.current_task()

    def _leave(self) -> None:
        self._holder = None
        self._line.leave()
        self._left()

    def _left(self) -> None:
        self._in_line -= 1
        if self._in_line:
            return
        if self._closed:
            self._dismantle_unless_used()
        else:
            self._reopen()
        if self._watcher is not None:
            self._watcher()

    # Waiting

    def _new_poller(self, parked: memoryview, others: Sequence[int], bell: Bell | None) -> Poller:
        """Make what waits, now that the other ends are known.

        Args:
            parked: This end's parked flag.
            others: The process of each other end that this one has to do with, 0 where that is not known.
            bell: What they wake this one by, if it is that.
        """
        loop, options, spin = self._loop, self._options, self._core.spin
        assert loop is not None
        if isinstance(loop, BlockingLoop):
            # Its spins are for an answer, whichever end that comes to: whoever else is under way needs a CPU too.
            _others[self] = {pid for pid in others if pid > 0}
            everybody = {*others}.union(*_others.values())
            crowded = _apart(others) and 1 + len(everybody) > _cpus_of(others)
            predictor = predictor_among(others, options, crowded=crowded, yields=True)
            return BlockingPoller(loop, parked, predictor, options.wait, spin, bell, crowded=crowded)
        return Poller(loop, parked, predictor_among(others, options), options.wait, spin)

    def _wake(self) -> None:
        """Let a waiting call look at the ring."""
        if self._poller is not None:
            self._poller.wake()
        if self._watcher is not None:
            self._watcher()

    def _stall(self, report: Callable[[float], float | None]) -> Stall:
        return Stall(self._options.stall_warning_s, report)

    # Telling about itself

    def stats(self) -> QueueStats:
        return self._last_stats if self._dismantled else self._current_stats()

    def _stats(self, ring: RingReader | RingWriter | None, rank: int, backlog: int, readers: int) -> QueueStats:
        waits = WaitStats() if self._poller is None else self._poller.stats
        return QueueStats(
            queue=self._name,
            side=self._side,
            rank=rank,
            ready=self._ready,
            messages=0 if ring is None else ring.seq,
            overflows=self._overflows,
            backlog=backlog,
            max_chunks=0 if ring is None else ring.layout.max_chunks,
            readers=readers,
            spins=self._core.spins,
            spin_hits=self._core.hits,
            spin_s=self._core.spun_ns / 1e9,
            naps=waits.naps,
            parks=waits.parks,
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ready" if self._ready else "not ready"
        return f"<{type(self).__name__} of queue {self._name}, {state}>"


def _always() -> bool:
    return True


def predictor_among(
    others: Sequence[int], options: Options, *, crowded: bool | None = None, yields: bool = False
) -> Predictor:
    """Return what decides how an end waits for others.

    Args:
        others: The process of each, 0 where that is not known.
        options: The end's.
        crowded: Whether there are more ends than CPUs; None: find out.
        yields: Whether it hands its CPU on while it spins.
    """
    cpus = _cpus_of(others)
    # Ends of one process hand over to each other through its event loop, or its GIL: spinning would keep both.
    apart = _apart(others)
    return Predictor(
        may_spin=apart and cpus > 1,
        crowded=apart and 1 + len(others) > cpus if crowded is None else crowded,
        yields=yields,
        max_spin_cpu=options.max_spin_cpu,
    )


def _apart(others: Sequence[int]) -> bool:
    return os.getpid() not in others


def _cpus_of(others: Sequence[int]) -> int:
    return usable_cpus(pids=[pid for pid in others if pid > 0])


def deadline_after(
    timeout: float | None, cancel: asyncio.Event | None = None, indefinite: bool = False
) -> float | None:
    """Return the deadline, by ``time.monotonic()``, of a wait of ``timeout`` seconds, whose arguments are checked.

    Raises:
        TypeError, ValueError: One of them is not what it has to be; the text names it.
    """
    seconds = check_timeout("timeout", timeout)
    if cancel is not None and not isinstance(cancel, asyncio.Event):
        raise TypeError(f"cancel must be an asyncio.Event or None, not {shown(cancel)}")
    check_bool("indefinite", indefinite)
    return None if seconds is None else monotonic() + seconds
