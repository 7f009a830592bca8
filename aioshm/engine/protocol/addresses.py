"""The participants of a startup, and the addresses that engines get. No I/O.

The names and the fields are those of vLLM: the wire has these dataclasses as MessagePack maps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Generic, NoReturn, TypeVar, overload

IDENTITY_BYTES = 2
MAX_INDEX = 2 ** (8 * IDENTITY_BYTES) - 1

_PARALLEL_FIELDS = (
    "data_parallel_master_ip",
    "data_parallel_master_port",
    "_data_parallel_master_port_list",
    "_coord_store_port",
    "data_parallel_size",
)

T_co = TypeVar("T_co", covariant=True)


class CoreEngineState(Enum):
    """The progress of an engine's startup, as seen by its front end."""

    NEW = auto()
    """Nothing was heard of it."""
    CONNECTED = auto()
    """It said HELLO, and INIT was sent."""
    READY = auto()
    """It said READY."""


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


@dataclass(slots=True)
class EngineHandshakeMetadata:
    """The front end's answer to HELLO.

    Attributes:
        addresses: The addresses to connect to.
        parallel_config: Changes to the engine's parallel configuration, by name.
    """

    addresses: EngineZmqAddresses
    parallel_config: dict[str, Any]


class ConstantList(Sequence[T_co], Generic[T_co]):
    """A list that cannot be changed through this view; changes by its owner are visible immediately.

    Args:
        items: The list itself, not a copy.
    """

    __slots__ = ("_items",)

    def __init__(self, items: list[T_co]) -> None:
        self._items = items

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> list[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | list[T_co]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ConstantList):
            return self._items == other._items
        return self._items == other if isinstance(other, list) else NotImplemented

    def __repr__(self) -> str:
        return f"ConstantList({self._items!r})"

    def _refuse(self, *_args: object, **_options: object) -> NoReturn:
        raise TypeError("a ConstantList cannot be changed")

    append = _refuse
    extend = _refuse
    insert = _refuse
    pop = _refuse
    remove = _refuse
    clear = _refuse
    sort = _refuse
    reverse = _refuse
    __setitem__ = _refuse
    __delitem__ = _refuse
    __iadd__ = _refuse
    __imul__ = _refuse


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
