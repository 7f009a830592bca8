"""The same queue for plain threads: every call blocks instead of being awaited.

Each end has an event loop of its own, which runs only while a call has to wait: there it parks, its lifeline is
watched, large messages arrive. Whatever need not wait never comes near it. Writers and readers of one queue may mix
this face with the other one. Threads that use the same end take turns; see ``turns.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from threading import get_ident
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from aioshm.codec import Codec, cannot_decode
from aioshm.codec.frames import body_bytes, write_body
from aioshm.config import Options, check_int
from aioshm.errors import AioshmError, QueueClosed, QueueEmpty, QueueFull, RoleError
from aioshm.queue import base
from aioshm.queue.base import MAX_CHUNK_BYTES, MAX_CHUNKS
from aioshm.queue.blocking_calls import NotAtOnce, called, cancellable, check_cancel, made
from aioshm.queue.blocks import Block
from aioshm.queue.end import deadline_after
from aioshm.queue.handle import Handle
from aioshm.queue.private_loop import PrivateLoop
from aioshm.queue.reader_end import ReaderEnd
from aioshm.queue.stats import QueueStats
from aioshm.queue.turns import Turns
from aioshm.queue.writer import Writer
from aioshm.ring.atomics import ELSEWHERE, NOTHING, native_core
from aioshm.wait.blocking import WindowBegins

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from aioshm.queue.process_group import ObjectGroup

T = TypeVar("T")


class MessageQueue:
    """A queue from one writer to many readers, for threads without an event loop.

    The arguments, the results and the errors are those of `aioshm.MessageQueue`, and the names are, too. While a call
    waits, other threads run. An end notices what happens to the other ends only inside of calls.

    **Signals.** What the handler of a signal raises, such as Ctrl-C's KeyboardInterrupt or an alarm's exception, ends a
    call that waits, and comes out of it. A call that receives has lost nothing then: the next one returns the same
    message. A call that sends may be interrupted before or after it has sent, and `messages` tells::

        before = mq.messages
        try:
            mq.enqueue(obj)
        except KeyboardInterrupt:
            if mq.messages == before:
                ...  # nothing was sent

    A block that is interrupted on the way in was never entered; on the way out it ends, at the latest with the next
    call of this end, and what it was to send is not sent. That much holds where a Python function calls the end
    directly. Under a trace function, a debugger or any other evaluator of frames than Python's own (``torch.compile``
    sets one), through ``map()``, a ``functools.partial`` or, before Python 3.12, a call with ``*args``, and where a
    list is made of an end, what had been received for a call can be lost.

    Any thread of the process that made it may use an end, one at a time: a call waits while another thread is in a call
    of the same end, or in a block that has its slot, and its ``timeout`` counts meanwhile. Messages are sent whole and
    in the order in which the calls had their turns; several threads that receive get different messages. A call inside
    of a block of the same thread, and in a signal handler that interrupts one, is refused with `RoleError` instead of
    waiting for itself; but see `close`.

    Args:
        n_reader, n_local_reader, local_reader_ranks, max_chunk_bytes, max_chunks, connect_ip, codec, options,
            remote_reader_ranks: As
            `aioshm.MessageQueue`.
    """

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        connect_ip: str | None = None,
        *,
        codec: str | Codec = "pickle",
        options: Options | None = None,
        remote_reader_ranks: Sequence[int] | None = None,
    ) -> None:
        self._adopt(
            base.MessageQueue(
                n_reader,
                n_local_reader,
                local_reader_ranks,
                max_chunk_bytes,
                max_chunks,
                connect_ip,
                codec=codec,
                options=options,
                remote_reader_ranks=remote_reader_ranks,
            )
        )

    @classmethod
    def create_from_handle(
        cls,
        handle: Handle | str | bytes,
        rank: int,
        *,
        codec: str | Codec | None = None,
        options: Options | None = None,
    ) -> Self:
        """Make a reader's end, as `aioshm.MessageQueue.create_from_handle`."""
        queue = cls.__new__(cls)
        queue._adopt(base.MessageQueue.create_from_handle(handle, rank, codec=codec, options=options))
        return queue

    def _adopt(self, end: base.MessageQueue) -> None:
        assert isinstance(end, (Writer, ReaderEnd))
        self._end: Writer | ReaderEnd = end
        end.block()
        self._loop = PrivateLoop(lambda: f"<blocking {end!r}>")
        self._turns = Turns(end)
        self._block: Block | None = None  # what has a slot
        self._to_close = False  # whether whoever has the turn is to close this end when it is over
        # What was received for a call that a signal's handler ended: the next one's. Looking at it and taking something
        # off takes no call: nothing comes in between, nor on the way back to the caller.
        self._kept: list[Any] = []
        self.late = False
        # What usually is all that a call needs; until the end is ready, both say that they cannot.
        self._sending: Any = NotAtOnce
        self._reading: Any = NotAtOnce

    @classmethod
    def around(cls, end: base.MessageQueue) -> Self:
        """Make the blocking face of an end that no loop has used; for this package."""
        queue = cls.__new__(cls)
        queue._adopt(end)
        return queue

    @classmethod
    def create_from_process_group(
        cls,
        pg: ProcessGroup | ObjectGroup,
        max_chunk_bytes: int,
        max_chunks: int,
        writer_rank: int = 0,
        external_writer_handle: Handle | str | bytes | None = None,
        blocking: bool = True,
        *,
        options: Options | None = None,
        codec: str | Codec = "pickle",
        connect_ip: str | None = None,
    ) -> Self:
        """Make a queue from one rank of a process group to all the others; every rank calls this.

        As `aioshm.MessageQueue.create_from_process_group`; the ranks may use either face. What a signal's handler
        raises takes effect as cancelling that does.
        """
        from aioshm.queue.groups import create_from_process_group

        end = made(
            lambda: create_from_process_group(
                pg,
                max_chunk_bytes,
                max_chunks,
                writer_rank,
                external_writer_handle,
                blocking=False,
                options=options,
                codec=codec,
                connect_ip=connect_ip,
            ),
            lambda end: end,
        )
        return cls.around(end)._become_ready(blocking)

    @classmethod
    def create_from_process_group_single_reader(
        cls,
        pg: ProcessGroup | ObjectGroup,
        max_chunk_bytes: int,
        max_chunks: int,
        reader_rank: int = 0,
        blocking: bool = False,
        *,
        options: Options | None = None,
        codec: str | Codec = "pickle",
        connect_ip: str | None = None,
    ) -> tuple[Self, list[Handle]]:
        """Make a queue from every rank of a process group to one of them; every rank calls this.

        As `aioshm.MessageQueue.create_from_process_group_single_reader`.
        """
        from aioshm.queue.groups import create_from_process_group_single_reader
        from aioshm.queue.process_group import as_group

        end, handles = made(
            lambda: create_from_process_group_single_reader(
                pg,
                max_chunk_bytes,
                max_chunks,
                reader_rank,
                blocking=False,
                options=options,
                codec=codec,
                connect_ip=connect_ip,
            ),
            lambda made: made[0],
        )
        return cls.around(end)._become_ready(blocking and as_group(pg).rank != reader_rank), handles

    def _become_ready(self, wait: bool) -> Self:
        try:
            if wait:
                self.wait_until_ready()
        except BaseException:
            self.close()
            raise
        return self

    # Attaching

    def export_handle(self) -> Handle:
        """Return what readers need in order to attach."""
        return self._end.export_handle()

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every reader is attached; every end calls this."""
        self._run(self._end.wait_until_ready, timeout)

    # Sending

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send an object to every reader, waiting for a free slot."""
        core = self._sending
        try:
            message = core.send(obj)
            if message is None:
                if core.owes:
                    self._tell()
                return
        except BaseException:
            if core.owes:  # it was sent
                self._tell()
            raise
        self._enqueue_slowly(obj, message, timeout)

    def _enqueue_slowly(self, obj: Any, message: Any, timeout: float | None) -> None:
        end = self._end
        if not isinstance(end, Writer):
            self._run(lambda left: end.enqueue(obj, left), timeout)  # which refuses it
            return
        answers = [message]

        def send() -> bool:
            if message is False and end._ready:
                answers[0] = end.send(obj)
            return answers[0] is None

        self._run(lambda left: end.enqueue_slowly(obj, answers[0], left), timeout, first=send)

    def enqueue_many(self, objs: Iterable[Any], timeout: float | None = None) -> None:
        """Send objects, in order and one right after the other: all or none."""
        self._run(lambda left: self._end.enqueue_many(objs, left), timeout)

    def enqueue_nowait(self, obj: Any) -> None:
        """Send an object to every reader now."""
        self._run(lambda _: called(self._end.enqueue_nowait, obj), busy=QueueFull)

    def acquire_write(self, timeout: float | None = None) -> AbstractContextManager[memoryview]:
        """Give the next free slot's chunk to the block to fill."""
        if not isinstance(self._end, Writer):
            self._end.acquire_write(timeout)  # which refuses it
        return self._new_block(lambda _, left: self._end.acquire_write(left), timeout)

    # Receiving

    def dequeue(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> Any:
        """Receive the next message; ``cancel``, a `threading.Event`, ends the wait within `CANCEL_POLL_S`."""
        looked = False  # once more
        while True:
            kept = self._kept
            if kept:
                obj = kept[0]
                del kept[0]
                return obj
            core = self._reading
            try:
                obj = core.next
            except AioshmError:
                raise
            except Exception as error:  # the ring's core decodes with the codec's bare function
                raise cannot_decode(error, cast(ReaderEnd, self._end).codec_name) from error
            if obj is NOTHING and not looked and timeout != 0:
                looked = True
                if self._end.linger_ns and core is self._end._core:
                    if self._end.linger(timeout):
                        continue
                else:
                    # Before the way to sleep, which takes a tenth of a millisecond and more where it is seldom gone:
                    # whom this thread has just answered may be waiting for this CPU.
                    os.sched_yield()
                    continue
            if obj is NOTHING or obj is ELSEWHERE:
                began = monotonic()
                try:
                    self._receive(lambda event, left: self._dequeue(left, event, indefinite), timeout, cancel)
                except WindowBegins:
                    if timeout is not None:
                        timeout = max(0.0, timeout - (monotonic() - began))
                    self._end.watch(timeout)
            elif core.owes:
                end: Any = self._end  # from here on no call until the message is kept: a handler could run in it
                if end._waking and core.seq < end._wake_at:  # the writer is to be woken later: no need to go there
                    core.owes = False
                    return obj
                self._kept = [obj]
                obj = None
                self._tell()
            else:
                return obj

    async def _dequeue(self, timeout: float | None, cancel: asyncio.Event | None, indefinite: bool) -> Any:
        """Receive the next message, or leave the loop when it is about to come."""
        end = self._end
        end.leaves = cancel is None and self._reading is end._core
        try:
            return await end.dequeue(timeout, cancel, indefinite)
        finally:
            end.leaves = False

    def dequeue_many(
        self,
        max_items: int,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> list[Any]:
        """Wait for a message and return it with those behind it that are there."""
        if max_items != 1 or not self._kept:
            check_int("max_items", max_items, minimum=1)
        while True:
            kept = self._kept
            if kept:
                batch = kept[:max_items]
                del kept[:max_items]
                return batch
            self._receive(
                lambda event, left: self._end.dequeue_many(max_items, left, event, indefinite),
                timeout,
                cancel,
                many=True,
            )

    def dequeue_nowait(self) -> Any:
        """Receive the next message if it is there."""
        while True:
            kept = self._kept
            if kept:
                obj = kept[0]
                del kept[0]
                return obj
            self._run(lambda _: self._keep(lambda: called(self._end.dequeue_nowait)), busy=QueueEmpty)

    def acquire_read(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> AbstractContextManager[memoryview]:
        """Give the next message's bytes, undecoded and read-only, to the block."""
        return self._new_block(
            lambda event, left: self._end.acquire_read(left, event, indefinite), timeout, cancel, self._bytes_of_kept
        )

    def lease(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> AbstractContextManager[Any]:
        """Give the next message to the block, decoded where it lies.

        Where a large message is still held when the block ends, its slot goes back at the latest with the next call.
        """
        return self._new_block(
            lambda event, left: self._end.lease(left, event, indefinite), timeout, cancel, lambda obj: obj
        )

    def broadcast_object(self, obj: Any = None) -> Any:
        """Send ``obj`` and return it (writer), or receive what the writer sends (reader)."""
        if isinstance(self._end, Writer):
            self.enqueue(obj)
            return obj
        return self.dequeue()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return self.dequeue()
        except QueueClosed:
            raise StopIteration from None

    # Telling about itself, closing

    def stats(self) -> QueueStats:
        """Return what this end has done so far."""
        return self._end.stats()

    @property
    def messages(self) -> int:
        """How many messages this end has sent, or its calls have returned: tells what became of an interrupted call."""
        return self._end.stats().messages - len(self._kept)

    def __repr__(self) -> str:
        return f"<blocking {self._end!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close this end: the other side is told. Idempotent, and from any thread.

        Calls that wait in other threads raise `QueueClosed` before this returns. Where the end is in use so that this
        cannot wait, inside of a block that has its slot, in whichever thread, or in a signal handler that interrupts
        one of its calls, this returns at once, everything that is asked of the end from then on raises `QueueClosed`
        (a block of `acquire_write` sends nothing), and it is closed when that block or call ends.
        """
        turns = self._turns
        while not self._loop.closed:
            taken = turns.take_now()
            mine = self._end._core.user == get_ident()
            if taken:
                try:
                    self._loop.run(self._end.aclose)
                    self._loop.run_now(self._loop.close)
                finally:
                    turns.lasting = False
                    self._end._core.user = 0
                    turns.wake()
                return
            self._loop.check_process()
            self._leave_if_gone()
            if mine or self._block is not None:
                self._to_close = True
                self._end.refuse_closed()
                self._loop.call_soon(self._end.refuse_closed)
                self._end._core.owes = True  # so that a message that passes the core just now has somebody look, too
                turns.wake()
                if self._end._core.user:  # whoever has the turn looks what there is to do, after it
                    return
            else:
                self._end._core.open = False  # so that also a thread that never has to wait comes by
                self._loop.call_soon(self._end.refuse_closed)
                turns.wait()

    aclose = close

    def __del__(self) -> None:
        if hasattr(self, "_loop"):
            self._loop.close()  # the end itself warns

    # Running the loop

    def _run(
        self,
        call: Callable[[float | None], Coroutine[Any, Any, T]],
        timeout: float | None = None,
        *,
        busy: type[AioshmError] | None = None,
        first: Callable[[], bool] | None = None,
        block: Block | None = None,
        leaving: bool = False,
    ) -> None:
        """Run what ``call`` makes of the time that is left, in this thread's turn.

        Args:
            call: Makes it.
            timeout: For all of it, waiting for the turn included.
            busy: What to raise instead of waiting for the turn.
            first: What may make it unnecessary, and says so.
            block: This enters it; the turn lasts until it is left.
            leaving: This must run; whichever thread has the turn has it for the block that this ends.
        """
        self._loop.check_thread()
        self._leave_if_gone(leaving)
        turns = self._turns
        if leaving:
            self._end._core.user = get_ident()
            taken = True
        elif not (taken := turns.take_now()):
            deadline = deadline_after(timeout)
            taken = turns.take(deadline, busy)
            if deadline is not None:
                timeout = max(0.0, deadline - monotonic())

        def make() -> Coroutine[Any, Any, T]:
            if self._end._ready:
                self._tell_now()  # as a call that was interrupted before it did: the other end may be waiting for it
            return call(timeout)

        try:
            self._loop.run(make, first=first, whole=leaving)
        finally:
            if taken and (block is None or block.opened is None):
                turns.lasting = False
                self._end._core.user = 0
                if self._end._ready:
                    self._take_short_cuts()
                turns.wake()
                if self._to_close:
                    self.close()

    def _take_short_cuts(self) -> None:
        """Let the next calls send or receive at once: where the native core does that in one piece."""
        end = self._end
        core = end._core
        if native_core and getattr(getattr(end, "send", None), "__self__", None) is core:
            core.quiet = True
            self._sending = core
        elif native_core and isinstance(end, ReaderEnd) and getattr(end.receive, "__self__", None) is core:
            core.quiet = True
            self._reading = core

    def _tell(self) -> None:
        """Wake the ends that sleep though they can go on."""
        end, core = self._end, self._end._core
        if not self._turns.take_now():
            if core.user != get_ident():
                self._loop.call_soon(self._tell_now)  # whoever has the turn does it
                return
            self._tell_now()
            return
        try:
            self._tell_now()
        except BaseException:  # a signal's handler has come in between
            self._loop.run_now(self._tell_now)
            raise
        finally:
            self._turns.lasting = False
            end._core.user = 0
            if self._to_close:
                self.close()

    def _tell_now(self) -> None:
        core = self._end._core
        if core.owes:
            self._end.tell_parked()
            core.owes = False

    # Receiving

    async def _keep(self, call: Callable[[], Coroutine[Any, Any, Any]], *, many: bool = False) -> None:
        """Put what is received where the next call finds it; no handler raises in here."""
        obj = await call()
        if many:
            self._kept.extend(obj)
        else:
            self._kept.append(obj)

    def _receive(
        self,
        call: Callable[[asyncio.Event | None, float | None], Coroutine[Any, Any, Any]],
        timeout: float | None,
        cancel: threading.Event | None,
        *,
        many: bool = False,
    ) -> None:
        check_cancel(cancel)

        def make(left: float | None) -> Coroutine[Any, Any, None]:
            if cancel is None:
                return self._keep(lambda: call(None, left), many=many)
            return self._keep(lambda: cancellable(cancel, lambda event: call(event, left)), many=many)

        def receive() -> bool:
            end = self._end
            if many or not end._ready or not isinstance(end, ReaderEnd) or self._reading is end._core:
                return False
            try:
                obj = end.receive()
            except AioshmError:
                raise
            except Exception as error:
                raise cannot_decode(error, end.codec_name) from error
            if obj is NOTHING or obj is ELSEWHERE:
                return False
            self._kept.append(obj)
            return True

        self._run(make, timeout, first=receive)

    def poll(self) -> None:
        """Let the loop have a turn, and receive what is there, for the next call to return; for `merge`.

        Sets ``late``: whether there is a message of which something has not arrived yet.

        Raises:
            QueueEmpty: Another thread has its turn.
            AioshmError: As `dequeue_nowait`.
        """
        end = cast(ReaderEnd, self._end)
        if self._block is not None and end._core.user == get_ident() and not self._block.gone():
            raise RoleError(f"{end!r}: called inside of a block that has its slot, and so would wait for itself")

        async def look() -> None:
            if end._ready:
                await asyncio.sleep(0)
            else:
                end._start_attaching()
                await asyncio.sleep(0)
                end.check_refusal()
                if not end._ready:
                    if end._writer_gone is not None:
                        raise end._writer_gone()
                    return
            end.check_refusal()
            end._new_turn()
            end._reopen()
            gone = end._writer_gone  # before looking: what was published before the writer went is then seen
            obj = end._poll()
            self.late = obj is ELSEWHERE
            if obj is not NOTHING and not self.late:
                self._kept.append(obj)
            elif gone is not None:
                raise end._annex_lost() if self.late else gone()

        self._run(lambda _: look(), busy=QueueEmpty)

    def end_turn(self) -> None:
        """End this thread's turn, and do what was left to its end."""
        self._turns.lasting = False
        self._end._core.user = 0
        self._turns.wake()
        if self._to_close:
            self.close()

    # Blocks

    def _new_block(
        self,
        call: Callable[[asyncio.Event | None, float | None], AbstractAsyncContextManager[Any]],
        timeout: float | None,
        cancel: threading.Event | None = None,
        of_kept: Callable[[Any], Any] | None = None,
    ) -> Block:
        check_cancel(cancel)

        async def open_block(event: asyncio.Event | None, left: float | None) -> None:
            opened = call(event, left)
            block.value = await opened.__aenter__()
            block.opened, self._block = opened, block

        def make(left: float | None) -> Coroutine[Any, Any, None]:
            if cancel is None:
                return open_block(None, left)
            return cancellable(cancel, lambda event: open_block(event, left))

        def enter() -> None:
            if of_kept is not None and self._kept:
                block.value = of_kept(self._kept[0])
                del self._kept[0]
            else:
                self._run(make, timeout, block=block)

        block = Block(self, enter)
        return block

    def enter_block(self, block: Block) -> None:
        """Wait for a block's slot (see `Block`)."""
        block.open_block()

    def undo_block(self, block: Block) -> None:
        """Leave a block that was never entered; the message stays the next one."""
        error = QueueClosed("interrupted")
        self._end.undo = True
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

        async def leave(_: float | None) -> None:
            opened, block.opened, self._block = block.opened, None, None
            try:
                answers.append(await opened.__aexit__(*error))
            finally:
                self._end.undo = False

        self._run(leave, leaving=True)
        return answers[0]

    def _leave_if_gone(self, leaving: bool = False) -> None:
        """Leave a block that will not be left: a signal's handler raised on the way to its end."""
        block = self._block
        if not leaving and block is not None and self._end._core.user == get_ident() and block.gone():
            with contextlib.suppress(KeyboardInterrupt):
                self._leave(block, KeyboardInterrupt, KeyboardInterrupt(), None)

    def _bytes_of_kept(self, obj: Any) -> memoryview:
        encoded = cast(ReaderEnd, self._end).encode(obj)
        if isinstance(encoded, bytes):
            return memoryview(encoded)
        parts, buffers = encoded
        body = bytearray(body_bytes(sum(map(len, parts)), [len(buffer) for buffer in buffers]))
        write_body(memoryview(body), parts, buffers)
        return memoryview(body).toreadonly()
