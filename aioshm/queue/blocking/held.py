"""An end that threads use: its private loop, their turns, and what was received for a call that was interrupted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from threading import get_ident
from time import monotonic
from typing import Any, TypeVar

from aioshm.errors import AioshmError, QueueClosed
from aioshm.queue.blocking.blocks import Block
from aioshm.queue.blocking.calls import NotAtOnce, cancellable, check_cancel
from aioshm.queue.blocking.private_loop import PrivateLoop
from aioshm.queue.blocking.turns import Turns
from aioshm.queue.ends.gate import Gate
from aioshm.queue.ends.leasing import ReadBlock
from aioshm.queue.ends.lending import Loan
from aioshm.queue.ends.reading import ReadingEnd
from aioshm.queue.ends.waiting import deadline_after
from aioshm.queue.ends.writing import WritingEnd
from aioshm.ring.atomics import ELSEWHERE, NOTHING, native_core

T = TypeVar("T")


class Held:
    """An end that threads use, one at a time.

    Args:
        end: The end, which no loop has used.

    Attributes:
        end: The end.
        gate: The end's.
        loop: Runs while a call waits.
        turns: Whose turn it is.
        kept: What was received for a call that a signal's handler ended: the next one's. Looking at it and taking
            something off takes no call: nothing comes in between, nor on the way back to the caller. It is always the
            same list, which the core looks at, too.
        sending, reading: What usually is all that a call needs; until the end is ready, both say that they cannot.
        block: What has a slot.
        to_close: Whether the thread that has the turn is to close the end when it is over.
    """

    def __init__(self, end: WritingEnd | ReadingEnd) -> None:
        self.end = end
        self.gate: Gate = end.gate
        self.gate.block()
        self.loop: PrivateLoop = PrivateLoop(lambda: f"<blocking {end!r}>")
        self.turns: Turns = Turns(end.gate)
        self.kept: list[Any] = []
        self.sending: Any = NotAtOnce
        self.reading: Any = NotAtOnce
        self.block: Block | None = None
        self.to_close: bool = False

    # Running the loop

    def run(
        self,
        call: Callable[[float | None], Coroutine[Any, Any, T]],
        timeout: float | None = None,
        *,
        busy: type[AioshmError] | None = None,
        first: Callable[[], bool] | None = None,
        leaving: bool = False,
    ) -> None:
        """Run what ``call`` makes of the time that is left, in this thread's turn; a block it enters lasts as long.

        Args:
            call: Makes it.
            timeout: For all of it, waiting for the turn included.
            busy: What to raise instead of waiting for the turn.
            first: What may make it unnecessary, and says so.
            leaving: This must run; whichever thread has the turn has it for the block that this ends.
        """
        self.loop.check_thread()
        self._leave_if_gone(leaving)
        turns, taken = self.turns, False

        def make() -> Coroutine[Any, Any, T]:
            if self.gate.ready:
                self.tell_now()  # as a call that was interrupted before it did: the other end may be waiting for it
            return call(timeout)

        try:
            if leaving:
                self.gate.core.user = get_ident()
                taken = True
            elif not (taken := turns.take_now()):
                deadline = deadline_after(timeout)
                taken = turns.take(deadline, busy)
                if deadline is not None:
                    timeout = max(0.0, deadline - monotonic())
            self.loop.run(make, first=first, whole=leaving)
        finally:
            if taken and self.block is None:  # interrupted before it has left one, this leaves it to the next call
                try:
                    self._tell_what_is_owed()
                finally:
                    turns.lasting = False
                    self.gate.core.user = 0
                    if self.gate.ready:
                        self._take_short_cuts()
                    turns.wake()
                    if self.to_close:
                        self.close()

    def _take_short_cuts(self) -> None:
        """Let the next calls send or receive at once: where the native core does that in one piece."""
        end, core = self.end, self.gate.core
        if not native_core:
            return
        if isinstance(end, WritingEnd):
            if getattr(end.send, "__self__", None) is core:
                core.quiet = True
                self.sending = core
        elif end.has_news:
            self.reading = NotAtOnce
        elif getattr(end.source.receive, "__self__", None) is core:
            core.quiet = True
            core.bind_undelivered(self.kept)
            self.reading = core
        else:
            self.reading = NotAtOnce

    def end_turn(self) -> None:
        """End this thread's turn, and do what was left to its end."""
        try:
            self._tell_what_is_owed()
        finally:
            self.turns.lasting = False
            self.gate.core.user = 0
            self.turns.wake()
            if self.to_close:
                self.close()

    def tell(self) -> None:
        """Wake the ends that sleep though they can go on."""
        core = self.gate.core
        if not self.turns.take_now():
            if core.user != get_ident():
                self.loop.call_soon(self.tell_now)  # the thread that has the turn does it
                return
            self.tell_now()
            return
        try:
            self.tell_now()
        except BaseException:  # a signal's handler has come in between
            self.loop.run_now(self.tell_now)
            raise
        finally:
            self.turns.lasting = False
            core.user = 0
            if self.to_close:
                self.close()

    def tell_now(self) -> None:
        """Do so in this thread's turn."""
        core = self.gate.core
        if core.owes:
            self.end.tell_parked()
            core.owes = False

    def _tell_what_is_owed(self) -> None:
        """Wake the other end for what passed the core in this turn, or for a thread that found the turn taken.

        The next call would, but there may be none for long: the other end would sleep beside its message.
        """
        if self.gate.core.owes and self.gate.ready:
            self.loop.run_now(self.tell_now)

    def do(self, call: Callable[[], object]) -> None:
        """Do what does not wait, in this thread's turn or in that of a call that waits in another thread.

        Raises:
            Whatever ``call`` does.
        """
        done: Future[object] = Future()

        def once() -> None:
            if done.done():
                return
            try:
                done.set_result(call())
            except BaseException as error:
                done.set_exception(error)

        self.loop.check_process()
        turns, asked = self.turns, False
        while not done.done():
            if turns.mine:
                self.loop.run_now(once)
            elif turns.take_now():
                try:
                    self.loop.run_now(once)
                finally:
                    self.end_turn()
            else:
                if not asked:
                    asked = True
                    self.loop.call_soon(once)
                turns.wait()
        done.result()

    # Receiving

    async def keep(self, call: Callable[[], Coroutine[Any, Any, Any]], *, many: bool = False) -> None:
        """Put what is received where the next call finds it; no handler raises in here."""
        obj = await call()
        if many:
            self.kept.extend(obj)
        else:
            self.kept.append(obj)

    def receive(
        self,
        call: Callable[[asyncio.Event | None, float | None], Coroutine[Any, Any, Any]],
        timeout: float | None,
        cancel: threading.Event | None,
        *,
        many: bool = False,
    ) -> None:
        """Run a call that receives, which may last for ``timeout``, and keep what it returns for the next one."""
        check_cancel(cancel)

        def make(left: float | None) -> Coroutine[Any, Any, None]:
            if cancel is None:
                return self.keep(lambda: call(None, left), many=many)
            return self.keep(lambda: cancellable(cancel, lambda event: call(event, left)), many=many)

        def receive() -> bool:
            end = self.end
            if many or not end.gate.ready or not isinstance(end, ReadingEnd) or self.reading is end.gate.core:
                return False
            if end.has_news:
                return False
            try:
                obj = end.source.receive()
            except Exception as error:
                end.fail(error)
            if obj is NOTHING or obj is ELSEWHERE:
                return False
            self.kept.append(obj)
            return True

        self.run(make, timeout, first=receive)

    # Blocks

    def new_block(
        self,
        call: Callable[[asyncio.Event | None, float | None], AbstractAsyncContextManager[Any]],
        timeout: float | None,
        cancel: threading.Event | None = None,
        of_kept: Callable[[Any], Any] | None = None,
    ) -> Block:
        """Return a block that has a slot.

        Args:
            call: Makes the end's own block.
            timeout: For the wait for the slot.
            cancel: Ends that wait once set.
            of_kept: Makes what the block shows of a message that was kept.
        """
        check_cancel(cancel)

        async def open_block(event: asyncio.Event | None, left: float | None) -> None:
            opened = call(event, left)
            block.value = await opened.__aenter__()
            block.opened, self.block = opened, block

        def make(left: float | None) -> Coroutine[Any, Any, None]:
            if cancel is None:
                return open_block(None, left)
            return cancellable(cancel, lambda event: open_block(event, left))

        def enter() -> None:
            self._leave_if_gone()  # first: that may put a message back among those that were kept
            if of_kept is not None and self.kept:
                block.value = of_kept(self.kept[0])
                del self.kept[0]
            else:
                self.run(make, timeout, first=enter_now)

        def enter_now() -> bool:
            if not self.gate.ready or (cancel is not None and cancel.is_set()):
                return False
            opened = call(None, timeout)
            if not isinstance(opened, Loan | ReadBlock) or not opened.enter_now():
                return False
            block.value = opened.pop_value() if isinstance(opened, ReadBlock) else opened.value
            block.opened, self.block = opened, block
            return True

        block = Block(self, enter)
        return block

    def enter_block(self, block: Block) -> None:
        """Wait for a block's slot (see `Block`)."""
        block.open_block()

    def undo_block(self, block: Block) -> None:
        """Leave a block whose body has not run to its end as far as Python told: a writer's sends nothing.

        Where the body was never entered, a reader's message stays the next one.
        """
        error = QueueClosed("interrupted")
        try:
            self._leave(block, type(error), error, None)
        except QueueClosed as again:
            if again is not error:
                raise

    def leave_block(self, block: Block, *error: Any) -> bool | None:
        """Leave a block; does nothing once done."""
        return self._leave(block, *error) if block.opened is not None else None

    def _leave(self, block: Block, *error: Any) -> bool | None:
        answers: list[bool | None] = []
        opened, begun = block.opened, False

        def leave_now() -> bool:
            nonlocal begun
            if isinstance(opened, ReadBlock):
                block.opened = self.block = None
                if block.undone and opened.taken:
                    self.kept.insert(0, block.value)
                answers.append(None)
                opened.leave_now(undo=block.undone)
                return True
            if not isinstance(opened, Loan):
                return False
            if self.gate.refusal is not None or not opened.is_local:  # there is more to do, on the loop
                return False
            block.opened = self.block = None
            begun = True
            if not opened.leave_now(error[0]):
                return False
            answers.append(None)
            return True

        async def leave(_: float | None) -> None:
            block.opened = self.block = None
            answers.append(await (opened.leave_copy() if begun else opened.__aexit__(*error)))

        self.run(leave, leaving=True, first=leave_now)
        return answers[0]

    def _leave_if_gone(self, leaving: bool = False) -> None:
        """Leave a block that will not be left: a signal's handler raised on the way to its end."""
        block = self.block
        if not leaving and block is not None and self.gate.core.user == get_ident() and block.gone():
            self.undo_block(block)

    # Closing

    def close(self) -> None:
        """Close the end from any thread, now or when what uses it ends; see `MessageQueue.close`."""
        turns = self.turns
        while not self.loop.closed:
            taken = turns.take_now()
            mine = self.gate.core.user == get_ident()
            if taken:
                try:
                    self.loop.run(self.gate.aclose)
                    self.loop.run_now(self.loop.close)
                finally:
                    turns.lasting = False
                    self.gate.core.user = 0
                    turns.wake()
                return
            self.loop.check_process()
            self._leave_if_gone()
            if mine or self.block is not None:
                self.to_close = True
                self.gate.refuse_closed()
                self.loop.call_soon(self.gate.refuse_closed)
                self.gate.core.owes = True  # so that a message that passes the core just now makes its thread look, too
                turns.wake()
                if self.gate.core.user:  # the thread that has the turn looks what there is to do, after it
                    return
            else:
                self.gate.core.open = False  # so that also a thread that never has to wait comes by
                self.loop.call_soon(self.gate.refuse_closed)
                turns.wait()
