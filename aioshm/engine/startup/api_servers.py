"""The API server processes of a front end: started, restarted, and waited for."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aioshm.arguments import check_int, check_plain, check_type
from aioshm.config import Options
from aioshm.engine.security.keys import EngineKeys, as_attributes, keys_to_hand_over
from aioshm.engine.startup.processes import close_any
from aioshm.errors import EndClosed, ProcessDied, RoleError
from aioshm.process.background import in_thread, notify_soon
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.placement import Placement, check_placement, place_of
from aioshm.process.restart import Life, RankInfo, Restart
from aioshm.process.stalls import ProgressWatch, Watched
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S
from aioshm.process.watch import ProcessExit, ProcessWatch, WatchedProcess

logger: logging.Logger = logging.getLogger("aioshm.engine")


class APIServerProcessManager(ProcessManager):
    """API server processes that share one listening socket, named ``ApiServer_0`` and so on.

    Each runs ``target_server_fn(listen_address, sock, args, client_config)``. The client config is a dict:
    ``input_address`` and ``output_address``, where this server meets the engines; ``client_count``, the number of
    servers; ``client_index``, the index of this server; ``stats_update_address`` and ``membership_address``, if there
    are any.

    With ``restart`` a dead server is restarted with the same index and socket, while other servers run. The
    connections and requests of the dead server are lost. New connections go to other servers, or wait at the
    socket. Engines abort the requests of the dead server, and register with the new process when the process binds its
    addresses, which need fixed ports over TCP. Late outputs for the dead server are dropped, see
    `EngineClient.late_outputs`: request ids have to be unique across processes. A server that exits with code 0 is
    done, and not restarted. A server whose event loop makes no progress for ``AIOSHM_STALL_WARNING_S`` is named in the
    log with its line of Python, and killed and restarted after ``Restart(hang_s=)``; this begins when the server opens
    its first `EngineClient`.

    Args:
        target_server_fn: The target of each process.
        listen_address: Where the socket listens, for people.
        sock: The listening socket; each process gets a copy. The caller may close it at any time.
        args: Passed to the target.
        num_servers: The number of servers.
        input_addresses: One for each server.
        output_addresses: One for each server.
        stats_update_address: Where the DP coordinator publishes, if there is one.
        shutdown_timeout: See `ProcessManager`.
        capture_stderr: See `ProcessManager`.
        keys: The keys for the `EngineClient` of each process; None: the keys of this process.
        membership_address: Where front ends learn which engines are present, see `ClientOptions`.
        restart: When dead servers are restarted, each by itself, on the running loop, to which the manager belongs
            then. None: never, and the death of one server ends all, see `wait_for_completion_or_failure`.
        on_change: With ``restart``, called on the loop when the state of a server has changed.
        placement: Environment, CPUs and NUMA node of each server, by its index; see `Placement`.

    Raises:
        RoleError: With ``restart``: there is no running loop.
        TypeError, ValueError: An argument is invalid; the text names it.
    """

    def __init__(
        self,
        target_server_fn: Callable[..., object],
        listen_address: str,
        sock: socket.socket | None,
        args: Any,
        num_servers: int,
        input_addresses: Sequence[str],
        output_addresses: Sequence[str],
        stats_update_address: str | None = None,
        *,
        shutdown_timeout: float = SHUTDOWN_TIMEOUT_S,
        capture_stderr: bool = True,
        keys: EngineKeys | None = None,
        membership_address: str | None = None,
        restart: Restart | None = None,
        on_change: Callable[[RankInfo], object] | None = None,
        placement: Placement | None = None,
    ) -> None:
        check_plain("target_server_fn", target_server_fn)
        check_int("num_servers", num_servers, minimum=1)
        for name, addresses in (("input_addresses", input_addresses), ("output_addresses", output_addresses)):
            if len(addresses) != num_servers:
                raise ValueError(f"{name} must be {num_servers}, one for each server, not {addresses!r}")
        check_type("restart", restart, Restart)
        if on_change is not None and restart is None:
            raise ValueError("on_change must go with restart: without it no server's state changes but once")
        check_placement(placement, range(num_servers))
        self.listen_address = listen_address
        self.sock = sock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._copy: socket.socket | None = None  # the caller may close the socket before a server is restarted
        if restart is not None:
            self._loop = _running_loop()
            if sock is not None:
                self._copy = sock.dup()
        self._lives: dict[str, Life] = {}  # by the names of the processes, with ``restart``
        self._watch: ProcessWatch | None = None
        self._stalls: ProgressWatch | None = None
        self._failure: ProcessDied | None = None  # the last death of a crash loop
        self._over = asyncio.Event()  # all servers are done, or one is in a crash loop, or the manager is closed
        attributes = as_attributes(keys_to_hand_over(keys))
        shared = {"stats_update_address": stats_update_address, "membership_address": membership_address}
        jobs = []
        for index in range(num_servers):
            config: dict[str, Any] = {"client_count": num_servers, "client_index": index}
            config |= {"input_address": input_addresses[index], "output_address": output_addresses[index]}
            config |= {name: address for name, address in shared.items() if address is not None}
            arguments = (listen_address, self._copy or sock, args, config)
            place = place_of(placement, index)
            jobs.append(Job(f"ApiServer_{index}", arguments, attributes=attributes, place=place))
        super().__init__(target_server_fn, jobs, shutdown_timeout=shutdown_timeout, capture_stderr=capture_stderr)
        if restart is not None:
            report = on_change and partial(notify_soon, on_change)
            for rank, process in enumerate(self.processes):
                self._lives[process.name] = Life(rank, restart, report, process.pid)
            self._watch = ProcessWatch(manager=self, on_exit=self._server_exited)
            self._stalls = ProgressWatch(Options.from_env().stall_warning_s, restart, self._health_changed)
            for process in self.processes:
                self._stalls.add(process.name, process)

    @property
    def servers(self) -> tuple[RankInfo, ...]:
        """The servers, by index."""
        if self._lives:
            return tuple(life.info for life in self._lives.values())
        found = []
        for index, process in enumerate(self.processes):
            running = process.exitcode is None
            found.append(RankInfo(index, process.pid, "running" if running else "exited", 0, ""))
        return tuple(found)

    async def wait(self) -> None:
        """Wait until all servers are done: they have exited with code 0. Cancelling this changes nothing.

        Raises:
            ProcessDied: A server exited with another code; with ``restart``, in a crash loop: the text has every cause.
            QueueClosed: The manager was closed.
        """
        if self._loop is not None:
            await self._over.wait()
            failure = self._failure
            if failure is not None:
                raise ProcessDied(failure.name, failure.pid, failure.exitcode, failure.story)
        else:
            try:
                await all_succeed(self.processes)
            except ProcessDied:
                if not self._closing:
                    raise
        if self._closing:
            raise EndClosed("the manager of the API servers was closed")

    # Restarts

    def _begin_to_close(self) -> None:
        super()._begin_to_close()
        if self._watch is not None and self._loop is not None:
            self._watch.close()
            if self._stalls is not None:
                self._stalls.close()
            if not self._loop.is_closed():
                self._over.set()
                for life in self._lives.values():
                    if life.task is not None:
                        life.task.cancel()

    def _release(self) -> None:
        super()._release()
        if self._copy is not None:
            self._copy.close()

    def _health_changed(self, watched: Watched) -> None:
        life = self._lives[watched.process.name]
        if life.pid == watched.process.pid:
            life.note_health(watched.health, watched.where)

    def _server_exited(self) -> None:
        assert self._watch is not None
        assert self._loop is not None
        for found in self._watch.take():
            life = self._lives[found.name]
            if found.exitcode == 0:
                life.enter("exited")
                if all(other.state == "exited" for other in self._lives.values()):
                    self._over.set()
            elif self._failure is None:
                life.task = self._loop.create_task(self._bring_back(life, found), name=f"aioshm-restarts-{found.name}")

    async def _bring_back(self, life: Life, found: ProcessExit) -> None:
        async def start() -> str:
            life.enter("starting")
            try:
                process = await in_thread(lambda: self.start_again(found.name))
            except Exception as error:
                return f"{found.name} could not be started: {error}"
            life.pid = process.pid
            assert self._watch is not None
            assert self._stalls is not None
            self._watch.add([process], self)
            self._stalls.add(process.name, process)
            life.enter("running")
            return ""

        cause = found.describe()
        if not await life.bring_back(cause, start):
            life.cause = cause
            life.enter("exited")
            story = f"it is in a crash loop: {life.history.story}"
            self._failure = ProcessDied(found.name, found.pid, found.exitcode, story)
            logger.error("%s", self._failure)
            self._over.set()


async def all_succeed(processes: Sequence[WatchedProcess]) -> None:
    """Wait until all processes have exited; raise `ProcessDied` for the first with a code other than 0."""
    with ProcessWatch(processes) as watch:
        while watch.running:
            for found in await watch.next():
                if found.exitcode != 0:
                    raise ProcessDied(found.name, found.pid, found.exitcode)


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RoleError("an event loop restarts servers: with restart=, create the manager in a coroutine") from None


async def wait_for_completion_or_failure(
    api_server_manager: APIServerProcessManager,
    engine_manager: Any = None,
    coordinator: Any = None,
) -> None:
    """Wait until all API servers are done, or the first process of any kind has failed; then stop everything.

    An API server that its manager restarts has not failed.

    Everything is stopped in every case, also when this is cancelled, as by Ctrl-C under `asyncio.run`. A cancellation
    while everything is being stopped kills the remaining processes.

    Args:
        api_server_manager: The API servers.
        engine_manager: The engines: a manager of processes, or another object, such as an `EngineSupervisor`, whose
            ``join_first()`` raises when an engine fails.
        coordinator: The DP coordinator, with its process as ``proc``. Either is stopped by ``aclose()``, or else by
            ``close()``, which may block.

    Raises:
        ProcessDied: A process exited with a code other than 0.
        EngineDead: An engine that is no process of the manager has failed.
    """
    others = [manager for manager in (engine_manager, coordinator) if manager is not None]
    completion = asyncio.ensure_future(api_server_manager.wait())
    tasks = [completion, *(asyncio.ensure_future(_fail_with(other)) for other in others)]
    try:
        left = set(tasks)
        while not completion.done():
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        stopping = map(close_any, [api_server_manager, *others])
        outcomes = await asyncio.gather(*stopping, return_exceptions=True)
        await asyncio.gather(*tasks, return_exceptions=True)
        failures = [error for error in outcomes if error is not None]
        for error in failures:
            logger.error("could not stop everything: %s", error)
    if failures:
        raise failures[0]


async def _fail_with(manager: Any) -> None:
    """Wait for the processes or actors of a manager; raise if one fails."""
    if hasattr(manager, "join_first") and not isinstance(manager, ProcessManager):
        await manager.join_first()
    elif hasattr(manager, "processes"):
        await all_succeed(list(manager.processes))
    elif hasattr(manager, "proc"):
        await all_succeed([manager.proc])
