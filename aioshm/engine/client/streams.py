"""The outputs of one request, as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Protocol, Self, TypeVar

from aioshm.engine.protocol.payloads import Frame
from aioshm.errors import RoleError

Output = TypeVar("Output")


class Waiter(Protocol):
    """What is told that something has come: the future of a task that waits, or what stands for a thread."""

    def done(self) -> bool:
        """Whether it was told already, and need not be again."""

    def set_result(self, result: None, /) -> None:
        """Tell it."""


class Inbox:
    """What has come for a request and was not taken yet.

    The client has this, and its user an `OutputStream`, so that the latter can be forgotten.

    Attributes:
        position: Of the engine that has the request.
        engine: The rank of that engine.
        request: What to send another engine if this one dies before the first output; None: that is not to be done.
        tried: The positions of engines that had the request, and died.
        outputs: What has come.
        waiter: Is told of what comes.
        ended: Whether no more will come.
        error: Why, if that is not because the request is finished.
    """

    __slots__ = ("ended", "engine", "error", "outputs", "position", "request", "tried", "waiter")

    def __init__(self, position: int, engine: int, request: list[Frame] | None = None) -> None:
        self.position: int = position
        self.engine: int = engine
        self.request: list[Frame] | None = request
        self.tried: tuple[int, ...] = ()
        self.outputs: deque[Any] = deque()
        self.waiter: Waiter | None = None
        self.ended: bool = False
        self.error: Callable[[], Exception] | None = None

    def put(self, output: Any) -> None:
        """Add an output."""
        self.request = None
        self.outputs.append(output)
        self._wake()

    def end(self, error: Callable[[], Exception] | None = None) -> None:
        """Let nothing come any more."""
        self.ended, self.error = True, error
        self._wake()

    def _wake(self) -> None:
        waiter = self.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class OutputStream(AsyncIterator[Output], Generic[Output]):
    """The outputs of one request: ``async for`` gets them; it ends after the last one.

    Leaving it before that, by breaking off, by being cancelled in it, or with `aclose`, aborts the request.

    Attributes:
        request_id: Of the request.
    """

    __slots__ = ("_inbox", "_leave", "request_id")

    def __init__(self, request_id: str, inbox: Inbox, leave: Callable[[str, Inbox], None]) -> None:
        self.request_id: str = request_id
        self._inbox = inbox
        self._leave = leave

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        """Wait for the next output.

        Raises:
            EngineDead: The engine is gone; with ``on_engine_death="fail"`` another one may be it, too.
            RequestFailed: The engine has refused the request.
            QueueClosed: The client was closed.
            RoleError: Another task waits for the next output.
        """
        inbox = self._inbox
        while not inbox.outputs:
            if inbox.ended:
                if inbox.error is not None:
                    raise inbox.error()
                raise StopAsyncIteration
            if inbox.waiter is not None:
                raise RoleError(f"two tasks wait for outputs of request {self.request_id!r}")
            waiter = inbox.waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            except asyncio.CancelledError:
                self._leave(self.request_id, inbox)
                raise
            finally:
                inbox.waiter = None
        output: Output = inbox.outputs.popleft()
        return output

    @property
    def engine(self) -> int:
        """The rank of the engine that has the request; another one's after a death, with ``resubmit="unstarted"``."""
        return self._inbox.engine

    @property
    def inbox(self) -> Inbox:
        """What has come and was not taken yet."""
        return self._inbox

    def leave(self) -> None:
        """Abort the request unless it is finished. Idempotent."""
        self._leave(self.request_id, self._inbox)

    async def aclose(self) -> None:
        """Do what `leave` does."""
        self.leave()

    def __del__(self) -> None:
        if not self._inbox.ended:
            self._leave(self.request_id, self._inbox)

    def __repr__(self) -> str:
        return f"<OutputStream of request {self.request_id!r} at engine {self.engine}>"
