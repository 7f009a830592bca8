"""Waits until engines are ready, or says who is not, and why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from time import monotonic

import zmq

from aioshm.arguments import check_seconds
from aioshm.closing import AsyncClosing, warn_not_closed
from aioshm.config import engine_ready_timeout
from aioshm.engine.endpoints import check_handshake_address
from aioshm.engine.protocol.addresses import CoreEngine, CoreEngineState, EngineZmqAddresses
from aioshm.engine.protocol.handshake import FrontEndHandshake
from aioshm.engine.protocol.progress import EngineReport, StartupProgress, StartupReport, Waiting
from aioshm.engine.security.binding import over_tcp
from aioshm.engine.security.keys import EngineKeys
from aioshm.engine.startup.router import HandshakeRouter
from aioshm.engine.startup.supervision import Supervision
from aioshm.errors import EngineStartupError, HandshakeError, RoleError
from aioshm.lifeline.address import connectable
from aioshm.logs import LogLimiter
from aioshm.process.background import completed, notify
from aioshm.process.watch import WatchedManager, WatchedProcess
from aioshm.zeromq.sockets import Socket

logger: logging.Logger = logging.getLogger("aioshm.engine")

_LOG_INTERVAL_S = 10.0

REMINDER_S, LAST_REMINDER_S = 10.0, 60.0
"""After this long without progress, and then ever more rarely, it is said once more who is waited for."""

SETTLE_S = 0.1
"""What brings one process down often brings down others: those are named, too, if they exit within this."""


class EngineStartupCoordinator(AsyncClosing):
    """The front end's side of a startup: shakes hands with engines, and watches all processes meanwhile.

        async with EngineStartupCoordinator(address, engines, addresses, proc_manager=manager) as startup:
            report = await startup.wait()

    It has failed when a watched process exits, however well; when a handshake message is refused, from any sender,
    because an engine with a wrong rank is a message from an unknown sender, and the engine that is missing would never
    come; and when nothing has moved for ``progress_timeout``. What has failed, or is left before every engine is ready,
    stops the engines of ``proc_manager`` and ``coord_process``; ``watched_processes`` belong to others and are only
    watched.

    Messages are read from the beginning of the block on, processes that are given are watched from then on, and the
    time without progress runs from the first `wait` on. ``proc_manager`` and ``coord_process`` may be set until then:
    with an address whose port the kernel chooses, engines can only be started inside the block, and told
    `handshake_address`.

    Args:
        handshake_address: Where engines say HELLO: an ``ipc://`` or ``tcp://`` address to bind, or a bound ROUTER
            socket (plain, or of ``zmq.asyncio``), which stays open and is read by nothing else meanwhile. With such a
            socket two engines of one rank that come at the same moment are noticed only by the lack of progress.
        engines: Those that are expected; their states are kept up to date.
        addresses: What engines are told, as it is when they say HELLO. Gets the ``frontend_stats_publish_address`` that
            an engine passes on.
        parallel_config: What engines are to change in their parallel configuration: a mapping, sent as it is, or an
            object with vLLM's attributes. Its ``data_parallel_hybrid_lb`` and ``data_parallel_external_lb`` say
            whether engines on other hosts have front ends of their own.
        proc_manager: What has started the local engines.
        coord_process: The process of the data-parallel coordinator.
        watched_processes: Other processes without which there is nothing to start for, such as front ends.
        progress_timeout: Seconds without progress after which the startup has failed; None:
            ``AIOSHM_ENGINE_READY_TIMEOUT_S``, or 600. Progress is a HELLO or a READY.
        parallel_config_hash: What engines that say such a hash must say; None: the same as each other.
        remote_headless: Whether engines on other hosts must be headless; None: as ``parallel_config`` says.
        on_progress: Called on the loop when an engine came further, and with reminders in between.
        keys: Who may connect over TCP, and as whom; None: those of this process.
        secure: Whether connections over TCP are encrypted, and only holders of keys get in; engines have to say the
            same. False for engines that know no keys, as vLLM's: then what is refused is logged, and does not end the
            startup, since it may be a stranger's.

    Attributes:
        proc_manager: See above.
        coord_process: See above; stopped if it is one of ``multiprocessing``.

    Raises:
        TypeError, ValueError: An argument makes no sense; the text names it.
    """

    def __init__(
        self,
        handshake_address: str | Socket,
        engines: Iterable[CoreEngine],
        addresses: EngineZmqAddresses,
        *,
        parallel_config: object = None,
        proc_manager: WatchedManager | None = None,
        coord_process: WatchedProcess | None = None,
        watched_processes: Iterable[WatchedProcess] = (),
        progress_timeout: float | None = None,
        parallel_config_hash: object = None,
        remote_headless: bool | None = None,
        on_progress: Callable[[StartupProgress], object] | None = None,
        keys: EngineKeys | None = None,
        secure: bool = True,
    ) -> None:
        self._router: HandshakeRouter | None = None
        self._closed = False
        if not isinstance(handshake_address, zmq.Socket):
            check_handshake_address(handshake_address)
        self.proc_manager = proc_manager
        self.coord_process = coord_process
        self._place = handshake_address
        self._addresses = addresses
        self.handshake: FrontEndHandshake = FrontEndHandshake(
            engines, addresses, parallel_config, config_hash=parallel_config_hash, remote_headless=remote_headless
        )
        self._patience = (
            engine_ready_timeout() if progress_timeout is None else check_seconds("progress_timeout", progress_timeout)
        )
        self._on_progress = on_progress
        self._keys, self._secure = keys, secure
        self._limiter = LogLimiter(_LOG_INTERVAL_S)
        self._strange = ""  # the last message that was refused and may be a stranger's
        self._since: dict[int, float] = {}
        self._processes = Supervision(watched_processes, self._process_exited)
        self._timers: list[asyncio.TimerHandle] = []
        self._settled = asyncio.Event()
        self._report: StartupReport | None = None
        self._refusal: HandshakeError | None = None
        self._failed, self._cause = False, ""
        self._conclusion: asyncio.Task[EngineStartupError] | None = None
        self._on_ready: Callable[[int], object] | None = None  # engines may come back

    def __repr__(self) -> str:
        return f"<EngineStartupCoordinator at {self.handshake_address}: {self.progress}>"

    @property
    def handshake_address(self) -> str:
        """Where engines say HELLO: what was really bound, once it is, with this host's address for a wildcard."""
        if self._router is not None:
            return connectable(self._router.address)
        return self._place if isinstance(self._place, str) else "a socket"

    @property
    def progress(self) -> StartupProgress:
        """How far it is now."""
        return self._progress(None)

    async def __aenter__(self) -> EngineStartupCoordinator:
        self.open()
        return self

    def open(self) -> None:
        """Bind the address and begin to listen; ``async with`` does it.

        Raises:
            OSError: The address cannot be bound.
            RoleError: It was open before, or this process has the keys of one engine only.
            ValueError: The socket is no ROUTER, or a process was not started.
        """
        if self._router is not None or self._closed:
            raise RoleError("a startup of engines can be entered once")
        self._router = HandshakeRouter(
            self._place, self.take, self.handshake.engines, keys=self._keys, secure=self._secure
        )
        self._since = dict.fromkeys(self.handshake.engines, monotonic())
        try:
            self._processes.watch(self.proc_manager, self.coord_process)
        except BaseException:
            self._closed = True
            self._close_sockets()
            raise

    def watch_also(self, processes: Iterable[WatchedProcess]) -> None:
        """Watch these processes, too, from the next `wait` on; to be called before the first one."""
        self._processes.watch_also(processes)

    async def wait(self, timeout: float | None = None) -> StartupReport:
        """Wait until every engine is ready.

        Cancelling this call changes nothing: it may be called again. What stops the engines is leaving the block.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            HandshakeError: A message was refused. The engines were stopped.
            EngineStartupError: A process exited, or nothing has moved for too long. The engines were stopped.
            TimeoutError: They are not ready in time. They go on, and it may be waited for them again.
            RoleError: The block was not entered, or left.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        if self._router is None:
            raise RoleError("a startup of engines is waited for inside `async with`")
        if self._report is None and self._conclusion is None and not self._closed:
            self._processes.watch(self.proc_manager, self.coord_process)
        if not self._settled.is_set():
            if not self._timers:
                self._restart_timers()
            if self.handshake.complete:  # there are none
                self._succeed()
        try:
            async with asyncio.timeout(timeout):
                await self._settled.wait()
        except TimeoutError:
            raise TimeoutError(f"engines are not ready after {timeout} s: {self.progress}") from None
        if self._report is not None:
            return self._report
        if not self._failed:
            raise RoleError("this startup of engines was left before they were ready")
        if self._conclusion is None:
            self._conclusion = asyncio.create_task(self._conclude(), name="aioshm-engine-startup-failed")
        raise await asyncio.shield(self._conclusion)

    def stay_open(self, on_ready: Callable[[int], object]) -> EngineStartupCoordinator:
        """Shake hands with engines that come back, from now on until this is closed; once all of them were ready.

        Nothing that is refused ends anything then: it is logged, and an engine that gets no answer gives up.

        Args:
            on_ready: Called on the loop with the rank of an engine that is ready again.

        Returns:
            This: call `expect` when an engine has died.

        Raises:
            RoleError: Not all were ready, or this is closed.
        """
        if self._report is None or self._closed or self._router is None:
            raise RoleError("a startup of engines stays open once all of them were ready, and before it is closed")
        self._on_ready = on_ready
        self.handshake.allow_restarts()
        self._router.pump.resume()
        return self

    def expect(self, index: int) -> None:
        """Let an engine shake hands: the one that had its rank is dead. One that has said HELLO by now is answered."""
        early = self.handshake.expect(index)
        if early is not None:
            self.take(self.handshake.engines[index].identity, list(early), f"engine {index}")

    def void_keys(self, index: int, incarnation: int) -> None:
        """Refuse the keys of the incarnations of an engine that were before this one."""
        if self._router is not None:
            self._router.protection.void(index, incarnation)

    async def aclose(self) -> None:
        """Close the socket, and stop the engines unless all of them were ready.

        Idempotent; finishes also when it is cancelled.
        """
        self._closed = True
        self._settle()
        try:
            if self._report is None and self._router is not None:
                if self._conclusion is not None:
                    await completed(self._conclusion)
                await self._processes.stop()
        finally:
            self._close_sockets()

    def __del__(self) -> None:
        if self._router is not None and not self._closed:
            warn_not_closed(self)
            self._close_sockets()

    # What happens

    def take(self, identity: bytes, frames: list[bytes], sender: str) -> bool:
        """Take a message; return whether to take more."""
        if self._settled.is_set() and self._on_ready is None:
            return self._hear_out(identity, frames, sender)
        assert self._router is not None
        index = int.from_bytes(identity, "little")
        engine = self.handshake.engines.get(index)
        before = None if engine is None else engine.state
        try:
            reply = self.handshake.receive(identity, frames)
        except HandshakeError as error:
            return self._refuse(f"{error}; it came from {sender}", error, goes_on=not self._router.trusted)
        except (TypeError, ValueError) as error:  # the addresses were changed to something else
            return self._refuse(f"engine {index} cannot be told the addresses: {error}")
        if reply is not None:
            try:
                self._router.answer(reply)
            except zmq.ZMQError as error:
                goes_on = over_tcp([self._router.address]) or self._on_ready is not None
                if goes_on:  # it may come back: its connection broke
                    self.handshake.forget(index)
                text = f"engine {index} left before it could be told the addresses: {error}; it was at {sender}"
                return self._refuse(text, goes_on=goes_on)
        if engine is not None and engine.state is not before:
            self._move(index)
        return self._on_ready is not None or not self._settled.is_set()

    def _refuse(self, text: str, error: HandshakeError | None = None, *, goes_on: bool = False) -> bool:
        """Fail, or go on after what may be a stranger's, whose words are not to end a startup; return which."""
        if not goes_on and self._on_ready is None:
            self._fail(text, error)
            return False
        self._strange = text
        self._limiter.warn(logger, "ignored a message: %s", text)
        return True

    def _hear_out(self, identity: bytes, frames: list[bytes], sender: str) -> bool:
        """Take a message that a process sent before it exited, and whose exit was seen first; return as `take` does.

        The kernel tells of an exit at once, and ZeroMQ's thread hands over messages when it has its turn.
        """
        assert self._router is not None
        if not self._failed or self._cause:
            return False
        try:
            self.handshake.receive(identity, frames)
        except HandshakeError as error:
            if self._router.trusted:
                self._cause, self._refusal = f"{error}; it came from {sender}", error
        except (TypeError, ValueError):  # the addresses were changed to something else
            return False
        return not self._cause

    def _move(self, index: int) -> None:
        if self._on_ready is not None:
            if self.handshake.engines[index].state is CoreEngineState.READY:
                notify(self._on_ready, index)
            return
        self._since[index] = monotonic()
        if self._addresses.frontend_stats_publish_address is None:
            self._addresses.frontend_stats_publish_address = self.handshake.stats_address
        if self._on_progress is not None or logger.isEnabledFor(logging.DEBUG):
            progress = self._progress(index)
            logger.debug("engine %d is %s: %s", index, self.handshake.engines[index].state.name, progress)
            self._announce(progress)
        if self._timers:
            self._restart_timers()
        if self.handshake.complete:
            self._succeed()

    def _succeed(self) -> None:
        if self._processes.exited():
            self._fail()  # READY was the last message of a process that has exited
            return
        self._report = StartupReport(
            {
                index: EngineReport(index, engine.local, self.handshake.hello[index], self.handshake.ready[index])
                for index, engine in self.handshake.engines.items()
            },
            self.handshake.num_gpu_blocks or 0,
            self.handshake.parallel_config_hash,
            self.handshake.stats_address,
        )
        self._settle()
        self._processes.close()

    def _process_exited(self) -> None:
        assert self._router is not None
        self._router.pump.run()  # what it said before it died may be the reason
        self._fail()

    def _fail(self, cause: str = "", refusal: HandshakeError | None = None) -> None:
        if not self._settled.is_set():
            self._failed, self._cause, self._refusal = True, cause, refusal
            self._settle()

    def _settle(self) -> None:
        self._cancel_timers()
        self._settled.set()

    # Time

    def _restart_timers(self) -> None:
        self._cancel_timers()
        loop = asyncio.get_running_loop()
        self._timers = [
            loop.call_later(self._patience, self._give_up),
            loop.call_later(REMINDER_S, self._remind, REMINDER_S),
        ]

    def _give_up(self) -> None:
        text = f"no progress for {self._patience:g} s"
        self._fail(f"{text}; the last message that was ignored: {self._strange}" if self._strange else text)

    def _remind(self, interval: float) -> None:
        progress = self._progress(None)
        logger.info("%s", progress)
        self._announce(progress)
        interval = min(2 * interval, LAST_REMINDER_S)
        self._timers[1] = asyncio.get_running_loop().call_later(interval, self._remind, interval)

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    # What is said

    def _progress(self, moved: int | None) -> StartupProgress:
        now = monotonic()
        pids = {index: process.pid for index, process in self._processes.engines().items()}
        waiting = tuple(
            Waiting(index, engine.state, now - self._since.get(index, now), pids.get(index))
            for index, engine in self.handshake.engines.items()
            if engine.state is not CoreEngineState.READY
        )
        heard = len(self.handshake.hello)
        return StartupProgress(len(self.handshake.engines), heard, len(self.handshake.ready), waiting, moved)

    def _announce(self, progress: StartupProgress) -> None:
        if self._on_progress is not None:
            asyncio.get_running_loop().call_soon(notify, self._on_progress, progress)

    # Failure and closing

    async def _conclude(self) -> EngineStartupError:
        """Stop everything, and return what is to be raised."""
        try:
            await asyncio.sleep(SETTLE_S)
            error = self._processes.failure(self._cause, self._refusal, self.progress, self.handshake.engines)
        finally:
            await self._processes.stop()
        logger.debug("%s", error)
        return error

    def _close_sockets(self) -> None:
        self._processes.close()
        if self._router is not None:
            self._router.close()
