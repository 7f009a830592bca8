"""Publishes the present engines to front ends in other processes, and receives their progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import msgspec
import zmq

from aioshm.closing import Closing
from aioshm.engine.protocol.addresses import identity
from aioshm.engine.protocol.messages import (
    Death,
    Membership,
    PauseMode,
    PauseOrder,
    Progress,
    check_mode,
    decode_progress,
    describe_unpaused,
    encode,
)
from aioshm.engine.security.binding import FRONT_ENDS, Protection
from aioshm.engine.security.bound_sockets import BoundSockets, sender_of, with_sender
from aioshm.engine.security.keys import EngineKeys
from aioshm.errors import EndClosed, EngineDead, RoleError
from aioshm.logs import LogLimiter
from aioshm.process.restart import Health
from aioshm.zeromq.endpoint import SILENCE_S
from aioshm.zeromq.hosts import connectable
from aioshm.zeromq.sockets import send_message

logger: logging.Logger = logging.getLogger("aioshm.engine")

_LOG_INTERVAL_S = 10.0
_MAX_PROGRESS_BYTES = 1 << 17
_ACKNOWLEDGED_S = 1.0
_UNBOUNDED = 0  # a stopped front end must miss nothing; memberships are small and rare


class FrontEnds(Closing):
    """The front ends of engines, each an `EngineClient` in another process; a context manager, on the running loop.

    Each `EngineClient` with this ``membership_address`` receives the membership immediately and after every change. The
    methods are those of `EngineClient`, for all front ends together. No method waits for a disconnected front end.
    """

    def __init__(
        self, address: str, ranks: Iterable[int], *, keys: EngineKeys | None = None, secure: bool = True
    ) -> None:
        ranks = list(ranks)
        self._membership = Membership(1, dict.fromkeys(ranks, 0))
        self._valid: dict[int, int] = {}  # also of removed engines
        self._alive: set[int] = set()  # the supervisor's engines that are ready; nobody reports deaths of others
        self._names: dict[int, bytes] = {}  # ZeroMQ identities, by connection number
        self._progress: dict[int, Progress] = {}  # by connection number
        self._changed = asyncio.Event()
        self.on_loss: Callable[[], object] | None = None  # an engine may have lost its last front end
        self._limiter = LogLimiter(_LOG_INTERVAL_S)
        protection = Protection.of_front_end([address], (), keys=keys, secure=secure)
        self._bound = BoundSockets(protection)
        try:
            self._router = self._bound.open(
                zmq.ROUTER,
                address,
                hwm=_UNBOUNDED,
                max_bytes=_MAX_PROGRESS_BYTES,
                domain=FRONT_ENDS,
                silence_s=SILENCE_S,
            )
            # Sending to a disconnected front end is an error.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._connections = self._bound.watch(self._router, self._left)
            self.address: str = connectable(self._bound.bind(self._router, address))
            self._pump = self._bound.read(self._router, self._take, partial(with_sender, self._router))
        except BaseException:
            self._bound.close()
            raise

    def __len__(self) -> int:
        """The number of connected front ends."""
        return len(self._progress)

    def close(self) -> None:
        """Stop publishing. Idempotent."""
        self._bound.close()
        self._progress.clear()
        self._changed.set()

    # Published changes

    @property
    def ranks(self) -> list[int]:
        """The ranks of the engines."""
        return list(self._membership.engines)

    def add_engine(self, rank: int) -> None:
        identity(rank)
        if rank in self._membership.engines:
            raise ValueError(f"rank must be that of no engine, not {rank}")
        self._membership.engines[rank] = self._valid.get(rank, 0)
        self._publish()

    async def remove_engine(self, rank: int, *, timeout: float | None = None) -> None:
        leaving = self._membership.leaving
        leaving.append(rank)
        version = self._publish()
        try:
            async with asyncio.timeout(timeout):
                await self._all(lambda each: each.version >= version and rank not in each.busy)
        except TimeoutError:
            pass
        except BaseException:
            leaving.remove(rank)
            self._publish()
            raise
        leaving.remove(rank)
        del self._membership.engines[rank]
        self._alive.discard(rank)
        self._membership.deaths.pop(rank, None)
        self._membership.health.pop(rank, None)
        self._publish()

    async def acknowledged(self) -> None:
        """Wait until all front ends know the newest membership; a front end that hangs holds this up for 1 s."""
        version = self._membership.version
        with suppress(TimeoutError):
            async with asyncio.timeout(_ACKNOWLEDGED_S):
                await self._all(lambda each: each.version >= version)

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        version = self._membership.version
        try:
            async with asyncio.timeout(timeout):
                await self._all(lambda each: each.version >= version and not each.missing)
        except TimeoutError:
            missing = sorted({rank for each in self._progress.values() for rank in each.missing})
            text = f"engines {missing} have not registered everywhere after {timeout} s"
            for rank, (health, where) in self._membership.health.items():
                text += f"; engine {rank} is {health}: {where}"
            raise TimeoutError(text) from None

    def void_keys(self, rank: int, incarnation: int) -> None:
        if incarnation > self._valid.get(rank, 0):
            self._valid[rank] = incarnation
            if rank in self._membership.engines:
                self._membership.engines[rank] = incarnation
                self._publish()

    def note_health(self, rank: int, health: Health, where: str = "") -> None:
        if rank in self._membership.engines:
            if health == "running":
                self._membership.health.pop(rank, None)
            else:
                self._membership.health[rank] = (health, where)
            self._publish()

    def died(self, error: EngineDead, incarnation: int) -> None:
        """Publish the death of an incarnation of an engine."""
        if error.engine in self._membership.engines:
            self._alive.discard(error.engine)
            self._membership.deaths[error.engine] = Death(str(error), error.engine, error.pid, incarnation)
            self._membership.health.pop(error.engine, None)
            self._publish()

    def returned(self, rank: int) -> None:
        """Note that an engine of the supervisor is ready, and stop publishing its death."""
        if rank not in self._membership.engines:  # another host has its front ends
            return
        self._alive.add(rank)
        if self._membership.deaths.pop(rank, None) is not None:
            self._publish()

    def give_up(self, error: EngineDead) -> None:
        self._publish(failure=Death(str(error), error.engine, error.pid))
        self._changed.set()

    def _publish(self, **changes: object) -> int:
        """Publish the membership; return its version."""
        version = self._membership.version + 1
        self._membership = msgspec.structs.replace(self._membership, version=version, **changes)
        if not self._pump.paused:
            for connection in self._progress:
                self._send(connection)
        return version

    def _send(self, connection: int) -> None:
        try:
            send_message(self._router, [self._names[connection], encode(self._membership)])
        except zmq.ZMQError as error:  # disconnected, as the monitor will report
            logger.debug("cannot send the membership to a front end: %s", error)
        self._pump.run_soon()  # sending may clear the event of a received message

    # The pause

    @property
    def paused(self) -> PauseMode | None:
        return self._membership.order.mode or None

    def pause_order(self) -> PauseOrder:
        return self._membership.order

    async def pause(self, mode: PauseMode = "finish", timeout: float | None = None) -> None:
        """Pause the engines; the connected front ends do so, and this waits for one."""
        check_mode(mode)
        self._publish(order=self._membership.order.next(0, mode))
        try:
            async with asyncio.timeout(timeout):
                await self._obeyed()
                while self.paused and (not self._progress or self._unpaused()):
                    await self._change()
                    await self._obeyed()
        except TimeoutError:
            raise TimeoutError(self._describe_unpaused(timeout)) from None
        if not self.paused:
            raise RoleError("the engines were resumed before pause() has returned")

    async def resume(self) -> None:
        self._publish(order=self._membership.order.next(0, ""))
        await self._obeyed()

    async def _obeyed(self) -> None:
        """Wait until all front ends, and so all engines, have obeyed the newest order."""
        await self._all(lambda each: each.order >= self._membership.order and not each.unpaused)

    def _unpaused(self) -> list[int]:
        """Return the ranks of the engines that have not obeyed the newest order, as far as known here."""
        unpaused = {rank for each in self._progress.values() for rank in each.unpaused}
        obeyed = [each for each in self._progress.values() if each.order >= self._membership.order]
        unpaused |= {rank for rank in self._alive if all(rank in each.missing for each in obeyed)}
        return sorted(unpaused)

    def _describe_unpaused(self, timeout: float | None) -> str:
        text = f"the engines have not paused after {timeout} s"
        if not self._progress:
            return f"{text}: no front end is connected, and front ends pause them"
        silent = sum(each.order < self._membership.order for each in self._progress.values())
        if silent:
            return f"{text}: {silent} front ends have not answered"
        return describe_unpaused(self._unpaused(), timeout)

    # Progress of front ends

    def serves(self, rank: int) -> bool:
        """Return whether all front ends have an engine; the first to lose the engine notices a death."""
        known = [each for each in self._progress.values() if each.version]
        return rank in self.ranks and bool(known) and all(rank not in each.missing for each in known)

    async def _all(self, condition: Callable[[Progress], bool]) -> None:
        """Wait until a condition holds for all front ends; raises `EngineDead` when no engine will come back."""
        while True:
            failure = self._membership.failure
            if failure is not None:
                raise EngineDead(failure.text, engine=failure.engine, pid=failure.pid)
            if all(map(condition, self._progress.values())):
                return
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
        if self._pump.paused:
            raise EndClosed("the front ends of the engines are not heard any more: their supervisor was closed")

    def _take(self, message: tuple[zmq.Frame, list[bytes]]) -> None:
        sender, (name, *frames) = message
        connection = self._connections.of(sender)
        if connection is None:
            return
        try:
            progress = decode_progress(frames)
        except ValueError as error:
            self._limiter.warn(logger, "ignored a message from %s, no front end: %s", sender_of(sender), error)
            return
        known = self._progress.get(connection)
        self._names[connection] = name
        self._progress[connection] = progress
        if progress.order > self._membership.order:
            self._publish(order=progress.order)
        if not self._connections.is_open(connection):  # the end was reported before this message
            self._left(connection)
        elif known is None or not progress.version:
            self._send(connection)
        self._note_change()

    def _left(self, connection: int) -> None:
        if self._progress.pop(connection, None) is not None:
            del self._names[connection]
            self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        if self.on_loss is not None:
            self.on_loss()
