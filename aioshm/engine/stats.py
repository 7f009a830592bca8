"""What engines, their clients and workers have done so far, as it stands at one moment."""

from __future__ import annotations

import msgspec

from aioshm.engine.metering import CallStats, StreamStats
from aioshm.process.restart import RankInfo


class WorkerGroupStats(msgspec.Struct, frozen=True):
    """What a group of workers has done so far.

    Attributes:
        name: The group's.
        n_workers: How many workers there are to be.
        standbys: How many processes can take a rank at once.
        workers: Each of them; none without ``restart``.
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
    """What a client of engines has done so far.

    Attributes:
        index: Which of the front end's clients this is.
        engines: How many engines there are to be.
        missing: How many of them do not serve: they have not registered yet, or are dead.
        requests: How many requests were sent in all.
        failed: How many of them ended with an error, such as that of a dead engine.
        in_flight: How many have not ended.
        late_outputs: How many outputs came for requests that were aborted, or whose engine was taken for dead.
        deaths: How many engines have died in all.
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
    """What a supervisor of engines has done so far.

    Attributes:
        engines: The engines of this host.
        client: What their client has done; None: API servers have the clients.
    """

    engines: tuple[RankInfo, ...]
    client: EngineClientStats | None
