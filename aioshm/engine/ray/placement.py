"""Chooses the node of a cluster for each engine. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from aioshm.errors import EngineStartupError

PackStrategy: TypeAlias = Literal["fill", "strict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """The resources of an engine on its node.

    Attributes:
        world_size: The number of devices.
        device: The name of devices in the cluster.
        cpus: The number of CPUs.
        worker_bundles: Whether each device has a bundle of its own in the engine's placement group, for workers of Ray.
            The engine itself is in the last bundle then, without a device. Otherwise there is one bundle, and the
            engine sees all devices.
        pack_strategy: ``"fill"`` uses up one node after the other; ``"strict"`` runs as many engines on every node as
            are local.

    Raises:
        ValueError: An attribute is invalid; the text names it.
    """

    world_size: int = 1
    device: str = "GPU"
    cpus: float = 1.0
    worker_bundles: bool = False
    pack_strategy: PackStrategy = "fill"

    def __post_init__(self) -> None:
        if not isinstance(self.world_size, int) or self.world_size < 0:
            raise ValueError(f"world_size must be an int of at least 0, not {self.world_size!r}")
        if not isinstance(self.cpus, (int, float)) or not (math.isfinite(self.cpus) and self.cpus > 0):
            raise ValueError(f"cpus must be a number above 0, not {self.cpus!r}")
        if self.pack_strategy not in ("fill", "strict"):
            raise ValueError(f"pack_strategy must be 'fill' or 'strict', not {self.pack_strategy!r}")

    def bundles(self) -> list[dict[str, float]]:
        """Return the bundles of the engine's placement group."""
        if self.worker_bundles:
            return [{self.device: 1.0} for _ in range(self.world_size)] + [{"CPU": self.cpus}]
        return [{self.device: float(self.world_size), "CPU": self.cpus} if self.world_size else {"CPU": self.cpus}]

    def __str__(self) -> str:
        return f"{self.world_size} {self.device} and {self.cpus:g} CPU"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster."""

    id: str  # in the cluster
    address: str
    devices: float  # how many devices are free
    cpus: float  # how many CPUs are free
    head: bool = False  # whether the front end is on it

    def room(self, needs: EngineNeeds) -> int:
        """Return how many engines fit."""
        room = int(self.cpus / needs.cpus)
        return min(room, int(self.devices) // needs.world_size) if needs.world_size else room


class Place(NamedTuple):
    """The node of an engine."""

    node: Node
    local_rank: int  # its rank among the engines of that node


def place_engines(nodes: Sequence[Node], engine_count: int, local_engine_count: int, needs: EngineNeeds) -> list[Place]:
    """Return the nodes of engines, by rank: local ones on the head node, the others packed on the other nodes.

    Nodes with the most room come first, so that few nodes have engines.
    """
    head = next((node for node in nodes if node.head), None)
    room = head.room(needs) if head is not None else 0
    if room < local_engine_count:
        where = f"the head node {head.address}" if head is not None else "a head node, which is not there,"
        raise _too_small(f"{local_engine_count} engines are to run on {where} with room for {room}", nodes, needs)
    places = [Place(head, rank) for rank in range(local_engine_count)] if head is not None else []
    others = sorted((node for node in nodes if not node.head), key=lambda node: (-node.room(needs), node.id))
    for node in others:
        room = node.room(needs)
        if needs.pack_strategy == "strict" and local_engine_count:
            room = local_engine_count if room >= local_engine_count else 0
        places += [Place(node, rank) for rank in range(min(room, engine_count - len(places)))]
    if len(places) < engine_count:
        found = f"{engine_count - local_engine_count} engines are to run on other nodes than the head, with room for "
        raise _too_small(f"{found}{len(places) - local_engine_count}", nodes, needs)
    return places


def _too_small(shortage: str, nodes: Sequence[Node], needs: EngineNeeds) -> EngineStartupError:
    free = (
        f"{node.address}{' (head)' if node.head else ''}: {node.devices:g} {needs.device}, {node.cpus:g} CPU"
        for node in nodes
    )
    packed = f", {needs.pack_strategy!r} packed" if needs.pack_strategy != "fill" else ""
    return EngineStartupError(
        f"the cluster is too small: {shortage}. Each needs {needs}{packed}. Free are: {'; '.join(free) or 'no nodes'}"
    )
