"""A worker's own two queues, for the calls of it alone: the driver's side. Each process has its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from aioshm.config import Options
from aioshm.engine.workers.crew import Member
from aioshm.engine.workers.envelope import CANCEL, CREDIT, Envelope, EnvelopeCodec, Request
from aioshm.engine.workers.inbox import Waiter
from aioshm.engine.workers.schedule import Ticket
from aioshm.errors import AioshmError, QueueEmpty, QueueFull
from aioshm.queue import MessageQueue


class Call(Waiter):
    """A call of one worker.

    Attributes:
        method: What is called, for people.
        wanted: The worker's rank; None: any.
        stream: Whether it is that of a stream.
        ticket: Its place in line, from when it has one.
        channel: Who has it, once it may be sent.
        number: What it is called there.
        sent: Whether it was sent.
        items: A stream's items that nobody has taken yet.
        done: Whether there is nothing more to come.
        value: The result.
        failure: Makes the error, if there is one.
        abandoned: Whether nobody waits for it any more.
    """

    __slots__ = (
        "abandoned",
        "channel",
        "done",
        "failure",
        "items",
        "method",
        "number",
        "sent",
        "stream",
        "ticket",
        "value",
        "wanted",
    )

    def __init__(self, method: str, wanted: int | None, *, stream: bool) -> None:
        super().__init__()
        self.method, self.wanted, self.stream = method, wanted, stream
        self.ticket: Ticket | None = None
        self.channel: Channel | None = None
        self.number = -1
        self.sent = self.done = self.abandoned = False
        self.items: deque[Any] = deque()
        self.value: Any = None
        self.failure: Callable[[], AioshmError] | None = None

    def end(self, value: Any = None, failure: Callable[[], AioshmError] | None = None) -> None:
        """Note how it has ended."""
        self.value, self.failure = value, failure
        self.done = self.ready = True


class Channel:
    """The queue of a worker's requests, and that of its answers.

    Args:
        member: The worker's process.
        rank: Its rank.
        requests: Its requests go there.
        replies: Its answers come from there.
        steps: Returns how many steps it has been sent.

    Attributes:
        member, rank, replies: As above.
        calls: The calls that it has not answered, by number.
        lost: Whether a queue has ended, whose cause is not known yet.
        closed: Whether the worker is gone.
    """

    def __init__(
        self, member: Member, rank: int, requests: MessageQueue, replies: MessageQueue, steps: Callable[[], int]
    ) -> None:
        self.member, self.rank, self.replies = member, rank, replies
        self.calls: dict[int, Call] = {}
        self.lost = self.closed = False
        self._requests = requests
        self._steps = steps
        self._number = 0
        self._telling: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls, member: Member, rank: int, sizes: tuple[int, int], options: Options, steps: Callable[[], int]
    ) -> Channel:
        """Make the queues of a worker, which has to be there and made.

        Raises:
            EOFError, OSError: It has exited.
            AioshmError: A queue cannot be made here.
        """
        options = msgspec.structs.replace(
            options, on_reader_death="raise", max_readers=None, slow_reader="block", prefault_bytes=0
        )
        requests = MessageQueue(1, 1, None, *sizes, codec=EnvelopeCodec(), options=options)
        replies = None
        try:
            await member.control.send(requests.export_handle())
            handle = await member.control.receive()
            replies = MessageQueue.create_from_handle(handle, 0, codec=EnvelopeCodec(), options=options)
            await replies.wait_until_ready()
            await requests.wait_until_ready()  # last: this is what the worker waits for
        except BaseException:
            await requests.aclose()
            if replies is not None:
                await replies.aclose()
            raise
        return cls(member, rank, requests, replies, steps)

    async def send(self, call: Call, kind: int, request: Request) -> None:
        """Send a call; `calls` has it from the beginning.

        Raises:
            PeerDied, QueueClosed: The worker is gone; it has not seen the call.
            CodecError, MessageTooLarge, SharedMemoryError: It cannot be sent.
        """
        self._number += 1
        call.channel, call.number = self, self._number
        self.calls[call.number] = call
        call.ready = False
        envelope = Envelope(kind, call.number, self._steps(), request)
        try:
            self._requests.enqueue_nowait(envelope)  # in order with all calls, where there is room
        except QueueFull:
            await self._requests.enqueue(envelope)
        call.sent = True

    def cancel(self, call: Call) -> None:
        """Tell the worker that nobody waits for a call any more; it is answered all the same."""
        call.abandoned = True
        call.items.clear()
        self._tell(Envelope(CANCEL, call.number))

    def want(self, call: Call, items: int) -> None:
        """Let a stream's worker make so many items more."""
        self._tell(Envelope(CREDIT, call.number, 0, items))

    def rest(self) -> Iterator[Any]:
        """Take what a worker that is gone has left, once nobody else reads that."""
        while True:
            try:
                yield self.replies.dequeue_nowait()
            except QueueEmpty:
                return
            except AioshmError:
                return

    async def aclose(self) -> None:
        """Close both queues. Idempotent."""
        self.closed = True
        for task in self._telling:
            task.cancel()
        try:
            await self._requests.aclose()
        finally:
            await self.replies.aclose()

    def _tell(self, envelope: Envelope) -> None:
        """Send what may not wait here: the ring can be full, of requests that the worker has not come to."""
        try:
            self._requests.enqueue_nowait(envelope)
        except QueueFull:
            task = asyncio.get_running_loop().create_task(self._tell_late(envelope))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)
        except AioshmError:  # the worker is gone, and all its calls end
            pass

    async def _tell_late(self, envelope: Envelope) -> None:
        try:
            await self._requests.enqueue(envelope)
        except AioshmError:
            pass
