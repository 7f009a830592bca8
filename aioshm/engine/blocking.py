"""Engines for plain threads: the client and the launch without ``await``.

    from aioshm.engine.blocking import launch_core_engines

    with launch_core_engines(serve, 2) as launch:
        for output in launch.client.submit(request):
            ...

The client runs on the background loop of the process. The client notices the death of an engine also between calls,
and any number of threads may wait for outputs at the same time.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, Self, TypeVar

from aioshm.arguments import check_limit
from aioshm.closing import Closing, warn_not_closed
from aioshm.engine.client import client as awaited
from aioshm.engine.client.client import ClientOptions
from aioshm.engine.client.requests import Inbox
from aioshm.engine.dp import DPCoordinator
from aioshm.engine.protocol.addresses import CoreEngine, EngineZmqAddresses, StartupReport
from aioshm.engine.protocol.messages import PauseMode
from aioshm.engine.ray.actor import EngineActor
from aioshm.engine.ray.manager import CoreEngineActorManager
from aioshm.engine.startup import launch as launching
from aioshm.engine.startup.processes import CoreEngineProcManager
from aioshm.engine.stats import EngineClientStats
from aioshm.errors import RoleError
from aioshm.process.child import Child
from aioshm.process.loop_thread import LoopThread, shared_loop
from aioshm.process.watch import WatchedManager, WatchedProcess

__all__ = ["CoreEngineLaunch", "EngineClient", "OutputStream", "launch_core_engines"]

Output = TypeVar("Output")


class EngineClient(Closing):
    """`aioshm.engine.EngineClient` for threads, without ``await``, with `close`, and for the engines of the start.

    The methods raise the same errors; `stats` has ``deaths`` and ``late_outputs``.

        with EngineClient(addresses, 2) as client:
            ...  # start the engines with client.addresses, and shake hands with them
            client.wait_until_ready()
            for output in client.submit(request):
                ...

    Several threads may call any method at the same time. Ctrl-C, or an exception of a signal handler, aborts the
    interrupted request, or drops the interrupted call, and nothing else. In a forked child every call raises
    `RoleError`.

    Args:
        addresses: Where to bind.
        engines: The engines, or their number.
        options: See `ClientOptions`; None: the defaults.

    Raises:
        TypeError, ValueError: An argument is invalid; the text names it.
    """

    def __init__(
        self, addresses: EngineZmqAddresses, engines: Sequence[CoreEngine] | int, options: ClientOptions | None = None
    ) -> None:
        self._host: LoopThread | None = None
        self._begin(awaited.EngineClient(addresses, engines, options), None)

    @classmethod
    def around(cls, client: awaited.EngineClient, host: LoopThread) -> EngineClient:
        """Return a client around an open one on the background loop; the caller closes that."""
        made = cls.__new__(cls)
        made._begin(client, host)
        return made

    def _begin(self, client: awaited.EngineClient, host: LoopThread | None) -> None:
        self._client = client
        self._host = host
        self._owns_client = host is None
        self._closing = threading.RLock()
        self._closed = False

    def __repr__(self) -> str:
        return f"<blocking {repr(self._client)[1:]}"

    @property
    def addresses(self) -> EngineZmqAddresses:
        """The addresses for engines."""
        return self._client.addresses

    @property
    def ranks(self) -> list[int]:
        """The ranks of the engines."""
        return self._client.ranks

    @property
    def ready(self) -> Mapping[int, dict[str, Any]]:
        """The registration of each engine, by rank."""
        return self._client.ready

    @property
    def paused(self) -> PauseMode | None:
        """The mode of the pause, from `pause` until `resume` by any client; None: the engines are not paused."""
        return self._client.paused

    @property
    def in_flight(self) -> int:
        """The number of requests in flight."""
        return self._client.in_flight

    def stats(self) -> EngineClientStats:
        """Return the counters of the client; from any thread."""
        return self._client.stats()

    def __enter__(self) -> Self:
        self.open()
        return self

    def open(self) -> None:
        """Bind the addresses and begin to read; ``with`` does it.

        Raises:
            OSError: An address cannot be bound.
            RoleError: The client was open before.
        """
        if self._host is not None:
            raise RoleError("a client of engines can be entered once")
        self._host = shared_loop()
        try:
            self._host.do(self._client.open)
        except BaseException:
            self.close()
            raise

    def watch(self, manager: WatchedManager | None = None, processes: Iterable[WatchedProcess] = ()) -> None:
        """Treat every exit of these processes as the death of an engine."""
        self._open_host().do(lambda: self._client.watch(manager, processes))

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until every engine has registered, for ``timeout`` seconds at most; None waits for ever."""
        self._open_host().run(lambda: self._client.wait_until_ready(timeout))

    def submit(self, request: Any, *, engine: int | None = None, timeout: float | None = None) -> OutputStream[Any]:
        """Send a request; return the iterator of its outputs: see `aioshm.engine.EngineClient.submit`."""
        check_limit("timeout", timeout)
        host = self._open_host()
        client = self._client
        return host.do(lambda: OutputStream(client.send_request(request, engine), client, host, timeout))

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests: their streams raise `RequestAborted` after the received outputs."""
        if not isinstance(request_ids, str):
            request_ids = list(request_ids)
        self._open_host().run(lambda: self._client.abort(request_ids))

    def call(self, method: str, *args: Any, engine: int | None = None, timeout: float | None = None) -> Any:
        """Call a method of the engine, or of all engines.

        Args:
            method: Its name.
            args: Values that MessagePack can encode, and arrays and tensors.
            engine: The rank of the engine; None: all engines.
            timeout: Seconds to wait; None waits for ever. The method still runs after a timeout.

        Raises:
            TimeoutError: No answer in time.
        """
        check_limit("timeout", timeout)

        async def called() -> Any:
            try:
                async with asyncio.timeout(timeout) as limit:
                    return await self._client.call(method, *args, engine=engine)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise TimeoutError(f"no answer to a call of {method} within {timeout} s") from None

        return self._open_host().run(called)

    def pause(self, mode: PauseMode = "finish", timeout: float | None = None) -> None:
        """Pause all engines, see `aioshm.engine.EngineClient.pause`. Ctrl-C leaves the engines pausing."""
        self._open_host().run(lambda: self._client.pause(mode, timeout))

    def resume(self) -> None:
        """End the pause, see `aioshm.engine.EngineClient.resume`."""
        self._open_host().run(self._client.resume)

    def close(self) -> None:
        """Abort all requests, and close the sockets.

        Waiting calls in all threads raise `QueueClosed`. Idempotent.
        """
        host = self._host
        if host is None or host.elsewhere:
            return
        with self._closing:  # a second thread that closes waits for the first
            if not host.ended:
                host.run(self._client.aclose)
            self._closed = True

    def __del__(self) -> None:
        host = getattr(self, "_host", None)
        if host is None or not self._owns_client or self._closed or host.ended or host.elsewhere:
            return
        warn_not_closed(self, "use `with`")
        host.start(self._client.aclose)

    def _open_host(self) -> LoopThread:
        if self._host is None:
            raise RoleError("a client of engines is used inside `with`")
        return self._host


class OutputStream(Closing, Iterator[Output], Generic[Output]):
    """The outputs of one request: ``for`` iterates over them.

    Leaving the loop early, an interrupt in it, or `close` aborts the request; received outputs remain. A timeout aborts
    nothing: the next output may be waited for again.

    Attributes:
        request_id: The id of the request.
        timeout: Seconds that ``for`` waits for each output; None: no limit. May be changed.
    """

    __slots__ = ("__weakref__", "_finalizer", "_host", "_inbox", "_leave", "request_id", "timeout")

    def __init__(self, inbox: Inbox, client: awaited.EngineClient, host: LoopThread, timeout: float | None) -> None:
        self.request_id: str = inbox.request_id
        self.timeout: float | None = timeout
        self._inbox = inbox
        self._host = host
        self._leave = client.leave
        # No __del__: its code runs wherever the stream is dropped, and an exception of a signal handler would be lost
        # in there. A finalizer can be detached at the end of the outputs.
        self._finalizer = weakref.finalize(self, client.leave, inbox)
        self._finalizer.atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Output:
        """Wait for the next output for `timeout` seconds, see `next`."""
        return self.next(self.timeout)

    def next(self, timeout: float | None = None) -> Output:
        """Wait for the next output.

        A timeout loses nothing: the next call returns the same output. Ctrl-C aborts the request.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            StopIteration: The request is finished, and all outputs were returned.
            RoleError: Another thread waits for the next output, or this is a forked child.
            EngineDead, QueueClosed, RequestAborted, RequestFailed, TimeoutError: As in `aioshm.engine.OutputStream`.
        """
        inbox = self._inbox
        try:
            check_limit("timeout", timeout)
            if not inbox.outputs:
                if not inbox.ended:
                    self._host.run(partial(self._wait, timeout))
                if inbox.ended:
                    self._finalizer.detach()
            output: Output = inbox.take()  # only now: an interrupt of the wait loses no output
            return output
        except StopAsyncIteration:
            raise StopIteration from None
        except Exception:
            raise
        except BaseException:  # an interrupt, anywhere in here
            self.close()
            raise

    async def _wait(self, timeout: float | None) -> None:
        try:
            await self._inbox.wait(timeout)
        except asyncio.CancelledError:  # an interrupt of the waiting thread, whatever a signal handler has raised
            self._leave(self._inbox)
            raise

    def close(self) -> None:
        """Abort the request unless it is finished. Idempotent; may be called in any thread."""
        self._host.post(partial(self._leave, self._inbox))

    @property
    def engine(self) -> int:
        """The rank of the engine that has the request."""
        return self._inbox.rank

    def __repr__(self) -> str:
        return f"<blocking OutputStream of request {self.request_id!r} at engine {self.engine}>"


class CoreEngineLaunch:
    """The engines and their surroundings; see `aioshm.engine.CoreEngineLaunch`.

    Attributes:
        awaited: The launch on the loop of the thread.
        engine_manager: The manager of the engines of this host, or of Ray's actors.
        coordinator: The data-parallel coordinator, if there is one.
        processes: The engines that were started here: processes of this host, or Ray's actors.
        addresses: The addresses for engines, and for API servers.
        handshake_address: Where engines say HELLO.
    """

    def __init__(self, launch: launching.CoreEngineLaunch, host: LoopThread) -> None:
        self.awaited = launch
        self.engine_manager: CoreEngineProcManager | CoreEngineActorManager = launch.engine_manager
        self.coordinator: DPCoordinator | None = launch.coordinator
        self.processes: Sequence[Child | EngineActor] = launch.processes
        self.addresses: EngineZmqAddresses = launch.addresses
        self.handshake_address: str = launch.handshake_address
        self._host = host
        self._client: EngineClient | None = None

    @property
    def report(self) -> StartupReport | None:
        """The answers of the engines; None until all are ready."""
        return self.awaited.report

    @property
    def client(self) -> EngineClient:
        """The client of these engines.

        Raises:
            RoleError: API servers have the clients, or there are no engines.
        """
        if self._client is None:
            self._client = EngineClient.around(self.awaited.client, self._host)
        return self._client

    def wait_until_ready(
        self, timeout: float | None = None, *, watched_processes: Iterable[WatchedProcess] = ()
    ) -> StartupReport:
        """Wait until every engine is ready; needed after ``wait=False`` only.

        Args:
            timeout: Seconds to wait; None waits for as long as there is progress.
            watched_processes: More processes whose exit ends the startup.
        """
        launch = self.awaited
        launch.watched_processes = (*launch.watched_processes, *watched_processes)
        return self._host.run(lambda: launch.wait_until_ready(timeout))


@contextmanager
def launch_core_engines(
    target_fn: Callable[..., object], engine_count: int = 1, local_engine_count: int | None = None, **options: Any
) -> Iterator[CoreEngineLaunch]:
    """Start coordinator and engines, shake hands with them, and open a client; a context manager.

    Ctrl-C while engines start stops them; the signal reaches this process only, not the engines.

    Args:
        target_fn: The function that each engine's process runs.
        engine_count: The total number of engines.
        local_engine_count: The number of engines on this host; None: all.
        options: Further arguments of `aioshm.engine.launch_core_engines`. ``on_progress`` is called in the thread.

    Yields:
        The launch.

    Raises:
        Exception: As from `aioshm.engine.launch_core_engines`.
    """
    host = shared_loop()
    manager = launching.launch_core_engines(target_fn, engine_count, local_engine_count, **options)
    launch = host.run(manager.__aenter__)
    try:
        yield CoreEngineLaunch(launch, host)
    finally:
        host.run(lambda: manager.__aexit__(None, None, None))
