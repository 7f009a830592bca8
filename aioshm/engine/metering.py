"""How many calls were made, how they ended, and how long they took."""

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
        calls: How many were begun.
        failed: How many ended with an error.
        cancelled: How many were cancelled, or were out of time.
        in_flight: How many have not ended.
        latency: How long those took that have ended well, the wait for their turn included.
    """

    calls: int = 0
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    latency: Latency = Latency()


class CallMeter:
    """Counts calls; used in one thread, read in any."""

    def __init__(self) -> None:
        self._calls = self._failed = self._cancelled = self._ended = self._sum_ns = 0
        self._counts = [0] * len(Latency().counts)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count the call that the block makes."""
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
            took = monotonic_ns() - began
            self._sum_ns += took
            self._counts[bisect_right(Latency.BOUNDS_NS, took)] += 1
        finally:
            self._ended += 1

    def stats(self) -> CallStats:
        """Return what was counted."""
        latency = Latency(tuple(self._counts), self._sum_ns)
        return CallStats(self._calls, self._failed, self._cancelled, self._calls - self._ended, latency)


def meter_of(owner: Any) -> CallMeter:
    """Return what counts the calls of an object's methods that are `metered`."""
    meter: CallMeter = vars(owner).setdefault("_meter", CallMeter())
    return meter


def metered(
    method: Callable[Concatenate[S, P], Awaitable[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Let an object count the calls of a method of its class; see `meter_of`."""

    @functools.wraps(method)
    async def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with meter_of(self).call():
            return await method(self, *args, **kwargs)

    return call
