"""What a client waits for: outputs of requests, and answers to calls."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

from aioshm.engine.client.streams import Inbox
from aioshm.engine.protocol.balance import LoadBalancer
from aioshm.engine.protocol.envelopes import EnvelopeDecoder
from aioshm.engine.protocol.messages import EngineCoreOutputs, UtilityOutput, is_finished, request_id_of
from aioshm.engine.protocol.payloads import Frame
from aioshm.errors import CallFailed, CodecError


class PendingCall(NamedTuple):
    """A call that waits for its answer.

    Attributes:
        call_id: What the answer names.
        method: What was called.
        position: Of the engine that was called.
        answer: The answer.
    """

    call_id: int
    method: str
    position: int
    answer: asyncio.Future[Any]


class Pending:
    """Gives what engines send to whom it is for.

    Args:
        decoder: Of what engines send.
        balance: Is told where requests begin and end.
        ranks: Of the engines, by position.
        strict: Whether an engine speaks only for the requests that it has, also where it is not recognised by its keys:
            what a dead engine has sent may come when its requests are another one's.

    Attributes:
        inboxes: Of the requests in flight, by id.
        requests: How many requests were sent in all.
        failed: How many of them ended with an error.
        idle: Is called with the position of an engine whose last request has come to an end.
        late_outputs: How many outputs came for requests that their engine had no more: they were aborted, their engine
            was taken for dead, or they were those of a client that was here before; and answers to calls, likewise.
    """

    def __init__(
        self, decoder: EnvelopeDecoder, balance: LoadBalancer, ranks: Sequence[int], *, strict: bool = False
    ) -> None:
        self.inboxes: dict[str, Inbox] = {}
        self.late_outputs: int = 0
        self.requests: int = 0
        self.failed: int = 0
        self.idle: Callable[[int], None] | None = None
        self._strict = strict
        self._decoder = decoder
        self._balance = balance
        self._ranks = ranks
        self._calls: dict[int, PendingCall] = {}
        # Answers to the calls of a client that was here before this one shall not be taken for this one's.
        self._call_ids = count(secrets.randbits(48))

    @property
    def calls(self) -> int:
        """How many calls wait for their answers."""
        return len(self._calls)

    def add(self, request_id: str, position: int, request: list[Frame] | None = None) -> Inbox:
        """Wait for the outputs of a request that an engine was sent."""
        self._balance.sent(position)
        self.requests += 1
        inbox = self.inboxes[request_id] = Inbox(position, self._ranks[position], request)
        return inbox

    def move(self, request_id: str, position: int) -> None:
        """Wait for the outputs of a request from another engine: the one that had it is dead."""
        inbox = self.inboxes[request_id]
        self._balance.done(inbox.position)
        self._balance.sent(position)
        inbox.tried += (inbox.position,)
        inbox.position, inbox.engine = position, self._ranks[position]

    def finish(self, request_id: str, error: Callable[[], Exception] | None = None) -> None:
        """Let a request end."""
        inbox = self.inboxes.pop(request_id)
        self.failed += error is not None
        self._balance.done(inbox.position)
        inbox.end(error)
        if self.idle is not None and not self._balance.in_flight[inbox.position]:
            self.idle(inbox.position)

    def by_engine(self, request_ids: str | Iterable[str] | None = None) -> dict[int, list[str]]:
        """Return which of these requests, or of all, each engine has, by its position."""
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
        """Wait for an engine's answer to a call."""
        call = PendingCall(next(self._call_ids), method, position, asyncio.get_running_loop().create_future())
        self._calls[call.call_id] = call
        return call

    def forget(self, calls: Iterable[PendingCall]) -> None:
        """Wait for these answers no more."""
        for call in calls:
            self._calls.pop(call.call_id, None)
            if call.answer.done() and not call.answer.cancelled():
                call.answer.exception()  # if nobody looks at it, it shall not be reported

    def fail(self, error: Callable[[], Exception]) -> None:
        """Let everything end."""
        for request_id in list(self.inboxes):
            self.finish(request_id, error)
        self._fail_calls(self._calls.values(), error)

    def fail_calls(self, position: int, error: Callable[[], Exception]) -> None:
        """Let the calls of one engine end."""
        self._fail_calls([call for call in self._calls.values() if call.position == position], error)

    def calls_of(self, position: int) -> list[asyncio.Future[Any]]:
        """Return what waits for answers of an engine."""
        return [call.answer for call in self._calls.values() if call.position == position]

    def _fail_calls(self, calls: Iterable[PendingCall], error: Callable[[], Exception]) -> None:
        for call in calls:
            if not call.answer.done():
                call.answer.set_exception(error())

    def take(self, frames: list[Frame], sender: int | None = None) -> Iterable[tuple[int, str]]:
        """Take what an engine has sent.

        Args:
            frames: What it has sent.
            sender: Its rank, where it is known by its keys: it may speak for no other one.

        Returns:
            Requests whose outputs cannot be used: the engine's position and the id of each, to be aborted.

        Raises:
            CodecError: It is no envelope, or has outputs that are nobody's.
        """
        try:
            envelope = self._decoder.decode(frames)
        except CodecError:
            return self._salvage(frames, sender)
        self._deliver(envelope, sender)
        return ()

    def _deliver(self, envelope: EngineCoreOutputs[Any], sender: int | None) -> None:
        if sender is not None and envelope.engine_index != sender:
            raise CodecError(f"engine {sender} speaks for engine {envelope.engine_index}")
        if self._strict:
            sender = envelope.engine_index
        if envelope.utility_output is not None:
            self._answer(envelope.engine_index, envelope.utility_output)
        inboxes, nobodys = self.inboxes, None
        for output in envelope.outputs:
            try:
                request_id = request_id_of(output)
            except CodecError as error:
                nobodys = error
                continue
            inbox = inboxes.get(request_id)
            if inbox is None or (sender is not None and inbox.engine != sender):
                self.late_outputs += 1
                continue
            inbox.put(output)
            if is_finished(output):
                self.finish(request_id)
        for request_id in envelope.finished_requests or ():
            inbox = inboxes.get(request_id)
            if inbox is not None and (sender is None or inbox.engine == sender):
                self.finish(request_id)
        if nobodys is not None:
            raise nobodys

    def _salvage(self, frames: list[Frame], sender: int | None) -> list[tuple[int, str]]:
        """Take what can be read of an envelope whose outputs are not all of the right type."""
        envelope, failures = self._decoder.salvage(frames)
        if self._strict and sender is None:
            sender = envelope.engine_index
        finished, envelope.finished_requests = envelope.finished_requests or set(), None
        self._deliver(envelope, sender)
        unwanted = []
        for failure in failures:
            inbox = self.inboxes.get(failure.request_id)
            if inbox is not None and (sender is None or inbox.engine == sender):
                if not (failure.finished or failure.request_id in finished):
                    unwanted.append((inbox.position, failure.request_id))
                self.finish(failure.request_id, failure.raising(envelope.engine_index))
        for request_id in finished & self.inboxes.keys():
            if sender is None or self.inboxes[request_id].engine == sender:
                self.finish(request_id)
        return unwanted

    def _answer(self, engine: int, answer: UtilityOutput) -> None:
        call = self._calls.get(answer.call_id)
        if call is None or call.answer.done():
            self.late_outputs += 1
            return
        if answer.failure_message is not None:
            call.answer.set_exception(CallFailed(answer.failure_message, engine=engine, method=call.method))
        else:
            call.answer.set_result(None if answer.result is None else answer.result[1])
