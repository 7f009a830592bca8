"""What a client has to do with its engines: their connections, what they send, and their deaths."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
import zmq

from aioshm.arguments import check_int
from aioshm.closing import warn_not_closed
from aioshm.config import Options
from aioshm.engine.client.liveness import Liveness
from aioshm.engine.client.membership import MembershipLink
from aioshm.engine.client.pending import Pending
from aioshm.engine.client.sockets import ClientSockets
from aioshm.engine.client.streams import Inbox
from aioshm.engine.protocol.addresses import CoreEngine, EngineZmqAddresses
from aioshm.engine.protocol.balance import LoadBalancer
from aioshm.engine.protocol.envelopes import EnvelopeDecoder
from aioshm.engine.protocol.membership import Membership, Progress
from aioshm.engine.protocol.messages import ENGINE_CORE_DEAD, EngineCoreRequestType
from aioshm.engine.protocol.payloads import Frame, check_stranger
from aioshm.engine.protocol.registrations import Registrations
from aioshm.engine.protocol.reports import encode_scale
from aioshm.engine.security.binding import Protection, over_tcp
from aioshm.engine.security.keys import EngineKeys, keys_for_front_end
from aioshm.errors import CodecError, EndClosed, EngineDead, RoleError
from aioshm.lifeline.address import connectable
from aioshm.logs import LogLimiter
from aioshm.process.guard import built
from aioshm.zeromq.curve import CurveKeys
from aioshm.zeromq.endpoint import host_of

logger: logging.Logger = logging.getLogger("aioshm.engine")

_LOG_INTERVAL_S = 10.0
_UNKNOWN_S = 2.0  # that an engine may know that it is one before this client was told of it
_ADD = EngineCoreRequestType.ADD.value
_ABORT = EngineCoreRequestType.ABORT.value

OnEngineChange: TypeAlias = Callable[[int, EngineDead | None], object]
OnEngineDeath: TypeAlias = Literal["fail", "continue"]
Resubmit: TypeAlias = Literal["unstarted"]

_encode_plain = msgspec.msgpack.Encoder().encode
_decode_counts = built(lambda: msgspec.msgpack.Decoder(tuple[list[list[float]] | None, int, bool])).decode


class EngineLink:
    """Sends to engines, and gives what comes from them to whom it is for; its arguments are those of `EngineClient`.

    Attributes:
        index: Which of the addresses' inputs and outputs are used.
        addresses: What engines are to be told.
        options: Those given, or the environment's.
        engines: The engines, and what they have said.
        balance: Chooses among them.
        pending: What is waited for.
        liveness: Notices their deaths; once this is open.
        settled: Set when all engines have registered, or never will; once this is open.
        wave: The wave that the coordinator has told of.
        goes_on: Whether the others go on when an engine dies.
        deaths: How the engines have died that are not back, by rank, if this goes on without them.
        died: How many have died in all.
    """

    def __init__(
        self,
        addresses: EngineZmqAddresses,
        engines: Sequence[CoreEngine] | int,
        client_index: int,
        output_type: Any,
        options: Options | None,
        keys: EngineKeys | None,
        secure: bool,
        on_engine_death: OnEngineDeath,
        on_engine_change: OnEngineChange | None,
        membership_address: str | None,
    ) -> None:
        self.sockets: ClientSockets | None = None
        self._closed = False
        if isinstance(engines, int):
            self.engines: Registrations = Registrations(range(check_int("engines", engines, minimum=1)))
        else:
            self.engines = Registrations(engine.index for engine in engines)
        n_clients = min(len(addresses.inputs), len(addresses.outputs))
        if check_int("client_index", client_index, minimum=0) >= n_clients:
            raise ValueError(f"client_index must be below {n_clients}, the number of addresses, not {client_index}")
        self.addresses = addresses
        self.options: Options = options or Options.from_env()
        self._secure = secure and self.options.secure
        self.goes_on: bool = on_engine_death == "continue"
        self._on_change = on_engine_change
        self._given_keys = keys
        self.index = client_index
        n_engines = len(self.engines.ranks)
        self.balance: LoadBalancer = LoadBalancer(n_engines, n_engines * client_index // n_clients, n_clients)
        self.pending: Pending = Pending(
            EnvelopeDecoder(output_type), self.balance, self.engines.ranks, strict=self.goes_on
        )
        self.wave: int = 0
        self._dead: EngineDead | None = None
        self.deaths: dict[int, EngineDead] = {}
        self.died: int = 0
        self._began = self._complete = False
        self._leaving: set[int] = set()  # engines that get nothing more
        self._membership_address = membership_address
        self._membership: MembershipLink | None = None
        self._early: dict[bytes, tuple[list[bytes], int, str, str]] = {}  # engines that were not told of yet
        self._version = 0  # of the membership that this goes by
        self._incarnations: dict[int, int] = {}  # of the engines that have registered, where their keys tell
        self._limiter = LogLimiter(_LOG_INTERVAL_S)

    def __repr__(self) -> str:
        in_flight = len(self.pending.inboxes)
        return f"<EngineClient {self.index} of engines {self.engines.ranks}, {in_flight} requests in flight>"

    # Opened and closed

    def open(self) -> None:
        """Bind the addresses and begin to listen."""
        if self.sockets is not None or self._closed:
            raise RoleError("a client of engines can be entered once")
        self.settled: asyncio.Event = asyncio.Event()
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        addresses = self.addresses.inputs[self.index], self.addresses.outputs[self.index]
        protection = Protection.of_front_end(addresses, self.engines.ranks, keys=self._given_keys, secure=self._secure)
        self._protection = protection
        self.engines.identities = [protection.name(rank, addresses[0]) for rank in self.engines.ranks]
        # Where engines are recognised by their keys, they speak for nobody else.
        self._recognised = protection.encrypts(addresses[0]), protection.encrypts(addresses[1])
        self._open_to_all = over_tcp(addresses[1:]) and not self._recognised[1]
        hosts = {host_of(address) for address in addresses}
        self._same_route = len(hosts) == 1 and "" not in hosts  # an engine connects to both from one address
        this: EngineLink = weakref.proxy(self)  # the loop holds on to what it calls; a forgotten client shall end
        self.sockets = ClientSockets(
            *addresses,
            this,
            protection,
            max_bytes=self.options.max_message_bytes,
            silence_s=self.options.remote_timeout,
            patience_s=0.0 if self._membership_address is None else _UNKNOWN_S,
        )
        self.addresses.inputs[self.index] = connectable(self.sockets.input_address)
        self.addresses.outputs[self.index] = connectable(self.sockets.output_address)
        self.liveness: Liveness = Liveness(lambda rank: this._lose(rank), lambda error: this._die(error))
        if (address := self._membership_address) is not None:
            self.liveness.expect_explanations()
            self.pending.idle = lambda _position: this._say_progress()
            own = keys_for_front_end(self._given_keys).front_end if self._secure and over_tcp([address]) else None
            curve = None if own is None else CurveKeys(public=own.public, secret=own.secret, server=own.public)
            try:
                self._membership = MembershipLink(address, lambda told: this._follow(told), curve)
            except BaseException:
                self._closed = True
                self.liveness.stop()
                self.sockets.close()
                raise

    async def aclose(self) -> None:
        """Abort what is in flight, and close the sockets."""
        if self._closed or self.sockets is None:
            self._closed = True
            return
        for position, ids in self.pending.by_engine().items():
            self.abort(position, ids)
        self._closed = True
        self.liveness.stop()
        if self._membership is not None:
            self._membership.close()
        self._fail(lambda: EndClosed("the client of the engines was closed"))
        await self.sockets.aclose()

    def __del__(self) -> None:
        if self.sockets is not None and not self._closed:
            warn_not_closed(self)
            self.liveness.stop()
            if self._membership is not None:
                self._membership.close()
            self.sockets.close()

    # What is sent

    def send(self, position: int, kind: bytes, frames: list[Frame]) -> None:
        """Send an engine something.

        Raises:
            EngineDead: It is gone.
        """
        assert self.sockets is not None
        try:
            self.sockets.send(self.engines.identities[position], kind, frames)
        except zmq.ZMQError as error:
            rank = self.engines.ranks[position]
            self.liveness.lost(rank)
            raise EngineDead(f"engine {rank} cannot be reached: {error}", engine=rank) from None
        if not self._complete:
            self.sockets.look_for_registrations()

    def abort(self, position: int, request_ids: list[str]) -> None:
        """Abort requests that were not waited for to the end, if their engine is still there."""
        if self._dead is None and self.engines.ranks[position] not in self.deaths:
            try:
                self.send(position, _ABORT, [_encode_plain(request_ids)])
            except EngineDead:
                pass  # the waiting calls are told

    # What comes

    def registered(self, sender_identity: bytes, frames: list[bytes], connection: int, sender: str, user: str) -> None:
        """Take an engine's registration."""
        try:
            if self._recognised[0]:
                rank_by_keys = self._protection.ranks.get(user)
                self.engines.recognise(sender_identity, rank_by_keys, self._protection.name_of(user))
            if self._membership is not None and self.engines.may_come(sender_identity):
                self._early[sender_identity] = frames, connection, sender, user
                return
            rank = self.engines.take(sender_identity, frames)
        except ValueError as error:
            self._limiter.warn(
                logger, "a registration of %s by %s is ignored: %s", sender_identity[:16].hex(), sender, error
            )
            return
        self.liveness.connected(rank, connection, sender)
        if self._dead is not None:  # of its predecessor, which was not known before
            return
        if self.deaths.pop(rank, None) is not None:
            self.engines.take(sender_identity, frames)  # its predecessor's death, if it was told now, has undone it
            logger.info("engine %d is back: it is %s", rank, sender)
            self._tell_change(rank, None)
        if self._recognised[0]:
            self._incarnations[rank] = int(user.partition(".")[2])
        if rank not in self._leaving:
            self.balance.take_in(self.engines.position(rank))
        self._settle()

    def _settle(self) -> None:
        """Let calls begin if all engines have registered, and those are all that there are."""
        self._say_progress()
        if self.engines.missing or (self._membership is not None and not self._version):
            return
        self._complete = True
        self.settled.set()
        if not self._began:
            self._began = True
            self._subscribe(self.addresses.frontend_stats_publish_address or self.engines.stats_address)

    def disconnected(self, connection: int) -> None:
        """Take the end of a connection."""
        for name in [each for each, (_, its_connection, *_) in self._early.items() if its_connection == connection]:
            del self._early[name]
        self.liveness.disconnected(connection)

    def output(self, frames: list[Frame], origin: str) -> None:
        """Take what an engine has sent."""
        try:
            if self._open_to_all:
                self._check_origin(origin)
                check_stranger(frames)
            sender = None
            if self._recognised[1] and (sender := self._protection.ranks.get(origin)) is None:
                raise CodecError(f"the keys of engine {origin.partition('.')[0]} are void: that incarnation is dead")
            if len(frames) == 1 and frames[0] == ENGINE_CORE_DEAD:
                self.liveness.said_dead(sender)
                return
            unwanted = self.pending.take(frames, sender)
        except CodecError as error:
            self._limiter.warn(logger, "a message from an engine is dropped: %s", error)
            return
        for position, request_id in unwanted:
            self.abort(position, [request_id])

    def counts(self, payload: bytes) -> None:
        """Take what the coordinator has published."""
        try:
            counts, self.wave, _running = _decode_counts(payload)
            if counts is not None:
                self.balance.update([counts[rank] for rank in self.engines.ranks])
        except (ValueError, IndexError) as error:
            self._limiter.warn(logger, "counts from the coordinator are ignored: %s", error)

    def _check_origin(self, origin: str) -> None:
        """Make sure that it comes from a host that an engine has connected from, where strangers may send, too."""
        if self._same_route and origin not in self.liveness.hosts:
            raise CodecError(f"it comes from {origin}, and no engine does")

    # Requests left, engines dead

    def leave(self, request_id: str, inbox: Inbox) -> None:
        """Abort a request whose stream was left."""
        if inbox.ended or self._closed:
            return
        if threading.get_ident() != self._thread:  # the garbage collector's choice
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self.leave, request_id, inbox)
            return
        if self._loop.is_closed():
            return
        self.pending.finish(request_id)
        self.abort(inbox.position, [request_id])

    def _lose(self, rank: int) -> None:
        """Give no more requests to an engine that cannot be reached; its death is told soon."""
        if self.goes_on and rank in self.engines.ranks:
            self.balance.leave_out(self.engines.position(rank))

    def _die(self, error: EngineDead) -> None:
        if self._closed or self._dead is not None:
            return
        assert self.sockets is not None
        self.sockets.read_outputs()  # its last words
        if self.goes_on and error.engine in self.engines.ranks:
            self._go_on_without(error.engine, error)
            return
        self._dead = error
        self.died += 1
        self.liveness.stop()
        # Waiting calls are told; where there are none, it is but an engine that was stopped.
        logger.debug("%s; %d requests and %d calls were pending", error, len(self.pending.inboxes), self.pending.calls)
        self._fail(lambda: _again(error))

    def _go_on_without(self, rank: int, error: EngineDead) -> None:
        """Fail what only a dead engine could have finished, and give others what it had not begun."""
        position = self.engines.position(rank)
        self.engines.died(rank)
        self.balance.leave_out(position)
        self.deaths[rank] = error
        self.died += 1
        self._expect_more()
        its_own = self.pending.by_engine().get(position, [])
        moved = [request_id for request_id in its_own if self._resubmit(request_id)]
        for request_id in its_own:
            if request_id not in moved:
                self.pending.finish(request_id, lambda: _again(error))
        self.pending.fail_calls(position, lambda: _again(error))
        logger.warning(
            "%s; %d of its requests failed, %d went to other engines", error, len(its_own) - len(moved), len(moved)
        )
        self._tell_change(rank, error)
        self._say_progress()

    def _expect_more(self) -> None:
        assert self.sockets is not None
        self._complete = False
        self.settled.clear()
        self.sockets.look_for_registrations()

    def _tell_change(self, rank: int, error: EngineDead | None) -> None:
        if self._on_change is not None:
            self._loop.call_soon(self._on_change, rank, error)

    def _resubmit(self, request_id: str) -> bool:
        """Send a request of a dead engine to another one, if it has brought nothing yet; return whether it was sent."""
        inbox = self.pending.inboxes[request_id]
        if inbox.request is None:
            return False
        # Not to one that has had it before: what its dead process may have sent must not be taken for the new one's.
        tried = {inbox.position, *inbox.tried}
        while choices := [position for position in self.balance.choices if position not in tried]:
            position = self.balance.choose(choices)
            tried.add(position)
            try:
                self.send(position, _ADD, inbox.request)
            except EngineDead:
                continue  # its own death is told soon
            self.pending.move(request_id, position)
            return True
        return False

    def give_up(self, error: EngineDead) -> None:
        """Fail everything that is pending, and all that is begun later, with this error."""
        if not self._closed and self._dead is None:
            self._dead = error
            self.liveness.stop()
            self._fail(lambda: _again(error))

    # More engines, or fewer

    def add(self, rank: int) -> None:
        """Expect one more engine, which gets requests once it has registered."""
        assert self.sockets is not None
        self.engines.add(rank, self._protection.name(rank, self.sockets.input_address))
        self._protection.expect(rank)
        self.balance.resize(len(self.engines.ranks))
        self._expect_more()

    def void_keys(self, rank: int, incarnation: int) -> None:
        """Refuse the keys of the incarnations of an engine that were before this one."""
        assert self.sockets is not None
        self.sockets.read_outputs()  # its last words
        self._protection.void(rank, incarnation)

    async def drain(self, rank: int) -> None:
        """Give an engine no more requests, and wait until it has finished what it has; cancelling this changes that."""
        position = self._begin_to_leave(rank)
        idle = asyncio.Event()

        def notice(now_idle: int) -> None:
            if now_idle == position:
                idle.set()

        try:
            self.pending.idle = notice
            if self.balance.in_flight[position]:
                await idle.wait()
            if answers := self.pending.calls_of(position):
                await asyncio.wait(answers)
        except BaseException:
            self._stay(rank)
            raise
        finally:
            self.pending.idle = None

    def _begin_to_leave(self, rank: int) -> int:
        position = self.engines.position(rank)
        self._leaving.add(rank)
        self.balance.leave_out(position)
        return position

    def _stay(self, rank: int) -> None:
        self._leaving.discard(rank)
        if rank in self.engines.ready:
            self.balance.take_in(self.engines.position(rank))

    def remove_last(self) -> None:
        """Expect the last engine no more; what it still has fails."""
        position, rank = len(self.engines.ranks) - 1, self.engines.ranks[-1]
        gone = EngineDead(f"engine {rank} was taken out of service", engine=rank)
        for request_id in self.pending.by_engine().get(position, []):
            self.pending.finish(request_id, lambda: _again(gone))
        self.pending.fail_calls(position, lambda: _again(gone))
        self.liveness.dismiss(rank)
        self.deaths.pop(rank, None)
        self.engines.remove_last()
        self._leaving.discard(rank)
        self.balance.resize(len(self.engines.ranks))
        self._settle()

    # As another process tells

    def _follow(self, told: Membership) -> None:
        """Go by what is told of the engines: more of them, fewer, some that are to be left alone, or how they died."""
        if self._dead is not None or self._closed:
            return
        for rank in sorted(told.engines.keys() - self.engines.ranks):
            self.add(rank)
        while self.engines.ranks[-1] not in told.engines and len(self.engines.ranks) > 1:
            self.remove_last()
        for rank, incarnation in told.engines.items():
            self.void_keys(rank, incarnation)
        for rank in self._leaving.difference(told.leaving):
            self._stay(rank)
        for rank in set(told.leaving).intersection(self.engines.ranks) - self._leaving:
            for answer in self.pending.calls_of(self._begin_to_leave(rank)):
                answer.add_done_callback(lambda _answer: self._loop.call_soon(self._say_progress))
        for rank, death in told.deaths.items():
            is_this = self._incarnations.get(rank) == death.incarnation if self._recognised[0] else None
            self.liveness.explain(EngineDead(death.text, engine=rank, pid=death.pid), is_this=is_this)
        self._version = told.version
        assert self.sockets is not None
        self.sockets.reconsider()
        for name in self._early.keys() & set(self.engines.identities):
            self.registered(name, *self._early.pop(name))
        if told.failure is not None:
            self.give_up(EngineDead(told.failure.text, engine=told.failure.engine, pid=told.failure.pid))
        self._settle()

    def _say_progress(self) -> None:
        """Tell the process that starts engines how far this front end is with what it was told."""
        if self._membership is not None and not self._closed:
            busy = [rank for rank in sorted(self._leaving) if self._is_busy(self.engines.position(rank))]
            self._membership.say(Progress(self._version, self.engines.missing, busy))

    def _is_busy(self, position: int) -> bool:
        return self.balance.in_flight[position] > 0 or any(not each.done() for each in self.pending.calls_of(position))

    def tell_scale(self) -> None:
        """Tell the coordinator, if there is one, how many engines there are."""
        assert self.sockets is not None
        self.sockets.tell_coordinator(encode_scale(len(self.engines.ranks)))

    def _fail(self, error: Callable[[], Exception]) -> None:
        self.pending.fail(error)
        self.settled.set()

    # Who may call

    def check_ready(self) -> None:
        self.check_open()
        if not self._began:
            raise RoleError("the engines are not ready: await wait_until_ready() first")

    def choose(self, rank: int | None) -> int:
        """Return the position of the engine that gets the next request: that of this rank, or the least busy one.

        Raises:
            EngineDead: It is gone, or all of them are.
            ValueError: There is no such engine.
        """
        if rank is not None:
            if rank in self.deaths:
                raise _again(self.deaths[rank])
            if rank in self._leaving:
                raise EngineDead(f"engine {rank} is being taken out of service", engine=rank)
            return self.engines.position(rank)
        if self.balance.choices:
            return self.balance.choose()
        raise self._nobody()

    def all_positions(self) -> list[int]:
        """Return the positions of the engines that live, and stay.

        Raises:
            EngineDead: None does.
        """
        if not self.balance.choices:
            raise self._nobody()
        return self.balance.choices.copy()

    def _nobody(self) -> EngineDead:
        if len(self.deaths) == 1:
            return _again(*self.deaths.values())
        last = next(reversed(self.deaths.values()), None)
        said = "; ".join(str(error) for error in self.deaths.values())
        return EngineDead(
            f"no engine is left: {said}" if said else "no engine can be reached",
            engine=None if last is None else last.engine,
            pid=None if last is None else last.pid,
        )

    def check_open(self) -> None:
        if self._closed:
            raise EndClosed("the client of the engines was closed")
        if self.sockets is None:
            raise RoleError("a client of engines is used inside `async with`")
        if threading.get_ident() != self._thread:
            raise RoleError("a client of engines is used in the thread of its event loop")
        if self._dead is not None:
            raise _again(self._dead)

    # The coordinator, and complaints

    def _subscribe(self, address: str | None) -> None:
        assert self.sockets is not None
        try:
            if address is not None:
                encrypted = self._secure and over_tcp([address])
                self.sockets.subscribe(
                    address, keys_for_front_end(self._given_keys).to_coordinator() if encrypted else None
                )
        except (OSError, RuntimeError) as error:  # requests are distributed by what this client knows, then
            self._limiter.warn(logger, "there are no counts from the coordinator: %s", error)


def _again(error: EngineDead) -> EngineDead:
    """Return the same error once more: each call that raises it has its own traceback."""
    return EngineDead(*error.args, engine=error.engine, pid=error.pid)
