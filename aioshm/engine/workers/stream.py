"""The items of a worker's generator, for the caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from aioshm.engine.workers.messages import Request
from aioshm.engine.workers.schedule import Call
from aioshm.errors import RequestAborted

if TYPE_CHECKING:
    from aioshm.engine.workers.calls import Calls


class WorkerStream(AsyncIterator[Any]):
    """The items of a worker's generator, see `WorkerGroup.stream`.

    After a timeout the next item may be waited for again. Leaving the stream closes the generator: leaving the loop,
    dropping the stream, `aclose`, or a cancellation. Iterating further raises `RequestAborted`.
    """

    def __init__(
        self, calls: Calls, call: Call, request: Request, timeout: float | None, metering: AbstractContextManager[Any]
    ) -> None:
        self._calls = calls
        self._call = call
        self._request = request
        self._timeout = timeout
        self._metering = metering
        self._count_item: Callable[[], None] | None = None  # None: before the beginning, and after the end
        self._loop = asyncio.get_running_loop()
        self._left = False
        self._waiting = False

    async def __anext__(self) -> Any:
        call = self._call
        if self._waiting:
            raise RuntimeError(f"{call.method}: another task waits for an item of this stream")
        if self._left:
            raise self._aborted()
        if self._count_item is None and not call.done:
            self._count_item = self._metering.__enter__()
        self._waiting = True
        try:
            item = await self._calls.next_item(call, self._request, self._timeout)
        except TimeoutError:
            raise
        except BaseException as error:
            self._end(None if isinstance(error, StopAsyncIteration) else error)
            if self._left and not isinstance(error, asyncio.CancelledError):
                raise self._aborted() from None
            self._left = isinstance(error, asyncio.CancelledError)
            raise
        finally:
            self._waiting = False
        if self._count_item is not None:
            self._count_item()
        return item

    def _aborted(self) -> RequestAborted:
        call = self._call
        text = f"{call.method}: the stream was left before its last item"
        return RequestAborted(text, engine=call.rank, request_id=call.method)

    def _end(self, error: BaseException | None) -> None:
        self._calls.abandon_call(self._call)
        if self._count_item is not None:
            self._count_item = None
            self._metering.__exit__(None if error is None else type(error), error, None)

    async def aclose(self) -> None:
        """Close the generator unless it is finished. Idempotent."""
        self._left = self._left or not self._call.done or bool(self._call.items)
        self._end(GeneratorExit())
        self._call.notify()

    def __del__(self) -> None:
        if self._count_item is not None and asyncio._get_running_loop() is self._loop:
            self._end(GeneratorExit())
