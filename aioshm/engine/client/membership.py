"""A front end's connection to the launching process, which publishes the present engines."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

import zmq

from aioshm.engine.protocol.membership import (
    MAX_MEMBERSHIP_BYTES,
    Membership,
    Progress,
    decode_membership,
    encode,
)
from aioshm.errors import EngineDead
from aioshm.logs import LogLimiter
from aioshm.zeromq.endpoint import CurveKeys, attach, limit_frames, open_socket
from aioshm.zeromq.monitor import Monitor
from aioshm.zeromq.pump import Pump, whole
from aioshm.zeromq.sockets import Sockets

if TYPE_CHECKING:
    from aioshm.engine.client.link import EngineLink

logger: logging.Logger = logging.getLogger("aioshm.engine")

_LOG_INTERVAL_S = 10.0
_UNBOUNDED = 0


class EarlyRegistration(NamedTuple):
    """The registration of an engine that is not in this front end's membership yet; see `ClientSockets`."""

    frames: list[bytes]
    connection: int
    sender: str
    user: str


class MembershipListener:
    """Receives the membership, and reports the progress of this front end; on the running loop."""

    def __init__(self, address: str, link: EngineLink, curve: CurveKeys | None) -> None:
        self._link = link
        self.version: int = 0  # the applied version; 0: none yet
        self.early: dict[bytes, EarlyRegistration] = {}
        self._said = Progress()
        self._limiter = LogLimiter(_LOG_INTERVAL_S)
        self._sockets = Sockets()
        try:
            self._dealer = self._sockets.add(
                open_socket(
                    self._sockets.context,
                    zmq.DEALER,
                    address,
                    bind=False,
                    hwm=_UNBOUNDED,
                    curve=curve,
                    heartbeats=True,
                )
            )
            limit_frames(self._dealer, MAX_MEMBERSHIP_BYTES)
            self._monitor = Monitor(self._dealer)
            self._sockets.add(self._monitor.pair)
            attach(self._dealer, address, bind=False)
            self._dealer.send(encode(self._said), zmq.NOBLOCK)
            loop = self._loop = asyncio.get_running_loop()
            self._pump = Pump.of_messages(loop, self._dealer, self._take, whole(self._dealer))
            self._connection = Pump(loop, self._monitor.pair, self._look_at_connection)
        except BaseException:
            self._sockets.close()
            raise

    def forget_early(self, connection: int) -> None:
        """Drop early registrations of a connection that has ended."""
        for name in [name for name, each in self.early.items() if each.connection == connection]:
            del self.early[name]

    def say(self, missing: list[int], busy: list[int]) -> None:
        """Report the progress of this front end, if it has changed."""
        progress = Progress(self.version, missing, busy)
        if progress != self._said:
            self._said = progress
            self._send()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._pump.pause()
        self._connection.pause()
        self._monitor.close()
        self._sockets.close()

    def _send(self) -> None:
        self._dealer.send(encode(self._said), zmq.NOBLOCK)
        self._pump.run_soon()  # sending may clear the sign that there is something to read

    def _look_at_connection(self) -> None:
        if self._monitor.read()[0]:  # a new connection, of which the other end knows nothing yet
            self._send()

    def _take(self, frames: list[bytes]) -> None:
        try:
            told = decode_membership(frames)
        except ValueError as error:
            self._limiter.warn(logger, "what was said of the engines is ignored: %s", error)
            return
        if self._link.dead is None and not self._link.closed:
            self._follow(told)

    def _follow(self, told: Membership) -> None:
        """Apply a membership: more engines, fewer, leaving ones, and deaths."""
        link = self._link
        engines = link.engines
        for rank in sorted(told.engines.keys() - engines.ranks):
            link.add(rank)
        while engines.ranks[-1] not in told.engines and len(engines.ranks) > 1:
            link.remove_last()
        for rank, incarnation in told.engines.items():
            link.void_keys(rank, incarnation)
        for rank in engines.leaving.difference(told.leaving):
            engines.stay(rank)
        for rank in set(told.leaving).intersection(engines.ranks) - engines.leaving:
            engines.begin_to_leave(rank)
            for answer in link.pending.calls_of(rank):
                answer.add_done_callback(lambda _answer: self._loop.call_soon(link.say_progress))
        for rank, death in told.deaths.items():
            link.explain(rank, death.incarnation, EngineDead(death.text, engine=rank, pid=death.pid))
        self.version = told.version
        for name in self.early.keys() & set(engines.names.values()):
            link.registered(name, *self.early.pop(name))
        if told.failure is not None:
            link.give_up(EngineDead(told.failure.text, engine=told.failure.engine, pid=told.failure.pid))
        link.settle()
