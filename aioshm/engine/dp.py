"""The coordinator of data-parallel engines: the process with the sockets, and its owner. ``waves.py`` decides."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self

import zmq

from aioshm.arguments import check_int, check_seconds
from aioshm.closing import Closing
from aioshm.engine.protocol.addresses import MAX_INDEX
from aioshm.engine.protocol.messages import COORDINATOR_READY, SUBSCRIBE_TO_ALL, StartWave, encode
from aioshm.engine.protocol.waves import (
    NOTICE_BYTES,
    UNSUBSCRIBED,
    Notice,
    Published,
    Waves,
    decode_from_front_end,
    decode_notice,
    decode_report,
    encode_start,
)
from aioshm.engine.security.binding import ENGINES, FRONT_ENDS, Protection, over_tcp, warn_of_strangers
from aioshm.engine.security.bound_sockets import (
    MAX_STRANGE_BYTES,
    BoundSockets,
    get_engine_client_zmq_addr,
    user_of,
    with_sender,
)
from aioshm.engine.security.keys import EngineKeys, keys_for_front_end
from aioshm.errors import EngineStartupError
from aioshm.logs import LogLimiter
from aioshm.process import progress
from aioshm.process.background import in_thread
from aioshm.process.child import Child
from aioshm.process.limits import naming_limits
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S
from aioshm.process.watch import ProcessExit
from aioshm.zeromq.endpoint import BoundFile
from aioshm.zeromq.hosts import connectable
from aioshm.zeromq.pump import Pump
from aioshm.zeromq.sockets import Socket, send_message

NAME = "DPCoordinator"
START_TIMEOUT_S = 60.0
"""How long the process of a coordinator may take until it is bound."""
_EXIT_S = 2.0  # how long the process may take to exit once its pipe has ended

COMPLAINT_S = 10.0

# An XPUB socket drops messages above these. Counts are published again, but messages to engines are not.
_FRONT_END_HWM = 1_000
_ENGINE_HWM = 100_000
_OVERSIZED = 16 << 20  # ZeroMQ closes the connection at such a frame; shorter ones are refused with a log line

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
            send_message(self._engines, encode_start(start))
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
            coordination.notice(decode_notice(notices.recv(NOTICE_BYTES)))

    with notices, coordination, progress.own().serving():
        loop.add_reader(notices, receive_notice)
        try:
            loop.add_signal_handler(signal.SIGTERM, coordination.end)
            with bound:
                bound.send(tuple(coordination.addresses))
            await coordination.over
        finally:
            loop.remove_reader(notices)


class DPCoordinator(ProcessManager):
    """The process between data-parallel engines and their front ends, named ``DPCoordinator``.

        async with await DPCoordinator.start(n_engines) as coordinator:
            addresses.coordinator_input, addresses.coordinator_output = coordinator.get_engine_socket_addresses()
            addresses.frontend_stats_publish_address = coordinator.get_stats_publish_address()

    The coordinator publishes to front ends how many requests wait and run on each engine, at most every 100 ms and at
    least every 5 s. It wakes paused engines when one of them gets a request. The messages are vLLM's: ``(counts, wave,
    running)`` as MessagePack, with counts of None after a change of the wave only. Invalid messages, and messages of
    unknown engines, are logged and ignored.

    The constructor blocks until the process is bound, for as long as Python takes to start; `start` does not. Engines
    wait for the coordinator's READY, which comes when all have subscribed.

    Args:
        n_engines: The number of engines. A front end may change it with ``("SCALE_ELASTIC_EP", n)``.
        host: This host's address, for peers on other hosts; ``"*"`` binds all addresses, and peers get the source
            address of this host's packets.
        local_engines: Whether all engines are on this host, and so connect to ``ipc://`` addresses.
        local_front_ends: The same for front ends.
        enable_wave_coordination: Whether engines work in lockstep and so in waves, such as those of mixtures of
            experts.
        kv_cache_usage: Whether counts are ``[waiting, running, kv_cache_usage]``, for the newest front ends;
            ``[waiting, running]`` otherwise.
        timeout: Seconds until the process must be bound.
        wait: Whether to wait until the process is bound. False: call `wait_until_bound`.
        shutdown_timeout: See `ProcessManager`.
        capture_stderr: See `ProcessManager`.
        keys: The keys of the deployment, for TCP; None: the keys of this process.
        secure: Whether TCP connections are encrypted and admit holders of keys only; engines and front ends need the
            same setting.

    Raises:
        EngineStartupError: The process exited, or was not bound in time; the text has the cause, if known.
        TypeError, ValueError: An argument is invalid.
    """

    def __init__(
        self,
        n_engines: int,
        *,
        host: str = "127.0.0.1",
        local_engines: bool = True,
        local_front_ends: bool = True,
        enable_wave_coordination: bool = True,
        kv_cache_usage: bool = True,
        timeout: float = START_TIMEOUT_S,
        wait: bool = True,
        shutdown_timeout: float = SHUTDOWN_TIMEOUT_S,
        capture_stderr: bool = True,
        keys: EngineKeys | None = None,
        secure: bool = True,
    ) -> None:
        _checked(n_engines)
        check_seconds("timeout", timeout)
        wanted = CoordinatorAddresses(
            get_engine_client_zmq_addr(local_front_ends, host),
            get_engine_client_zmq_addr(local_engines, host),
            get_engine_client_zmq_addr(local_engines, host),
        )
        if not secure:
            warn_of_strangers(wanted)
        self._secure = secure
        self._timeout = timeout
        self._given_keys = keys_for_front_end(keys) if secure and over_tcp(wanted) else None
        self._waves = Waves(n_engines, lockstep=enable_wave_coordination, kv_cache_usage=kv_cache_usage)
        self._valid: dict[int, int] = {}  # the first incarnations with valid keys
        self._notices: socket.socket | None = None
        self._bound = wanted
        super().__init__(run_coordinator, (), shutdown_timeout=shutdown_timeout, capture_stderr=capture_stderr)
        try:
            self._reported = self._launch(self.start_more)
            if wait:
                self.wait_until_bound()
        except BaseException:
            self._shutdown_timeout = 0
            self.close()
            raise

    def wait_until_bound(self) -> None:
        """Block until the process is bound, see ``wait``.

        Raises:
            EngineStartupError: The process exited, or was not bound in time.
        """
        with self._reported:
            self._bound = self._await_addresses()
        self._addresses = CoordinatorAddresses(*map(connectable, self._bound))

    @classmethod
    async def start(cls, n_engines: int, **options: Any) -> Self:
        """Create a coordinator, without blocking the loop.

        Cancelling this kills the process, and returns after its exit.

        Args:
            n_engines: The number of engines.
            options: Further arguments of the class.
        """
        coordinator = cls(n_engines, wait=False, **options)
        try:
            await in_thread(coordinator.wait_until_bound)
        except BaseException:
            coordinator._shutdown_timeout = 0
            await coordinator.aclose()
            raise
        return coordinator

    @property
    def proc(self) -> Child:
        """The process of the coordinator."""
        return self.processes[0]

    def get_stats_publish_address(self) -> str:
        """Return where front ends subscribe."""
        return self._addresses.stats_publish

    def get_engine_socket_addresses(self) -> tuple[str, str]:
        """Return where engines subscribe, and where they report to."""
        return self._addresses.engine_input, self._addresses.engine_output

    def void_keys(self, rank: int, incarnation: int) -> None:
        """Note the death of an engine: its load is void, and so are the keys before this incarnation."""
        self._valid[rank] = incarnation
        self._notify(Notice(dead=rank, incarnation=incarnation))

    def scale(self, n_engines: int) -> None:
        """Change the number of engines: the lowest ranks stay.

        Raises:
            TypeError, ValueError: The number is invalid.
        """
        self._waves.scale(_checked(n_engines), 0.0)
        self._notify(Notice(engines=n_engines))

    def _notify(self, notice: Notice) -> None:
        if self._notices is not None:
            try:
                self._notices.send(encode(notice))
            except BlockingIOError:  # stuck, and the socket is full; the replacement gets all that notices say
                self.proc.kill()
            except OSError:
                pass  # the process has exited; the same

    def run_again(self) -> None:
        """Restart the exited process at the same addresses, where engines and front ends reconnect.

        Blocks until the process is bound.

        Raises:
            EngineStartupError: As from the class.
            RoleError: The process still runs, or the coordinator is closed.
        """
        self._waves.restarted = True
        self._reported = self._launch(lambda job: self.start_again(NAME, job))
        try:
            self.wait_until_bound()
        except BaseException:
            self.proc.kill()
            self.proc.join(_EXIT_S)
            raise

    def _launch(self, start: Callable[[Job], Child]) -> Connection:
        """Start the coordinator's process; return the pipe on which the process reports its addresses."""
        with ExitStack() as stack:
            with naming_limits(NAME):
                reported, reporting = map(stack.enter_context, multiprocessing.Pipe(duplex=False))
                notices, received = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            notices.setblocking(False)
            if self._notices is not None:
                self._notices.close()
            self._notices = notices
            with reporting, received:
                state = (self._waves, self._bound, self._given_keys, self._secure, self._valid.copy())
                start(Job(NAME, (reporting, received, *state)))
            stack.pop_all()
            return reported

    def _await_addresses(self) -> CoordinatorAddresses:
        try:
            if self._reported.poll(self._timeout):
                return CoordinatorAddresses(*self._reported.recv())
        except EOFError:
            self.proc.join(_EXIT_S)
        found = ProcessExit(self.proc.name, self.proc.pid, self.proc.exitcode)
        if found.exitcode is None:
            raise EngineStartupError(f"{found.name} (pid {found.pid}) was not bound after {self._timeout:g} s")
        text = f"{found.describe()} before it was bound"
        lines = self.last_lines(NAME)
        if lines:
            text = "\n  ".join([f"{text}\nlast lines of its stderr:", *lines])
        raise EngineStartupError(text, failed={found.name: found.exitcode})

    def _release(self) -> None:
        super()._release()
        if self._notices is not None:
            self._notices.close()
        for address in self._bound:  # a killed process leaves its socket files
            BoundFile(address).remove()


def _checked(n_engines: int) -> int:
    return check_int("n_engines", n_engines, minimum=1, maximum=MAX_INDEX + 1)
