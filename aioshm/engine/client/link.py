"""The parts of an `EngineClient` and their events: registrations, outputs, and deaths of engines."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import msgspec
import zmq

from aioshm.arguments import check_int
from aioshm.closing import warn_not_closed
from aioshm.config import Options
from aioshm.engine.client.engines import Engine, Engines
from aioshm.engine.client.liveness import Liveness
from aioshm.engine.client.pause import PauseOfEngines
from aioshm.engine.client.requests import Inbox, Pending
from aioshm.engine.client.sockets import ClientSockets, MembershipListener, Registration
from aioshm.engine.protocol.addresses import IDENTITY_BYTES, CoreEngine, EngineZmqAddresses
from aioshm.engine.protocol.messages import (
    ENGINE_CORE_DEAD,
    NO_ORDER,
    PAUSE,
    EngineCoreRequestType,
    EnvelopeDecoder,
    encode,
    order_or_none,
)
from aioshm.engine.protocol.payloads import Frame
from aioshm.engine.protocol.waves import encode_scale
from aioshm.engine.security.binding import Protection, over_tcp
from aioshm.engine.security.keys import EngineKeys, keys_for_front_end
from aioshm.errors import AioshmError, CodecError, EndClosed, EngineDead, RoleError, copy_error
from aioshm.logs import LogLimiter
from aioshm.process import progress
from aioshm.process.background import notify
from aioshm.zeromq.hosts import connectable

if TYPE_CHECKING:
    from aioshm.engine.client.client import ClientOptions

logger: logging.Logger = logging.getLogger("aioshm.engine")

_LOG_INTERVAL_S = 10.0
_LAST_BURSTS = 1000
_ADD = EngineCoreRequestType.ADD.value
_ABORT = EngineCoreRequestType.ABORT.value

_decode_counts = msgspec.msgpack.Decoder(tuple[list[list[float]] | None, int, bool]).decode


class EngineLink:
    """Sends to engines, and dispatches their messages.

    The loop references it weakly, so that a forgotten client is collected, and warns.
    """

    def __init__(
        self, addresses: EngineZmqAddresses, engines: Sequence[CoreEngine] | int, chosen: ClientOptions
    ) -> None:
        self._opened = False
        self.closed: bool = False
        ranks: Iterable[int]
        if isinstance(engines, int):
            ranks = range(check_int("engines", engines, minimum=1))
        else:
            ranks = [engine.index for engine in engines]
        n_clients = min(len(addresses.inputs), len(addresses.outputs))
        self.index: int = chosen.client_index
        if self.index >= n_clients:
            raise ValueError(f"client_index must be below {n_clients}, the number of addresses, not {self.index}")
        self.addresses = addresses
        self.chosen: ClientOptions = chosen
        self.options: Options = chosen.options or Options.from_env()
        self.goes_on: bool = chosen.on_engine_death == "continue"
        this: EngineLink = weakref.proxy(self)
        self.engines: Engines = Engines(ranks, self.index, n_clients)
        self.pending: Pending = Pending(self.engines, EnvelopeDecoder(chosen.output_type), this)
        self.pause: PauseOfEngines = PauseOfEngines(this)
        self.wave: int = 0  # as published by the coordinator
        self.dead: EngineDead | None = None  # why no message is sent any more
        # Whether to log how an engine has died; a supervisor logs that itself.
        self.logs_deaths: bool = chosen.membership_address is None
        self._began = False  # whether all engines have registered at some time
        self._membership: MembershipListener | None = None
        self._idle = asyncio.Event()  # a leaving engine has become idle
        self._signs_of_life = ExitStack()  # of the loop, in an API server
        self._limiter = LogLimiter(_LOG_INTERVAL_S)

    def __repr__(self) -> str:
        in_flight = len(self.pending.inboxes)
        return f"<EngineClient {self.index} of engines {self.engines.ranks}, {in_flight} requests in flight>"

    # Opened and closed

    def open(self) -> None:
        if self._opened or self.closed:
            raise RoleError("a client of engines can be entered once")
        self.settled: asyncio.Event = asyncio.Event()  # all engines have registered, or never will
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        addresses = (self.addresses.inputs[self.index], self.addresses.outputs[self.index])
        membership_address = self.chosen.membership_address
        self._protection = Protection.of_front_end(
            addresses, self.engines.ranks, keys=self.chosen.keys, secure=self._secure
        )
        for engine in self.engines:
            engine.name = self._protection.name(engine.rank, addresses[0])
        this: EngineLink = weakref.proxy(self)
        # With a membership an engine may connect before this client knows its keys.
        retry = membership_address is not None
        self.sockets: ClientSockets = ClientSockets(*addresses, this, self._protection, self.options, retry=retry)
        self._opened = True
        self.addresses.inputs[self.index] = connectable(self.sockets.input_address)
        self.addresses.outputs[self.index] = connectable(self.sockets.output_address)
        self.liveness: Liveness = Liveness(this)
        if membership_address is not None:
            try:
                keys = self._keys(membership_address)
                curve = None if keys is None else keys.to_front_end()
                self._membership = MembershipListener(membership_address, this, curve)
            except BaseException:
                self.closed = True
                self.liveness.stop()
                self.sockets.close()
                raise
        self._signs_of_life.enter_context(progress.own().serving())

    async def aclose(self) -> None:
        if self.closed or not self._opened:
            self.closed = True
            return
        for engine, ids in self.pending.by_engine(self.pending.inboxes).items():
            self.abort(engine, ids)
        self.closed = True
        self._stop_listening()
        self._fail(EndClosed("the client of the engines was closed"))
        await self.sockets.aclose()

    def __del__(self) -> None:
        if self._opened and not self.closed:
            warn_not_closed(self)
            self._stop_listening()
            self.sockets.close()

    def _stop_listening(self) -> None:
        self._signs_of_life.close()
        self.liveness.stop()
        if self._membership is not None:
            self._membership.close()

    def check_open(self) -> None:
        if self.closed:
            raise EndClosed("the client of the engines was closed")
        if not self._opened:
            raise RoleError("a client of engines is used inside `async with`")
        if threading.get_ident() != self._thread:
            raise RoleError("a client of engines is used in the thread of its event loop")
        if self.dead is not None:
            raise copy_error(self.dead)

    def check_ready(self) -> None:
        self.check_open()
        if not self._began:
            raise RoleError("the engines are not ready: await wait_until_ready() first")

    @property
    def _secure(self) -> bool:
        return self.chosen.secure and self.options.secure

    def _keys(self, address: str) -> EngineKeys | None:
        if not self._secure or not over_tcp([address]):
            return None
        return keys_for_front_end(self.chosen.keys)

    # Sending

    def send(self, engine: Engine, kind: bytes, frames: list[Frame]) -> None:
        """Send a message to an engine; raises `EngineDead` if the engine is gone."""
        try:
            self.sockets.send(engine.name, kind, frames)
        except zmq.ZMQError as error:
            if engine.connection is not None:
                self.liveness.lose(engine)
            raise EngineDead(f"engine {engine.rank} cannot be reached: {error}", engine=engine.rank) from None
        if not self.settled.is_set():
            self.sockets.registrations.run_soon()  # a send may clear the event of a waiting registration

    def send_request(self, inbox: Inbox, engine: Engine, frames: list[Frame]) -> Inbox:
        """Send a request to this engine, or to another one if it is gone and was not wanted."""
        while True:
            try:
                self._add(inbox, engine, frames)
                break
            except EngineDead:
                if inbox.wanted is not None or not self.goes_on:
                    raise
                engine = self.engines.choose()  # not the same engine: it does not serve any more
        inbox.request = None
        if self.chosen.resubmit is not None:  # the caller may change the arrays before an engine dies
            inbox.request = [bytes(frame) for frame in frames]
        return inbox

    def _add(self, inbox: Inbox, engine: Engine, request: list[Frame]) -> None:
        self.pending.check_reuse(inbox.request_id, engine)
        generation, frames = self.pending.new_generation(engine, request)
        self.send(engine, _ADD, frames)
        self.pending.add(inbox, engine, generation)

    def abort(self, engine: Engine | None, request_ids: list[str]) -> None:
        """Abort requests at a living engine."""
        if self.dead is None and engine is not None and engine.death is None:
            with suppress(EngineDead):  # its death will be reported
                self.send(engine, _ABORT, [encode(request_ids)])

    def end_and_abort(self, request_ids: Iterable[str], cause: str = "") -> None:
        for engine, ids in self.pending.by_engine(request_ids).items():
            for request_id in ids:
                self.pending.abort(request_id, cause)
            self.abort(engine, ids)

    def leave(self, inbox: Inbox) -> None:
        if inbox.ended or self.closed or self._loop.is_closed():
            return
        if threading.get_ident() != self._thread:  # the garbage collector may run in any thread
            self._loop.call_soon_threadsafe(self.leave, inbox)
            return
        self.end_and_abort([inbox.request_id])

    # Receiving

    def registered(self, registration: Registration) -> None:
        name = registration.name
        incarnation: int | None = None
        try:
            if self.sockets.register_by_keys:
                self._check_keys(registration)
                incarnation = int(registration.user.partition(".")[2])
            if self._membership is not None and self.engines.named(name) is None and len(name) == IDENTITY_BYTES:
                self._membership.early[name] = registration
                return
            engine, fields = self.engines.read_registration(name, registration.frames)
        except ValueError as error:
            self._limiter.warn(
                logger, "a registration of %s by %s is ignored: %s", name[:16].hex(), registration.sender, error
            )
            return
        self.liveness.replaced(engine, registration.connection)
        if self.dead is not None:  # the death of its predecessor has just become known
            return
        was_dead = engine.death is not None
        order = order_or_none(fields.pop(PAUSE, NO_ORDER))
        engine.register(fields, registration.connection, registration.sender, incarnation)
        if was_dead:
            logger.info("engine %d is back: it is %s", engine.rank, engine.sender)
            self._notify_change(engine.rank, None)
        self.pause.meet(engine, order)
        self.settle()

    def _check_keys(self, registration: Registration) -> None:
        """Check an engine's identity against the name in its keys, and expect that name from now on."""
        rank = self._protection.rank_of(registration.user)
        if rank is None:
            raise ValueError("its keys are void: that incarnation of the engine is dead")
        if registration.name == self._protection.name_of(registration.user):
            engine = self.engines.get(rank)
            if engine is not None:
                engine.name = registration.name
        elif self.engines.named(registration.name) is not None:
            raise ValueError(f"it has the keys of engine {rank}, and the identity of another engine")

    def settle(self) -> None:
        """Admit calls if all present engines have registered."""
        self.report_progress()
        if self.engines.missing or (self._membership is not None and not self._membership.version):
            return
        self.settled.set()
        if not self._began:
            self._began = True
            self._subscribe(self.addresses.frontend_stats_publish_address or self.engines.stats_address)

    def _subscribe(self, address: str | None) -> None:
        if address is None:
            return
        try:
            keys = self._keys(address)
            self.sockets.subscribe(address, None if keys is None else keys.to_coordinator())
        except (OSError, RuntimeError) as error:  # this client then balances by its own requests only
            self._limiter.warn(logger, "there are no counts from the coordinator: %s", error)

    def heartbeat(self, connection: int, frames: list[bytes]) -> None:
        engine = self.engines.at(connection)
        if engine is None or self.dead is not None:
            return
        try:
            self.liveness.beat(engine, frames)
        except ValueError as error:
            self._limiter.warn(logger, "a heartbeat of engine %d is ignored: %s", engine.rank, error)

    def disconnected(self, connection: int) -> None:
        if self._membership is not None:
            self._membership.forget_early(connection)
        self.liveness.disconnected(connection)

    def output(self, frames: list[Frame], user: str) -> None:
        """Handle a message of an engine; ``user`` names its keys."""
        try:
            sender = self.sockets.rank_of(frames, user)
            if len(frames) == 1 and frames[0] == ENGINE_CORE_DEAD:
                self.liveness.said_dead(sender)
                return
            unwanted = self.pending.take(frames, sender)
        except CodecError as error:
            self._limiter.warn(logger, "a message from an engine is dropped: %s", error)
            return
        for inbox in unwanted:
            self.abort(inbox.engine, [inbox.request_id])

    def counts(self, payload: bytes) -> None:
        try:
            counts, self.wave, _running = _decode_counts(payload)
            if counts is not None:
                self.engines.update(counts)
        except ValueError as error:
            self._limiter.warn(logger, "counts from the coordinator are ignored: %s", error)

    # Deaths of engines

    def die(self, error: EngineDead) -> None:
        """Handle the death of an engine, or of all if the error names none."""
        if self.closed or self.dead is not None:
            return
        engine = self.engines.get(error.engine)
        if engine is not None and self.goes_on:
            engine.death = error  # from here on, a report of its end is no news
        self._read_last_outputs()
        self.engines.died += 1
        if engine is not None and self.goes_on:
            self._continue_without(engine, error)
            return
        # Waiting calls raise the error; without any, an engine was stopped.
        n_requests = len(self.pending.inboxes)
        logger.debug("%s; %d requests and %d calls were pending", error, n_requests, len(self.pending.calls))
        self.give_up(error)

    def _read_last_outputs(self) -> None:
        """Read all outputs of a dead engine; living engines may send more and more meanwhile."""
        for _ in range(_LAST_BURSTS):
            if not self.sockets.outputs.run():
                break

    def _continue_without(self, engine: Engine, error: EngineDead) -> None:
        """Resubmit a dead engine's requests that brought no output yet to other engines, and fail all others."""
        self.liveness.forget_heartbeats(engine)
        self._expect_more()
        engine.registration = None
        engine.stall = ""
        inboxes = [inbox for inbox in self.pending.inboxes.values() if inbox.engine is engine]
        moved = sum([self._resubmit(inbox, engine) for inbox in inboxes])
        failed = len(inboxes) - moved
        self.pending.fail(error, engine)
        if inboxes or self.logs_deaths:
            text = str(error) if self.logs_deaths else f"engine {engine.rank} is gone"
            logger.warning("%s; %d of its requests failed, %d went to other engines", text, failed, moved)
        self._notify_change(engine.rank, error)
        self.report_progress()

    def _resubmit(self, inbox: Inbox, former: Engine) -> bool:
        """Resubmit a dead engine's request if it has brought no output yet; return whether it was sent."""
        if inbox.request is None or inbox.ended:
            return False
        # Skip engines that had this request before: late output of the dead process must not pass for its successor's.
        tried = {former.rank, *inbox.tried}
        while choices := [engine for engine in self.engines if engine.serves and engine.rank not in tried]:
            engine = self.engines.least_busy(choices)
            tried.add(engine.rank)
            with suppress(EngineDead, ValueError):  # dead, or the id cannot be used again there
                self._add(inbox, engine, inbox.request)
                return True
        return False

    def give_up(self, error: EngineDead) -> None:
        if not self.closed and self.dead is None:
            self.dead = error
            self.liveness.stop()
            self._fail(error)

    def _fail(self, error: AioshmError) -> None:
        self.pending.fail(error)
        self.settled.set()

    def _notify_change(self, rank: int, error: EngineDead | None) -> None:
        if self.chosen.on_engine_change is not None:
            self._loop.call_soon(notify, self.chosen.on_engine_change, rank, error)

    # More engines, or fewer

    def _expect_more(self) -> None:
        self.settled.clear()
        self.sockets.registrations.run_soon()

    def add(self, rank: int) -> None:
        self.engines.add(rank, self._protection.name(rank, self.sockets.input_address))
        self._protection.expect(rank)
        self._expect_more()

    def void_keys(self, rank: int, incarnation: int) -> None:
        self._read_last_outputs()
        self._protection.void(rank, incarnation)

    def remove_last(self) -> None:
        """Remove the last engine, and fail its remaining requests and calls."""
        engine = self.engines.remove_last()
        self.liveness.forget(engine)
        text = f"engine {engine.rank} was taken out of service"
        if engine.stall:
            text += f"; {engine.stall}"
        self.pending.fail(EngineDead(text, engine=engine.rank), engine)
        self.settle()

    async def drain(self, engine: Engine) -> None:
        """Mark an engine as leaving, and wait until its requests and calls are done. Cancelling undoes the mark."""
        engine.leaving = True
        try:
            while self.pending.is_busy(engine):
                self._idle.clear()
                await self._idle.wait()
                engine.leaving = True  # also if another task has stopped waiting for this engine
        except BaseException:
            engine.leaving = False
            self._idle.set()
            raise

    def note_idle(self) -> None:
        self._idle.set()
        self.report_progress()

    def report_scale(self) -> None:
        """Report the number of engines to the coordinator, if there is one."""
        self.sockets.send_to_coordinator(encode_scale(len(self.engines.ranks)))

    # The membership in the launching process

    def check_own(self) -> None:
        """Raise unless this client decides which engines are present."""
        self.check_open()
        if self.chosen.membership_address is not None:
            raise RoleError("the process at membership_address decides which engines are present: scale its supervisor")

    def report_progress(self) -> None:
        """Report to the launching process how far this front end has applied the membership."""
        if self._membership is not None and not self.closed:
            busy = [each.rank for each in self.engines if each.leaving and self.pending.is_busy(each)]
            self._membership.report(self.engines.missing, sorted(busy), self.pause.order, self.pause.unanswered)
