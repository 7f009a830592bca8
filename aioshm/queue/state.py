"""The state of one end of a queue: its owner, whether it is ready, closed or failed, and its budget of messages.

Fast calls go directly to the end's core. The core is shut while the end is not ready, has failed, or a call waits.
Calls then take the slow path, which waits or raises the error.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Sequence
from threading import current_thread, get_ident
from time import monotonic, monotonic_ns
from typing import Any, TypeAlias

import msgspec

from aioshm.config import Options
from aioshm.errors import AioshmError, EndClosed, RoleError
from aioshm.lifeline.sockets import Doorbell
from aioshm.process.loop_thread import process_lock
from aioshm.queue.call_lock import CallLock
from aioshm.queue.closing import Closable, ClosingOrder
from aioshm.queue.stats import QueueStats, Rates
from aioshm.ring import RingReader, RingWriter
from aioshm.ring.copying import CopyingCore
from aioshm.ring.cores import ReaderCore, WriterCore
from aioshm.wait.cpus import policy_for
from aioshm.wait.limits import Stall
from aioshm.wait.poller import Poller, ThreadPoller, WaitStats

YIELD_AFTER_MESSAGES = 256
YIELD_AFTER_NS = 1_000_000
"""The budget: a task that never waits yields to the loop after this many messages, or nanoseconds."""

YIELD_SOON_AFTER_MESSAGES = 16
"""The same while a reader waits for the loop to attach."""

NO_TURNS = 1 << 62
"""The same for blocking ends: the background loop runs between calls anyway."""


class NoRing:
    """The core of an end that has no ring, or none yet; it has the attributes of a ring's core that `EndState` uses."""

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
        """Belong to this thread, while ``runs()`` is true; None: to whichever uses it."""
        self._thread = get_ident()
        self._runs = runs

    def share(self, _turn: Any, /) -> None:
        """Belong to any thread."""
        self.belong(None)

    def spin(self, _budget_ns: int, /) -> bool:
        """Return False: there is no memory to look at."""
        return False


Core: TypeAlias = WriterCore | ReaderCore | CopyingCore | NoRing


class EndState:
    """The owning loop and thread of an end, whether it is ready, closed or failed, and what its calls share."""

    def __init__(self, what: str, options: Options) -> None:
        self.name = ""
        self.options = options
        # Handles the fast calls.
        self.core: Core = NoRing()
        # The owner; None until the end is first awaited.
        self.loop: asyncio.AbstractEventLoop | None = None
        # True where threads use the end, which belongs to the background loop.
        self.blocks: bool = False
        # Of blocking ends: not empty while `wake_peers` has to wake a sleeping peer.
        self.pending_wakeups: list[None] = []
        self.defer_wakeup: Callable[[], None] = functools.partial(self.pending_wakeups.append, None)
        # Whether all ends of the queue are attached.
        self.ready: bool = False
        # Makes the error that every call raises.
        self.refusal: Callable[[], AioshmError] | None = None
        # Admits one call at a time.
        self.lock: CallLock = CallLock()
        self._yielding = 0  # calls that let the other tasks run before they enter
        self._hurried = False
        self._gives_way: Callable[[], bool] = bool  # False, until there is a ring
        self.poller: Poller | ThreadPoller | None = None
        # Keeps the fast path shut while it returns true.
        self.shut_while: Callable[[], object] | None = None
        self.on_interrupt: Callable[[], object] | None = None
        self._what = what
        self._closing = ClosingOrder(self)
        self._thread = -1
        self._loop_runs: Callable[[], bool] = bool  # False, until there is a loop
        # Called whenever a waiting call would poll again; set by a merge.
        self.watcher: Callable[[], object] | None = None
        self._news: asyncio.Future[None] | None = None
        self.rates: Rates = Rates(monotonic())

    def enclose(self, inside: Closable) -> None:
        """Set the complete end, which `aclose` closes."""
        self._inside = inside
        self._closing.enclose(inside)

    # The owner

    def bind(self) -> asyncio.AbstractEventLoop:
        """Belong to the running loop from now on, or raise if another loop is the owner."""
        loop = asyncio.get_running_loop()
        if self.loop is None and self.refusal is None:
            self.loop, self._thread = loop, get_ident()
            self._loop_runs = loop.is_running
            self.use(self.core)
        self.check_usable()
        return loop

    def use(self, core: Core) -> None:
        """Route the fast calls to this core from now on. Call it on the core's thread."""
        self.core = core
        if self.blocks:
            core.share(process_lock)
        else:
            core.belong(self._loop_runs)

    def part(self, shut_while: Callable[[], object]) -> None:
        """Release the core and the poller before their memory is unmapped; a new core follows."""
        self.ready = False
        self.core.open = False
        if self.poller is not None:
            self.poller.close()
            self.poller = None
        self._gives_way = bool
        self.use(NoRing())
        self.shut_while = shut_while

    def block(self) -> None:
        """Allow calls from any thread, and turn off wake-ups by Python code (platform notes: signal handlers)."""
        self.blocks = True
        self.core.share(process_lock)

    def wake_peers(self) -> None:
        """Wake sleeping peers that can continue; call it again after an interruption."""
        if self.pending_wakeups:
            self._inside.wake_peers()
            self.pending_wakeups.clear()

    @property
    def on_its_thread(self) -> bool:
        """Whether the calling thread runs the owning loop."""
        return get_ident() == self._thread

    def check_refusal(self) -> None:
        """Raise the end's error, if it has one."""
        if self.refusal is not None:
            raise self.refusal()

    def check_usable(self) -> None:
        """Raise if the end has an error, or another loop or thread owns it."""
        if self.refusal is not None:
            raise self.refusal()
        if self.loop is None:
            raise RoleError(f"{self!r} is not ready: await wait_until_ready() first")
        self._check_here()

    def check_owner(self) -> None:
        """Raise if another loop or thread owns the end, or it was closed; its other errors do not matter."""
        if self.closed:
            self.check_refusal()
        if self.loop is not None:
            self._check_here()

    def _check_here(self) -> None:
        if get_ident() != self._thread and not self.blocks:
            raise RoleError(
                f"{self!r} belongs to another thread than {current_thread().name}: have its loop do this, with "
                "asyncio.run_coroutine_threadsafe, or make an aioshm.blocking.MessageQueue, which any threads may use"
            )
        if not self._loop_runs():
            raise RoleError(
                f"{self!r} belongs to another event loop than this one: make and await it in one loop, "
                "or make an aioshm.blocking.MessageQueue, which needs none"
            )

    def check_ready(self) -> None:
        """Raise if a ``_nowait`` call cannot run now; tasks that wait do not matter."""
        self.check_usable()
        if not self.ready:
            raise RoleError(f"{self!r} is not ready: await wait_until_ready() first")

    # The fast path, the budget, the call lock

    def reopen(self) -> None:
        """Open the fast path, if nothing forbids it."""
        shut = self.lock.calls or self.refusal is not None or (self.shut_while is not None and self.shut_while())
        self.core.open = self.ready and not shut

    def new_turn(self, now_ns: int = 0) -> None:
        """Start a new budget, now or at a given time, because the loop's other tasks have run."""
        core = self.core
        if self.blocks:
            core.budget = core.budget_ends_ns = NO_TURNS
            return
        core.budget = YIELD_SOON_AFTER_MESSAGES if self._hurried else YIELD_AFTER_MESSAGES
        self._hurried = False
        core.budget_ends_ns = (now_ns or monotonic_ns()) + YIELD_AFTER_NS

    def hurry(self) -> None:
        """Shorten the budget, so that the loop runs soon."""
        if self.blocks:
            return
        self._hurried = True
        self.core.budget = min(self.core.budget, YIELD_SOON_AFTER_MESSAGES)

    def count_turn(self) -> None:
        """Count a message that did not pass the core."""
        core = self.core
        core.budget = core.budget - 1 if monotonic_ns() < core.budget_ends_ns else 0

    async def yield_turn(self) -> None:
        """Run other tasks, if this end's budget is spent."""
        if self.core.budget <= 0 or monotonic_ns() >= self.core.budget_ends_ns:
            self._yielding += 1
            self.give_way()
            try:
                await asyncio.sleep(0)
            finally:
                self._yielding -= 1
            self.new_turn()
        self.reopen()

    def give_way(self) -> None:
        """Yield the CPU when the budget is spent, if a new reader may need a CPU."""
        if not self.dismantled and self._gives_way():
            os.sched_yield()

    async def enter(self, deadline: float | None, cancel: asyncio.Event | None = None) -> None:
        """Shut the fast path and acquire the call lock; each `enter` needs a `leave`."""
        if self.lock.in_own_block:
            raise RoleError(f"{self!r}: called inside of a block that has its slot, and so would wait for itself")
        self.core.open = False
        try:
            await self.lock.acquire(deadline, cancel)
        except BaseException:
            self._left()
            raise

    def enter_now(self) -> None:
        """Acquire the lock; the core let the caller pass, so the lock is free."""
        self.core.open = False
        self.lock.acquire_free()

    def hold(self) -> None:
        """Record that a block of this task owns a slot until `leave`."""
        self.lock.hold()

    @property
    def waits(self) -> bool:
        """Whether a call holds or awaits the lock while no block owns a slot. Call it on the loop."""
        return self.lock.calls + self._yielding > 0 and not self.lock.in_block

    def leave(self) -> None:
        """Release the lock."""
        self.lock.release()
        self._left()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Set the callback for whenever a waiting call would poll again, or a task leaves."""
        if self.watcher is not None:
            raise RoleError(f"{self!r}: another merge is waiting for it")
        self.watcher = watcher

    def unwatch(self) -> None:
        """Remove the callback."""
        self.watcher = None

    def _left(self) -> None:
        if self.lock.calls:
            return
        if self._closing.begun:
            self._closing.dismantle_unless_used()
        else:
            self.reopen()
        if self.watcher is not None:
            self.watcher()

    # Waiting

    def new_poller(self, ring: RingWriter | RingReader, peers: Sequence[int], doorbell: Doorbell | None) -> None:
        """Make the poller of the calls; ``peers``: the other ends' pids, 0 where unknown."""
        assert self.loop is not None
        policy = policy_for(peers, self.options, in_threads=self.blocks)
        if self.blocks:
            if doorbell is not None:
                doorbell.unwatch(self.loop)  # the thread that waits polls it
            doorbells = [] if doorbell is None else [doorbell]
            self.poller = ThreadPoller(self.loop, ring.parked, policy, self.core.spin, doorbells)
            self.new_turn()
        else:
            self.poller = Poller(self.loop, ring.parked, policy, self.core.spin)
            self.core.spin_yields = policy.crowded
        self._gives_way = ring.gives_way

    def wake(self) -> None:
        """Make a call that waits for messages or slots poll again."""
        if self.poller is not None:
            self.poller.wake()
        if self.watcher is not None:
            self.watcher()

    def news(self) -> asyncio.Future[None]:
        """Return a future that the next `interrupt` resolves."""
        if self._news is None or self._news.done():
            assert self.loop is not None
            self._news = self.loop.create_future()
        return self._news

    def interrupt(self) -> None:
        """Make every waiting call poll again."""
        self.wake()
        if self.on_interrupt is not None:
            self.on_interrupt()
        if self._news is not None and not self._news.done() and not self._news.get_loop().is_closed():
            self._news.set_result(None)

    def stall(self, report: Callable[[float], float | None]) -> Stall:
        """Return an object that reports long waits through ``report``."""
        return Stall(self.options.stall_warning_s, report)

    # Closing

    @property
    def closed(self) -> bool:
        """Whether closing has begun."""
        return self._closing.begun

    @property
    def dismantled(self) -> bool:
        """Whether closing has nothing to release."""
        return self._closing.dismantled

    def refuse(self, refusal: Callable[[], AioshmError]) -> None:
        """Make every call raise an error from now on, also calls that wait."""
        self.refusal = refusal
        self.core.open = False
        if self.loop is None or not self.loop.is_closed():
            self.interrupt()

    def accept_again(self, refusal: Callable[[], AioshmError]) -> None:
        """Make calls no longer raise this error, if they raise it now."""
        if self.refusal is refusal:
            self.refusal = None
            self.reopen()

    def forbid(self) -> None:
        """Make every call in a forked child raise. Wakes no call: the loop belongs to the parent."""
        self.refusal = lambda: RoleError(f"{self!r} belongs to the process that this one was forked from")
        self.core.open = False

    def refuse_closed(self) -> None:
        """Make every call raise `QueueClosed` from now on; the first step of closing."""
        self.refuse(lambda: EndClosed(f"{self!r}: this end was closed"))

    def discard(self) -> None:
        """Close an end that was never used, without an event loop."""
        self._closing.discard()

    async def aclose(self) -> None:
        """Close the end; see `aioshm.MessageQueue.aclose`."""
        await self._closing.aclose()

    def stats(self) -> QueueStats:
        stats = self._closing.last_stats if self.dismantled else self._inside.stats()
        messages_per_s, bytes_per_s = self.rates.since(monotonic(), stats.messages, stats.bytes)
        return msgspec.structs.replace(stats, messages_per_s=messages_per_s, bytes_per_s=bytes_per_s)

    # Statistics

    def new_stats(self, side: str, rank: int, **fields: Any) -> QueueStats:
        """Return statistics with the costs of waiting so far, and other fields of `QueueStats`."""
        core = self.core
        waits = WaitStats() if self.poller is None else self.poller.stats
        return QueueStats(
            queue=self.name,
            side=side,
            rank=rank,
            ready=self.ready,
            spins=core.spins,
            spin_hits=core.hits,
            spin_s=core.spun_ns / 1e9,
            naps=waits.naps,
            parks=waits.parks,
            copied_bytes=core.copied,
            garbled_traces=core.garbled,
            **fields,
        )

    def __repr__(self) -> str:
        state = "closed" if self.closed else "ready" if self.ready else "not ready"
        return f"<{self._what} of queue {self.name}, {state}>"
