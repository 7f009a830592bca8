"""The requests and calls of a client that are in flight, and the streams of outputs."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from aioshm.arguments import check_limit
from aioshm.engine.client.engines import Engine, Engines
from aioshm.engine.protocol.messages import (
    NO_GENERATION,
    NOTICE_ID,
    EnvelopeDecoder,
    Unreadable,
    UtilityOutput,
    generations_of,
    is_finished,
    mark,
    refusal_of,
    request_id_of,
)
from aioshm.engine.protocol.payloads import Frame
from aioshm.errors import AioshmError, CallFailed, CodecError, RequestAborted, RequestFailed, RoleError, copy_error

if TYPE_CHECKING:
    from aioshm.engine.client.link import EngineLink

Output = TypeVar("Output")

UNSENT = -1
"""The rank of the engine for users, while a request waits for the end of a pause."""

REUSE_AFTER_S = 60.0
"""How long the id of an aborted request is refused for engines of vLLM, whose late outputs have no generation."""


@dataclass(slots=True, eq=False)
class Inbox:
    """The received outputs of a request, until its user takes them.

    The client references this object, and the user a stream, which the garbage collector can free.
    """

    request_id: str
    engine: Engine | None = None  # that has the request; None: the request waits for the end of a pause
    wanted: int | None = None  # the rank of the engine that the request is for
    generation: int = NO_GENERATION  # the generation of the submission that the engine has
    request: list[Frame] | None = None  # unsent, or for another engine if its engine dies before the first output
    tried: tuple[int, ...] = ()  # the ranks of engines that had the request, and died
    outputs: deque[Any] = field(default_factory=deque)
    waiter: asyncio.Future[bool] | None = None  # whether its time limit has expired
    ended: bool = False
    error: AioshmError | None = None
    _stay: Callable[[], object] | None = None  # unregisters the callback at the end of a cancelled wait's task

    @property
    def rank(self) -> int:
        """The rank of the engine, or `UNSENT`."""
        return UNSENT if self.engine is None else self.engine.rank

    @property
    def interrupted(self) -> bool:
        """Whether the last wait was cancelled, and no task has waited since."""
        return self._stay is not None

    def put(self, output: Any) -> None:
        self.request = None
        self.outputs.append(output)
        self._wake()

    def end(self, error: AioshmError | None = None) -> None:
        self.ended = True
        self.error = error
        self.resume()
        self._wake()

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until there is an output, or the request has ended; raise `TimeoutError` after ``timeout`` seconds."""
        expired = False
        while not self.outputs and not self.ended:
            if expired:
                source = "because the engines are paused"
                if self.engine is not None:
                    source = f"from engine {self.engine.rank}"
                    if self.engine.stall:
                        source += f"; {self.engine.stall}"
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
            raise copy_error(self.error)
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
        check_limit("timeout", timeout)
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
        return self.inbox.rank

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
    engine: Engine
    answer: asyncio.Future[Any]


class Pending:
    """The table of requests and calls in flight; dispatches outputs to them."""

    def __init__(self, engines: Engines, decoder: EnvelopeDecoder, link: EngineLink | None = None) -> None:
        self.inboxes: dict[str, Inbox] = {}  # by request id, in the order of submission
        self.calls: dict[int, PendingCall] = {}  # by call id
        self.late_outputs: int = 0
        self.requests: int = 0  # requests sent in total
        self.failed: int = 0  # requests that ended with an error
        self._engines = engines
        self._decoder = decoder
        self._link = link  # gets the notices of engines
        # Answers to calls of a former client at this address must not match calls of this one.
        self._call_ids = count(secrets.randbits(48))
        self._generations = count(1 + secrets.randbits(48))
        self._aborted: dict[tuple[int, str], float] = {}  # times of aborts at vLLM's engines, by rank and id

    # Requests

    def new_generation(self, engine: Engine, request: list[Frame]) -> tuple[int, list[Frame]]:
        """Return the generation of a new submission, and the frames for its engine."""
        generation = next(self._generations)
        if engine.of_vllm:
            return generation, request
        return generation, mark(request, generation)

    def check_reuse(self, request_id: str, engine: Engine) -> None:
        """Raise if late outputs of an aborted request could be taken for those of a new request with the same id."""
        left = self._aborted.get((engine.rank, request_id), -REUSE_AFTER_S) + REUSE_AFTER_S - monotonic()
        if left > 0:
            raise ValueError(
                f"request_id {request_id!r} is that of an aborted request at engine {engine.rank}, whose late outputs "
                f"could not be told apart; use another id, or wait for {left:.0f} s"
            )

    def wait(self, inbox: Inbox, request: list[Frame]) -> Inbox:
        """Add a request that is sent after a pause."""
        inbox.request = request
        self.inboxes[inbox.request_id] = inbox
        return inbox

    def add(self, inbox: Inbox, engine: Engine, generation: int) -> Inbox:
        """Add a request that was sent, or was sent again after the death of its engine."""
        former = inbox.engine
        self._engines.sent(engine)
        self.inboxes[inbox.request_id] = inbox
        inbox.engine = engine
        inbox.generation = generation
        if former is None:
            self.requests += 1
        else:
            former.in_flight -= 1
            inbox.tried += (former.rank,)
            self._note_idle(former)
        return inbox

    def abort(self, request_id: str, cause: str = "") -> None:
        """End a request at its user's wish; see `finish`."""
        inbox = self.inboxes.get(request_id)
        if inbox is None:
            return
        rank: int | None = None
        if inbox.engine is not None:
            self._note_abort(inbox.engine, request_id)
            rank = inbox.engine.rank
        text = f"request {request_id!r} was aborted before its last output{cause}"
        self.finish(request_id, RequestAborted(text, engine=rank, request_id=request_id))

    def _note_abort(self, engine: Engine, request_id: str) -> None:
        if not engine.of_vllm:
            return
        now = monotonic()
        while self._aborted and now - next(iter(self._aborted.values())) > REUSE_AFTER_S:
            del self._aborted[next(iter(self._aborted))]
        self._aborted.pop((engine.rank, request_id), None)  # the dict is in the order of time
        self._aborted[engine.rank, request_id] = now

    def finish(self, request_id: str, error: AioshmError | None = None) -> None:
        """End a request, unless the garbage collector, which may run at any time, has just dropped the stream."""
        inbox = self.inboxes.pop(request_id, None)
        if inbox is None:
            return
        self.failed += not isinstance(error, RequestAborted | None)
        inbox.end(error)
        if inbox.engine is not None:
            inbox.engine.in_flight -= 1
            self._note_idle(inbox.engine)

    def by_engine(self, request_ids: Iterable[str]) -> dict[Engine | None, list[str]]:
        """Return the ids that are in flight, by engine; None: they wait for the end of a pause."""
        found: dict[Engine | None, list[str]] = {}
        for request_id in dict.fromkeys(request_ids):
            inbox = self.inboxes.get(request_id)
            if inbox is not None:
                found.setdefault(inbox.engine, []).append(inbox.request_id)
        return found

    # Calls

    def call(self, method: str, engine: Engine) -> PendingCall:
        call = PendingCall(next(self._call_ids), method, engine, asyncio.get_running_loop().create_future())
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

    def is_busy(self, engine: Engine) -> bool:
        return engine.in_flight > 0 or any(call.engine is engine for call in self.calls.values())

    def fail(self, error: AioshmError, engine: Engine | None = None) -> None:
        """Fail all requests and calls, or those of one engine."""
        for inbox in list(self.inboxes.values()):
            if engine is None or inbox.engine is engine:
                self.finish(inbox.request_id, error)
        for call in self.calls.values():
            if (engine is None or call.engine is engine) and not call.answer.done():
                call.answer.set_exception(copy_error(error))

    def _note_idle(self, engine: Engine) -> None:
        if self._link is not None and engine.leaving and not self.is_busy(engine):
            self._link.note_idle()

    # Outputs

    def take(self, frames: list[Frame], sender: int | None = None) -> list[Inbox]:
        """Dispatch a message of an engine, whose rank ``sender`` is if keys are in use.

        Returns:
            The requests to abort: they have failed here, and the engine still works on them.
        """
        envelope = self._decoder.decode(frames)
        engine = self._engines.get(envelope.engine_index)
        if sender is None and len(self._engines) == 1:
            engine = next(iter(self._engines))  # some engines count differently
        elif sender is not None and envelope.engine_index != sender:
            raise CodecError(f"engine {sender} speaks for engine {envelope.engine_index}")
        if envelope.utility_output is not None:
            self._answer(envelope.utility_output, sender)
        if envelope.generations is not None and engine is not None:
            engine.marks = True
        unwanted: list[Inbox] = []
        without_id: CodecError | None = None
        for output, generation in zip(envelope.outputs, generations_of(envelope), strict=True):
            try:
                inbox = self._inbox(engine, request_id_of(output), generation)
            except CodecError as error:
                without_id = error
                continue
            if inbox is None:
                self.late_outputs += 1
            elif self._deliver(inbox, output) and inbox.request_id not in (envelope.finished_requests or ()):
                unwanted.append(inbox)
        generations: Sequence[int | None] = [None] if envelope.generations is None else envelope.generations
        for request_id in envelope.finished_requests or ():
            if any(self._inbox(engine, request_id, each) for each in generations):
                self.finish(request_id)
        for inbox in unwanted:
            assert inbox.engine is not None
            self._note_abort(inbox.engine, inbox.request_id)
        if without_id is not None:
            raise without_id
        return unwanted

    def _inbox(self, engine: Engine | None, request_id: str, generation: int | None) -> Inbox | None:
        """Return the inbox of a request of this engine, and of this generation if the engine sends generations."""
        inbox = self.inboxes.get(request_id)
        if inbox is None or engine is None or inbox.engine is not engine:
            return None
        if generation == inbox.generation or (generation is None and not engine.marks):
            return inbox
        return None

    def _deliver(self, inbox: Inbox, output: Any) -> bool:
        """Deliver an output; return whether its request has failed while the engine still works on it."""
        finished = is_finished(output)
        if type(output) is Unreadable:
            text: str | None = output.error
        elif not finished or (text := refusal_of(output)) is None:
            inbox.put(output)
            if finished:
                self.finish(inbox.request_id)
            return False
        self.finish(inbox.request_id, RequestFailed(text, engine=inbox.rank, request_id=inbox.request_id))
        return not finished

    def _answer(self, answer: UtilityOutput, sender: int | None) -> None:
        call = self.calls.get(answer.call_id)
        if answer.call_id == NOTICE_ID and answer.result is not None and self._link is not None:
            self._link.pause.notice(answer.result[1])
        elif call is None or call.answer.done():
            self.late_outputs += 1
        elif sender not in (None, call.engine.rank):
            raise CodecError(f"engine {sender} answers a call of engine {call.engine.rank}")
        elif answer.failure_message is not None:
            error = CallFailed(answer.failure_message, engine=call.engine.rank, method=call.method)
            call.answer.set_exception(error)
        elif answer.result is None:
            call.answer.set_result(None)
        else:
            call.answer.set_result(answer.result[1])
