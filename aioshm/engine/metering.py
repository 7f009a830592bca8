"""Counts calls, their ends, and their durations."""

from __future__ import annotations

import asyncio
import functools
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from aioshm.ring.header import Latency

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class CallStats(msgspec.Struct, frozen=True):
    """Calls up to one moment.

    Attributes:
        calls: How many began.
        failed: How many ended with an error.
        cancelled: How many were cancelled, or timed out.
        in_flight: How many have not ended.
        latency: The durations of successful calls, waits included.
    """

    calls: int = 0
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    latency: Latency = Latency()


class StreamStats(msgspec.Struct, frozen=True):
    """Streams up to one moment.

    Attributes:
        streams: How many began.
        failed: How many ended with an error.
        cancelled: How many were left early, cancelled, or timed out.
        in_flight: How many have not ended.
        items: How many items the consumers received.
        first_item: The times until the first items, waits included.
    """

    streams: int = 0
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    items: int = 0
    first_item: Latency = Latency()


class _Histogram:
    """Counts durations."""

    def __init__(self) -> None:
        self._sum_ns = 0
        self._counts = [0] * len(Latency().counts)

    def add(self, took_ns: int) -> None:
        self._sum_ns += took_ns
        self._counts[bisect_right(Latency.BOUNDS_NS, took_ns)] += 1

    def latency(self) -> Latency:
        return Latency(tuple(self._counts), self._sum_ns)


class CallMeter:
    """Counts calls; used in one thread, read in any."""

    def __init__(self) -> None:
        self._calls = self._failed = self._cancelled = self._ended = 0
        self._took = _Histogram()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count the call in the block."""
        self._calls += 1
        began = monotonic_ns()
        try:
            yield
        except (TimeoutError, asyncio.CancelledError, GeneratorExit):
            self._cancelled += 1
            raise
        except BaseException:
            self._failed += 1
            raise
        else:
            self._took.add(monotonic_ns() - began)
        finally:
            self._ended += 1

    def stats(self) -> CallStats:
        """Return the counters."""
        in_flight = self._calls - self._ended
        return CallStats(self._calls, self._failed, self._cancelled, in_flight, self._took.latency())


class StreamMeter:
    """Counts streams and their items; used in one thread, read in any."""

    def __init__(self) -> None:
        self._streams = CallMeter()
        self._items = 0
        self._first = _Histogram()

    @contextmanager
    def stream(self) -> Iterator[Callable[[], None]]:
        """Count the stream in the block; the yielded function counts an item."""
        began = monotonic_ns()
        first = True

        def item() -> None:
            nonlocal first
            self._items += 1
            if first:
                first = False
                self._first.add(monotonic_ns() - began)

        with self._streams.call():
            yield item

    def stats(self) -> StreamStats:
        """Return the counters."""
        all_of = self._streams.stats()
        return StreamStats(
            all_of.calls, all_of.failed, all_of.cancelled, all_of.in_flight, self._items, self._first.latency()
        )


def meter_of(owner: Any) -> CallMeter:
    """Return the counter of an object's `metered` methods."""
    meter: CallMeter = vars(owner).setdefault("_meter", CallMeter())
    return meter


def metered(
    method: Callable[Concatenate[S, P], Awaitable[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Count the calls of a method for each object; see `meter_of`."""

    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with meter_of(self).call():
            return await method(self, *args, **kwargs)

    return call
