"""The client of engines for plain threads, on the background loop of the process."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Self, TypeVar

from aioshm.arguments import check_plain, check_seconds
from aioshm.closing import Closing, warn_not_closed
from aioshm.engine.client import client as awaited
from aioshm.engine.client.options import ClientOptions
from aioshm.engine.client.requests import Inbox
from aioshm.engine.protocol.addresses import CoreEngine, EngineZmqAddresses
from aioshm.engine.stats import EngineClientStats
from aioshm.errors import RoleError
from aioshm.process.loop_thread import LoopThread, loop_for
from aioshm.process.watch import WatchedManager, WatchedProcess

Output = TypeVar("Output")


class EngineClient(Closing):
    """`aioshm.engine.EngineClient` for plain threads: the same names without ``await``, and `close`.

    The methods raise the same errors.

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
        loop_factory: Creates an event loop for a thread of the client's own; None: the background loop of the process.

    Raises:
        TypeError, ValueError: An argument is invalid; the text names it.
    """

    def __init__(
        self,
        addresses: EngineZmqAddresses,
        engines: Sequence[CoreEngine] | int,
        options: ClientOptions | None = None,
        *,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    ) -> None:
        self._host: LoopThread | None = None
        self._loop_factory = check_plain("loop_factory", loop_factory)
        self._own(awaited.EngineClient(addresses, engines, options), owns_host=True)

    @classmethod
    def around(cls, client: awaited.EngineClient, host: LoopThread) -> EngineClient:
        """Return a client around one that is open on the loop of a thread; both stay the caller's."""
        made = cls.__new__(cls)
        made._host = host
        made._own(client, owns_host=False)
        return made

    def _own(self, client: awaited.EngineClient, *, owns_host: bool) -> None:
        self._client = client
        self._owns_host = owns_host
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
        self._host = loop_for("a client of engines", self._loop_factory)
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
        """Send a request, and return its outputs. The request is sent when this returns.

        Args:
            request: Do not change it before this returns.
            engine: The rank of the engine; None: the least busy one.
            timeout: Seconds that each output may take; None: no limit.
        """
        if timeout is not None:
            check_seconds("timeout", timeout)
        host = self._open_host()
        client = self._client
        return host.do(lambda: OutputStream(client.send_request(request, engine), client, host, timeout))

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests: their streams raise `RequestAborted` after the received outputs."""
        ids = request_ids if isinstance(request_ids, str) else list(request_ids)
        self._open_host().run(lambda: self._client.abort(ids))

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
        if timeout is not None:
            check_seconds("timeout", timeout)

        async def called() -> Any:
            try:
                async with asyncio.timeout(timeout) as limit:
                    return await self._client.call(method, *args, engine=engine)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise TimeoutError(f"no answer to a call of {method} within {timeout} s") from None

        return self._open_host().run(called)

    def close(self) -> None:
        """Abort all requests, and close the sockets; a thread of the client's own ends.

        Waiting calls in all threads raise `QueueClosed`. Idempotent.
        """
        host = self._host
        if host is None or host.elsewhere:
            return
        with self._closing:  # a second thread that closes waits for the first
            try:
                if not host.ended:
                    host.run(self._client.aclose)
            finally:
                if self._owns_host:
                    host.end()
            self._closed = True

    def __del__(self) -> None:
        host = self._host
        if host is None or not self._owns_host or self._closed or host.ended or host.elsewhere:
            return
        warn_not_closed(self, "use `with`")
        host.end_after(self._client.aclose)

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
        timeout: Seconds that each output may take; None: no limit. May be changed.
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
        """Wait for the next output.

        Raises:
            EngineDead: An engine is dead.
            RequestFailed: The engine has refused the request.
            RequestAborted: The stream was closed, or its id was aborted.
            QueueClosed: The client was closed.
            RoleError: Another thread waits for the next output, or this is a forked child.
            TimeoutError: The output took longer than ``timeout``; the request continues.
        """
        inbox = self._inbox
        try:
            if not inbox.outputs:
                if not inbox.ended:
                    self._host.run(self._wait)
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

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self.timeout):
                await self._inbox.wait()
        except TimeoutError:
            raise TimeoutError(f"request {self.request_id!r}: no output within {self.timeout:g} s") from None
        except asyncio.CancelledError:  # an interrupt of the waiting thread, whatever a signal handler has raised
            self._leave(self._inbox)
            raise

    def close(self) -> None:
        """Abort the request unless it is finished. Idempotent; may be called in any thread."""
        self._host.post(partial(self._leave, self._inbox))

    @property
    def engine(self) -> int:
        """The rank of the engine that has the request."""
        return self._inbox.engine

    def __repr__(self) -> str:
        return f"<blocking OutputStream of request {self.request_id!r} at engine {self.engine}>"
