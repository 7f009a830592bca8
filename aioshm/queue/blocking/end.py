"""An end of a queue for threads, one call at a time. Its asynchronous end belongs to the background loop.

The native core sends and receives in the calling thread, which also waits for messages and slots of a local ring
(`Poller`). Everything else is a coroutine on the background loop, for which the thread waits.

A signal handler may raise out of any call in this module. An indivisible change is therefore one call of the core, runs
in the loop's thread, where no handler runs, or consists of statements without a call between them.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from math import inf
from threading import get_ident
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, TypeVar

from aioshm.closing import warn_not_closed
from aioshm.errors import AioshmError, QueueCancelled, QueueClosed, QueueRestarted, RoleError
from aioshm.process.loop_thread import LoopThread, ProcessLock, process_lock, shared_loop
from aioshm.queue.ends.blocks import ReadBlock
from aioshm.queue.ends.reader import Reader
from aioshm.queue.ends.writer import Writer
from aioshm.queue.state import EndState
from aioshm.ring import RingReader
from aioshm.ring.cores import EMPTY, native_core
from aioshm.wait.poller import CANCEL_POLL_S

if TYPE_CHECKING:
    from aioshm.queue.blocking.blocks import Block

T = TypeVar("T")

TURN_S = 0.0001
"""How long a call waits at its end for a thread that waits for its turn to acquire the lock."""

CLOSING_POLL_S = 0.05
"""How often the loop checks whether the call or block that uses a closing end is over."""


class BlockingEnd:
    """An asynchronous end, its undelivered messages, and a lock that admits one thread at a time."""

    def __init__(self, end: Writer | Reader) -> None:
        self.end = end
        self.state: EndState = end.state
        end.state.block()
        if isinstance(end, Writer):
            end.sender.bind(end.state.defer_wakeup)
        # Received messages that no call has returned yet; always the same list.
        self.undelivered: list[Any] = []
        # An error to raise after them.
        self.failure: AioshmError | None = None
        # The fast path: methods of the native core, once the end is ready.
        self.send_if_room: Callable[[Any], Any] = _send_nothing
        self.receive_next: Callable[[list[Any]], Any] = _receive_nothing
        self.pending_wakeups: list[None] = end.state.pending_wakeups
        # Held by the thread that waits in a call or is in a block.
        self.lock: ProcessLock = ProcessLock(recheck_s=0.1)
        # The open block. Its slot is in the asynchronous block, or its message in `taken`.
        self.block: weakref.ref[Block] | None = None
        self.async_block: Any = None
        self.taken: list[Any] = []
        # Asynchronous block, value, and whether the caller never got the value.
        self.abandoned_blocks: list[tuple[Any, Any, bool]] = []
        self.closed: bool = False
        self._closes_later = False
        self._loop: LoopThread | None = None

    # Running on the background loop

    def loop(self) -> LoopThread:
        """Return the background loop, if this thread may wait for it."""
        check_thread(self)
        if self._loop is None:
            self._loop = shared_loop()
        return self._loop

    def run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of the end on the background loop; an exception of a signal handler cancels the coroutine."""

        async def called() -> T:
            if not self.undelivered and not self.abandoned_blocks:
                self.state.raw.clear()  # the callers have them
            try:
                return await call()
            except QueueRestarted as news:
                self.failure = news  # the end raises it once, and a handler may interrupt this call
                self.receive_next = _receive_nothing
                raise
            finally:
                self.state.wake_peers()

        try:
            return self.loop().run(called)
        except QueueRestarted:
            self.failure = None
            raise

    def run_cancellable(
        self, call: Callable[[asyncio.Event | None], Coroutine[Any, Any, T]], cancel: threading.Event | None
    ) -> T:
        """Run a coroutine that ``cancel`` stops; the coroutine gets an `asyncio.Event` that follows ``cancel``."""
        if cancel is None:
            return self.run(lambda: call(None))

        async def called() -> T:
            event = asyncio.Event()
            if cancel.is_set():
                event.set()
            watching = asyncio.ensure_future(_follow(cancel, event))
            try:
                return await call(event)
            finally:
                watching.cancel()

        return self.run(called)

    # One call at a time

    def acquire(
        self, deadline: float | None, busy: type[AioshmError] | None = None, cancel: threading.Event | None = None
    ) -> None:
        """Acquire the lock of this end, or raise ``busy``; ``lock.owner = 0`` and `release` release the lock."""
        if self.state.refusal is not None and self._loop is not None and self._loop.elsewhere:
            self.state.check_refusal()
        self.loop()
        me = get_ident()
        mine = self.lock
        if mine.owner == me and self.block is not None and self.block() is None:
            self.drop_block()
        if mine.owner == me:
            self.state.check_refusal()
            raise RoleError(f"{self!r}: called inside of a block that has its slot, and so would wait for itself")
        until = inf
        if busy is not None:
            until = 0.0
        elif deadline is not None:
            until = deadline
        while not mine.acquire(me, min(until, monotonic() + 0.1)):
            self.state.check_refusal()
            if busy is not None:
                raise busy(f"{self!r}: another thread waits here, or is in a block that has a slot")
            if cancel is not None and cancel.is_set():
                raise QueueCancelled("the cancel event is set")
            if monotonic() >= until:
                raise TimeoutError(f"{self!r}: another thread's call, or its block, did not end in time")
        if self.abandoned_blocks:
            try:
                self.run(self._leave_blocks)
            except BaseException:
                mine.owner = 0
                raise

    def alone(self, call: Callable[[], object], deadline: float | None) -> None:
        """Call a function while this thread holds the lock of this end."""
        self.acquire(deadline)
        try:
            call()
        finally:
            self.lock.owner = 0
            self.release()

    def release(self) -> None:
        """Wake waiting threads after a call, reopen the fast path, and close the end if `close` was postponed."""
        others_wait = bool(self.lock.waiting)
        if others_wait:
            self.lock.wake()
        if self._closes_later:
            self.close()
        state = self.state
        core: Any = state.core
        if state.ready and not core.open:
            locked(state.reopen)  # the loop's thread could refuse calls at the same moment
        self.send_if_room = _send_nothing
        self.receive_next = _receive_nothing
        if native_core and state.ready and self.failure is None:
            if isinstance(self.end, Writer):
                if self.end.network is None:
                    self.send_if_room = core.send
            elif type(core) is RingReader and not self.end.has_news:
                self.receive_next = core.receive_next
        if others_wait:
            sleep(TURN_S)  # the GIL stays in this thread, whose next call would come first again and again

    # Receiving

    def receive_now(self, most: int) -> None:
        """Receive with the core until ``most`` messages are undelivered, or none is there."""
        undelivered = self.undelivered
        try:
            while len(undelivered) < most and self.receive_next(undelivered) is None:
                pass
            if self.pending_wakeups or process_lock.waiting:
                self.settle()
        except BaseException as error:
            self.interrupted(error)

    def settle(self) -> None:
        """Wake sleeping peers that can continue, and threads that wait for the process lock."""
        locked(self.state.wake_peers)

    def interrupted(self, error: BaseException) -> None:
        """Raise an error of the core or of `settle`; the loop wakes the peers that were not woken.

        An error of decoding a message is raised after the messages before that message.
        """
        if self.state.pending_wakeups and self._loop is not None:
            self._loop.post(self.state.wake_peers)
        if isinstance(error, Exception) and isinstance(self.end, Reader):
            self.fail(error)
        else:
            raise error

    def receive(self, deadline: float | None, cancel: threading.Event | None, indefinite: bool, most: int = 1) -> None:
        """Wait until a message is undelivered. Another thread may take it before the caller does."""
        self.acquire(deadline, cancel=cancel)
        try:
            while not self.undelivered:
                self.receive_once(deadline, cancel, indefinite, most)
        finally:
            self.lock.owner = 0
            self.release()

    def receive_once(
        self, deadline: float | None, cancel: threading.Event | None, indefinite: bool, most: int = 1
    ) -> None:
        """Wait once: for a message, or until the end has attached or has switched to the next writer."""
        self.raise_failure()
        self.state.raw.clear()
        reader = self.reader
        in_thread = self.state.ready and not reader.has_news and reader.source.ring is not None
        if not (in_thread and self.wait_for_message(deadline, cancel, indefinite) and self.take(most)):
            self.run_cancellable(lambda event: self._receive_on_loop(deadline, event, indefinite, most), cancel)

    def raise_failure(self) -> None:
        """Raise, once, the error that was kept until the messages before it were delivered."""
        failure = self.failure
        self.failure = None
        if failure is not None:
            raise failure

    def wait_for_message(self, deadline: float | None, cancel: Any, indefinite: bool) -> bool:
        """Wait in this thread for a message of the ring; return False if a next writer is due."""
        state = self.state

        def wait() -> bool:
            try:
                state.lock.calls = 1  # keeps the memory mapped; nothing else sets this before `finally`
                state.core.open = False
                self.reader.wait_for_writer_message(deadline, cancel, indefinite).send(None)
                raise AssertionError("a call that blocks has suspended")
            except StopIteration as done:
                return bool(done.value)
            finally:
                state.lock.calls = 0

        return locked(wait)

    def take(self, most: int) -> bool:
        """Take up to ``most`` messages in this thread; return False if the core cannot take the first."""
        core = self.state.core
        if type(core) is not RingReader or not native_core:
            return False

        def take() -> None:
            try:
                answer = None
                while answer is None and len(self.undelivered) < most:
                    answer = core.receive_into(self.undelivered)
                self.state.wake_peers()
            except Exception as error:
                self.fail(error)

        locked(take)
        return bool(self.undelivered)

    def fail(self, error: Exception) -> None:
        """Raise an error of the core, or keep the error until the messages before it are delivered."""
        try:
            self.reader.fail(error)
        except AioshmError as failure:
            if not self.undelivered:
                raise
            self.failure = failure
            self.receive_next = _receive_nothing

    async def _receive_on_loop(
        self, deadline: float | None, cancel: asyncio.Event | None, indefinite: bool, most: int
    ) -> None:
        reader = self.reader
        if not self.state.ready or reader.has_news:
            await reader.wait_until_ready(deadline, cancel)
            if reader.source.ring is not None:
                return  # the thread waits for messages
        left_s = remaining_s(deadline)
        if most > 1:
            self.undelivered += await reader.dequeue_many(most, left_s, cancel, indefinite)
        else:
            self.undelivered.append(await reader.dequeue(EMPTY, left_s, cancel, indefinite))

    @property
    def reader(self) -> Reader:
        """The `Reader` of this end, which must not be a writer's."""
        assert isinstance(self.end, Reader)
        return self.end

    # Sending

    def send_now(self, obj: Any) -> Any:
        """Send an object with the core. Return None: sent; False: not tried; else the encoded object, to send later."""
        try:
            message = self.send_if_room(obj)
            if self.pending_wakeups or process_lock.waiting:
                self.settle()
        except BaseException as error:
            self.interrupted(error)
        return message

    def encode(self, writer: Writer, obj: Any) -> Any:
        """Encode an object under the process lock, as the core does: codecs are used by one thread at a time."""
        return locked(lambda: writer.sender.encode(obj))

    def send(self, obj: Any, message: Any, deadline: float | None) -> None:
        """Send an object, waiting for room; ``message`` is what `send_now` has returned."""
        writer = self.end
        assert isinstance(writer, Writer)
        self.acquire(deadline)
        try:
            if message is False:
                self.run(lambda: writer.prepare(deadline))
                message = self.encode(writer, obj)
            if writer.network is not None or not native_core or not self._put(writer, message, deadline):
                self.run(lambda: writer.send_one(message, deadline))
        finally:
            self.lock.owner = 0
            self.release()

    def _put(self, writer: Writer, message: Any, deadline: float | None) -> bool:
        """Send a message in this thread once there is room; return False if the loop has to send it."""
        state = self.state
        core: Any = state.core

        def put() -> bool:
            try:
                state.lock.calls = 1
                core.open = False
                state.check_usable()
                writer.sender.note_trace()  # another thread may have encoded a message since
                while not core.put(message):
                    try:
                        writer.wait_for_room(message, deadline).send(None)
                    except StopIteration as done:
                        if not done.value:
                            return False
                    state.check_usable()
                    writer.sender.note_trace()
                state.wake_peers()
                return True
            finally:
                state.lock.calls = 0

        try:
            return locked(put)
        finally:
            if state.pending_wakeups and self._loop is not None:
                self._loop.post(state.wake_peers)

    # Blocks

    def drop_block(self) -> None:
        """Release this end's lock after a ``with`` block; the loop exits an ``async with`` block that is still open."""
        if self.async_block is not None:
            self.abandoned_blocks += [(self.async_block, None, False)]
            self.async_block = None
        elif self.taken:
            self.state.lock.calls = 0
        self.taken = []
        self.block = None
        self.lock.owner = 0
        self.release()
        if self.abandoned_blocks:
            self.leave_soon()

    def block_dropped(self, block: weakref.ref[Block]) -> None:
        """Release this end's lock after a block was garbage-collected."""
        if self.block is block:
            self.drop_block()

    def leave_soon(self) -> None:
        """Exit abandoned ``async with`` blocks on the background loop. Without a loop yet, the next call exits them."""
        if self._loop is not None:
            self._loop.post(lambda: _start(self._leave_blocks()))

    async def _leave_blocks(self) -> None:
        while self.abandoned_blocks:
            await self.leave_block(*self.abandoned_blocks.pop(0))

    async def leave_block(self, async_block: Any, value: Any, undo: bool) -> None:
        """Leave a block that has no caller any more; ``undo``: the next call returns its message."""
        if not isinstance(async_block, ReadBlock):
            with suppress(Exception):  # no caller is left to see an error
                await async_block.__aexit__(QueueClosed, QueueClosed("a block was never left"), None)
            return
        if undo and async_block.taken:
            self.undelivered.insert(0, value)
        async_block.leave_now(undo=undo)

    # Closing

    def close(self) -> None:
        """Close the end from any thread: now, or when the call or block that uses the end is over."""
        if self.closed or (self._loop is not None and self._loop.elsewhere):
            return
        try:
            self._close()
        except QueueClosed:
            if not self.loop().ended:
                raise
            self.state.discard()  # Python exits: the calls that the loop ran have ended with it

    def _close(self) -> None:
        me = get_ident()
        mine = self.lock
        state = self.state
        if process_lock.owner == me:  # a codec or a signal handler calls this inside of another call
            state.refuse_closed()
            self._close_later()
            return
        self._do(state.refuse_closed)
        if mine.owner == me or self.block is not None:
            self._close_later()
            return
        while not mine.acquire(me, monotonic() + 0.1):
            if self.block is not None:
                self._close_later()
                return
        self._closes_later = False
        try:
            if not self.closed:
                if state.loop is None:
                    self._do(state.discard)
                else:
                    self.run(state.aclose)
                self.closed = True
        finally:
            mine.owner = 0
            if mine.waiting:
                mine.wake()

    def _close_later(self) -> None:
        """Have `release` close the end, or the loop: the fast path has no `release`, and handlers may interrupt it."""
        self._closes_later = True
        shared_loop().start(self._close_on_loop)

    async def _close_on_loop(self) -> None:
        mine = self.lock
        me = get_ident()
        while mine.owner == me or not mine.acquire(me, 0.0):
            await asyncio.sleep(CLOSING_POLL_S)
            if self.closed:
                return
        try:
            if self.state.loop is None:
                self.state.discard()
            else:
                await self.state.aclose()
            self.closed = True
        finally:
            mine.release()

    def _do(self, function: Callable[[], object]) -> None:
        """Run a function that does not wait: on the loop if the end belongs to one, else here."""
        if self.state.loop is not None:
            self.loop().do(function)
        else:
            function()

    def forget(self) -> None:
        """Close an end that was garbage-collected; called by ``__del__``, in any thread."""
        state = self.state
        loop = self._loop
        if self.closed or state.closed or state.loop is None or loop is None or loop.elsewhere or loop.ended:
            return  # `ClosingOrder` warns of an end that was never used
        try:
            warn_not_closed(state, "use `with`, or call close()")
        finally:
            loop.post(lambda: _start(state.aclose()))

    def __repr__(self) -> str:
        return f"<blocking {self.end!r}>"


def remaining_s(deadline: float | None) -> float | None:
    """Return the seconds until a deadline; None: no deadline."""
    if deadline is None:
        return None
    return max(0.0, deadline - monotonic())


async def _follow(cancel: threading.Event, event: asyncio.Event) -> None:
    while not cancel.is_set():  # noqa: ASYNC110 - a threading.Event cannot notify a loop
        await asyncio.sleep(CANCEL_POLL_S)
    event.set()


def locked(function: Callable[[], T]) -> T:
    """Call a function while this thread holds the process lock, which is free again whatever a handler raises."""
    me = get_ident()
    if process_lock.owner == me:  # called by a codec, a handler or the garbage collector, inside of another call
        return function()
    try:
        process_lock.acquire(me)
        return function()
    finally:
        if process_lock.owner == me:
            process_lock.owner = process_lock.next_owner
        if process_lock.waiting:
            process_lock.wake()


def check_thread(owner: object) -> None:
    """Raise `RoleError`, which names ``owner``, if the calling thread may not wait for the background loop."""
    if asyncio._get_running_loop() is not None:
        raise RoleError(f"{owner!r} would block this thread's event loop: use aioshm.MessageQueue there")
    if process_lock.owner == get_ident():
        raise RoleError(f"{owner!r}: a codec or a signal handler called inside of another call, and would wait for it")


def _send_nothing(_obj: Any) -> bool:
    return False


def _receive_nothing(_messages: list[Any]) -> Any:
    return EMPTY


def made(make: Callable[[], Coroutine[Any, Any, T]], end_of: Callable[[T], Writer | Reader]) -> T:
    """Create an object with a coroutine on the background loop; close its end if a signal handler raises."""
    kept: list[T] = []

    async def keep() -> None:
        kept.append(await make())

    loop = shared_loop()
    try:
        loop.run(keep)
        return kept[0]
    except BaseException:
        if kept:
            loop.run(end_of(kept[0]).state.aclose)
        raise


def _start(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on the loop. Keep the task alive: asyncio holds tasks only weakly."""
    task = asyncio.ensure_future(coroutine)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


_tasks: set[asyncio.Future[None]] = set()
