"""The API server processes of a front end."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from aioshm.arguments import check_int, check_plain
from aioshm.engine.security.keys import EngineKeys, as_attributes, keys_to_hand_over
from aioshm.engine.startup.api_server_restarts import ServerRestarts
from aioshm.errors import EndClosed, ProcessDied, RoleError
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.restart import RankInfo, Restart
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S
from aioshm.process.watch import ProcessWatch


class APIServerProcessManager(ProcessManager):
    """API server processes that share one listening socket, named ``ApiServer_0`` and so on.

    Each runs ``target_server_fn(listen_address, sock, args, client_config)``. The client config is a dict:
    ``input_address`` and ``output_address``, where this server meets the engines; ``client_count``, how many servers
    there are; ``client_index``, which one it is; ``stats_update_address`` and ``membership_address``,
    only if there is one.

    With ``restart`` a server that dies is started again, with the same index and socket, while the others serve. Its
    connections and requests are lost, and nothing else: whoever connects meanwhile is another server's, or waits at the
    socket. Engines abort what the dead one has asked for, and register with its successor when that binds its
    addresses, which need ports of their own over TCP. What may still come of a request of the dead one is dropped, see
    `EngineClient.late_outputs`: so ids of requests have to be unique beyond one process. A server that exits with code
    0 is done, and not started again.

    Args:
        target_server_fn: What each process runs.
        listen_address: Where the socket listens, for people.
        sock: The listening socket; each process gets a copy. It stays the caller's to close, at any time.
        args: For the target, as it is.
        num_servers: How many.
        input_addresses: One for each.
        output_addresses: One for each.
        stats_update_address: Where the DP coordinator publishes, if there is one.
        shutdown_timeout: See `ProcessManager`.
        capture_stderr: See `ProcessManager`.
        keys: Each process starts with them, for its `EngineClient`; None: with those of this process.
        membership_address: Where front ends are told which engines there are, if they are; see `EngineClient`.
        restart: When servers that die are started again, each for itself: on the running loop, whose the manager is
            then. None: not at all, the death of one is the end of all, see `wait_for_completion_or_failure`.
        on_change: With ``restart``, called on the loop when the state of a server has changed.

    Raises:
        RoleError: With ``restart``: there is no running loop.
        TypeError, ValueError: An argument makes no sense; the text names it.
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
    ) -> None:
        check_plain("target_server_fn", target_server_fn)
        check_int("num_servers", num_servers, minimum=1)
        for name, addresses in (("input_addresses", input_addresses), ("output_addresses", output_addresses)):
            if len(addresses) != num_servers:
                raise ValueError(f"{name} must be {num_servers}, one for each server, not {addresses!r}")
        if restart is not None and not isinstance(restart, Restart):
            raise TypeError(f"restart must be a Restart, or None, not {restart!r}")
        if on_change is not None and restart is None:
            raise ValueError("on_change must go with restart: without it no server's state changes but once")
        loop = None if restart is None else _running_loop()
        self.listen_address = listen_address
        self.sock = sock
        # A copy: servers are started when the caller may have closed the socket.
        self._copy = sock.dup() if sock is not None and loop is not None else None
        self._restarts: ServerRestarts | None = None
        jobs, attributes = [], as_attributes(keys_to_hand_over(keys))
        for index, addresses in enumerate(zip(input_addresses, output_addresses, strict=True)):
            config: dict[str, Any] = dict(zip(("input_address", "output_address"), addresses, strict=True))
            config |= {"client_count": num_servers, "client_index": index}
            if stats_update_address is not None:
                config["stats_update_address"] = stats_update_address
            if membership_address is not None:
                config["membership_address"] = membership_address
            jobs.append(
                Job(f"ApiServer_{index}", (listen_address, self._copy or sock, args, config), attributes=attributes)
            )
        super().__init__(target_server_fn, jobs, shutdown_timeout=shutdown_timeout, capture_stderr=capture_stderr)
        if restart is not None and loop is not None:
            self._restarts = ServerRestarts(loop, self.processes, self, restart, on_change)

    @property
    def restarts(self) -> bool:
        """Whether servers that die are started again."""
        return self._restarts is not None

    @property
    def servers(self) -> tuple[RankInfo, ...]:
        """The servers, by index."""
        if self._restarts is not None:
            return tuple(life.info for life in self._restarts.lives)
        return tuple(
            RankInfo(index, process.pid, "running" if process.exitcode is None else "exited", 0, "")
            for index, process in enumerate(self.processes)
        )

    async def wait(self) -> None:
        """Wait until all servers are done: they have exited with code 0. Cancelling this changes nothing.

        Raises:
            ProcessDied: One exited with another code; with ``restart``, so often that it is a crash loop: the text has
                the cause of every death.
            QueueClosed: The manager was closed.
        """
        if self._restarts is not None:
            await self._restarts.over.wait()
            if (failure := self._restarts.failure) is not None:
                raise ProcessDied(failure.name, failure.pid, failure.exitcode, failure.story)
        else:
            with ProcessWatch(self.processes) as watch:
                while watch.running:
                    for found in await watch.next():
                        if found.exitcode != 0 and not self._closing:
                            raise ProcessDied(found.name, found.pid, found.exitcode)
        if self._closing or (self._restarts is not None and self._restarts.closed):
            raise EndClosed("the manager of the API servers was closed")

    def close(self) -> None:
        """Stop the servers, see `shutdown`. Idempotent; blocks. With ``restart``, in the thread of the loop."""
        if self._restarts is not None and self._pid == os.getpid():
            self._restarts.close()
        super().close()
        if self._copy is not None:
            self._copy.close()

    async def aclose(self) -> None:
        """Stop the servers, see `ashutdown`. Idempotent; cancelling this kills them, and nothing is left."""
        try:
            if self._restarts is not None and self._pid == os.getpid():
                await self._restarts.aclose()
        finally:
            try:
                await super().aclose()
            finally:
                if self._copy is not None:
                    self._copy.close()


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RoleError("servers are started again by an event loop: with restart=, make this in a coroutine") from None
