"""The internals of an `EngineClient`: connections, registrations, outputs, and deaths of engines."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import msgspec
import zmq

from aioshm.arguments import check_int
from aioshm.closing import warn_not_closed
from aioshm.config import Options
from aioshm.engine.client.engines import Engines, again
from aioshm.engine.client.liveness import Liveness
from aioshm.engine.client.membership import EarlyRegistration, MembershipListener
from aioshm.engine.client.options import ClientOptions
from aioshm.engine.client.pending import Pending
from aioshm.engine.client.sockets import ClientSockets
from aioshm.engine.client.streams import Inbox
from aioshm.engine.protocol.addresses import CoreEngine, EngineZmqAddresses
from aioshm.engine.protocol.balance import LoadBalancer
from aioshm.engine.protocol.messages import ENGINE_CORE_DEAD, EngineCoreRequestType
from aioshm.engine.protocol.payloads import Frame
from aioshm.engine.protocol.reports import encode_scale
from aioshm.engine.security.binding import Protection, over_tcp
from aioshm.engine.security.keys import EngineKeys, keys_for_front_end
from aioshm.errors import CodecError, EndClosed, EngineDead, RoleError
from aioshm.logs import LogLimiter
from aioshm.process.background import notify
from aioshm.zeromq.hosts import connectable

logger: logging.Logger = logging.getLogger("aioshm.engine")

_LOG_INTERVAL_S = 10.0
_ABORT = EngineCoreRequestType.ABORT.value

_encode_plain = msgspec.msgpack.Encoder().encode
_decode_counts = msgspec.msgpack.Decoder(tuple[list[list[float]] | None, int, bool]).decode


class EngineLink:
    """Sends to engines, and dispatches their messages."""

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
        self.addresses = addresses  # what engines are to be told
        self._chosen = chosen
        self.options: Options = chosen.options or Options.from_env()
        self.goes_on: bool = chosen.on_engine_death == "continue"
        self.engines: Engines = Engines(ranks, self.index, n_clients, chosen.output_type)
        self.balance: LoadBalancer = self.engines.balance
        self.pending: Pending = self.engines.pending
        self.wave: int = 0  # the wave that the coordinator has told of
        self.dead: EngineDead | None = None  # why nothing is sent any more
        # Whether to log how an engine has died; a supervisor logs that itself.
        self.logs_deaths: bool = chosen.membership_address is None
        self._began = self._complete = False
        self._membership: MembershipListener | None = None
        self._incarnations: dict[int, int] = {}  # of the engines that have registered, where their keys tell
        self._limiter = LogLimiter(_LOG_INTERVAL_S)

    def __repr__(self) -> str:
        in_flight = len(self.pending.inboxes)
        return f"<EngineClient {self.index} of engines {self.engines.ranks}, {in_flight} requests in flight>"

    @property
    def _secure(self) -> bool:
        return self._chosen.secure and self.options.secure

    @property
    def explained(self) -> bool:
        """Whether another process reports how engines have died."""
        return self._chosen.membership_address is not None

    # Opened and closed

    def open(self) -> None:
        """Bind the addresses and begin to read."""
        if self._opened or self.closed:
            raise RoleError("a client of engines can be entered once")
        self.settled: asyncio.Event = asyncio.Event()  # all engines have registered, or never will
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        addresses = self.addresses.inputs[self.index], self.addresses.outputs[self.index]
        address = self._chosen.membership_address
        protection = Protection.of_front_end(addresses, self.engines.ranks, keys=self._chosen.keys, secure=self._secure)
        self._protection = protection
        self.engines.names = {rank: protection.name(rank, addresses[0]) for rank in self.engines.ranks}
        this: EngineLink = weakref.proxy(self)  # the loop holds on to what it calls; a forgotten client shall end
        self.sockets: ClientSockets = ClientSockets(
            *addresses,
            this,
            protection,
            max_bytes=self.options.max_message_bytes,
            silence_s=self.options.remote_timeout,
            retry=address is not None,  # an engine may connect before this client has its membership
        )
        self._opened = True
        self.addresses.inputs[self.index] = connectable(self.sockets.input_address)
        self.addresses.outputs[self.index] = connectable(self.sockets.output_address)
        self.liveness: Liveness = Liveness(this)
        if address is not None:
            self.pending.idle = lambda _rank: this.say_progress()
            try:
                keys = self._keys(address)
                self._membership = MembershipListener(address, this, None if keys is None else keys.to_front_end())
            except BaseException:
                self.closed = True
                self.liveness.stop()
                self.sockets.close()
                raise

    async def aclose(self) -> None:
        """Abort all requests, and close the sockets."""
        if self.closed or not self._opened:
            self.closed = True
            return
        for rank, ids in self.pending.by_engine(self.pending.inboxes).items():
            self.abort(rank, ids)
        self.closed = True
        self._stop_listening()
        self._fail(lambda: EndClosed("the client of the engines was closed"))
        await self.sockets.aclose()

    def __del__(self) -> None:
        if self._opened and not self.closed:
            warn_not_closed(self)
            self._stop_listening()
            self.sockets.close()

    def _stop_listening(self) -> None:
        self.liveness.stop()
        if self._membership is not None:
            self._membership.close()

    def check_ready(self) -> None:
        self.check_open()
        if not self._began:
            raise RoleError("the engines are not ready: await wait_until_ready() first")

    def check_open(self) -> None:
        if self.closed:
            raise EndClosed("the client of the engines was closed")
        if not self._opened:
            raise RoleError("a client of engines is used inside `async with`")
        if threading.get_ident() != self._thread:
            raise RoleError("a client of engines is used in the thread of its event loop")
        if self.dead is not None:
            raise again(self.dead)

    # Sending

    def send(self, rank: int, kind: bytes, frames: list[Frame]) -> None:
        """Send a message to an engine; raises `EngineDead` if the engine is gone."""
        try:
            self.sockets.send(self.engines.names[rank], kind, frames)
        except zmq.ZMQError as error:
            self.liveness.lost(rank)
            raise EngineDead(f"engine {rank} cannot be reached: {error}", engine=rank) from None
        if not self._complete:
            self.sockets.registrations.run_soon()  # sending may have swallowed the sign of one

    def abort(self, rank: int, request_ids: list[str]) -> None:
        """Abort requests at their engine, if it is still there."""
        if self.dead is None and rank not in self.engines.deaths:
            try:
                self.send(rank, _ABORT, [_encode_plain(request_ids)])
            except EngineDead:
                pass  # the waiting calls are told

    def leave(self, inbox: Inbox) -> None:
        """Abort a request whose stream was left."""
        if inbox.ended or self.closed or self._loop.is_closed():
            return
        if threading.get_ident() != self._thread:  # the garbage collector's choice
            self._loop.call_soon_threadsafe(self.leave, inbox)
            return
        self.pending.abort(inbox.request_id)
        self.abort(inbox.engine, [inbox.request_id])

    # Receiving

    def registered(self, sender_identity: bytes, frames: list[bytes], connection: int, sender: str, user: str) -> None:
        """Handle an engine's registration; ``sender`` describes the connection, ``user`` names the keys."""
        try:
            if self.sockets.register_by_keys:
                rank_by_keys = self._protection.rank_of(user)
                self.engines.recognise(sender_identity, rank_by_keys, self._protection.name_of(user))
            if self._membership is not None and self.engines.may_come(sender_identity):
                self._membership.early[sender_identity] = EarlyRegistration(frames, connection, sender, user)
                return
            rank = self.engines.register(sender_identity, frames)
        except ValueError as error:
            self._limiter.warn(
                logger, "a registration of %s by %s is ignored: %s", sender_identity[:16].hex(), sender, error
            )
            return
        self.pending.registered(rank, self.engines.ready[rank])
        self.liveness.connected(rank, connection, sender)
        if self.dead is not None:  # of its predecessor, which was not known before
            return
        if self.engines.deaths.pop(rank, None) is not None:
            # The death of its predecessor, if reported just now, has removed the registration.
            self.engines.register(sender_identity, frames)
            logger.info("engine %d is back: it is %s", rank, sender)
            self._tell_change(rank, None)
        if self.sockets.register_by_keys:
            self._incarnations[rank] = int(user.partition(".")[2])
        self.engines.take_in(rank)
        self.settle()

    def settle(self) -> None:
        """Admit calls if all present engines have registered."""
        self.say_progress()
        if self.engines.missing or (self._membership is not None and not self._membership.version):
            return
        self._complete = True
        self.settled.set()
        if not self._began:
            self._began = True
            self._subscribe(self.addresses.frontend_stats_publish_address or self.engines.stats_address)

    def _subscribe(self, address: str | None) -> None:
        try:
            if address is not None:
                keys = self._keys(address)
                self.sockets.subscribe(address, None if keys is None else keys.to_coordinator())
        except (OSError, RuntimeError) as error:  # requests are distributed by what this client knows, then
            self._limiter.warn(logger, "there are no counts from the coordinator: %s", error)

    def _keys(self, address: str) -> EngineKeys | None:
        if not self._secure or not over_tcp([address]):
            return None
        return keys_for_front_end(self._chosen.keys)

    def disconnected(self, connection: int) -> None:
        """Handle the end of a connection."""
        if self._membership is not None:
            self._membership.forget_early(connection)
        self.liveness.disconnected(connection)

    def output(self, frames: list[Frame], user: str) -> None:
        """Handle an engine's output; see `ClientSockets.rank_of`."""
        try:
            sender = self.sockets.rank_of(frames, user)
            if len(frames) == 1 and frames[0] == ENGINE_CORE_DEAD:
                self.liveness.said_dead(sender)
                return
            unwanted = self.pending.take(frames, sender)
        except CodecError as error:
            self._limiter.warn(logger, "a message from an engine is dropped: %s", error)
            return
        for rank, request_id in unwanted:
            self.abort(rank, [request_id])

    def counts(self, payload: bytes) -> None:
        """Handle a publication of the coordinator."""
        try:
            counts, self.wave, _running = _decode_counts(payload)
            if counts is not None:
                self.balance.update(counts)
        except ValueError as error:
            self._limiter.warn(logger, "counts from the coordinator are ignored: %s", error)

    # Engines dead

    def lose(self, rank: int) -> None:
        """Send no more requests to an unreachable engine; its death is reported soon."""
        if self.goes_on:
            self.balance.leave_out(rank)

    def die(self, error: EngineDead) -> None:
        """Handle the death of an engine, or of all if the error names none."""
        if self.closed or self.dead is not None:
            return
        self.sockets.outputs.run()  # its last words
        if self.goes_on and error.engine in self.engines.ranks:
            self._expect_more()
            failed, moved = self.engines.go_on_without(error.engine, error, self.send)
            if failed or moved or self.logs_deaths:
                what = error if self.logs_deaths else f"engine {error.engine} is gone"
                logger.warning("%s; %d of its requests failed, %d went to other engines", what, failed, moved)
            self._tell_change(error.engine, error)
            self.say_progress()
            return
        self.engines.died += 1
        # Waiting calls raise the error; without any, an engine was stopped.
        logger.debug(
            "%s; %d requests and %d calls were pending", error, len(self.pending.inboxes), len(self.pending.calls)
        )
        self.give_up(error)

    def give_up(self, error: EngineDead) -> None:
        """Fail everything that is pending, and all later calls, with this error."""
        if not self.closed and self.dead is None:
            self.dead = error
            self.liveness.stop()
            self._fail(lambda: again(error))

    def _fail(self, error: Callable[[], Exception]) -> None:
        self.pending.fail(error)
        self.settled.set()

    def _expect_more(self) -> None:
        self._complete = False
        self.settled.clear()
        self.sockets.registrations.run_soon()

    def _tell_change(self, rank: int, error: EngineDead | None) -> None:
        if self._chosen.on_engine_change is not None:
            self._loop.call_soon(notify, self._chosen.on_engine_change, rank, error)

    # More engines, or fewer

    def add(self, rank: int) -> None:
        """Expect one more engine, which gets requests once it has registered."""
        self.engines.add(rank, self._protection.name(rank, self.sockets.input_address))
        self._protection.expect(rank)
        self._expect_more()

    def void_keys(self, rank: int, incarnation: int) -> None:
        """Refuse the keys of an engine's earlier incarnations."""
        self.sockets.outputs.run()  # its last words
        self._protection.void(rank, incarnation)

    def remove_last(self) -> None:
        """Remove the last engine; its remaining requests fail."""
        self.liveness.dismiss(self.engines.remove_last())
        self.settle()

    def tell_scale(self) -> None:
        """Report the number of engines to the coordinator, if there is one."""
        self.sockets.tell_coordinator(encode_scale(len(self.engines.ranks)))

    def check_own(self) -> None:
        """Raise unless this client decides which engines are present."""
        self.check_open()
        if self._chosen.membership_address is not None:
            raise RoleError("the process at membership_address says which engines there are: scale its supervisor")

    # Membership

    def explain(self, rank: int, incarnation: int, error: EngineDead) -> None:
        """Handle the launching process's account of a death."""
        by_keys = self.sockets.register_by_keys
        is_this = self._incarnations.get(rank) == incarnation if by_keys else None
        self.liveness.explain(error, is_this=is_this)

    def say_progress(self) -> None:
        """Report to the launching process how far this front end has applied the membership."""
        if self._membership is not None and not self.closed:
            self._membership.say(self.engines.missing, self.engines.busy())
