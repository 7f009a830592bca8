"""The requests and calls of a client that wait for engines."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from itertools import count
from time import monotonic
from typing import Any, NamedTuple

from aioshm.engine.client.streams import Inbox
from aioshm.engine.protocol.balance import LoadBalancer
from aioshm.engine.protocol.messages import (
    EnvelopeDecoder,
    Failure,
    MarkedOutputs,
    UtilityOutput,
    generations_of,
    is_finished,
    mark,
    refusal_of,
    request_id_of,
)
from aioshm.engine.protocol.payloads import Frame
from aioshm.errors import CallFailed, CodecError, RequestAborted

REUSE_AFTER_S = 60.0
"""How long after its abort an id is refused for an engine that sends no generations and does not confirm the abort."""


class PendingCall(NamedTuple):
    """A call that waits for its answer."""

    call_id: int  # what the answer names
    method: str
    engine: int  # the rank
    answer: asyncio.Future[Any]


class Pending:
    """The table of requests and calls in flight; dispatches outputs to them."""

    def __init__(self, decoder: EnvelopeDecoder, balance: LoadBalancer) -> None:
        self.inboxes: dict[str, Inbox] = {}  # of the requests in flight, by id
        self.calls: dict[int, PendingCall] = {}  # that wait for their answers, by id
        self.late_outputs: int = 0
        self.requests: int = 0  # how many requests were sent in all
        self.failed: int = 0  # how many of them ended with an error
        self.idle: Callable[[int], None] | None = None  # called with the rank of an engine without requests
        self._decoder = decoder
        self._balance = balance
        # Answers to calls of a former client at this address must not match calls of this one.
        self._call_ids = count(secrets.randbits(48))
        self._generations = count(1 + secrets.randbits(48))
        self._marking: set[int] = set()  # the ranks of engines that have sent generations
        self._unmarked: set[int] = set()  # the ranks of engines that send none
        self._aborted: dict[tuple[int, str], float] = {}  # when, at engines that send no generations

    # Requests

    def registered(self, rank: int, fields: dict[str, Any]) -> None:
        """Note a registration: vLLM's engines name their release, and send no generations."""
        self._marking.discard(rank)
        self._unmarked.discard(rank)
        if "vllm_version" in fields:
            self._unmarked.add(rank)

    def new_generation(self, rank: int, request: list[Frame]) -> tuple[int, list[Frame]]:
        """Return the generation of a new submission, and the frames for its engine."""
        generation = next(self._generations)
        return generation, request if rank in self._unmarked else mark(request, generation)

    def check_reuse(self, request_id: str, rank: int) -> None:
        """Raise if an engine cannot tell a new request from an aborted one with the same id."""
        if (rank, request_id) not in self._aborted:
            return
        left = self._aborted[rank, request_id] + REUSE_AFTER_S - monotonic()
        if left > 0:
            raise ValueError(
                f"request_id {request_id!r} is that of an aborted request, and engine {rank} has not confirmed the "
                f"abort: its outputs could not be told apart; use another id, or wait for {left:.0f} s"
            )
        del self._aborted[rank, request_id]

    def add(self, request_id: str, rank: int, generation: int, request: list[Frame] | None = None) -> Inbox:
        """Add a request that an engine has received."""
        self._balance.sent(rank)
        self.requests += 1
        inbox = self.inboxes[request_id] = Inbox(request_id, rank, generation, request)
        return inbox

    def move(self, request_id: str, rank: int, generation: int) -> None:
        """Move a request of a dead engine to another engine."""
        inbox = self.inboxes[request_id]
        self._balance.done(inbox.engine)
        self._balance.sent(rank)
        inbox.tried += (inbox.engine,)
        inbox.engine = rank
        inbox.generation = generation

    def abort(self, request_id: str, error: Callable[[], Exception] | None = None) -> None:
        """End a request whose engine is asked to abort it; ``error`` creates its error, if it failed."""
        rank = self.inboxes[request_id].engine
        if rank in self._unmarked:
            now = monotonic()
            while self._aborted and now - next(iter(self._aborted.values())) > REUSE_AFTER_S:
                del self._aborted[next(iter(self._aborted))]
            self._aborted.pop((rank, request_id), None)
            self._aborted[rank, request_id] = now
        if error is None:
            text = f"request {request_id!r} was aborted before its last output"
            self._end(request_id, lambda: RequestAborted(text, engine=rank, request_id=request_id))
        else:
            self.finish(request_id, error)

    def finish(self, request_id: str, error: Callable[[], Exception] | None = None) -> None:
        """End a request; ``error`` creates its error, if it failed."""
        self.failed += error is not None
        self._end(request_id, error)

    def _end(self, request_id: str, error: Callable[[], Exception] | None) -> None:
        inbox = self.inboxes.pop(request_id)
        self._balance.done(inbox.engine)
        inbox.end(error)
        if self.idle is not None and not self._balance.in_flight[inbox.engine]:
            self.idle(inbox.engine)

    def of_engine(self, rank: int) -> list[str]:
        """Return the ids of the requests of an engine."""
        return [request_id for request_id, inbox in self.inboxes.items() if inbox.engine == rank]

    def by_engine(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """Return these ids, without those that are not in flight, by the ranks of their engines."""
        found: dict[int, list[str]] = {}
        for request_id in dict.fromkeys(request_ids):
            inbox = self.inboxes.get(request_id)
            if inbox is not None:
                found.setdefault(inbox.engine, []).append(request_id)
        return found

    # Calls

    def call(self, method: str, rank: int) -> PendingCall:
        """Add a call of an engine."""
        call = PendingCall(next(self._call_ids), method, rank, asyncio.get_running_loop().create_future())
        self.calls[call.call_id] = call
        return call

    def forget(self, calls: Iterable[PendingCall]) -> None:
        """Remove calls whose answers nobody waits for."""
        for call in calls:
            self.calls.pop(call.call_id, None)
            if call.answer.done() and not call.answer.cancelled():
                call.answer.exception()  # retrieved, so that asyncio does not report it

    def calls_of(self, rank: int) -> list[asyncio.Future[Any]]:
        """Return the futures of an engine's answers."""
        return [call.answer for call in self.calls.values() if call.engine == rank]

    # Failures

    def fail(self, error: Callable[[], Exception]) -> None:
        """Fail all requests and calls."""
        for rank in list(self._balance.in_flight):
            self.fail_engine(rank, error)

    def fail_engine(self, rank: int, error: Callable[[], Exception]) -> None:
        """Fail the requests and calls of one engine."""
        for request_id in self.of_engine(rank):
            self.finish(request_id, error)
        for answer in self.calls_of(rank):
            if not answer.done():
                answer.set_exception(error())

    # Outputs

    def take(self, frames: list[Frame], sender: int | None = None) -> list[tuple[int, str]]:
        """Dispatch a message of an engine; return requests to abort, each with the rank of its engine."""
        failures: list[Failure] = []
        try:
            envelope = self._decoder.decode(frames)
        except CodecError:
            envelope, failures = self._decoder.salvage(frames)
        nobodys = self._deliver(envelope, sender)
        unwanted = self._fail_unreadable(envelope, failures)
        self._finish_all(envelope)
        if nobodys is not None:
            raise nobodys
        return unwanted

    def _deliver(self, envelope: MarkedOutputs[Any], sender: int | None) -> CodecError | None:
        if sender is None and len(self._balance.in_flight) == 1:
            envelope.engine_index = next(iter(self._balance.in_flight))  # there are engines that count otherwise
        engine = envelope.engine_index
        if sender is not None and engine != sender:
            raise CodecError(f"engine {sender} speaks for engine {engine}")
        if envelope.utility_output is not None:
            self._answer(engine, envelope.utility_output)
        if envelope.generations is not None:
            self._marking.add(engine)
        nobodys = None
        for output, generation in zip(envelope.outputs, generations_of(envelope), strict=True):
            try:
                request_id = request_id_of(output)
            except CodecError as error:
                nobodys = error
                continue
            inbox = self._inbox(engine, request_id, generation)
            is_last = is_finished(output)
            if inbox is None:
                self.late_outputs += 1
                if is_last:
                    self._aborted.pop((engine, request_id), None)
            elif not is_last:
                inbox.put(output)
            elif (text := refusal_of(output)) is not None:
                self.finish(request_id, Failure(request_id, text, finished=True).raising(engine))
            else:
                inbox.put(output)
                self.finish(request_id)
        return nobodys

    def _finish_all(self, envelope: MarkedOutputs[Any]) -> None:
        engine = envelope.engine_index
        for request_id in envelope.finished_requests or ():
            self._aborted.pop((engine, request_id), None)
            generations = [None] if envelope.generations is None else envelope.generations
            if any(self._inbox(engine, request_id, generation) for generation in generations):
                self.finish(request_id)

    def _inbox(self, engine: int, request_id: str, generation: int | None) -> Inbox | None:
        """Return the inbox of a request that this engine has, in this generation if the engine sends one."""
        inbox = self.inboxes.get(request_id)
        if inbox is None or inbox.engine != engine:
            return None
        if generation == inbox.generation or (generation is None and engine not in self._marking):
            return inbox
        return None

    def _fail_unreadable(self, envelope: MarkedOutputs[Any], failures: list[Failure]) -> list[tuple[int, str]]:
        """Fail the requests of outputs that cannot be decoded; return those that the engine works on."""
        engine = envelope.engine_index
        unwanted = []
        for failure in failures:
            request_id = failure.request_id
            if self._inbox(engine, request_id, failure.generation) is None:
                continue
            if failure.finished or request_id in (envelope.finished_requests or ()):
                self.finish(request_id, failure.raising(engine))
            else:
                unwanted.append((engine, request_id))
                self.abort(request_id, failure.raising(engine))
        return unwanted

    def _answer(self, engine: int, answer: UtilityOutput) -> None:
        call = self.calls.get(answer.call_id)
        if call is None or call.answer.done():
            self.late_outputs += 1
            return
        if answer.failure_message is not None:
            call.answer.set_exception(CallFailed(answer.failure_message, engine=engine, method=call.method))
        else:
            call.answer.set_result(None if answer.result is None else answer.result[1])
