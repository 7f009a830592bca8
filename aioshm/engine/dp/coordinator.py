"""The coordinator of data-parallel engines, as seen by the launching process."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, Self

from aioshm.arguments import check_int, check_seconds
from aioshm.engine.dp.coordination import CoordinatorAddresses, run_coordinator
from aioshm.engine.endpoints import get_engine_client_zmq_addr
from aioshm.engine.protocol.addresses import MAX_INDEX
from aioshm.engine.protocol.control import Notice, encode
from aioshm.engine.protocol.waves import Waves
from aioshm.engine.security.binding import over_tcp, warn_of_strangers
from aioshm.engine.security.keys import EngineKeys, keys_for_front_end
from aioshm.errors import EngineStartupError
from aioshm.process.background import in_thread
from aioshm.process.child import Child
from aioshm.process.limits import naming_limits
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S
from aioshm.process.watch import ProcessExit
from aioshm.zeromq.endpoint import BoundFile
from aioshm.zeromq.hosts import connectable

NAME = "DPCoordinator"
START_TIMEOUT_S = 60.0
"""How long its process may take until it is bound."""

_EXIT_S = 2.0  # from the end of its pipe to its exit


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
            except BlockingIOError:  # stuck, with a hundred unread notices; its replacement gets the whole state
                self.proc.kill()
            except OSError:
                pass  # it has exited, and its replacement gets the whole state

    def run_again(self) -> None:
        """Restart the exited process at the same addresses, where engines and front ends reconnect.

        Blocks until the process is bound.

        Raises:
            EngineStartupError: As from the class.
            RoleError: The process still runs, or the coordinator is closed.
        """
        self._reported = self._launch(lambda job: self.start_again(NAME, job))
        self.wait_until_bound()

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
