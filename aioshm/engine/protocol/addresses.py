"""The participants of a startup: engines, the addresses they get, and their progress. No I/O.

The names and the fields are those of vLLM: the wire has the addresses as MessagePack maps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

IDENTITY_BYTES = 2
MAX_INDEX = 2 ** (8 * IDENTITY_BYTES) - 1

_SHOWN_ENGINES = 8
_PARALLEL_FIELDS = (
    "data_parallel_master_ip",
    "data_parallel_master_port",
    "_data_parallel_master_port_list",
    "_coord_store_port",
    "data_parallel_size",
)


class CoreEngineState(Enum):
    """The progress of an engine's startup, as seen by its front end; the values stand in sentences."""

    NEW = "before HELLO"
    CONNECTED = "connected"  # it said HELLO, and INIT was sent
    READY = "ready"


@dataclass(slots=True, eq=False)
class CoreEngine:
    """One engine, for one data-parallel rank.

    Attributes:
        index: Its rank.
        local: Whether it runs on the front end's host.
        state: The progress of its startup.
    """

    index: int = 0
    local: bool = True
    state: CoreEngineState = field(default=CoreEngineState.NEW, init=False)

    def __post_init__(self) -> None:
        identity(self.index)

    @property
    def identity(self) -> bytes:
        """The ZeroMQ identity of the engine's sockets."""
        return identity(self.index)


def identity(index: int) -> bytes:
    """Return the ZeroMQ identity of an engine's sockets: its rank as 2 bytes, little-endian."""
    if not isinstance(index, int) or isinstance(index, bool):
        raise TypeError(f"index must be an int, not {index!r}")
    if not 0 <= index <= MAX_INDEX:
        raise ValueError(f"index must be 0 to {MAX_INDEX}, not {index}")
    return index.to_bytes(IDENTITY_BYTES, "little")


def engine_index(name: str) -> int | None:
    """Return the rank at the end of an engine process's name."""
    found = re.search(r"[0-9]+$", name)
    return int(found[0]) if found else None


# Addresses and settings


@dataclass(slots=True)
class EngineZmqAddresses:
    """The addresses that an engine's sockets connect to.

    May change until the first engine says HELLO: a port of the kernel's choice is known only once it is bound.

    Attributes:
        inputs: For each client, the source of requests.
        outputs: For each client, the destination of outputs.
        coordinator_input: Where the coordinator publishes to engines, if there is one.
        coordinator_output: Where engines report to the coordinator, if there is one.
        frontend_stats_publish_address: Where front ends subscribe to the coordinator's counts; engines only pass it on.
    """

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


def parallel_settings(config: object) -> dict[str, Any]:
    """Return the parallel configuration for engines: a mapping as it is, of an object vLLM's names."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(config)
    return {name: getattr(config, name) for name in _PARALLEL_FIELDS if hasattr(config, name)}


def balanced_outside(config: object) -> bool:
    """Return whether a parallel configuration enables hybrid or external load balancing."""
    names = ("data_parallel_hybrid_lb", "data_parallel_external_lb")
    if isinstance(config, Mapping):
        return any(config.get(name) for name in names)
    return any(getattr(config, name, False) for name in names)


# Progress


@dataclass(frozen=True, slots=True)
class Waiting:
    """An engine that is not ready yet.

    Attributes:
        index: Its rank.
        state: Its progress.
        seconds: The time since its last progress.
        pid: Its process id, where known.
    """

    index: int
    state: CoreEngineState
    seconds: float
    pid: int | None = None

    def __str__(self) -> str:
        pid = "" if self.pid is None else f"pid {self.pid}, "
        return f"{self.index} ({pid}{self.state.value}, {self.seconds:.0f} s)"


@dataclass(frozen=True, slots=True)
class StartupProgress:
    """The progress of a startup; as a string, one line for people.

    Attributes:
        total: The number of engines.
        connected: How many have said HELLO, the ready ones included.
        ready: How many have said READY.
        waiting: The engines that are not ready.
        moved: The rank of the engine that has just advanced; None for a reminder.
    """

    total: int
    connected: int
    ready: int
    waiting: tuple[Waiting, ...] = ()
    moved: int | None = None

    def __str__(self) -> str:
        text = f"{self.connected} of {self.total} engines connected, {self.ready} ready"
        if self.waiting:
            text += f"; waiting for engines {', '.join(map(str, self.waiting[:_SHOWN_ENGINES]))}"
        more = len(self.waiting) - _SHOWN_ENGINES
        if more > 0:
            text += f" and {more} more"
        return text


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The messages of one engine.

    Attributes:
        index: Its rank.
        local: Whether it runs on this host.
        hello: The map of its HELLO.
        ready: The map of its READY.
    """

    index: int
    local: bool
    hello: dict[str, Any]
    ready: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StartupReport:
    """The messages of all engines.

    Attributes:
        engines: The messages of each, by rank.
        num_gpu_blocks: The total; 0 if no engine reports a number.
        parallel_config_hash: The common hash; None if no engine reports one.
        stats_address: Where the coordinator publishes its counts, if an engine passes that on.
    """

    engines: Mapping[int, EngineReport]
    num_gpu_blocks: int = 0
    parallel_config_hash: Any = None
    stats_address: str | None = None
