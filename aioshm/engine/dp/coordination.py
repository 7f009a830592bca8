"""The coordinator's sockets, in a process of its own; ``waves.py`` decides."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import zmq

from aioshm.closing import Closing
from aioshm.engine.protocol.control import (
    NOTICE_BYTES,
    UNSUBSCRIBED,
    Notice,
    decode_from_front_end,
    decode_notice,
    decode_report,
    encode,
    encode_start,
)
from aioshm.engine.protocol.messages import COORDINATOR_READY, SUBSCRIBE_TO_ALL, StartWave
from aioshm.engine.protocol.waves import Published, Waves
from aioshm.engine.security.binding import ENGINES, FRONT_ENDS, Protection, over_tcp
from aioshm.engine.security.bound_sockets import MAX_STRANGE_BYTES, BoundSockets, user_of, with_sender
from aioshm.engine.security.keys import EngineKeys
from aioshm.logs import LogLimiter
from aioshm.process import progress
from aioshm.zeromq.pump import Pump
from aioshm.zeromq.sockets import Socket

COMPLAINT_S = 10.0
REMINDER_S = 60.0
"""How often the log says that engines have not subscribed yet."""

# An XPUB socket drops messages above these. Counts are published again, but messages to engines are not.
_FRONT_END_HWM = 1_000
_ENGINE_HWM = 100_000
_OVERSIZED = 16 << 20  # ZeroMQ closes the connection at such a frame; smaller messages are refused with a log line

logger: logging.Logger = logging.getLogger("aioshm.engine.coordinator")


class CoordinatorAddresses(NamedTuple):
    """The bound addresses of a coordinator."""

    stats_publish: str  # where front ends subscribe
    engine_input: str  # where engines subscribe
    engine_output: str  # where engines report to


class Coordination(Closing):
    """Passes messages between engines and front ends; a context manager, on the running loop."""

    def __init__(
        self,
        waves: Waves,
        addresses: CoordinatorAddresses,
        keys: EngineKeys | None = None,
        secure: bool = True,
        valid: Mapping[int, int] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = loop.create_future()
        self._waves = waves
        self._limiter = LogLimiter(COMPLAINT_S)
        self._pumps: list[Pump] = []
        self._reminding = loop.call_later(REMINDER_S, self._remind)
        self._publishing: asyncio.TimerHandle | None = None
        own = None if keys is None else keys.coordinator
        self._protection = Protection(keys, own, range(waves.n_engines), secure=secure, more=True)
        for rank, incarnation in (valid or {}).items():
            self._protection.void(rank, incarnation)
        self._bound = BoundSockets(self._protection)
        try:
            self._front_ends, stats_publish = self._bind(zmq.XPUB, addresses.stats_publish, _FRONT_END_HWM, FRONT_ENDS)
            self._engines, engine_input = self._bind(zmq.XPUB, addresses.engine_input, _ENGINE_HWM)
            self._reports, engine_output = self._bind(zmq.PULL, addresses.engine_output, _ENGINE_HWM)
        except BaseException:
            self.close()
            raise
        self.addresses: CoordinatorAddresses = CoordinatorAddresses(stats_publish, engine_input, engine_output)
        self._read(self._engines, self._from_engine)

    def end(self) -> None:
        """End the coordination without an error."""
        if not self.over.done():
            self.over.set_result(None)

    def close(self) -> None:
        """Close everything. Idempotent."""
        self._reminding.cancel()
        if self._publishing is not None:
            self._publishing.cancel()
        self._bound.close()

    def _bind(self, kind: int, address: str, hwm: int, domain: str = ENGINES) -> tuple[Socket, str]:
        max_bytes = MAX_STRANGE_BYTES if over_tcp([address]) else _OVERSIZED
        socket = self._bound.open(kind, address, hwm=hwm, max_bytes=max_bytes, domain=domain)
        if kind == zmq.XPUB:
            socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # reports every subscription and its end, not only the first
        if over_tcp([address]):
            self._bound.watch(socket)
        return socket, self._bound.bind(socket, address)

    # Receiving

    def _read(self, socket: Socket, handle: Callable[[list[bytes], zmq.Frame], None]) -> None:
        def take(message: tuple[zmq.Frame, list[bytes]]) -> None:
            sender, frames = message
            try:
                handle(frames, sender)
                self._publish()
            except ValueError as error:
                self._limiter.warn(logger, "dropped a message: %s", error)
            except Exception as error:  # engines would wait for ever: the end of this process is noticed
                if not self.over.done():
                    self.over.set_exception(error)

        self._pumps.append(self._bound.read(socket, take, partial(with_sender, socket)))

    def _from_engine(self, frames: list[bytes], sender: zmq.Frame) -> None:
        if frames == [SUBSCRIBE_TO_ALL]:
            was_ready = self._waves.ready
            if self._waves.subscribe(self._rank_of(sender)):
                self._engines.send(COORDINATOR_READY, zmq.NOBLOCK)
            if self._waves.ready and not was_ready:
                self._begin()
        elif frames == [UNSUBSCRIBED]:
            self._waves.unsubscribe()
        else:
            raise ValueError("engines subscribe to everything, and send nothing else here")

    def _begin(self) -> None:
        """Read reports and front ends from now on: before, an answer would not have reached all engines."""
        logger.debug("all engines have subscribed")
        self._reminding.cancel()
        self._read(self._front_ends, self._from_front_end)
        self._read(self._reports, self._from_report)

    def _from_front_end(self, frames: list[bytes], _sender: zmq.Frame) -> None:
        if frames == [SUBSCRIBE_TO_ALL]:
            self._waves.greet(asyncio.get_running_loop().time())
        elif frames != [UNSUBSCRIBED]:
            message = decode_from_front_end(frames)
            if isinstance(message, int):
                self._scale(message)
            else:
                self._start(self._waves.wake(message.exclude, message.wave))

    def _from_report(self, frames: list[bytes], sender: zmq.Frame) -> None:
        report = decode_report(frames)
        engine = report.engine_index
        rank = self._rank_of(sender)
        if rank is not None and rank != engine:
            raise ValueError(f"engine {rank} speaks for engine {engine}")
        if report.wave_complete is not None:
            if self._waves.complete(engine, report.wave_complete):
                self._publish_now(self._waves.state())
        elif report.start_wave is not None:
            self._start(self._waves.start(engine, report.start_wave))
        if report.scheduler_stats is not None:
            self._waves.load(engine, report.scheduler_stats, asyncio.get_running_loop().time())

    def _rank_of(self, sender: zmq.Frame) -> int | None:
        """Return the rank of an engine by its keys, if keys are in use."""
        if not self._protection.encrypts(self.addresses.engine_input):
            return None
        user = user_of(sender)
        rank = self._protection.rank_of(user)
        if rank is None:
            raise ValueError(f"the keys of engine {user.partition('.')[0]} are void: that incarnation is dead")
        return rank

    def notice(self, notice: Notice) -> None:
        if notice.engines is not None and notice.engines != self._waves.n_engines:
            self._scale(notice.engines)
        if notice.dead is not None:
            self._protection.void(notice.dead, notice.incarnation)
            self._waves.forget(notice.dead, asyncio.get_running_loop().time())
        self._publish()

    def _scale(self, n_engines: int) -> None:
        logger.info("%d engines from now on, after %d", n_engines, self._waves.n_engines)
        self._waves.scale(n_engines, asyncio.get_running_loop().time())

    # Publishing

    def _start(self, start: StartWave | None) -> None:
        if start is not None:
            self._engines.send_multipart(encode_start(start), zmq.NOBLOCK)
            self._publish_now(self._waves.state())

    def _publish_now(self, published: Published) -> None:
        self._front_ends.send(encode(published), zmq.NOBLOCK)
        for pump in self._pumps:
            pump.run_soon()  # sending may clear the event of a received message

    def _publish(self) -> None:
        """Publish counts if they are due, and schedule the next publication."""
        if not self._waves.ready:
            return
        loop = asyncio.get_running_loop()
        if self._waves.due() <= loop.time():
            self._publish_now(self._waves.publish(loop.time()))
        due = self._waves.due()
        if self._publishing is None or due != self._publishing.when():
            if self._publishing is not None:
                self._publishing.cancel()
            self._publishing = loop.call_at(due, self._publish_later)

    def _publish_later(self) -> None:
        self._publishing = None
        self._publish()

    def _remind(self) -> None:
        logger.warning("waiting for engines to subscribe: %d of %d have", self._waves.subscribed, self._waves.n_engines)
        self._reminding = asyncio.get_running_loop().call_later(REMINDER_S, self._remind)


def run_coordinator(bound: Connection, notices: socket.socket, *arguments: Any) -> None:
    """Run the coordinator until SIGTERM or SIGINT, with the arguments of `Coordination`.

    Sends the bound addresses to ``bound``, and receives notices.
    """
    asyncio.run(_run(bound, notices, *arguments))


async def _run(bound: Connection, notices: socket.socket, *arguments: Any) -> None:
    loop = asyncio.get_running_loop()
    notices.setblocking(False)
    try:
        coordination = Coordination(*arguments)
    except OSError as error:
        raise SystemExit(f"{error}") from None

    def receive_notice() -> None:
        with suppress(BlockingIOError):
            if payload := notices.recv(NOTICE_BYTES):
                coordination.notice(decode_notice(payload))
            else:  # the launching process is gone, so this process will soon be killed
                loop.remove_reader(notices)

    with notices, coordination, progress.own().serving():
        loop.add_reader(notices, receive_notice)
        try:
            loop.add_signal_handler(signal.SIGTERM, coordination.end)
            with bound:
                bound.send(tuple(coordination.addresses))
            await coordination.over
        finally:
            loop.remove_reader(notices)
