"""The same queue for plain threads: every call blocks instead of being awaited.

Each end has an event loop of its own, which runs only while a call has to wait: there it parks, its lifeline is
watched, large messages arrive. Whatever need not wait never comes near it. Writers and readers of one queue may mix
this face with the other one. Threads that use the same end take turns; see ``turns.py``.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast, overload

from aioshm.closing import Closing
from aioshm.codec import Codec, S, T
from aioshm.config import Options, SlowReader, check_int
from aioshm.errors import QueueClosed, QueueEmpty, QueueFull, RoleError
from aioshm.queue.base import QueueBase
from aioshm.queue.blocking.calls import called, made
from aioshm.queue.blocking.held import Held
from aioshm.queue.blocking.leasing import EachLeased, Leases
from aioshm.queue.blocking.lingering import linger, watch
from aioshm.queue.blocking.membership import BlockingMembership
from aioshm.queue.encoded import body_of
from aioshm.queue.ends.leasing import ReadBlock
from aioshm.queue.ends.lending import Message
from aioshm.queue.ends.reading import ReadingEnd
from aioshm.queue.ends.waiting import deadline_after
from aioshm.queue.ends.writing import WritingEnd
from aioshm.queue.groups.making import GroupCall
from aioshm.queue.handle import Handle, refuse_to_pickle
from aioshm.queue.local.loans import ArraySpec, Like
from aioshm.queue.membership import ReaderInfo
from aioshm.queue.stats import QueueStats
from aioshm.queue.tracing import TraceContext
from aioshm.ring.atomics import ELSEWHERE, NOTHING
from aioshm.wait.blocking import WindowBegins

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from aioshm.queue.groups.process_group import ObjectGroup


class MessageQueue(QueueBase[T], Closing):
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

    A `QueueRestarted` that what a handler raises comes in the way of is in that one's ``__context__``.

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

    Two ends of one queue in one thread never meet: attaching takes a call of each that waits. Give one to another
    thread, or take `aioshm.MessageQueue`, whose ``async with`` begins to attach.
    """

    def _hold(self, end: WritingEnd | ReadingEnd) -> None:
        self.held: Held = Held(end)
        self._writer = end if isinstance(end, WritingEnd) else None
        self._reader = end if isinstance(end, ReadingEnd) else None

    if TYPE_CHECKING:  # the type of what it returns depends on the face; what it does does not

        @overload
        @classmethod
        def create_from_handle(
            cls,
            handle: Handle | str | bytes,
            rank: int | None = None,
            *,
            codec: str | Codec | None = None,
            options: Options | None = None,
            slow: SlowReader | None = None,
            type: type[S],
            reconnect: bool = False,
            history: int = 0,
        ) -> MessageQueue[S]: ...

        @overload
        @classmethod
        def create_from_handle(
            cls,
            handle: Handle | str | bytes,
            rank: int | None = None,
            *,
            codec: Codec[S],
            options: Options | None = None,
            slow: SlowReader | None = None,
            reconnect: bool = False,
            history: int = 0,
        ) -> MessageQueue[S]: ...

        @overload
        @classmethod
        def create_from_handle(
            cls,
            handle: Handle | str | bytes,
            rank: int | None = None,
            *,
            codec: str | Codec | None = None,
            options: Options | None = None,
            slow: SlowReader | None = None,
            type: Any = None,  # also for a union, which is no `type` to type checkers
            reconnect: bool = False,
            history: int = 0,
        ) -> Self: ...

        @classmethod
        def create_from_handle(cls, *args: Any, **kwargs: Any) -> Any: ...

        @overload
        @classmethod
        def attach(
            cls,
            name: str,
            rank: int | None = None,
            *,
            timeout: float | None = ...,
            reconnect: bool = False,
            codec: str | Codec | None = None,
            options: Options | None = None,
            slow: SlowReader | None = None,
            type: type[S],
        ) -> MessageQueue[S]: ...

        @overload
        @classmethod
        def attach(
            cls,
            name: str,
            rank: int | None = None,
            *,
            timeout: float | None = ...,
            reconnect: bool = False,
            codec: Codec[S],
            options: Options | None = None,
            slow: SlowReader | None = None,
        ) -> MessageQueue[S]: ...

        @overload
        @classmethod
        def attach(
            cls,
            name: str,
            rank: int | None = None,
            *,
            timeout: float | None = ...,
            reconnect: bool = False,
            codec: str | Codec | None = None,
            options: Options | None = None,
            slow: SlowReader | None = None,
            type: Any = None,
        ) -> Self: ...

        @classmethod
        def attach(cls, *args: Any, **kwargs: Any) -> Any: ...

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
        slots: int | None = None,
        type: type[S] | None = None,  # noqa: A002
    ) -> MessageQueue[S]:
        """Make a queue from one rank of a process group to all the others; every rank calls this.

        As `aioshm.MessageQueue.create_from_process_group`; the ranks may use either face. What a signal's handler
        raises takes effect as cancelling that does.
        """
        call = GroupCall(pg, (max_chunk_bytes, max_chunks, slots), connect_ip, codec, options, type)
        end = made(lambda: call.one_writer(writer_rank, external_writer_handle, wait=False), lambda end: end)
        return cast(MessageQueue[S], cls.around(end)._become_ready(blocking))

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
        slots: int | None = None,
        type: type[S] | None = None,  # noqa: A002
    ) -> tuple[MessageQueue[S], list[Handle]]:
        """Make a queue from every rank of a process group to one of them; every rank calls this.

        As `aioshm.MessageQueue.create_from_process_group_single_reader`.
        """
        call = GroupCall(pg, (max_chunk_bytes, max_chunks, slots), connect_ip, codec, options, type)
        end, handles = made(lambda: call.one_reader(reader_rank, wait=False), lambda made: made[0])
        queue = cls.around(end)._become_ready(blocking and call.rank != reader_rank)
        return cast(MessageQueue[S], queue), handles

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
        writer = self._writer or self._wrong_end("export_handle", "writer")
        return writer.export_handle()

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every reader is attached; every end calls this."""
        self.held.run(lambda left: self.held.end.wait_until_ready(deadline_after(left)), timeout)

    # Sending

    def enqueue(self, obj: T, timeout: float | None = None) -> None:
        """Send an object to every reader, waiting for a free slot."""
        held = self.held
        core = held.sending
        try:
            message = core.send(obj)
            if message is None:
                if core.owes:
                    held.tell()
                return
        except BaseException:
            if core.owes:  # it was sent
                held.tell()
            raise
        self._enqueue_slowly(obj, message, timeout)

    def _enqueue_slowly(self, obj: Any, message: Any, timeout: float | None) -> None:
        writer, held = self._writer or self._wrong_end("enqueue", "writer"), self.held
        answers = [message]

        def send() -> bool:
            if message is False and held.gate.ready:
                answers[0] = writer.send(obj)
            return answers[0] is None

        held.run(lambda left: writer.enqueue(obj, answers[0], left), timeout, first=send)

    def enqueue_many(self, objs: Iterable[T], timeout: float | None = None) -> None:
        """Send objects, in order and one right after the other: all or none."""
        writer = self._writer or self._wrong_end("enqueue_many", "writer")
        self.held.run(lambda left: writer.enqueue_many(objs, left), timeout)

    def enqueue_nowait(self, obj: T) -> None:
        """Send an object to every reader now."""
        writer = self._writer or self._wrong_end("enqueue_nowait", "writer")
        self.held.run(lambda _: called(writer.enqueue_nowait, obj), busy=QueueFull)

    def acquire_write(
        self, timeout: float | None = None, *, nbytes: int | None = None
    ) -> AbstractContextManager[memoryview]:
        """Give so many writable bytes of the ring to the block to fill."""
        writer = self._writer or self._wrong_end("acquire_write", "writer")
        return self.held.new_block(lambda _, left: writer.acquire_write(left, nbytes), timeout)

    def loan(
        self,
        shape: int | Sequence[int],
        dtype: Any = "float32",
        like: Like = "numpy",
        timeout: float | None = None,
    ) -> AbstractContextManager[Any]:
        """Lend an array to the block, to be filled where readers will see it, and send it when the block ends."""
        writer = self._writer or self._wrong_end("loan", "writer")
        spec = ArraySpec.of(shape, dtype, like)
        return self.held.new_block(lambda _, left: writer.lender.loan(writer.prepare, spec, left), timeout)

    def loan_bytes(self, nbytes: int, timeout: float | None = None) -> AbstractContextManager[memoryview]:
        """Lend so many writable bytes to the block, as `loan` does an array."""
        writer = self._writer or self._wrong_end("loan_bytes", "writer")
        return self.held.new_block(lambda _, left: writer.lender.loan_bytes(writer.prepare, nbytes, left), timeout)

    def build(self, nbytes: int | None = None, timeout: float | None = None) -> AbstractContextManager[Message]:
        """Lend a message to the block that can have arrays inside, to be filled where readers will see them."""
        writer = self._writer or self._wrong_end("build", "writer")
        return self.held.new_block(lambda _, left: writer.lender.build(writer.prepare, nbytes, left), timeout)

    # Receiving

    def dequeue(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> T:
        """Receive the next message; ``cancel``, a `threading.Event`, ends the wait within `CANCEL_POLL_S`."""
        try:
            obj = self.held.reading.next
        except Exception as error:
            self._reading_end("dequeue").fail(error)
        if obj is NOTHING or obj is ELSEWHERE:
            return self._dequeue_slowly(obj, timeout, cancel, indefinite)
        return obj  # type: ignore[no-any-return]  # what the codec has decoded

    def _dequeue_slowly(self, obj: Any, timeout: float | None, cancel: threading.Event | None, indefinite: bool) -> T:
        """Receive the next message: the core has just answered that there is none, or none that it can return."""
        held, gate = self.held, self.held.gate
        answered, looked = True, False  # once more
        while True:
            kept = held.kept
            if kept:
                if gate.core.owes:
                    held.tell()
                if kept:  # from here on no call: a handler, or another thread, could run in it
                    obj = kept[0]
                    del kept[0]
                    return obj  # type: ignore[no-any-return]
            core = held.reading
            if not answered:
                try:
                    obj = core.next
                except Exception as error:
                    self._reading_end("dequeue").fail(error)
            answered = False
            if obj is NOTHING and not looked and timeout != 0:
                looked = True
                if core is not gate.core or not self._reading_end("dequeue").linger_ns:
                    # Before the way to sleep, which takes a tenth of a millisecond and more where it is seldom gone:
                    # whom this thread has just answered may be waiting for this CPU.
                    os.sched_yield()
                    continue
                if linger(self._reading_end("dequeue"), timeout):
                    continue
            if obj is not NOTHING and obj is not ELSEWHERE:
                return obj  # type: ignore[no-any-return]
            if held.kept:
                continue
            began = monotonic()
            try:
                self._wait_for_message(timeout, cancel, indefinite)
            except WindowBegins:
                if timeout is not None:
                    timeout = max(0.0, timeout - (monotonic() - began))
                watch(self._reading_end("dequeue"), timeout)

    def _wait_for_message(self, timeout: float | None, cancel: threading.Event | None, indefinite: bool) -> None:
        """Receive the next message, for the next look at what is kept.

        Raises:
            WindowBegins: It is about to come; the loop was left for that.
        """
        reader, held = self._reading_end("dequeue"), self.held

        async def dequeue(left: float | None, event: asyncio.Event | None) -> Any:
            reader.leaves = cancel is None and held.reading is held.gate.core
            try:
                return await reader.dequeue(left, event, indefinite)
            finally:
                reader.leaves = False

        held.receive(lambda event, left: dequeue(left, event), timeout, cancel)

    def dequeue_many(
        self,
        max_items: int,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        indefinite: bool = False,
    ) -> list[T]:
        """Wait for a message and return it with those behind it that are there."""
        reader, held = self._reading_end("dequeue_many"), self.held
        if max_items != 1 or not held.kept:
            check_int("max_items", max_items, minimum=1)
        while True:
            kept = held.kept
            if kept:
                batch = kept[:max_items]
                del kept[:max_items]
                return batch
            held.receive(
                lambda event, left: reader.dequeue_many(max_items, left, event, indefinite), timeout, cancel, many=True
            )

    def dequeue_nowait(self) -> T:
        """Receive the next message if it is there."""
        reader, held = self._reading_end("dequeue_nowait"), self.held
        while True:
            kept = held.kept
            if kept:
                obj = kept[0]
                del kept[0]
                return obj  # type: ignore[no-any-return]  # what the codec has decoded
            held.run(lambda _: held.keep(lambda: called(reader.dequeue_nowait)), busy=QueueEmpty)

    def acquire_read(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> AbstractContextManager[memoryview]:
        """Give the next message's bytes, undecoded and read-only, to the block."""
        reader = self._reading_end("acquire_read")
        return self.held.new_block(
            lambda event, left: ReadBlock(reader, left, event, indefinite, decoded=False),
            timeout,
            cancel,
            lambda obj: body_of(reader.encode(obj)),
        )

    def lease(
        self, timeout: float | None = None, cancel: threading.Event | None = None, indefinite: bool = False
    ) -> AbstractContextManager[T]:
        """Give the next message to the block, decoded where it lies.

        Where a large message is still held when the block ends, its slot goes back at the latest with the next call.
        """
        reader = self._reading_end("lease")
        return self.held.new_block(
            lambda event, left: ReadBlock(reader, left, event, indefinite), timeout, cancel, lambda obj: obj
        )

    def leases(self) -> Leases[T]:
        """Return what iterates over messages, each leased until the next one is asked for; until the writer closes.

        A loop that is left ends its last lease, unless the iterator has a name: then its ``close()`` does, or its end.
        """
        self._reading_end("leases")
        return EachLeased(self.lease)  # which keeps this queue while the loop lasts

    def _reading_end(self, call: str) -> ReadingEnd:
        return self._reader or self._wrong_end(call, "reader")

    def _wrong_end(self, call: str, end: str) -> NoReturn:
        side = "reader" if self._writer is None else "writer"
        raise RoleError(f"{call}() belongs to the queue's {end}; this is a {side}: {self.held.end!r}")

    def broadcast_object(self, obj: T | None = None) -> T:
        """Send ``obj`` and return it (writer), or receive what the writer sends (reader)."""
        if self._writer is None:
            return self.dequeue()
        self.enqueue(cast(T, obj))  # None may be a message, too
        return cast(T, obj)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        try:
            return self.dequeue()
        except QueueClosed:
            raise StopIteration from None

    # Telling about itself, closing

    @property
    def last_trace_context(self) -> TraceContext | None:
        """The context of the span in which the last message was sent; as that of `aioshm.MessageQueue`."""
        contexts = self.trace_contexts(1)
        return contexts[0] if contexts else None

    def trace_contexts(self, count: int) -> list[TraceContext | None]:
        """Return the trace contexts of the last messages that this end's calls have returned, in their order."""
        return self._reading_end("trace_contexts").trace_contexts(count, len(self.held.kept))

    @property
    def readers(self) -> tuple[ReaderInfo, ...]:
        """Who reads; as that of `aioshm.MessageQueue`."""
        writer = self._writer or self._wrong_end("readers", "writer")
        found: list[tuple[ReaderInfo, ...]] = []
        self.held.do(lambda: found.append(writer.readers()))
        return found[0] if found else ()

    def membership(self, timeout: float | None = None) -> BlockingMembership:
        """Iterate over what becomes of readers from now on, until this end is closed.

        As that of `aioshm.MessageQueue`. Each step is a call that waits: other threads' calls wait for its end, for at
        most ``timeout`` seconds, after which it raises ``TimeoutError`` and the next one goes on.
        """
        writer = self._writer or self._wrong_end("membership", "writer")
        return BlockingMembership(self.held, writer, timeout)

    def dismiss(self, rank: int) -> None:
        """Go on without a reader, also while another thread's call waits for it."""
        writer = self._writer or self._wrong_end("dismiss", "writer")
        self.held.do(lambda: writer.dismiss(rank))

    def stats(self) -> QueueStats:
        """Return what this end has done so far."""
        return self.held.gate.stats()

    @property
    def messages(self) -> int:
        """How many messages this end has sent, or its calls have returned: tells what became of an interrupted call."""
        return self.stats().messages - len(self.held.kept)

    def __reduce__(self) -> NoReturn:
        refuse_to_pickle(self, writes=self._writer is not None)

    def __repr__(self) -> str:
        return f"<blocking {self.held.end!r}>"

    def close(self) -> None:
        """Close this end: the other side is told. Idempotent, and from any thread.

        Calls that wait in other threads raise `QueueClosed` before this returns. Where the end is in use so that this
        cannot wait, inside of a block that has its slot, in whichever thread, or in a signal handler that interrupts
        one of its calls, this returns at once, everything that is asked of the end from then on raises `QueueClosed`
        (a block of `acquire_write` sends nothing), and it is closed when that block or call ends.
        """
        self.held.close()

    aclose = close

    def __del__(self) -> None:
        if hasattr(self, "held"):
            self.held.loop.close()  # the end itself warns
