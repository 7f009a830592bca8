"""The calls of one worker: which one has each, what has become of it, and what becomes of it when a worker dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from aioshm.config import Options
from aioshm.engine.metering import StreamMeter
from aioshm.engine.workers.channel import Call, Channel
from aioshm.engine.workers.channels import Channels
from aioshm.engine.workers.crew import Member, WorkerCrew
from aioshm.engine.workers.envelope import CALL, FAILURE, ITEM, STREAM, Envelope, Request, Undecodable
from aioshm.engine.workers.fate import Fate
from aioshm.engine.workers.inbox import Inbox, Waiter
from aioshm.engine.workers.schedule import Schedule, Ticket
from aioshm.engine.workers.steps import CODE_WITHIN_S
from aioshm.errors import AioshmError, PeerDied, QueueClosed, RemoteFailure, RequestAborted, WorkerError


class WorkerStream(AsyncIterator[Any]):
    """The items of a worker's generator, see `WorkerGroup.stream`.

    A timeout ends nothing: the next item may be waited for again. Leaving the stream closes the generator: breaking off
    and forgetting it, `aclose`, or being cancelled in it. Iterating on then raises `RequestAborted`.
    """

    def __init__(self, items: AsyncGenerator[Any, None], call: Call) -> None:
        self._items = items
        self._call = call
        self._left = False

    async def __anext__(self) -> Any:
        if self._left:
            method, channel = self._call.method, self._call.channel
            rank = self._call.wanted if channel is None else channel.rank
            text = f"{method}: the stream was left before its last item"
            raise RequestAborted(text, engine=rank, request_id=method)
        try:
            item = await anext(self._items)
        except asyncio.CancelledError:
            self._left = True
            raise
        except StopAsyncIteration:
            if self._call.failure is not None:
                raise self._call.failure() from None
            raise
        if type(item) is _TimedOut:
            raise TimeoutError(item.text)
        return item

    async def aclose(self) -> None:
        """Close the generator unless it is finished. Idempotent."""
        self._left = self._left or not self._call.done or bool(self._call.items)
        await self._items.aclose()


class _TimedOut(NamedTuple):
    """Stands for an item that timed out: an error would end the generator that raises it."""

    text: str  # not the error: its traceback would keep a stream alive that is forgotten


class Calls:
    """Calls of one worker, and streams.

    Args:
        crew: The processes.
        schedule: Says when a call may be sent.
        sizes: The bytes of a chunk, and the chunks, of each queue.
        options: Of each queue.
        fate: The group's.
        steps: Returns how many steps were sent to all workers.
        catch_up: Called when a call waits for an idle worker, and some have steps to do for which nobody waits.
        on_lost: Called with a worker whose queue has ended, but not its process.
        describe_absent: Says who has died and has no successor yet.

    Attributes:
        channels: The queues to the workers.
    """

    def __init__(
        self,
        crew: WorkerCrew,
        schedule: Schedule,
        sizes: tuple[int, int],
        options: Options,
        fate: Fate,
        *,
        steps: Callable[[], int],
        catch_up: Callable[[], None],
        on_lost: Callable[[Member], None],
        describe_absent: Callable[[], str],
    ) -> None:
        self._crew, self._schedule, self._catch_up, self._fate = crew, schedule, catch_up, fate
        self._on_lost, self._describe_absent = on_lost, describe_absent
        fate.on_end.append(self._end)
        schedule.on_turn = self._has_turn
        self._inbox = Inbox(self._received, self._ended)
        self.channels: Channels = Channels(
            crew, sizes, options, steps=steps, on_open=self._opened, on_failure=self._cannot_open
        )
        self._asking: dict[Ticket, Call] = {}
        self._draining: dict[Waiter, list[int]] = {}

    # Calling

    async def call(self, call: Call, request: Request, timeout: float | None) -> Any:
        """Make a call, and return its result.

        Args:
            call: The call.
            request: What is called.
            timeout: Seconds; None: as long as it takes.
        """
        try:
            async with self._within(timeout, call):
                await self._send(call, CALL, request)
                await self._inbox.wait(call)
        finally:
            self._leave(call)
        if call.failure is not None:
            raise call.failure()
        return call.value

    def stream(self, call: Call, request: Request, timeout: float | None, meter: StreamMeter) -> WorkerStream:
        """Make a call when it is iterated over, and return the items of its result.

        Args:
            call: The call.
            request: What is called.
            timeout: Seconds for each item; None: as long as it takes.
            meter: Counts the stream and its items.
        """
        return WorkerStream(self._items(call, request, timeout, meter), call)

    async def _items(
        self, call: Call, request: Request, timeout: float | None, meter: StreamMeter
    ) -> AsyncGenerator[Any, None]:
        with meter.stream() as count_item:
            taken, batch = 0, max(1, request.items // 2)
            try:
                while True:
                    late = None
                    try:
                        if not call.sent:
                            async with self._within(timeout, call):
                                await self._send(call, STREAM, request)
                        if not call.ready:
                            async with self._within(timeout, call):
                                await self._inbox.wait(call)
                    except TimeoutError as error:
                        late = _TimedOut(str(error))
                    if late is not None:
                        if not call.sent and call.ticket not in self._asking:
                            self._leave(call)  # its turn had come, but there was no room for it
                            call.ticket = call.channel = None
                        yield late
                        continue
                    if not call.items:
                        break
                    item = call.items.popleft()
                    call.ready = bool(call.items) or call.done
                    taken += 1
                    if taken == batch and not call.done:
                        taken = 0
                        assert call.channel is not None
                        call.channel.want(call, batch)
                    count_item()
                    yield item
            finally:
                self._leave(call)
            if call.failure is not None:
                raise call.failure()

    async def _send(self, call: Call, kind: int, request: Request) -> None:
        """Send a call to its worker, or to that one's successor, once it is its turn."""
        while True:
            self._fate.check()
            channel = await self._turn_of(call)
            if channel is None:  # its worker has died since its turn came
                continue
            try:
                await channel.send(call, kind, request)
                return
            except (PeerDied, QueueClosed):  # its worker is gone, and has not seen it
                if not channel.closed:
                    self._ended(channel.rank)
                    await self._inbox.wait(call)
                call.channel = None

    async def _turn_of(self, call: Call) -> Channel | None:
        ticket = call.ticket
        if ticket is None or ticket not in self._asking:  # else it has waited before, until its timeout
            call.ready = False
            self.channels.want(call.wanted)
            call.ticket = ticket = self._schedule.ask(call.wanted, stream=call.stream)
            if ticket.rank is None:
                self._asking[ticket] = call
                self.channels.open_wanted()
                if call.wanted is None:
                    self._catch_up()
        if ticket in self._asking:
            await self._inbox.wait(call)
            del self._asking[ticket]
            if call.failure is not None:
                raise call.failure()
        assert ticket.rank is not None
        return self.channels.open.get(ticket.rank) if self._schedule.holds(ticket) else None

    def _has_turn(self, ticket: Ticket) -> None:
        call = self._asking.get(ticket)
        if call is not None:
            call.ready = True
            self._inbox.wake(call)

    def _leave(self, call: Call) -> None:
        """Let go of a call that its caller does not wait for any more."""
        if call.sent:
            if not call.done and call.channel is not None:
                call.channel.cancel(call)
        else:
            if call.channel is not None:
                call.channel.calls.pop(call.number, None)
            if call.ticket is not None:
                self._asking.pop(call.ticket, None)
                self._schedule.withdraw(call.ticket)
            self._look_at_drained()

    @asynccontextmanager
    async def _within(self, timeout: float | None, call: Call) -> AsyncIterator[None]:
        if timeout is None:
            yield
            return
        try:
            async with asyncio.timeout(timeout) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            absent = f": {said}" if not call.sent and (said := self._describe_absent()) else ""
            raise TimeoutError(f"{call.method}: {self._waits_for(call)} within {timeout} s{absent}") from None

    def _waits_for(self, call: Call) -> str:
        rank = call.wanted if call.channel is None else call.channel.rank
        if rank is None:
            return f"no idle worker: {self._crew.describe(sorted(self.channels.present)) or 'all are being restarted'}"
        who = self._crew.describe([rank])
        return f"no answer from {who}" if rank in self.channels.present else f"no successor of {who}"

    # What comes from workers

    def _received(self, rank: int, message: Any) -> None:
        channel = self.channels.open.get(rank)
        if channel is None:
            return
        if isinstance(message, Envelope):
            self._deliver(channel, message)
            return
        for call in [*channel.calls.values()]:  # a message lies there that cannot be received, for want of something
            if call.sent and not call.done:
                call.end(failure=_failing(call, rank, _told(message)))
                self._inbox.wake(call)

    def _deliver(self, channel: Channel, reply: Envelope) -> None:
        kind, number, _, value = reply
        call = channel.calls.get(number)
        if call is None:
            return
        if kind != ITEM:
            del channel.calls[number]
            assert call.ticket is not None
            self._schedule.answered(call.ticket)
            self._look_at_drained()
        if call.abandoned or call.done:
            return
        if isinstance(value, Undecodable):
            if kind == ITEM:
                channel.cancel(call)
            call.end(failure=_failing(call, channel.rank, _told(value.error)))
        elif kind == ITEM:
            call.items.append(value)
            call.ready = True
        elif kind == FAILURE:
            call.end(failure=_failing(call, channel.rank, value))
        else:
            call.end(value)
        self._inbox.wake(call)

    def _ended(self, rank: int) -> None:
        """Note that a worker's queue has ended; its process, which is watched, ought to exit."""
        channel = self.channels.open.get(rank)
        if channel is not None and not channel.lost:
            channel.lost = True
            asyncio.get_running_loop().call_later(CODE_WITHIN_S, self._check_lost, channel)

    def _check_lost(self, channel: Channel) -> None:
        if not channel.closed:
            self._on_lost(channel.member)

    # Workers come and go

    def back(self, rank: int, base: int) -> None:
        """Note that there is a worker of this rank.

        Args:
            rank: The worker's rank.
            base: How many steps were sent before the first that it has to do.
        """
        self.channels.back(rank, base)

    def died(self, rank: int, failure: Callable[[], AioshmError]) -> None:
        """Fail the calls that a worker has not answered; those that wait for it wait for its successor.

        Args:
            rank: The worker's rank.
            failure: Makes their error.
        """
        self._schedule.gone(rank)
        channel = self.channels.gone(rank)
        if channel is not None:
            self._inbox.remove(rank)
            for reply in channel.rest():  # what it has answered is answered
                self._deliver(channel, reply)
            self._close(channel, failure)
        self._look_at_drained()

    def _end(self, failure: Callable[[], AioshmError]) -> None:
        """Fail all calls."""
        self.channels.stop_opening()
        asked = [each for channel in self.channels.open.values() for each in channel.calls.values()]
        for call in [*self._asking.values(), *asked]:
            self._fail(call, failure)
        for waiter in self._draining:
            waiter.ready = True
            self._inbox.wake(waiter)

    async def drain(self, ranks: Iterable[int]) -> None:
        """Give workers no calls of any worker, and wait until they have done what they have."""
        leaving = [*ranks]
        for rank in leaving:
            self._schedule.leaves(rank)
        waiter = Waiter()
        self._draining[waiter] = leaving
        try:
            self._look_at_drained()
            await self._inbox.wait(waiter)
        finally:
            del self._draining[waiter]
        self._fate.check()

    def forget(self, rank: int, failure: Callable[[], AioshmError]) -> None:
        """Have no worker of this rank any more; calls that wait for it raise an error."""
        self.died(rank, failure)
        for ticket in self._schedule.forget(rank):
            if (call := self._asking.get(ticket)) is not None:
                self._fail(call, failure)

    def _look_at_drained(self) -> None:
        for waiter, ranks in self._draining.items():
            if not waiter.ready and self._schedule.done(ranks):
                waiter.ready = True
                self._inbox.wake(waiter)

    def _fail(self, call: Call, failure: Callable[[], AioshmError]) -> None:
        if not call.done:
            call.end(failure=failure)
            self._inbox.wake(call)

    # Queues

    def _opened(self, channel: Channel) -> None:
        self._inbox.add(channel.rank, channel.replies)
        self._schedule.back(channel.rank)

    def _cannot_open(self, rank: int, error: AioshmError) -> None:
        """Tell those who wait for a worker that its queues cannot be made; the next call tries again."""
        for call in [*self._asking.values()]:
            if call.wanted == rank or (call.wanted is None and not self.channels.open and not self.channels.opening):
                self._fail(call, lambda: error)

    def _close(self, channel: Channel, failure: Callable[[], AioshmError]) -> None:
        channel.closed = True
        calls, channel.calls = [*channel.calls.values()], {}
        for call in calls:
            if call.sent:
                self._fail(call, failure)
            else:  # its turn is to come again
                call.ready = True
                self._inbox.wake(call)
        self.channels.close(channel)

    async def aclose(self) -> None:
        """Close all queues: the workers end what they do. Idempotent."""
        self.channels.close_all()
        await self._inbox.aclose()
        await self.channels.closed()


def _told(error: Exception) -> RemoteFailure:
    return RemoteFailure(f"{type(error).__module__}.{type(error).__qualname__}", str(error))


def _failing(call: Call, rank: int, failure: RemoteFailure) -> Callable[[], AioshmError]:
    return lambda: WorkerError(call.method, {rank: failure})
