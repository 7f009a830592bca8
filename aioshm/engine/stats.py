"""Counters of engines, their clients and workers, at one moment; and the meters that count calls and streams."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns

import msgspec

from aioshm.process.restart import RankInfo
from aioshm.ring.header import Latency


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


class WorkerGroupStats(msgspec.Struct, frozen=True):
    """The counters of a group of workers.

    Attributes:
        name: The group's name.
        n_workers: The number of workers.
        standbys: How many standbys can take a rank immediately.
        workers: The state of each.
        calls: The calls of all tasks.
        streams: The streams of all tasks.
    """

    name: str
    n_workers: int
    standbys: int
    workers: tuple[RankInfo, ...]
    calls: CallStats
    streams: StreamStats


class EngineClientStats(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of a client of engines.

    Attributes:
        index: The index of this client.
        engines: The number of engines.
        missing: How many engines do not serve: they have not registered yet, or are dead.
        requests: How many requests were sent in total.
        failed: How many requests ended with an error, such as the death of an engine.
        in_flight: How many requests have not ended.
        paused: The mode of the pause of the engines; None: they are not paused.
        late_outputs: How many outputs came for aborted requests, or from engines that counted as dead.
        deaths: How many engines have died in total.
        stalled: How many engines make no progress, or are stopped.
    """

    index: int
    engines: int
    missing: int
    requests: int
    failed: int
    in_flight: int
    paused: str | None = None
    late_outputs: int
    deaths: int
    stalled: int = 0


class EngineSupervisorStats(msgspec.Struct, frozen=True):
    """The counters of a supervisor of engines.

    Attributes:
        engines: The engines of this host.
        client: The counters of the client; None: API servers have the clients.
    """

    engines: tuple[RankInfo, ...]
    client: EngineClientStats | None


class Meter:
    """Counts calls or streams; used in one thread, read in any."""

    def __init__(self) -> None:
        self._begun = 0
        self._failed = 0
        self._cancelled = 0
        self._ended = 0
        self._sum_ns = 0
        self._counts = [0] * len(Latency().counts)  # of durations
        self.items: int = 0  # of all streams

    def begin(self) -> int:
        """Count a beginning; return the time."""
        self._begun += 1
        return monotonic_ns()

    def took(self, began: int) -> None:
        """Note the time of a call's result, or of a stream's first item."""
        took_ns = monotonic_ns() - began
        self._sum_ns += took_ns
        self._counts[bisect_right(Latency.BOUNDS_NS, took_ns)] += 1

    def end(self, error: BaseException | None) -> None:
        """Count an end."""
        if isinstance(error, (TimeoutError, asyncio.CancelledError, GeneratorExit)):
            self._cancelled += 1
        elif error is not None:
            self._failed += 1
        self._ended += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the call in the block."""
        began = self.begin()
        try:
            yield
        except BaseException as error:
            self.end(error)
            raise
        self.took(began)
        self.end(None)

    def call_stats(self) -> CallStats:
        """Return the counters of calls."""
        in_flight = self._begun - self._ended
        return CallStats(self._begun, self._failed, self._cancelled, in_flight, self._latency())

    def stream_stats(self) -> StreamStats:
        """Return the counters of streams."""
        in_flight = self._begun - self._ended
        return StreamStats(self._begun, self._failed, self._cancelled, in_flight, self.items, self._latency())

    def _latency(self) -> Latency:
        return Latency(tuple(self._counts), self._sum_ns)
