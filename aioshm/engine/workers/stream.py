"""The items of a worker's generator, for an ``async for`` loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager
from typing import Any

from aioshm.arguments import check_timeout
from aioshm.engine.workers.calls import CallTable
from aioshm.engine.workers.messages import Request
from aioshm.engine.workers.schedule import Call
from aioshm.errors import RequestAborted


class WorkerStream(AsyncIterator[Any]):
    """The items of a worker's generator, see `WorkerGroup.stream`.

    After a timeout the iteration may continue. Leaving the loop, dropping the stream, `aclose`, and a cancellation
    close the generator; iterating further raises `RequestAborted`.
    """

    def __init__(
        self,
        calls: CallTable,
        call: Call,
        request: Request,
        timeout: float | None,
        metering: AbstractContextManager[Any],
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

    def __anext__(self) -> Coroutine[Any, Any, Any]:
        return self.next(self._timeout)

    async def next(self, timeout: float | None = None) -> Any:
        """Wait for the next item; raises as the iteration does, see `WorkerGroup.stream`.

        Args:
            timeout: Seconds to wait; None waits for ever.
        """
        check_timeout("timeout", timeout)
        call = self._call
        if self._waiting:
            raise RuntimeError(f"{call.method}: another task waits for an item of this stream")
        if self._left:
            raise self._aborted()
        if self._count_item is None and not call.done:
            self._count_item = self._metering.__enter__()
        self._waiting = True
        try:
            item = await self._calls.next_item(call, self._request, timeout)
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
        self._calls.abandon(self._call)
        if self._count_item is not None:
            self._count_item = None
            self._metering.__exit__(None if error is None else type(error), error, None)

    async def aclose(self) -> None:
        """Close the generator unless finished. Idempotent."""
        self._left = self._left or not self._call.done or bool(self._call.items)
        self._end(GeneratorExit())
        self._call.notify()

    def __del__(self) -> None:
        if self._count_item is not None and asyncio._get_running_loop() is self._loop:
            self._end(GeneratorExit())
