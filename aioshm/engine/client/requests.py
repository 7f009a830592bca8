"""The requests and calls of a client that are in flight, and the streams of outputs."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from aioshm.arguments import check_seconds
from aioshm.engine.protocol.control import NOTICE_ID
from aioshm.engine.protocol.messages import (
    NO_GENERATION,
    EnvelopeDecoder,
    MarkedOutputs,
    Unreadable,
    UtilityOutput,
    generations_of,
    is_finished,
    mark,
    refusal_of,
    request_id_of,
)
from aioshm.engine.protocol.payloads import Frame
from aioshm.errors import CallFailed, CodecError, RequestAborted, RequestFailed, RoleError

if TYPE_CHECKING:
    from aioshm.engine.client.engines import LoadBalancer

Output = TypeVar("Output")

UNSENT = -1
"""Stands for the rank of the engine while a request waits for the end of a pause."""

REUSE_AFTER_S = 60.0
"""How long the id of an aborted request is refused for engines of vLLM, whose late outputs have no generation."""


@dataclass(slots=True, eq=False)
class Inbox:
    """The received outputs of a request, until its user takes them.

    The client references this object, and the user a stream, which the garbage collector can free.
    """

    request_id: str
    engine: int = UNSENT  # the rank of the engine that has the request
    generation: int = NO_GENERATION  # the generation of the submission that the engine has
    request: list[Frame] | None = None  # unsent, or for another engine if its engine dies before the first output
    tried: tuple[int, ...] = ()  # the ranks of engines that had the request, and died
    outputs: deque[Any] = field(default_factory=deque)
    waiter: asyncio.Future[bool] | None = None  # whether its time limit has expired
    ended: bool = False
    error: Callable[[], Exception] | None = None  # creates the error of a failed request
    stalled: Mapping[int, str] = field(default_factory=dict)  # how engines make no progress, by rank
    _stay: Callable[[], object] | None = None  # unregisters the callback at the end of a cancelled wait's task

    @property
    def interrupted(self) -> bool:
        """Whether the last wait was cancelled, and no task has waited since."""
        return self._stay is not None

    def put(self, output: Any) -> None:
        self.request = None
        self.outputs.append(output)
        self._wake()

    def end(self, error: Callable[[], Exception] | None = None) -> None:
        self.ended = True
        self.error = error
        self.resume()
        self._wake()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until there is an output, or the request has ended; raise `TimeoutError` after ``timeout`` seconds."""
        expired = False
        while not self.outputs and not self.ended:
            if expired:
                source = f"from engine {self.engine}"
                if self.engine == UNSENT:
                    source = "because the engines are paused"
                elif self.engine in self.stalled:
                    source += f"; {self.stalled[self.engine]}"
                raise TimeoutError(f"request {self.request_id!r}: no output within {timeout:g} s {source}")
            if self.waiter is not None:
                raise self._shared()
            loop = asyncio.get_running_loop()
            self.waiter = loop.create_future()
            # Not `asyncio.timeout`, which cancels the wait even if an output arrives in the same iteration of the loop.
            timer: asyncio.TimerHandle | None = None
            if timeout is not None:
                timer = loop.call_later(timeout, self._wake, True)
            try:
                expired = await self.waiter
            finally:
                self.waiter = None
                if timer is not None:
                    timer.cancel()

    def take(self) -> Any:
        """Return the next output after `wait`; raise the request's error or `StopAsyncIteration` if there is none."""
        ended = self.ended  # before the outputs: they are complete if this is true
        try:
            return self.outputs.popleft()
        except IndexError:
            pass
        if not ended:
            raise self._shared()
        if self.error is not None:
            raise self.error()
        raise StopAsyncIteration

    def _shared(self) -> RoleError:
        return RoleError(f"another task or thread waits for outputs of request {self.request_id!r}")

    def interrupt(self, consumer: asyncio.Task[Any], leave: Callable[[Inbox], None]) -> None:
        """Note a cancelled wait; leave the stream when the waiting task ends."""

        def on_end(_consumer: asyncio.Task[Any]) -> None:
            leave(self)

        consumer.add_done_callback(on_end)
        self._stay = partial(consumer.remove_done_callback, on_end)

    def resume(self) -> None:
        """Note another wait, or the end."""
        if self._stay is not None:
            self._stay()
            self._stay = None

    def _wake(self, expired: bool = False) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(expired)


class OutputStream(AsyncIterator[Output], Generic[Output]):
    """The outputs of one request: iterate over them with ``async for``.

    Leaving the iteration early aborts the request: leaving the loop and dropping the stream, `aclose`, or the end of
    the task after a cancelled wait. A `TimeoutError` aborts nothing: the iteration may continue with the same stream.
    So does a wait that ``asyncio.timeout`` or ``asyncio.wait_for`` cancels, while its task continues.

    Attributes:
        request_id: The id of the request.
        timeout: Seconds that ``async for`` waits for each output; None: no limit. May be changed.
    """

    __slots__ = ("_leave", "inbox", "request_id", "timeout")

    def __init__(self, inbox: Inbox, leave: Callable[[Inbox], None], timeout: float | None) -> None:
        self.request_id: str = inbox.request_id
        self.timeout: float | None = timeout
        self.inbox: Inbox = inbox
        self._leave = leave

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Output]:
        """Wait for the next output for `timeout` seconds, see `next`."""
        return self.next(self.timeout)

    def next(self, timeout: float | None = None) -> Coroutine[Any, Any, Output]:
        """Wait for the next output.

        A timeout or a cancellation loses nothing: the next call returns the same output. After a timeout the engine
        continues the request, also if this task ends while the stream is kept.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            StopAsyncIteration: The request is finished, and all outputs were returned.
            TimeoutError: No output arrived in time; the text names the request and its engine.
            EngineDead: The engine is gone; with ``on_engine_death="fail"``, any engine.
            RequestAborted: The stream was left, or its id was aborted, or submitted again after a cancelled wait.
            RequestFailed: The engine has refused the request.
            QueueClosed: The client was closed.
            RoleError: Another task waits for the next output.
            TypeError, ValueError: ``timeout`` is invalid.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        return self._next(timeout, asyncio.current_task())  # wait_for() of CPython 3.11 awaits this in its own task

    async def _next(self, timeout: float | None, consumer: asyncio.Task[Any] | None) -> Output:
        inbox = self.inbox
        inbox.resume()
        try:
            await inbox.wait(timeout)
        except asyncio.CancelledError:
            if consumer is not None and not inbox.ended:
                inbox.interrupt(consumer, self._leave)
            raise
        output: Output = inbox.take()
        return output

    @property
    def engine(self) -> int:
        """The rank of the engine; after its death with ``resubmit="unstarted"`` the rank of the next engine.

        -1 while the request waits for `EngineClient.resume`.
        """
        return self.inbox.engine

    async def aclose(self) -> None:
        """Abort the request unless it is finished. Idempotent."""
        self._leave(self.inbox)

    def __del__(self) -> None:
        if not self.inbox.ended:
            self._leave(self.inbox)

    def __repr__(self) -> str:
        return f"<OutputStream of request {self.request_id!r} at engine {self.engine}>"


class PendingCall(NamedTuple):
    """A call without an answer yet."""

    call_id: int
    method: str
    engine: int  # the rank
    answer: asyncio.Future[Any]


class Pending:
    """The table of requests and calls in flight; dispatches outputs to them."""

    def __init__(self, decoder: EnvelopeDecoder, balance: LoadBalancer) -> None:
        self.inboxes: dict[str, Inbox] = {}  # by request id
        self.unsent: dict[str, int | None] = {}  # requests that wait for the end of a pause, and the wanted engines
        self.calls: dict[int, PendingCall] = {}  # by call id
        self.on_notice: Callable[[Any], object] | None = None  # called with the order that a notice has
        self.late_outputs: int = 0
        self.requests: int = 0  # requests sent in total
        self.failed: int = 0  # requests that ended with an error
        self.on_idle: Callable[[int], object] | None = None  # called with the rank of an engine that has become idle
        self._decoder = decoder
        self._balance = balance
        # Answers to calls of a former client at this address must not match calls of this one.
        self._call_ids = count(secrets.randbits(48))
        self._generations = count(1 + secrets.randbits(48))
        self._marking: set[int] = set()  # the ranks of engines that have sent generations
        self._unmarked: set[int] = set()  # the ranks of vLLM's engines, which get no generations
        self._aborted: dict[tuple[int, str], float] = {}  # times of aborts at vLLM's engines, by rank and id

    # Requests

    def is_of_vllm(self, rank: int) -> bool:
        return rank in self._unmarked

    def registered(self, rank: int, fields: dict[str, Any]) -> None:
        """Note an engine's registration: vLLM's engines name their release."""
        self._marking.discard(rank)
        self._unmarked.discard(rank)
        if "vllm_version" in fields:
            self._unmarked.add(rank)

    def new_generation(self, rank: int, request: list[Frame]) -> tuple[int, list[Frame]]:
        """Return the generation of a new submission, and the frames for its engine."""
        generation = next(self._generations)
        if rank in self._unmarked:
            return generation, request
        return generation, mark(request, generation)

    def check_reuse(self, request_id: str, rank: int) -> None:
        """Raise if late outputs of an aborted request could be taken for those of a new request with the same id."""
        left = self._aborted.get((rank, request_id), -REUSE_AFTER_S) + REUSE_AFTER_S - monotonic()
        if left > 0:
            raise ValueError(
                f"request_id {request_id!r} is that of an aborted request at engine {rank}, whose late outputs could "
                f"not be told apart; use another id, or wait for {left:.0f} s"
            )

    def wait(self, request_id: str, wanted: int | None, request: list[Frame]) -> Inbox:
        """Add a request that is sent after a pause."""
        self.unsent[request_id] = wanted
        inbox = self.inboxes[request_id] = Inbox(request_id, request=request)
        return inbox

    def add(self, inbox: Inbox, rank: int, generation: int, request: list[Frame] | None = None) -> Inbox:
        """Add a request that was sent."""
        self._balance.sent(rank)
        self.requests += 1
        self.unsent.pop(inbox.request_id, None)
        self.inboxes[inbox.request_id] = inbox
        inbox.engine = rank
        inbox.generation = generation
        inbox.request = request
        inbox.stalled = self._balance.stalled
        return inbox

    def move(self, inbox: Inbox, rank: int, generation: int) -> None:
        self._balance.done(inbox.engine)
        self._balance.sent(rank)
        inbox.tried += (inbox.engine,)
        inbox.engine = rank
        inbox.generation = generation

    def abort(self, request_id: str, cause: str = "") -> None:
        """End a request at its user's wish."""
        rank = self.inboxes[request_id].engine
        self._note_abort(rank, request_id)
        text = f"request {request_id!r} was aborted before its last output{cause}"
        engine = None if rank == UNSENT else rank
        self._end(request_id, lambda: RequestAborted(text, engine=engine, request_id=request_id))

    def _note_abort(self, rank: int, request_id: str) -> None:
        if rank not in self._unmarked:
            return
        now = monotonic()
        while self._aborted and now - next(iter(self._aborted.values())) > REUSE_AFTER_S:
            del self._aborted[next(iter(self._aborted))]
        self._aborted.pop((rank, request_id), None)  # the dict is in the order of time
        self._aborted[rank, request_id] = now

    def finish(self, request_id: str, error: Callable[[], Exception] | None = None) -> None:
        """End a request; ``error`` creates its error, if it failed."""
        self.failed += error is not None
        self._end(request_id, error)

    def _end(self, request_id: str, error: Callable[[], Exception] | None) -> None:
        inbox = self.inboxes.pop(request_id)
        if inbox.engine == UNSENT:
            del self.unsent[request_id]
        else:
            self._balance.done(inbox.engine)
        inbox.end(error)
        self._note_idle(inbox.engine)

    def of_engine(self, rank: int) -> list[Inbox]:
        return [inbox for inbox in self.inboxes.values() if inbox.engine == rank]

    def by_engine(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """Return the ids that are in flight, by the ranks of their engines, or `UNSENT`."""
        found: dict[int, list[str]] = {}
        for request_id in dict.fromkeys(request_ids):
            inbox = self.inboxes.get(request_id)
            if inbox is not None:
                found.setdefault(inbox.engine, []).append(request_id)
        return found

    # Calls

    def call(self, method: str, rank: int) -> PendingCall:
        call = PendingCall(next(self._call_ids), method, rank, asyncio.get_running_loop().create_future())
        self.calls[call.call_id] = call
        return call

    def forget(self, calls: Iterable[PendingCall]) -> None:
        """Remove answered calls, and calls without a waiting task."""
        for call in calls:
            del self.calls[call.call_id]
            if call.answer.done() and not call.answer.cancelled():
                call.answer.exception()  # retrieved: otherwise asyncio reports the exception
            self._note_idle(call.engine)

    # Engines

    def is_busy(self, rank: int) -> bool:
        return self._balance.in_flight.get(rank, 0) > 0 or any(call.engine == rank for call in self.calls.values())

    def fail(self, error: Callable[[], Exception]) -> None:
        for rank in (*self._balance.in_flight, UNSENT):
            self.fail_engine(rank, error)

    def fail_engine(self, rank: int, error: Callable[[], Exception]) -> None:
        for inbox in self.of_engine(rank):
            self.finish(inbox.request_id, error)
        for call in self.calls.values():
            if call.engine == rank and not call.answer.done():
                call.answer.set_exception(error())

    def _note_idle(self, rank: int) -> None:
        if self.on_idle is not None and not self.is_busy(rank):
            self.on_idle(rank)

    # Outputs

    def take(self, frames: list[Frame], sender: int | None = None) -> list[tuple[int, str]]:
        """Dispatch a message of an engine; return requests to abort, each with the rank of its engine."""
        envelope = self._decoder.decode(frames)
        if sender is None and len(self._balance.in_flight) == 1:
            envelope.engine_index = next(iter(self._balance.in_flight))  # some engines count differently
        engine = envelope.engine_index
        if sender is not None and engine != sender:
            raise CodecError(f"engine {sender} speaks for engine {engine}")
        if envelope.utility_output is not None:
            self._answer(engine, envelope.utility_output)
        if envelope.generations is not None:
            self._marking.add(engine)
        unwanted: list[tuple[int, str]] = []
        without_id: CodecError | None = None
        for output, generation in zip(envelope.outputs, generations_of(envelope), strict=True):
            try:
                request_id = request_id_of(output)
            except CodecError as error:
                without_id = error
                continue
            if self._inbox(engine, request_id, generation) is None:
                self.late_outputs += 1
            elif self._deliver(engine, request_id, output) and request_id not in (envelope.finished_requests or ()):
                self._note_abort(engine, request_id)
                unwanted.append((engine, request_id))
        self._finish_all(envelope)
        if without_id is not None:
            raise without_id
        return unwanted

    def _deliver(self, engine: int, request_id: str, output: Any) -> bool:
        """Deliver an output; return whether its request has failed while the engine still works on it."""
        finished = is_finished(output)
        if type(output) is Unreadable:
            text: str | None = output.error
        elif not finished or (text := refusal_of(output)) is None:
            self.inboxes[request_id].put(output)
            if finished:
                self.finish(request_id)
            return False
        self.finish(request_id, lambda: RequestFailed(text, engine=engine, request_id=request_id))
        return not finished

    def _finish_all(self, envelope: MarkedOutputs[Any]) -> None:
        generations: Sequence[int | None] = [None]
        if envelope.generations is not None:
            generations = envelope.generations
        for request_id in envelope.finished_requests or ():
            if any(self._inbox(envelope.engine_index, request_id, each) for each in generations):
                self.finish(request_id)

    def _inbox(self, engine: int, request_id: str, generation: int | None) -> Inbox | None:
        """Return the inbox of a request of this engine, and of this generation if the engine sends generations."""
        inbox = self.inboxes.get(request_id)
        if inbox is None or inbox.engine != engine:
            return None
        if generation == inbox.generation or (generation is None and engine not in self._marking):
            return inbox
        return None

    def _answer(self, engine: int, answer: UtilityOutput) -> None:
        call = self.calls.get(answer.call_id)
        if answer.call_id == NOTICE_ID and answer.result is not None and self.on_notice is not None:
            self.on_notice(answer.result[1])
        elif call is None or call.answer.done():
            self.late_outputs += 1
        elif answer.failure_message is not None:
            call.answer.set_exception(CallFailed(answer.failure_message, engine=engine, method=call.method))
        elif answer.result is None:
            call.answer.set_result(None)
        else:
            call.answer.set_result(answer.result[1])
