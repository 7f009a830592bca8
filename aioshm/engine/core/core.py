"""The engine's side of the data path: the loop around the user's engine."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from aioshm.arguments import check_int, check_plain, shown
from aioshm.config import Options
from aioshm.engine.core.sockets import COORDINATOR, CoreSockets, FrontEnd
from aioshm.engine.protocol.addresses import EngineZmqAddresses
from aioshm.engine.protocol.handshake import EngineHandshakeMetadata
from aioshm.engine.protocol.messages import (
    NO_ORDER,
    NOTICE_ID,
    PAUSE,
    EngineCoreOutputs,
    EngineCoreRequestType,
    MarkedOutputs,
    PauseOrder,
    SchedulerStats,
    StartWave,
    UtilityOutput,
    encode,
    error_output,
    is_finished,
    pop_mark,
    request_id_of,
)
from aioshm.engine.protocol.payloads import Frame, PayloadDecoder, PayloadEncoder, convert, convert_arguments, readable
from aioshm.engine.protocol.waves import Lockstep
from aioshm.engine.security.keys import AnyKeys
from aioshm.errors import MAX_TEXT, AioshmError, CodecError, text_of
from aioshm.logs import LogLimiter
from aioshm.process import progress
from aioshm.process.progress import BUSY, IDLE, WAITING

logger: logging.Logger = logging.getLogger("aioshm.engine")

MAX_PENDING_BYTES = 128 << 20
"""The limit of waiting outputs for each front end on this host."""

IDLE_STEP_S = 0.001
"""How long to wait after a step without outputs, unless a message comes."""

_LOG_INTERVAL_S = 10.0
_USAGE_STEPS = 20
"""The steps of KV cache usage that are reported if nothing else has changed."""

_NEEDED = ("initialize", "add_request", "abort_requests", "step")
_NEVER_ASYNC = ("has_work", "request_counts", "kv_cache_usage", "error_output")
_NOT_TO_BE_CALLED = frozenset({*_NEEDED, "shutdown"})

_ADD = EngineCoreRequestType.ADD.value
_ABORT = EngineCoreRequestType.ABORT.value
_START_DP_WAVE = EngineCoreRequestType.START_DP_WAVE.value
_UTILITY = EngineCoreRequestType.UTILITY.value


class Owner(NamedTuple):
    """The client of an open request, and the generation of this submission: an id may be submitted again."""

    client: int
    generation: int


class Call(msgspec.Struct, array_like=True):
    """A call, as received."""

    client_index: int
    call_id: int
    method: str
    args: list[Any]


class EngineCore:
    """The loop around the user's engine: takes requests to the engine, and its outputs back; see `run_engine_core`."""

    def __init__(
        self,
        engine: Any,
        index: int,
        *,
        request_type: Any = None,
        options: Options | None = None,
        keys: AnyKeys | None = None,
        secure: bool = True,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        _check_engine(engine)
        self.options: Options = options or Options.from_env()
        self.keys: AnyKeys | bool | None = (secure and self.options.secure) and keys  # False: nothing is encrypted
        self.max_pending_bytes: int = check_int("max_pending_bytes", max_pending_bytes, minimum=1)
        self.index: int = index
        self._engine = engine
        self._sockets: CoreSockets | None = None
        self._encode = PayloadEncoder(self.options.max_message_bytes).encode
        self._decode_request = PayloadDecoder(request_type).decode
        self._decode_call = PayloadDecoder(Call).decode
        self._decode = PayloadDecoder().decode
        self._messages: deque[tuple[int, list[Frame]]] = deque()  # unhandled, with the indices of clients
        self._arrived = asyncio.Event()
        self._owners: dict[str, Owner] = {}  # by open request
        self._calls: set[asyncio.Task[None]] = set()
        self._order: PauseOrder = NO_ORDER  # the newest order to pause or to resume
        self._unanswered: list[tuple[int, int]] = []  # orders: clients and call ids
        self._held: list[tuple[Owner, str, Any]] = []  # requests of a pause with their ids, in the order of arrival
        self._start_is_lost = False  # perhaps: the coordinator has come back during a pause
        self._fields: dict[str, Any] = {}  # of READY
        self._counts: Any = None
        self._lockstep: Lockstep | None = None
        if hasattr(engine, "has_unfinished_dp"):
            self._lockstep = Lockstep(index)
        self._limiter = LogLimiter(_LOG_INTERVAL_S)
        self._progress = progress.own()

    async def initialize(self, metadata: EngineHandshakeMetadata, awaiting: Callable[[], object]) -> dict[str, Any]:
        """Initialise the engine, and return the fields of READY; call ``awaiting`` before awaiting it."""
        self._order = metadata.pause
        result = self._engine.initialize(metadata)
        if inspect.isawaitable(result):
            awaiting()
            result = await result
        fields = dict(result or {})
        stats_address = metadata.addresses.frontend_stats_publish_address
        if stats_address is not None:  # for front ends of the engine's host, if that is not the coordinator's
            fields.setdefault("dp_stats_address", stats_address)
        return fields

    async def connect(self, addresses: EngineZmqAddresses, fields: dict[str, Any]) -> CoreSockets:
        """Connect to the front ends, and register there with the fields of READY; return the sockets."""
        self._fields = fields
        self._sockets = CoreSockets(addresses, self)
        await self._sockets.register(self._registration())
        self._progress.enter(IDLE)  # before READY: from then on somebody may wait for this engine
        return self._sockets

    def _registration(self) -> bytes:
        fields = self._fields
        if self._order.version:
            fields = {**fields, PAUSE: self._order}
        return encode(fields) if fields else b""

    async def run(self) -> None:
        """Serve until cancelled, or until a step fails."""
        while True:
            while self._messages:
                await self._handle(*self._messages.popleft())
            self._answer_orders()
            self._progress.note_requests(len(self._owners))
            self._report_counts()
            if not self._has_work():
                await self._wait(None)
                continue
            busy = await self._step()
            if self._lockstep is not None:
                # An engine that is to keep its requests votes for the end of the wave: all stop at the same step.
                votes = bool(self._owners) and self._order.mode != "keep"
                self._progress.enter(WAITING)
                unfinished = await _awaited(self._engine.has_unfinished_dp(votes))
                self._progress.enter(BUSY)
                self._report_wave(complete=self._lockstep.stepped(unfinished))
                busy = busy or unfinished  # all other engines would have to wait, too
            self._report_counts()
            if busy:
                await asyncio.sleep(0)  # lets the sockets run, and a task that cancels this
            else:
                await self._wait(IDLE_STEP_S)

    async def aclose(self) -> None:
        """Report the end to the front ends, close the sockets, and shut the engine down."""
        self._progress.enter(BUSY)  # a supervisor that has not asked for the end watches how long it takes
        for task in self._calls:
            task.cancel()
        try:
            if self._sockets is not None:
                await self._sockets.aclose()
        finally:
            shutdown = getattr(self._engine, "shutdown", None)
            if shutdown is not None:
                await _awaited(shutdown())

    async def _wait(self, seconds: float | None) -> None:
        self._progress.enter(IDLE)
        if not self._messages:
            self._arrived.clear()
            if seconds is None:
                await self._arrived.wait()
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._arrived.wait()

    # Steps

    def _has_work(self) -> bool:
        if self._lockstep is not None and self._lockstep.running:
            return True  # also while it pauses: other engines may need it until all of them pause
        if self._order.mode:
            return self._order.mode == "finish" and bool(self._owners)
        if self._owners:
            return True
        has_work = getattr(self._engine, "has_work", None)
        return has_work is not None and bool(has_work())

    async def _step(self) -> bool:
        """Let the engine take a step; return whether it brought outputs."""
        self._progress.enter(BUSY)
        dummy = getattr(self._engine, "execute_dummy_batch", None)
        if dummy is not None and not self._owners and self._lockstep is not None:
            await _awaited(dummy())
            return False
        outputs = await _awaited(self._engine.step())
        return bool(outputs) and await self._send_outputs(outputs)

    # Receiving

    def receive(self, client: int, frames: list[Frame]) -> None:
        """Queue a message of a client, or of the `COORDINATOR`; without frames: see `CoreSockets`."""
        self._messages.append((client, frames))
        self._arrived.set()

    async def _handle(self, client: int, frames: list[Frame]) -> None:
        if not frames:
            await self._forget(client)
            return
        kind = frames[0]
        payload = frames[1:]
        try:
            if not payload:
                raise CodecError(f"a message of {len(frames)} frames")
            if client == COORDINATOR and kind == _START_DP_WAVE:
                self._start_wave(payload)
            elif client == COORDINATOR or kind not in (_ADD, _ABORT, _UTILITY):
                raise CodecError(f"a message of type {bytes(kind[:8])!r}")
            elif kind == _ADD:
                await self._add(client, payload)
            elif kind == _ABORT:
                await self._abort(client, payload)
            else:
                await self._call(client, payload)
        except CodecError as error:
            sender = "the coordinator" if client == COORDINATOR else f"client {client}"
            self._limiter.warn(logger, "engine %d ignores a message from %s: %s", self.index, sender, error)

    async def _forget(self, client: int) -> None:
        """Drop everything of a client that is gone."""
        if client == COORDINATOR:  # it may have lost the start of a wave, and the peer that reported it waits for all
            self._start_is_lost = bool(self._order.mode)
            if self._lockstep is not None and not self._order.mode:
                self._report_wave(start=self._lockstep.add(0))
            return
        self._held = [each for each in self._held if each[0].client != client]
        self._unanswered = [each for each in self._unanswered if each[0] != client]
        requests = [each for each, owner in self._owners.items() if owner.client == client]
        await self._drop(requests)
        self._front_end(client).connect_again(len(requests))

    async def _add(self, client: int, payload: list[Frame]) -> None:
        sender = Owner(client, pop_mark(payload))
        try:
            request = self._decode_request(payload)
            request_id = request_id_of(request, "request")
        except CodecError as error:
            request_id = request_id_of(readable(payload[0]), "request")  # raises if there is no request to fail
            self._refuse(sender, request_id, str(error))
            return
        if sender.generation:
            self._front_end(client).accept()
        if self._order.mode and self._owners.get(request_id) != sender:  # else another part of an open request
            self._held.append((sender, request_id, request))
        else:
            await self._admit(sender, request_id, request)

    async def _admit(self, sender: Owner, request_id: str, request: Any) -> None:
        owner = self._owners.get(request_id)
        if owner is not None and owner.client != sender.client:
            self._refuse(sender, request_id, f"request_id {request_id!r} is that of another request in flight")
            return
        if owner is not None and owner.generation != sender.generation:  # a request of the client before its restart
            await self._drop([request_id])
        self._progress.enter(BUSY)
        try:  # the id may be that of an open request: some front ends send a request in parts
            await _awaited(self._engine.add_request(request))
        except (Exception, asyncio.CancelledError) as error:
            if _is_cancellation(error):
                raise
            logger.debug("engine %d has refused request %r", self.index, request_id, exc_info=True)
            if request_id in self._owners:
                await self._drop([request_id])
            text = text_of(error)
            if not isinstance(error, AioshmError):
                text = f"{type(error).__name__}: {text}"
            self._refuse(sender, request_id, text)
            return
        self._owners[request_id] = sender
        if self._lockstep is not None:
            wave = getattr(request, "current_wave", 0)
            if not isinstance(wave, int):
                wave = 0
            self._report_wave(start=self._lockstep.add(wave))

    async def _abort(self, client: int, payload: list[Frame]) -> None:
        ids = self._decode(payload)
        if not isinstance(ids, list):
            raise CodecError(f"an abort of {type(ids).__qualname__}")
        named = {each for each in ids if isinstance(each, str)}
        held = {request_id for owner, request_id, _ in self._held if owner.client == client and request_id in named}
        self._held = [each for each in self._held if each[0].client != client or each[1] not in held]
        its_own = [each for each, owner in self._owners.items() if each in named and owner.client == client]
        if its_own or held:
            await self._drop(its_own)
            self._send_batch(client, [], [], held.union(its_own))

    async def _drop(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._owners.pop(request_id, None)
        self._progress.enter(BUSY)
        try:
            if request_ids:
                await _awaited(self._engine.abort_requests(request_ids))
        except (Exception, asyncio.CancelledError) as error:
            if _is_cancellation(error):
                raise
            logger.exception("engine %d could not abort %s", self.index, request_ids)

    def _front_end(self, client: int) -> FrontEnd:
        assert self._sockets is not None
        return self._sockets.front_ends[client]

    def _start_wave(self, payload: list[Frame]) -> None:
        start = convert(self._decode(payload), StartWave)
        if self._order.mode:  # a paused engine holds the request that has started the wave, and the others need it
            start = start._replace(exclude=None)
        if self._lockstep is not None:
            self._lockstep.start(start)

    # Calls

    async def _call(self, client: int, payload: list[Frame]) -> None:
        """Call a method for a client; an async one runs in a task."""
        try:
            call: Call = self._decode_call(payload)
        except CodecError as error:
            match readable(payload[0]):
                case [int(), int(call_id), str(name), _]:
                    self._fail_call(client, Call(client, call_id, name, []), error)
                    return
            raise
        if call.method == PAUSE:
            await self._obey(client, call)
            return
        try:
            method: Any = None
            if not call.method.startswith("_") and call.method not in _NOT_TO_BE_CALLED:
                method = getattr(self._engine, call.method, None)
            if not callable(method):
                raise AttributeError(f"the engine has no method {call.method!r} that may be called")
            self._progress.enter(BUSY)
            result = method(*convert_arguments(method, call.args))
        except (Exception, asyncio.CancelledError) as error:  # the latter from the method
            self._fail_call(client, call, error)
            return
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(self._finish_call(client, call, result))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
        else:
            await self._finish_call(client, call, result)

    async def _finish_call(self, client: int, call: Call, result: Any) -> None:
        try:
            self._answer(client, call.call_id, await _awaited(result))
        except (Exception, asyncio.CancelledError) as error:  # the latter also from `aclose`: it answers for all calls
            self._fail_call(client, call, error)

    def _fail_call(self, client: int, call: Call, error: BaseException) -> None:
        logger.debug("a call of %s has failed", call.method, exc_info=error)
        reason = "the engine has cancelled the call" if isinstance(error, asyncio.CancelledError) else text_of(error)
        text = f"Call to {call.method} method failed: {reason}"  # vLLM's words: clients look for them
        failure = UtilityOutput(call.call_id, self._sendable(text))
        self._send(client, EngineCoreOutputs(self.index, utility_output=failure), counts=False)

    def _answer(self, client: int, call_id: int, result: Any) -> None:
        answer = UtilityOutput(call_id, None, (None, result))
        self._send(client, EngineCoreOutputs(self.index, utility_output=answer), counts=False)

    # The pause

    async def _obey(self, client: int, call: Call) -> None:
        """Pause or resume, unless a newer order is in force; the answer comes when no step is taken any more."""
        order = convert(call.args, PauseOrder)
        self._front_end(client).accept()
        self._unanswered.append((client, call.call_id))
        if order <= self._order:
            return
        self._order = order
        assert self._sockets is not None
        self._sockets.registration = self._registration()
        for front_end in self._sockets.front_ends:
            if front_end.is_aioshm:
                self._answer(front_end.client, NOTICE_ID, order)
        if order.mode == "abort":
            owners = self._owners.copy()
            await self._drop(list(owners))
            for request_id, owner in owners.items():
                if not owner.generation:  # its client knows no notices
                    self._refuse(owner, request_id, "aborted: the engines were paused")
            return
        if not order.mode:
            released = self._held
            self._held = []
            for held in released:
                await self._admit(*held)
        is_due = self._start_is_lost and not order.mode
        if self._lockstep is not None and (is_due or (order.mode != "keep" and self._owners)):
            self._start_is_lost = False
            self._report_wave(start=self._lockstep.add(0))

    def _answer_orders(self) -> None:
        """Answer all orders, if no step is to be taken or the engine is not paused."""
        if self._unanswered and not (self._order.mode and self._has_work()):
            for client, call_id in self._unanswered:
                self._answer(client, call_id, self._order)
            self._unanswered.clear()

    # Sending

    async def _send_outputs(self, outputs: Iterable[Any]) -> bool:
        """Send each client its outputs; return whether there were any."""
        by_client: dict[int, list[tuple[Owner, str, Any]]] = {}
        for output in outputs:
            request_id = request_id_of(output)
            owner = self._owners.get(request_id)
            if owner is None:  # aborted meanwhile
                continue
            by_client.setdefault(owner.client, []).append((owner, request_id, output))
            if is_finished(output):
                del self._owners[request_id]
        for client, batch in by_client.items():
            try:
                generations = [owner.generation for owner, _, _ in batch]
                finished = {request_id for _, request_id, output in batch if is_finished(output)}
                self._send_batch(client, [output for _, _, output in batch], generations, finished)
            except CodecError:
                await self._send_one_by_one(batch)
        return bool(by_client)

    async def _send_one_by_one(self, batch: list[tuple[Owner, str, Any]]) -> None:
        """Send each output; a request fails if its output cannot be encoded."""
        for owner, request_id, output in batch:
            finished = {request_id} if is_finished(output) else set()
            try:
                self._send_batch(owner.client, [output], [owner.generation], finished)
            except CodecError as error:
                if request_id in self._owners:
                    await self._drop([request_id])
                self._refuse(owner, request_id, str(error))

    def _send_batch(self, client: int, outputs: list[Any], generations: list[int], finished: set[str]) -> None:
        if self._front_end(client).is_aioshm:
            self._send(client, MarkedOutputs(self.index, outputs, finished_requests=finished, generations=generations))
        else:
            self._send(client, EngineCoreOutputs(self.index, outputs, finished_requests=finished or None))

    def _send(self, client: int, envelope: EngineCoreOutputs[Any], *, counts: bool = True) -> None:
        assert self._sockets is not None
        self._sockets.send(client, self._encode(envelope), counts=counts)

    def _sendable(self, text: str) -> str:
        """Shorten a text so that its message can be sent, and escape surrogates: msgpack has UTF-8 only."""
        most = min(MAX_TEXT, self.options.max_message_bytes // 16)  # a character takes up to ten bytes
        return text[:most].encode(errors="backslashreplace").decode()

    def _refuse(self, owner: Owner, request_id: str, text: str) -> None:
        """Send the last output of a failed request."""
        text = self._sendable(text)
        for make in (getattr(self._engine, "error_output", error_output), error_output):
            try:
                self._send_batch(owner.client, [make(request_id, text)], [owner.generation], {request_id})
                return
            except Exception:
                logger.exception("engine %d has no error_output that can be sent for %r", self.index, request_id)

    def _report_counts(self) -> None:
        """Report the load to the coordinator, if it has changed."""
        if self._sockets is None or not self._sockets.coordinated:
            return
        stats = SchedulerStats(num_running_reqs=len(self._owners))
        if hasattr(self._engine, "request_counts"):
            stats.num_waiting_reqs, stats.num_running_reqs = self._engine.request_counts()
        if hasattr(self._engine, "kv_cache_usage"):
            stats.kv_cache_usage = self._engine.kv_cache_usage()
        counts = (stats.num_waiting_reqs, stats.num_running_reqs, int(_USAGE_STEPS * stats.kv_cache_usage))
        if counts != self._counts:
            self._counts = counts
            if self._lockstep is not None:
                stats.step_counter = self._lockstep.step
                stats.current_wave = self._lockstep.wave
            self._send(COORDINATOR, EngineCoreOutputs(self.index, scheduler_stats=stats))

    def _report_wave(self, *, start: int | None = None, complete: int | None = None) -> None:
        if (start is not None or complete is not None) and self._sockets is not None and self._sockets.coordinated:
            self._send(COORDINATOR, EngineCoreOutputs(self.index, wave_complete=complete, start_wave=start))


def _is_cancellation(error: BaseException) -> bool:
    """Return whether the current task was cancelled; else the engine itself raised the CancelledError."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def _awaited(result: Any) -> Any:
    if inspect.isawaitable(result):
        return await result
    return result


def _check_engine(engine: Any) -> None:
    missing = [f"{name}()" for name in _NEEDED if not callable(getattr(engine, name, None))]
    text = f"engine must be an object with {', '.join(_NEEDED)}, not {shown(engine)}"
    if missing:
        raise TypeError(f"{text}, which has no {', no '.join(missing)}")
    if isinstance(engine, type):
        raise TypeError(text)
    for name in _NEVER_ASYNC:
        check_plain(name, getattr(engine, name, None))
