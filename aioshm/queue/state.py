"""The state of one end of a queue: its owner, readiness, failure, call lock and budget.

Fast calls go to the core, which is shut while the end is not ready, has failed, or a call waits.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from threading import current_thread, get_ident
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from aioshm.config import Options
from aioshm.errors import AioshmError, EndClosed, RoleError
from aioshm.lifeline.sockets import Doorbell
from aioshm.process.loop_thread import process_lock
from aioshm.queue.closing import ClosingOrder
from aioshm.queue.source import NoRing
from aioshm.queue.stats import QueueStats, Rates
from aioshm.ring import RingReader, RingWriter
from aioshm.wait.limits import Stall, settle
from aioshm.wait.poller import Poller, WaitStats, policy_for

if TYPE_CHECKING:
    from aioshm.queue.ends.reader import Reader
    from aioshm.queue.ends.writer import Writer

YIELD_AFTER_MESSAGES = 256
YIELD_AFTER_NS = 1_000_000
"""The budget: a task that never waits yields to the loop after this many messages, or nanoseconds."""

NO_TURNS = 1 << 62
"""The same for blocking ends: the background loop runs between calls anyway."""


Core: TypeAlias = RingWriter | RingReader | NoRing


class CallLock:
    """Admits one call at a time to an end, in the order of the calls."""

    def __init__(self) -> None:
        # Calls that hold the lock or wait for it.
        self.calls: int = 0
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._block: object = None  # a weak reference to the task whose block has the lock

    async def acquire(self, deadline: float | None, cancel: asyncio.Event | None) -> None:
        """Wait until this task has the lock; each `acquire` needs a `release`."""
        self.calls += 1
        try:
            if self._taken:
                await self._wait(deadline, cancel)
        except BaseException:
            self.calls -= 1
            raise
        self._taken = True

    async def _wait(self, deadline: float | None, cancel: asyncio.Event | None) -> None:
        acquired: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(acquired)
        try:
            await settle(acquired, deadline=deadline, cancel=cancel)
        except BaseException as error:
            if acquired.done():
                self._hand_over()  # this call was next just now
            else:
                self._waiting.remove(acquired)
            if isinstance(error, TimeoutError):
                raise TimeoutError("the call of another task, which was first at this end, still waits") from None
            raise

    def acquire_free(self) -> None:
        """Acquire a free lock."""
        assert not self._taken
        self.calls += 1
        self._taken = True

    def release(self) -> None:
        """Hand the lock to the call that has waited longest, if any."""
        self.calls -= 1
        self._block = None
        self._hand_over()

    def _hand_over(self) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._taken = False

    def hold(self) -> None:
        """Note that a block of this task has the lock until `release`."""
        self._block = _this_task()

    @property
    def in_block(self) -> bool:
        """Whether a block has the lock."""
        return self._block is not None

    @property
    def in_own_block(self) -> bool:
        """Whether a block of the calling task has the lock."""
        return self._block is not None and self._block == _this_task()


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
        # Of blocking ends: messages of `acquire_write` that a call may find undelivered.
        self.raw: list[bytearray] = []
        # Whether all ends of the queue are attached.
        self.ready: bool = False
        # Makes the error that every call raises.
        self.refusal: Callable[[], AioshmError] | None = None
        # Admits one call at a time.
        self.lock: CallLock = CallLock()
        # Calls that yield to other tasks before they enter.
        self._yielding = 0
        self.poller: Poller | None = None
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

    def set_end(self, end: Reader | Writer) -> None:
        """Set the reader or writer that `aclose` closes. Its constructor has finished."""
        self._end = end
        self._closing.watch(end)

    # The owner

    def bind(self) -> asyncio.AbstractEventLoop:
        """Belong to the running loop from now on, or raise if another loop is the owner."""
        loop = asyncio.get_running_loop()
        if self.loop is None and self.refusal is None:
            self.loop = loop
            self._thread = get_ident()
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
        self.use(NoRing())
        self.shut_while = shut_while

    def block(self) -> None:
        """Allow calls from any thread, and turn off wake-ups by Python code (platform notes: signal handlers)."""
        self.blocks = True
        self.core.share(process_lock)

    def wake_peers(self) -> None:
        """Wake sleeping peers that can continue; call it again after an interruption."""
        if self.pending_wakeups:
            if not self.dismantled:
                self._end.wake_peers()
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
        self.check_here()

    def check_owner(self) -> None:
        """Raise if another loop, thread or process owns the end, or it was closed; ignore other errors of the end."""
        if self.closed or self.dismantled:
            self.check_refusal()
        if self.loop is not None:
            self.check_here()

    def check_here(self) -> None:
        """Raise if another loop or thread owns the end."""
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

    def raw_message(self, body: memoryview) -> bytearray:
        """Return a copy of a message of `acquire_write`, for callers that want an object."""
        message = bytearray(body)
        if self.blocks:
            self.raw.append(message)
        return message

    def new_turn(self, now_ns: int = 0) -> None:
        """Start a new budget, now or at a given time, because the loop's other tasks have run."""
        core = self.core
        if self.blocks:
            core.budget = core.budget_ends_ns = NO_TURNS
            return
        core.budget = YIELD_AFTER_MESSAGES
        core.budget_ends_ns = (now_ns or monotonic_ns()) + YIELD_AFTER_NS

    def count_turn(self) -> None:
        """Count a message that passed outside of the core towards the end's turn on the loop."""
        core = self.core
        core.budget -= 1
        if monotonic_ns() >= core.budget_ends_ns:
            core.budget = 0

    async def yield_turn(self) -> None:
        """Run other tasks, if this end's budget is spent."""
        if self.core.budget <= 0 or monotonic_ns() >= self.core.budget_ends_ns:
            self._yielding += 1
            try:
                await asyncio.sleep(0)
            finally:
                self._yielding -= 1
            self.new_turn()
        self.reopen()

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
        """Make the poller of the calls; ``peers``: the pids of the peers, 0 where unknown."""
        assert self.loop is not None
        policy = policy_for(peers, self.options, in_threads=self.blocks)
        if self.blocks:
            doorbells: list[Doorbell] = []
            if doorbell is not None:
                doorbell.unwatch(self.loop)  # the thread that waits polls it
                doorbells = [doorbell]
            self.poller = Poller(self.loop, ring.parked, policy, self.core.spin, doorbells)
            self.new_turn()
        else:
            self.poller = Poller(self.loop, ring.parked, policy, self.core.spin)
            self.core.spin_yields = policy.crowded

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

    def stall(self, report: Callable[[float], float | None], ask: Callable[[], bool] | None = None) -> Stall:
        """Return an object that reports long waits through ``report``, see `Stall`."""
        return Stall(self.options.stall_warning_s, report, ask)

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
        """End the effect of `refuse` with this error."""
        if self.refusal is refusal:
            self.refusal = None
            self.reopen()

    def forbid(self) -> None:
        """Make every call in a forked child raise. Wakes no call: the loop belongs to the parent."""
        self.refusal = lambda: RoleError(
            f"{self!r} belongs to the process that this one was forked from: create an end here, from the handle"
        )
        self.core.open = False
        unshared = memoryview(bytearray(1))  # a call that ends in the child leaves the parent's flag raised
        if not isinstance(self.core, NoRing):
            self.core.parked = unshared
        if self.poller is not None:
            self.poller.parked = unshared

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
        stats = self._closing.last_stats if self.dismantled else self._end.stats()
        messages_per_s, bytes_per_s = self.rates.since(monotonic(), stats.messages, stats.bytes)
        return msgspec.structs.replace(stats, messages_per_s=messages_per_s, bytes_per_s=bytes_per_s)

    # Statistics

    def new_stats(self, side: str, rank: int, **fields: Any) -> QueueStats:
        """Return statistics with the costs of waiting so far, and other fields of `QueueStats`."""
        core = self.core
        waits = WaitStats()
        if self.poller is not None:
            waits = self.poller.stats
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
        state = "not ready"
        if self.closed:
            state = "closed"
        elif self.ready:
            state = "ready"
        return f"<{self._what} of queue {self.name}, {state}>"


def _this_task() -> object:
    task = asyncio.current_task()
    if task is None:
        return None
    return weakref.ref(task)  # not the task: a lease may end when its task is collected
