"""Counters of engines, their clients and workers, at one moment."""

from __future__ import annotations

import msgspec

from aioshm.engine.metering import CallStats, StreamStats
from aioshm.process.restart import RankInfo


class WorkerGroupStats(msgspec.Struct, frozen=True):
    """The counters of a group of workers.

    Attributes:
        name: The group's name.
        n_workers: The number of workers.
        standbys: How many standbys can take a rank immediately.
        workers: The state of each; empty without ``restart``.
        calls: The calls of all tasks.
        streams: Their streams.
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
        late_outputs: How many outputs came for aborted requests, or from engines that counted as dead.
        deaths: How many engines have died in total.
    """

    index: int
    engines: int
    missing: int
    requests: int
    failed: int
    in_flight: int
    late_outputs: int
    deaths: int


class EngineSupervisorStats(msgspec.Struct, frozen=True):
    """The counters of a supervisor of engines.

    Attributes:
        engines: The engines of this host.
        client: The counters of the client; None: API servers have the clients.
    """

    engines: tuple[RankInfo, ...]
    client: EngineClientStats | None
