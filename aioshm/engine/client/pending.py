"""The requests and calls of a client that wait for engines."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
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
    position: int  # of the engine that was called
    answer: asyncio.Future[Any]


class Pending:
    """The table of requests and calls in flight; dispatches outputs to them."""

    def __init__(self, decoder: EnvelopeDecoder, balance: LoadBalancer, ranks: Sequence[int]) -> None:
        self.inboxes: dict[str, Inbox] = {}  # of the requests in flight, by id
        self.late_outputs: int = 0
        self.requests: int = 0  # how many requests were sent in all
        self.failed: int = 0  # how many of them ended with an error
        self.idle: Callable[[int], None] | None = None
        self._decoder = decoder
        self._balance = balance
        self._ranks = ranks
        self.calls: dict[int, PendingCall] = {}  # that wait for their answers, by id
        # Answers to calls of a former client at this address must not match calls of this one.
        self._call_ids = count(secrets.randbits(48))
        self._generations = count(1 + secrets.randbits(48))
        self._sends_generations: dict[int, bool] = {}  # by rank, once it is known
        self._aborted: dict[tuple[int, str], float] = {}  # when, at engines that may not send generations

    def registered(self, rank: int, fields: dict[str, Any]) -> None:
        """Note a registration: vLLM's engines name their release, and send no generations."""
        self._sends_generations.pop(rank, None)
        if "vllm_version" in fields:
            self._sends_generations[rank] = False

    def new_generation(self, position: int, request: list[Frame]) -> tuple[int, list[Frame]]:
        """Return the generation of a new submission, and the frames for its engine."""
        generation = next(self._generations)
        if self._sends_generations.get(self._ranks[position]) is False:
            return generation, request
        return generation, mark(request, generation)

    def check_reuse(self, request_id: str, position: int) -> None:
        """Raise if an engine cannot tell a new request from an aborted one with the same id."""
        key = self._ranks[position], request_id
        if key not in self._aborted or self._sends_generations.get(key[0]) is not False:
            return
        left = self._aborted[key] + REUSE_AFTER_S - monotonic()
        if left > 0:
            raise ValueError(
                f"request_id {request_id!r} is that of an aborted request, and engine {key[0]} has not confirmed the "
                f"abort: its outputs could not be told apart; use another id, or wait for {left:.0f} s"
            )
        del self._aborted[key]

    def add(self, request_id: str, position: int, generation: int, request: list[Frame] | None = None) -> Inbox:
        """Add a request that an engine has received."""
        self._balance.sent(position)
        self.requests += 1
        inbox = self.inboxes[request_id] = Inbox(position, self._ranks[position], generation, request)
        return inbox

    def move(self, request_id: str, position: int, generation: int) -> None:
        """Move a request of a dead engine to another engine."""
        inbox = self.inboxes[request_id]
        self._balance.done(inbox.position)
        self._balance.sent(position)
        inbox.tried += (inbox.position,)
        inbox.position = position
        inbox.engine = self._ranks[position]
        inbox.generation = generation

    def abort(self, request_id: str, error: Callable[[], Exception] | None = None) -> None:
        """End a request whose engine is asked to abort it; ``error`` creates its error, if it failed."""
        engine = self.inboxes[request_id].engine
        if not self._sends_generations.get(engine):
            now = monotonic()
            while self._aborted and now - next(iter(self._aborted.values())) > REUSE_AFTER_S:
                del self._aborted[next(iter(self._aborted))]
            self._aborted.pop((engine, request_id), None)
            self._aborted[engine, request_id] = now
        if error is None:
            text = f"request {request_id!r} was aborted before its last output"
            self._end(request_id, lambda: RequestAborted(text, engine=engine, request_id=request_id))
        else:
            self.finish(request_id, error)

    def finish(self, request_id: str, error: Callable[[], Exception] | None = None) -> None:
        """End a request; ``error`` creates its error, if it failed."""
        self.failed += error is not None
        self._end(request_id, error)

    def _end(self, request_id: str, error: Callable[[], Exception] | None) -> None:
        inbox = self.inboxes.pop(request_id)
        self._balance.done(inbox.position)
        inbox.end(error)
        if self.idle is not None and not self._balance.in_flight[inbox.position]:
            self.idle(inbox.position)

    def by_engine(self, request_ids: str | Iterable[str] | None = None) -> dict[int, list[str]]:
        """Return the ids of these requests, or of all, by position of their engine."""
        if request_ids is None:
            request_ids = list(self.inboxes)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        found: dict[int, list[str]] = {}
        for request_id in dict.fromkeys(request_ids):
            inbox = self.inboxes.get(request_id)
            if inbox is not None:
                found.setdefault(inbox.position, []).append(request_id)
        return found

    def call(self, method: str, position: int) -> PendingCall:
        """Add a call of an engine."""
        call = PendingCall(next(self._call_ids), method, position, asyncio.get_running_loop().create_future())
        self.calls[call.call_id] = call
        return call

    def forget(self, calls: Iterable[PendingCall]) -> None:
        """Remove calls whose answers nobody waits for."""
        for call in calls:
            self.calls.pop(call.call_id, None)
            if call.answer.done() and not call.answer.cancelled():
                call.answer.exception()  # retrieved, so that asyncio does not report it

    def fail(self, error: Callable[[], Exception]) -> None:
        """Fail all requests and calls."""
        for request_id in list(self.inboxes):
            self.finish(request_id, error)
        self.fail_calls(error)

    def fail_calls(self, error: Callable[[], Exception], position: int | None = None) -> None:
        """Fail the calls of one engine, or of all."""
        for call in self.calls.values():
            if position in (None, call.position) and not call.answer.done():
                call.answer.set_exception(error())

    def calls_of(self, position: int) -> list[asyncio.Future[Any]]:
        """Return the futures of an engine's answers."""
        return [call.answer for call in self.calls.values() if call.position == position]

    def take(self, frames: list[Frame], sender: int | None = None) -> Iterable[tuple[int, str]]:
        """Dispatch a message of an engine; return requests to abort."""
        try:
            envelope = self._decoder.decode(frames)
        except CodecError:
            return self._salvage(frames, sender)
        return self._deliver(envelope, sender)

    def _deliver(self, envelope: MarkedOutputs[Any], sender: int | None) -> list[tuple[int, str]]:
        if sender is None and len(self._ranks) == 1:
            envelope.engine_index = self._ranks[0]  # there are engines that count otherwise
        engine = envelope.engine_index
        if sender is not None and engine != sender:
            raise CodecError(f"engine {sender} speaks for engine {engine}")
        if envelope.utility_output is not None:
            self._answer(engine, envelope.utility_output)
        generations = generations_of(envelope)
        unwanted = self._learn(engine, envelope)
        nobodys = None
        for output, generation in zip(envelope.outputs, generations, strict=True):
            try:
                request_id = request_id_of(output)
            except CodecError as error:
                nobodys = error
                continue
            if not self._has(engine, request_id, generation):
                self.late_outputs += 1
                if generation is None and self._aborted and is_finished(output):
                    self._aborted.pop((engine, request_id), None)
                continue
            if not is_finished(output):
                self.inboxes[request_id].put(output)
            elif (text := refusal_of(output)) is not None:
                self.finish(request_id, Failure(request_id, text, finished=True).raising(engine))
            else:
                self.inboxes[request_id].put(output)
                self.finish(request_id)
        self._finish_all(envelope)
        if nobodys is not None:
            raise nobodys
        return unwanted

    def _finish_all(self, envelope: MarkedOutputs[Any]) -> None:
        engine = envelope.engine_index
        generations = envelope.generations
        for request_id in envelope.finished_requests or ():
            if generations is None:
                self._aborted.pop((engine, request_id), None)
                if self._has(engine, request_id, None):
                    self.finish(request_id)
            elif any(self._has(engine, request_id, generation) for generation in generations):
                self.finish(request_id)

    def _has(self, engine: int, request_id: str, generation: int | None) -> bool:
        """Return whether an engine has this request, in this generation if the engine sends one."""
        inbox = self.inboxes.get(request_id)
        if inbox is None or inbox.engine != engine:
            return False
        return inbox.generation == generation or (generation is None and not self._sends_generations.get(engine))

    def _learn(self, engine: int, envelope: MarkedOutputs[Any]) -> list[tuple[int, str]]:
        """Note whether an engine sends generations, as its first outputs show; return requests to abort.

        Without generations, outputs may belong to a request or to an aborted one with the same id.
        """
        sends = envelope.generations is not None
        if engine in self._sends_generations or not (sends or envelope.outputs or envelope.finished_requests):
            return []
        self._sends_generations[engine] = sends
        aborted = [request_id for rank, request_id in self._aborted if rank == engine]
        unwanted = []
        for request_id in aborted:
            if sends:
                del self._aborted[engine, request_id]
            elif self._has(engine, request_id, None):
                text = (
                    f"its id, {request_id!r}, is that of an aborted request, and outputs of engine {engine} do not say "
                    "whose they are: use another id"
                )
                unwanted.append((self.inboxes[request_id].position, request_id))
                self.abort(request_id, Failure(request_id, text, finished=False).raising(engine))
        return unwanted

    def _salvage(self, frames: list[Frame], sender: int | None) -> list[tuple[int, str]]:
        """Dispatch the readable outputs of an envelope, and fail the requests of the others."""
        envelope, failures = self._decoder.salvage(frames)
        finished = envelope.finished_requests or set()
        envelope.finished_requests = None
        unwanted = self._deliver(envelope, sender)
        for failure in failures:
            request_id = failure.request_id
            error = failure.raising(envelope.engine_index)
            if not self._has(envelope.engine_index, request_id, failure.generation):
                continue
            if failure.finished or request_id in finished:
                self.finish(request_id, error)
            else:
                unwanted.append((self.inboxes[request_id].position, request_id))
                self.abort(request_id, error)
        envelope.finished_requests = finished
        self._finish_all(envelope)
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
