"""The gate of an end: whose the end is, its line and its turns, and what it refuses.

The hot calls go straight to the end's core, which lets them pass (see ``ring/reference.py``) while the end is ready and
healthy and nobody waits in line. Whatever is wrong shuts it, and the slow path says what it is.
"""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from threading import current_thread, get_ident
from time import monotonic, monotonic_ns

import msgspec

from aioshm.config import Options
from aioshm.errors import AioshmError, EndClosed, RoleError
from aioshm.lifeline.bell import Bell
from aioshm.queue.ends.closing import ClosingOrder, Whole
from aioshm.queue.ends.core import Core, NoRing
from aioshm.queue.ends.waiting import new_poller
from aioshm.queue.stats import QueueStats, Rates, ReaderStats
from aioshm.ring import RingReader, RingWriter
from aioshm.ring.header import Latency
from aioshm.wait.line import Line
from aioshm.wait.poller import Poller, WaitStats
from aioshm.wait.stall import Stall

TURN_MESSAGES = 256
TURN_NS = 1_000_000
"""A task that never has to wait yields to the loop after this many messages, or this long."""

SHORT_TURN_MESSAGES = 16
"""The same where a reader that attaches waits for the loop."""

NO_TURNS = 1 << 62
"""The same for an end whose calls block: the background loop has its turn between any two of them."""


class Gate:
    """Lets one loop, thread and process use an end, one task at a time.

    Args:
        what: Names the end, for people: "writer", "local reader".
        options: The end's.

    Attributes:
        name: The queue's name, for messages.
        options: The end's.
        core: What the hot calls pass.
        loop: Whose the end is; None until it is first awaited.
        blocks: Whether threads use the end, which belongs to the background loop; each has the process' turn.
        owed: Of an end whose calls block: not empty where another end sleeps though it can go on; see `pay`.
        in_line: How many calls have entered, or wait to.
        ready: Whether every end of the queue is there.
        refusal: Makes the error that every call raises, if any.
        poller: What a call waits with, once the other ends are known.
        shut_while: Keeps the fast path shut while it is true, if there is such a thing.
        on_interrupt: Is told, too, that every waiting call is to look again.
        watcher: Called whenever a waiting call would look again; a merge's.
        rates: Of what the end sends or receives.
    """

    def __init__(self, what: str, options: Options) -> None:
        self.name = ""
        self.options = options
        self.core: Core = NoRing()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.blocks: bool = False
        self.owed: list[None] = []
        self.owe: Callable[[], None] = functools.partial(self.owed.append, None)
        self.ready: bool = False
        self.refusal: Callable[[], AioshmError] | None = None
        self.in_line: int = 0
        self._yielding = 0  # calls that let the other tasks run before they enter
        self._hurried = False
        self._gives_way: Callable[[], bool] = bool  # False, until there is a ring
        self.poller: Poller | None = None
        self.shut_while: Callable[[], object] | None = None
        self.on_interrupt: Callable[[], object] | None = None
        self._what = what
        self._closing = ClosingOrder(self)
        self._thread = -1
        self._loop_runs: Callable[[], bool] = bool  # False, until there is a loop
        self._line = Line()
        self._holder: object = None  # whose block has a slot
        self.watcher: Callable[[], object] | None = None
        self._news: asyncio.Future[None] | None = None
        self.rates: Rates = Rates(monotonic())

    def enclose(self, inside: Whole) -> None:
        """Take over the closing of an end, which is complete by now."""
        self._inside = inside
        self._closing.enclose(inside)

    # Whose the end is

    def bind(self) -> asyncio.AbstractEventLoop:
        """Belong to the running loop from now on, or refuse to be used from another one."""
        loop = asyncio.get_running_loop()
        if self.loop is None and self.refusal is None:
            self.loop, self._thread = loop, get_ident()
            self._loop_runs = loop.is_running
            self.use(self.core)
        self.check_usable()
        return loop

    def use(self, core: Core) -> None:
        """Let the hot calls pass this core from now on; called on the thread that it is to belong to."""
        self.core = core
        core.belong(None if self.blocks else self._loop_runs)

    def part(self, shut_while: Callable[[], object]) -> None:
        """Let go of the core, and of what waits on it, before what these are of is given back: there will be others.

        Args:
            shut_while: Keeps the fast path shut then.
        """
        self.ready = False
        self.core.open = False
        if self.poller is not None:
            self.poller.close()
            self.poller = None
        self._gives_way = bool
        self.use(NoRing())
        self.shut_while = shut_while

    def block(self) -> None:
        """Be used by threads, one at a time; called before anything else.

        A core's wake-up must not run Python code in such a thread: what a handler raises there would be lost.
        """
        self.blocks = True
        self.core.belong(None)

    def pay(self) -> None:
        """Wake the other ends that sleep though they can go on; may be interrupted, and then has to be called again."""
        if self.owed:
            self._inside.wake_peers()
            self.owed.clear()

    @property
    def on_its_thread(self) -> bool:
        """Whether this is the thread whose loop the end belongs to."""
        return get_ident() == self._thread

    def check_refusal(self) -> None:
        """Raise whatever forbids using the end at all."""
        if self.refusal is not None:
            raise self.refusal()

    def check_usable(self) -> None:
        """Raise whatever forbids using the end, here or at all."""
        if self.refusal is not None:
            raise self.refusal()
        if self.loop is None:
            raise RoleError(f"{self!r} is not ready: await wait_until_ready() first")
        self._check_here()

    def check_owner(self) -> None:
        """Raise what forbids changing the end here, also while calls that send or receive are refused."""
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
        """Raise whatever forbids a ``_nowait`` call; another task in line does not."""
        self.check_usable()
        if not self.ready:
            raise RoleError(f"{self!r} is not ready: await wait_until_ready() first")

    # Turns and lines

    def reopen(self) -> None:
        """Open the fast path, if nothing forbids it."""
        shut = self.in_line or self.refusal is not None or (self.shut_while is not None and self.shut_while())
        self.core.open = self.ready and not shut

    def new_turn(self, now_ns: int = 0) -> None:
        """Count from here, or from a time: the other tasks of the loop have just had theirs."""
        core = self.core
        if self.blocks:
            core.turn = core.turn_ends_ns = NO_TURNS
            return
        core.turn = SHORT_TURN_MESSAGES if self._hurried else TURN_MESSAGES
        self._hurried = False
        core.turn_ends_ns = (now_ns or monotonic_ns()) + TURN_NS

    def hurry(self) -> None:
        """Let the loop have its next turn soon: a task that never has to wait yields after a few more messages."""
        if self.blocks:
            return
        self._hurried = True
        self.core.turn = min(self.core.turn, SHORT_TURN_MESSAGES)

    def count_turn(self) -> None:
        """Count a message that has passed, but not in the core."""
        core = self.core
        core.turn = core.turn - 1 if monotonic_ns() < core.turn_ends_ns else 0

    async def yield_turn(self) -> None:
        """Let the other tasks run, if this end has had its turn."""
        if self.core.turn <= 0 or monotonic_ns() >= self.core.turn_ends_ns:
            self._yielding += 1
            self.give_way()
            try:
                await asyncio.sleep(0)
            finally:
                self._yielding -= 1
            self.new_turn()
        self.reopen()

    def give_way(self) -> None:
        """Hand the CPU on, at the end of a turn, if a reader has just been admitted, which may be waiting for it.

        It has had to do so much that the kernel lets it wait until the next tick of its timer, where no CPU is idle.
        """
        if not self.dismantled and self._gives_way():
            os.sched_yield()

    async def enter(self, deadline: float | None, cancel: asyncio.Event | None = None) -> None:
        """Wait for this task's turn at the end; each `enter` needs a `leave`."""
        if self.held_here:
            raise RoleError(f"{self!r}: called inside of a block that has its slot, and so would wait for itself")
        self.in_line += 1
        self.core.open = False
        try:
            await self._line.join(deadline, cancel)
        except BaseException:
            self._left()
            raise

    def enter_now(self) -> None:
        """Begin this task's turn where the core lets it pass, so that nobody is in line; as `enter`."""
        self.in_line += 1
        self.core.open = False
        self._line.take()

    def hold(self) -> None:
        """Note that a block has the slot until `leave`, and whose block."""
        self._holder = self._caller()

    @property
    def held_here(self) -> bool:
        """Whether a block of the task that asks has the slot."""
        return self._holder is not None and self._holder == self._caller()

    @property
    def waits(self) -> bool:
        """Whether a call has entered, or is about to, and no block has a slot; asked on the loop."""
        return self.in_line + self._yielding > 0 and self._holder is None

    def leave(self) -> None:
        """End this task's turn."""
        self._holder = None
        self._line.leave()
        self._left()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call back whenever a waiting call would look again, or a task has left the line.

        Raises:
            RoleError: Another merge watches.
        """
        if self.watcher is not None:
            raise RoleError(f"{self!r}: another merge is waiting for it")
        self.watcher = watcher

    def unwatch(self) -> None:
        """Call back no more."""
        self.watcher = None

    def _caller(self) -> object:
        """Return what cannot wait for itself: a reference to the task.

        A weak reference: a lease may end by nobody referring to its task, which refers to the lease, any more.
        """
        task = asyncio.current_task()
        return None if task is None else weakref.ref(task)

    def _left(self) -> None:
        self.in_line -= 1
        if self.in_line:
            return
        if self._closing.begun:
            self._closing.dismantle_unless_used()
        else:
            self.reopen()
        if self.watcher is not None:
            self.watcher()

    # Waiting

    def new_poller(self, cursor: RingWriter | RingReader, others: Sequence[int], bell: Bell | None) -> None:
        """Make what calls wait with; the arguments are those of `waiting.new_poller`."""
        assert self.loop is not None
        pay = self.pay if self.blocks else None
        self.poller = new_poller(self.loop, self.options, cursor, others, self.core.spin, bell, pay)
        self.core.spin_yields = self.poller.crowded and not self.blocks
        if self.blocks:
            self.new_turn()
        self._gives_way = cursor.gives_way

    def wake(self) -> None:
        """Let a call that waits for messages, or for slots, look again."""
        if self.poller is not None:
            self.poller.wake()
        if self.watcher is not None:
            self.watcher()

    def news(self) -> asyncio.Future[None]:
        """Return what is done at the next `interrupt`."""
        if self._news is None or self._news.done():
            assert self.loop is not None
            self._news = self.loop.create_future()
        return self._news

    def interrupt(self) -> None:
        """Let every waiting call look again, whatever it waits for."""
        self.wake()
        if self.on_interrupt is not None:
            self.on_interrupt()
        if self._news is not None and not self._news.done() and not self._news.get_loop().is_closed():
            self._news.set_result(None)

    def stall(self, report: Callable[[float], float | None]) -> Stall:
        """Return what calls back when a wait has lasted for long."""
        return Stall(self.options.stall_warning_s, report)

    # ClosingOrder

    @property
    def closed(self) -> bool:
        """Whether closing has begun."""
        return self._closing.begun

    @property
    def dismantled(self) -> bool:
        """Whether there is nothing to give back, or not any more."""
        return self._closing.dismantled

    def refuse(self, refusal: Callable[[], AioshmError]) -> None:
        """Answer every call, the waiting ones too, with an error from now on."""
        self.refusal = refusal
        self.core.open = False
        if self.loop is None or not self.loop.is_closed():
            self.interrupt()

    def accept_again(self, refusal: Callable[[], AioshmError]) -> None:
        """Let calls pass again that were answered with this error, if that is what they are answered with now."""
        if self.refusal is refusal:
            self.refusal = None
            self.reopen()

    def forbid(self) -> None:
        """Answer every call in a forked child with an error, and wake nobody: the loop is the parent's."""
        self.refusal = lambda: RoleError(f"{self!r} belongs to the process that this one was forked from")
        self.core.open = False

    def refuse_closed(self) -> None:
        """Let every call, the waiting ones too, raise `QueueClosed` from now on; the first step of closing."""
        self.refuse(lambda: EndClosed(f"{self!r}: this end was closed"))

    def discard(self) -> None:
        """Close an end that nobody has used, outside of any loop."""
        self._closing.discard()

    async def aclose(self) -> None:
        """Close the end; see `aioshm.MessageQueue.aclose`."""
        await self._closing.aclose()

    def stats(self) -> QueueStats:
        """Return what the end has done so far."""
        stats = self._closing.stats()
        messages_per_s, bytes_per_s = self.rates.since(monotonic(), stats.messages, stats.bytes)
        return msgspec.structs.replace(stats, messages_per_s=messages_per_s, bytes_per_s=bytes_per_s)

    # Telling about the end

    def new_stats(
        self,
        *,
        side: str,
        rank: int,
        messages: int,
        max_chunks: int,
        slots: int,
        overflows: int,
        backlog: int,
        readers: int,
        nbytes: int = 0,
        per_reader: tuple[ReaderStats, ...] = (),
        latency: Latency | None = None,
    ) -> QueueStats:
        """Return statistics, to which this adds what waiting has cost so far."""
        core, waits = self.core, WaitStats() if self.poller is None else self.poller.stats
        return QueueStats(
            queue=self.name,
            side=side,
            rank=rank,
            ready=self.ready,
            messages=messages,
            overflows=overflows,
            backlog=backlog,
            max_chunks=max_chunks,
            slots=slots,
            readers=readers,
            spins=core.spins,
            spin_hits=core.hits,
            spin_s=core.spun_ns / 1e9,
            naps=waits.naps,
            parks=waits.parks,
            copied_bytes=core.copied,
            garbled_traces=core.garbled,
            bytes=nbytes,
            per_reader=per_reader,
            latency=latency,
        )

    def __repr__(self) -> str:
        state = "closed" if self.closed else "ready" if self.ready else "not ready"
        return f"<{self._what} of queue {self.name}, {state}>"
