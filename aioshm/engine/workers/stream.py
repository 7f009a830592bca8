"""The items of a worker's generator, for an ``async for`` loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aioshm.arguments import check_timeout
from aioshm.engine.workers.calls import Call, CallTable
from aioshm.errors import RequestAborted

if TYPE_CHECKING:
    from aioshm.engine.stats import Meter


class WorkerStream(AsyncIterator[Any]):
    """The items of a worker's generator, see `WorkerGroup.stream`.

    After a timeout the iteration may continue. Leaving the loop, dropping the stream, `aclose`, and a cancellation
    close the generator; iterating further raises `RequestAborted`.
    """

    def __init__(self, calls: CallTable, call: Call, timeout: float | None, meter: Meter) -> None:
        self._calls = calls
        self._call = call
        self._timeout = timeout
        self._meter = meter
        self._began: int | None = None  # before the first item: the time of the start, for the meter
        self._counted = False  # whether the meter counts this stream now
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
        if not (self._counted or call.done):
            self._began = self._meter.begin()
            self._counted = True
        self._waiting = True
        try:
            item = await self._calls.next_item(call, timeout)
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
        self._meter.items += 1
        if self._began is not None:
            self._meter.took(self._began)
            self._began = None
        return item

    def _aborted(self) -> RequestAborted:
        call = self._call
        text = f"{call.method}: the stream was left before its last item"
        return RequestAborted(text, engine=call.rank, request_id=call.method)

    def _end(self, error: BaseException | None) -> None:
        self._calls.abandon(self._call)
        if self._counted:
            self._counted = False
            self._meter.end(error)

    async def aclose(self) -> None:
        """Close the generator unless finished. Idempotent."""
        self._left = self._left or not self._call.done or bool(self._call.items)
        self._end(GeneratorExit())
        self._call.ready.set()

    def __del__(self) -> None:
        if self._counted:
            with suppress(RuntimeError):  # the loop is closed
                # Later: the table may be at work now. The garbage collector may run in any thread.
                self._loop.call_soon_threadsafe(self._end, GeneratorExit())
