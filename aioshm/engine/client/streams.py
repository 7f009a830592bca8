"""The outputs of one request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Self, TypeVar

from aioshm.engine.protocol.payloads import Frame
from aioshm.errors import RoleError

Output = TypeVar("Output")


@dataclass(slots=True, eq=False)
class Inbox:
    """The received outputs of a request that its user has not taken yet.

    The client references this object, and the user an `OutputStream`, which the garbage collector can free.
    """

    request_id: str
    engine: int  # the rank of the engine that has the request
    generation: int  # the generation of the submission that it has
    request: list[Frame] | None = None  # for another engine if this one dies before the first output
    tried: tuple[int, ...] = ()  # the ranks of engines that had the request, and died
    outputs: deque[Any] = field(default_factory=deque)
    waiter: asyncio.Future[None] | None = None  # of the task that waits
    ended: bool = False
    error: Callable[[], Exception] | None = None  # why it has ended, if the request is not finished
    _stay: Callable[[], object] | None = None  # takes back that the end of a cancelled wait's task leaves the stream

    @property
    def interrupted(self) -> bool:
        """Whether the last wait was cancelled, and nobody has waited since."""
        return self._stay is not None

    def put(self, output: Any) -> None:
        """Add an output."""
        self.request = None
        self.outputs.append(output)
        self._wake()

    def end(self, error: Callable[[], Exception] | None = None) -> None:
        """End the outputs."""
        self.ended = True
        self.error = error
        self.resume()
        self._wake()

    async def wait(self) -> None:
        """Wait until there is an output, or the request has ended."""
        while not self.outputs and not self.ended:
            if self.waiter is not None:
                raise RoleError(f"another task or thread waits for outputs of request {self.request_id!r}")
            self.waiter = asyncio.get_running_loop().create_future()
            try:
                await self.waiter
            finally:
                self.waiter = None

    def take(self) -> Any:
        """Return the next output after `wait`; raise the request's error or `StopAsyncIteration` if there is none."""
        if self.outputs:
            return self.outputs.popleft()
        if self.error is not None:
            raise self.error()
        raise StopAsyncIteration

    def interrupt(self, consumer: asyncio.Task[Any], leave: Callable[[Inbox], None]) -> None:
        """Note a cancelled wait; leave the stream when the waiting task ends."""

        def on_end(_consumer: asyncio.Task[Any]) -> None:
            leave(self)

        consumer.add_done_callback(on_end)
        self._stay = partial(consumer.remove_done_callback, on_end)

    def resume(self) -> None:
        """Note that a task waits again, or that no wait is needed."""
        if self._stay is not None:
            self._stay()
            self._stay = None

    def _wake(self) -> None:
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class OutputStream(AsyncIterator[Output], Generic[Output]):
    """The outputs of one request: iterate over them with ``async for``.

    Leaving the iteration early aborts the request: leaving the loop and dropping the stream, `aclose`, or the end of
    the task after a cancelled wait. A timeout for one output aborts nothing while its task continues.

    Attributes:
        request_id: The id of the request.
    """

    __slots__ = ("_inbox", "_leave", "request_id")

    def __init__(self, inbox: Inbox, leave: Callable[[Inbox], None]) -> None:
        self.request_id: str = inbox.request_id
        self._inbox = inbox
        self._leave = leave

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Output]:
        """Wait for the next output.

        Cancelling this loses nothing: the next call returns the same output.

        Raises:
            EngineDead: The engine is gone; with ``on_engine_death="fail"``, any engine.
            RequestAborted: The stream was left, or its id was aborted, or submitted again after a cancelled wait.
            RequestFailed: The engine has refused the request.
            QueueClosed: The client was closed.
            RoleError: Another task waits for the next output.
        """
        return self._next(asyncio.current_task())  # wait_for() of CPython 3.11 awaits this in a task of its own

    async def _next(self, consumer: asyncio.Task[Any] | None) -> Output:
        inbox = self._inbox
        inbox.resume()
        try:
            await inbox.wait()
        except asyncio.CancelledError:
            if consumer is not None and not inbox.ended:
                inbox.interrupt(consumer, self._leave)
            raise
        output: Output = inbox.take()
        return output

    @property
    def engine(self) -> int:
        """The rank of the engine; after its death with ``resubmit="unstarted"`` the rank of the next engine."""
        return self._inbox.engine

    @property
    def inbox(self) -> Inbox:
        """The received outputs."""
        return self._inbox

    async def aclose(self) -> None:
        """Abort the request unless it is finished. Idempotent."""
        self._leave(self._inbox)

    def __del__(self) -> None:
        if not self._inbox.ended:
            self._leave(self._inbox)

    def __repr__(self) -> str:
        return f"<OutputStream of request {self.request_id!r} at engine {self.engine}>"
