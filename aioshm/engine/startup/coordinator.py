"""Shakes hands with engines until all of them are ready, or reports which engines are not, and why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

import zmq

from aioshm.arguments import check_limit, check_type
from aioshm.closing import AsyncClosing, warn_not_closed
from aioshm.config import engine_ready_timeout
from aioshm.engine.protocol.addresses import (
    CoreEngine,
    CoreEngineState,
    EngineZmqAddresses,
    StartupProgress,
    StartupReport,
    Waiting,
    identity,
)
from aioshm.engine.protocol.handshake import FrontEndHandshake
from aioshm.engine.security.binding import Protection, over_tcp
from aioshm.engine.security.bound_sockets import BoundSockets, check_handshake_address, sender_of, user_of, with_sender
from aioshm.engine.security.keys import EngineKeys
from aioshm.engine.startup.options import StartupOptions
from aioshm.engine.startup.processes import local_engines, startup_failure, stop_startup
from aioshm.errors import HandshakeError, RoleError
from aioshm.logs import LogLimiter
from aioshm.process.background import completed, notify, notify_soon
from aioshm.process.watch import ProcessWatch, WatchedManager, WatchedProcess
from aioshm.zeromq.hosts import connectable
from aioshm.zeromq.pump import Pump
from aioshm.zeromq.sockets import send_message

logger: logging.Logger = logging.getLogger("aioshm.engine")

REMINDER_S = 10.0
"""Seconds without progress between two reminders in the log."""

SETTLE_S = 0.1
"""From an exit to the failure: the error names further exits, and ZeroMQ delivers last messages later than the kernel
reports the exit."""

_LOG_INTERVAL_S = 10.0

MAX_FRAME_BYTES = 16 << 20
"""ZeroMQ closes the connection of a peer that sends more, without a log line; smaller messages are refused by name."""

_HWM = 1000


class HandshakeRouter:
    """A ROUTER bound to ``place``; ``on_message`` returns whether to read more."""

    def __init__(
        self,
        place: str,
        on_message: Callable[[bytes, list[bytes], str], bool],
        ranks: Iterable[int] = (),
        *,
        keys: EngineKeys | None = None,
        secure: bool = True,
    ) -> None:
        self._on_message = on_message
        self.protection: Protection = Protection.of_front_end([place], ranks, keys=keys, secure=secure, more=True)
        self._bound = BoundSockets(self.protection)
        try:
            self._router = self._bound.open(zmq.ROUTER, place, hwm=_HWM, max_bytes=MAX_FRAME_BYTES)
            if over_tcp([place]):
                self._bound.watch(self._router)
            self.address: str = self._bound.bind(self._router, place)
            # Sending INIT to a disconnected engine is an error.
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # A second engine with the same rank must reach the handshake, which refuses the engine. Without handover
            # the socket would ignore the second engine.
            self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self.pump: Pump = self._bound.read(self._router, self._take, self._receive)
        except BaseException:
            self.close()
            raise

    def _receive(self) -> tuple[zmq.Frame, list[bytes]]:
        if self.pump.paused:  # further messages are for `EngineStartupCoordinator.stay_open`
            raise zmq.Again
        return with_sender(self._router)

    def _take(self, message: tuple[zmq.Frame, list[bytes]]) -> None:
        sender, (_, *frames) = message
        if not self._on_message(self._identity_of(sender), frames, sender_of(sender)):
            self.pump.pause()

    def _identity_of(self, sender: zmq.Frame) -> bytes:
        """Return the identity that the engine has without keys; an invalid one if its keys are void or foreign.

        A connection outlives the keys of its handshake.
        """
        name = sender.bytes
        if self.protection.encrypts(self.address):
            user = user_of(sender)
            rank = self.protection.rank_of(user)
            if rank is not None and name == self.protection.name_of(user):
                return identity(rank)
        return name

    def answer(self, frames: list[bytes]) -> None:
        """Answer an engine; the first frame is its identity. `zmq.ZMQError`: the engine is not connected."""
        name = self.protection.name(int.from_bytes(frames[0], "little"), self.address)
        send_message(self._router, [name, *frames[1:]])

    def close(self) -> None:
        """Stop reading, and close the socket. Idempotent."""
        self._bound.close()


class EngineStartupCoordinator(AsyncClosing):
    """The front end's side of a startup: shakes hands with engines, and watches all processes meanwhile.

        async with EngineStartupCoordinator(address, engines, addresses, proc_manager=manager) as startup:
            report = await startup.wait()

    The startup fails if a watched process exits, even with code 0, or after ``progress_timeout`` without progress. A
    refused handshake message from any sender is a failure, too: an engine with a wrong rank is an unknown sender, and
    the missing engine would never come. A failure, or leaving the block before every engine is ready, stops the engines
    of ``proc_manager``, and ``coord_process``.

    Messages are read from the beginning of the block on. Processes are watched from the first `wait` on, and the time
    without progress runs from there. ``proc_manager`` and ``coord_process`` may be set until then: with a port that the
    kernel chooses, engines can only start inside the block, with `handshake_address`.

    Args:
        handshake_address: Where engines say HELLO: an ``ipc://`` or ``tcp://`` address to bind.
        engines: The expected engines; their states are kept up to date.
        addresses: The addresses that engines get, as of their HELLO. Receives the ``frontend_stats_publish_address``
            that an engine passes on.
        proc_manager: The manager of the local engines.
        coord_process: The process of the data-parallel coordinator; stopped if it is one of ``multiprocessing``.
        options: See `StartupOptions`; None: the defaults.

    Attributes:
        proc_manager, coord_process: See above.
        watched_processes: See `StartupOptions`; may be set until the first `wait`.
        handshake: The states of the engines, and their messages.
        report: The answers of the engines; None until `wait` has found all of them ready.

    Raises:
        TypeError, ValueError: An argument is invalid; the text names it.
    """

    def __init__(
        self,
        handshake_address: str,
        engines: Iterable[CoreEngine],
        addresses: EngineZmqAddresses,
        *,
        proc_manager: WatchedManager | None = None,
        coord_process: WatchedProcess | None = None,
        options: StartupOptions | None = None,
    ) -> None:
        self._router: HandshakeRouter | None = None
        self._closed = False
        check_handshake_address(handshake_address)
        self.proc_manager = proc_manager
        self.coord_process = coord_process
        self._place = handshake_address
        self._options = chosen = check_type("options", options, StartupOptions) or StartupOptions()
        self.handshake: FrontEndHandshake = FrontEndHandshake(
            engines,
            addresses,
            chosen.parallel_config,
            config_hash=chosen.parallel_config_hash,
            remote_headless=chosen.remote_headless,
        )
        self.progress_timeout: float = chosen.progress_timeout or engine_ready_timeout()
        self.watched_processes: Iterable[WatchedProcess] = chosen.watched_processes
        self.report: StartupReport | None = None
        self._since: dict[int, float] = {}  # the last progress of each engine
        self._reads = False
        self._news = asyncio.Event()  # an engine has advanced, a process has exited, a message was refused
        self._refused: HandshakeError | None = None
        self._outcome: asyncio.Task[StartupReport] | None = None  # since the first `wait`
        self._on_ready: Callable[[int], object] | None = None  # set when engines may come back
        self._limiter = LogLimiter(_LOG_INTERVAL_S)

    @property
    def handshake_address(self) -> str:
        """Where engines say HELLO: the bound address once it is known, with this host's address for a wildcard."""
        if self._router is not None:
            return connectable(self._router.address)
        return self._place

    async def __aenter__(self) -> EngineStartupCoordinator:
        self.open()
        return self

    def open(self) -> None:
        """Bind the address and begin to read; ``async with`` does it.

        Raises:
            OSError: The address cannot be bound.
            RoleError: It was open before, or this process has the keys of one engine only.
        """
        if self._router is not None or self._closed:
            raise RoleError("a startup of engines can be entered once")
        self._router = HandshakeRouter(
            self._place, self.take, self.handshake.engines, keys=self._options.keys, secure=self._options.secure
        )
        self._since = dict.fromkeys(self.handshake.engines, monotonic())
        self._reads = True

    async def wait(self, timeout: float | None = None) -> StartupReport:
        """Wait until every engine is ready.

        Cancelling this call changes nothing: it may be called again. Leaving the block stops the engines.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            HandshakeError: A message was refused. The engines were stopped.
            EngineStartupError: A process exited, or there was no progress for too long. The engines were stopped.
            TimeoutError: Not all engines are ready in time. The startup continues, and may be waited for again.
            RoleError: The block was not entered, or left.
            ValueError: A process was not started.
        """
        check_limit("timeout", timeout)
        if self._router is None:
            raise RoleError("a startup of engines is waited for inside `async with`")
        outcome = self._begin()
        await asyncio.wait([outcome], timeout=timeout)
        if self._reads and not outcome.done():
            raise TimeoutError(f"engines are not ready after {timeout} s: {self.progress}")
        await asyncio.wait([outcome])  # decided; the engines of a failed startup may still be stopping
        return outcome.result()

    def _begin(self) -> asyncio.Task[StartupReport]:
        if self._outcome is None:
            self._outcome = asyncio.create_task(self._run(), name="aioshm-engine-startup")
        return self._outcome

    async def _run(self) -> StartupReport:
        """Return the report once all engines are ready; otherwise stop the engines, and raise."""
        try:
            with ProcessWatch(self.watched_processes, manager=self.proc_manager, on_exit=self._news.set) as watch:
                if self.coord_process is not None:
                    watch.add([self.coord_process])
                cause = await self._shake_hands(watch)
                if cause is None:
                    return self._succeed()
                error = startup_failure(cause, watch.exited(), self.progress, self.handshake.engines, self.proc_manager)
            logger.debug("%s", error)
            raise error
        finally:
            self._reads = False
            if self.report is None:
                await stop_startup(self.proc_manager, self.coord_process)

    async def _shake_hands(self, watch: ProcessWatch) -> str | HandshakeError | None:
        """Wait until every engine is ready, and return None; or return the cause of a failure, "" for an exit."""
        progressed = monotonic()
        while True:
            self._news.clear()
            if watch.exited():  # even if all are ready: READY was the last message of a process then
                await asyncio.sleep(SETTLE_S)
                return self._refused or ""
            if self._refused is not None or self.handshake.complete:
                return self._refused
            if self._closed:
                raise RoleError("this startup of engines was left before they were ready")
            progressed = max([progressed, *self._since.values()])
            left_s = progressed + self.progress_timeout - monotonic()
            if left_s <= 0:
                return f"no progress for {self.progress_timeout:g} s"
            try:
                async with asyncio.timeout(min(REMINDER_S, left_s)):
                    await self._news.wait()
            except TimeoutError:
                if left_s > REMINDER_S:
                    self._announce(None, logging.INFO, "")

    def _succeed(self) -> StartupReport:
        self.report = report = self.handshake.report()
        cache_config = self._options.cache_config
        if cache_config is not None and self.handshake.num_gpu_blocks is not None:
            cache_config.num_gpu_blocks = (getattr(cache_config, "num_gpu_blocks", None) or 0) + report.num_gpu_blocks
        return report

    def stay_open(self, on_ready: Callable[[int], object]) -> None:
        """Shake hands with restarted engines, until the startup is closed.

        Call `handshake.forget` before a dead local engine is restarted, and `retry` when front ends have lost an engine
        of another host.

        From then on a refused message is logged, and ends nothing; an engine without an answer gives up.

        Args:
            on_ready: Called on the loop with the rank of an engine that is ready again.

        Raises:
            RoleError: Not all engines were ready, or the startup is closed.
        """
        if self.report is None or self._closed or self._router is None:
            raise RoleError("a startup of engines stays open once all of them were ready, and before it is closed")
        self._on_ready = on_ready
        self._reads = True
        self.handshake.allow_restarts()
        self._router.pump.resume()

    def retry(self) -> None:
        """Answer each HELLO from another host that has waited for the death of the former engine."""
        for index, early in self.handshake.released().items():
            self.take(self.handshake.engines[index].identity, list(early), f"engine {index}")

    def void_keys(self, index: int, incarnation: int) -> None:
        """Refuse the keys of an engine's earlier incarnations."""
        if self._router is not None:
            self._router.protection.void(index, incarnation)

    async def aclose(self) -> None:
        """Close the socket, and stop the engines unless all of them were ready.

        Idempotent; finishes also when cancelled.
        """
        self._closed = True
        self._reads = False
        self._news.set()
        if self._router is not None:
            outcome = self._begin()
            try:
                await completed(outcome)
            finally:
                if outcome.done() and not outcome.cancelled():
                    outcome.exception()  # retrieved, if nobody waits for it
                self._router.close()

    def __del__(self) -> None:
        router = getattr(self, "_router", None)
        if router is not None and not self._closed:
            warn_not_closed(self)
            router.close()

    # Messages

    def take(self, identity: bytes, frames: list[bytes], sender: str) -> bool:
        """Handle a message; return whether to read more."""
        assert self._router is not None
        if not self._reads:
            return False
        index = int.from_bytes(identity, "little")
        engine = self.handshake.engines.get(index)
        before = engine and engine.state
        try:
            reply = self.handshake.receive(identity, frames)
            if reply is not None:
                if engine is not None and before is not CoreEngineState.NEW:
                    logger.warning("engine %d says HELLO again, from %s: its handshake starts anew", index, sender)
                self._router.answer(reply)
        except HandshakeError as error:
            error.args = (f"{error}; it came from {sender}",)
            if self._on_ready is None:
                self._refused = error
                self._settle()
            else:
                self._ignore(str(error))
        except zmq.ZMQError as error:  # the engine may come back
            self.handshake.forget(index)
            self._ignore(f"engine {index} left before it got the addresses: {error}; it was at {sender}")
        if engine is not None and engine.state is not before:
            self._move(index)
        return self._reads

    def _ignore(self, text: str) -> None:
        self._limiter.warn(logger, "ignored a message: %s", text)

    def _move(self, index: int) -> None:
        """Note that an engine has advanced."""
        state = self.handshake.engines[index].state
        if self._on_ready is not None:
            if state is CoreEngineState.READY:
                notify(self._on_ready, index)
            return
        self._since[index] = monotonic()
        addresses = self.handshake.addresses
        if addresses.frontend_stats_publish_address is None:
            addresses.frontend_stats_publish_address = self.handshake.stats_address
        self._announce(index, logging.DEBUG, f"engine {index} is {state.name}: ")
        self._news.set()
        if self.handshake.complete:
            self._settle()

    def _settle(self) -> None:
        """Read no more, until `stay_open`."""
        self._reads = False
        self._news.set()

    # Progress

    @property
    def progress(self) -> StartupProgress:
        """The present progress."""
        return self._progress(None)

    def _announce(self, moved: int | None, level: int, prefix: str) -> None:
        on_progress = self._options.on_progress
        if on_progress is None and not logger.isEnabledFor(level):
            return
        progress = self._progress(moved)
        logger.log(level, "%s%s", prefix, progress)
        if on_progress is not None:
            notify_soon(on_progress, progress)

    def _progress(self, moved: int | None) -> StartupProgress:
        now = monotonic()
        processes = local_engines(self.proc_manager)
        waiting = []
        for index, engine in self.handshake.engines.items():
            if engine.state is not CoreEngineState.READY:
                pid = processes[index].pid if index in processes else None
                waiting.append(Waiting(index, engine.state, now - self._since.get(index, now), pid))
        heard = len(self.handshake.hello)
        return StartupProgress(len(self.handshake.engines), heard, len(self.handshake.ready), tuple(waiting), moved)


async def wait_for_engine_startup(
    handshake_address: str,
    addresses: EngineZmqAddresses,
    core_engines: Iterable[CoreEngine],
    parallel_config: object,
    cache_config: Any = None,
    proc_manager: WatchedManager | None = None,
    coord_process: WatchedProcess | None = None,
    **options: Any,
) -> StartupReport:
    """Wait until every engine is ready, and return their answers; `EngineStartupCoordinator` in one call.

    The arguments are those of `EngineStartupCoordinator` and the fields of `StartupOptions`. Cancelling this stops the
    engines, and so does every error.

    Raises:
        HandshakeError: A message was refused.
        EngineStartupError: A process exited, or there was no progress for too long.
        OSError: The address cannot be bound.
    """
    async with EngineStartupCoordinator(
        handshake_address,
        core_engines,
        addresses,
        proc_manager=proc_manager,
        coord_process=coord_process,
        options=StartupOptions(parallel_config=parallel_config, cache_config=cache_config, **options),
    ) as startup:
        return await startup.wait()
