"""Chooses the node of a cluster for each engine. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

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
        if self.world_size:
            return [{self.device: float(self.world_size), "CPU": self.cpus}]
        return [{"CPU": self.cpus}]

    def __str__(self) -> str:
        return f"{self.world_size} {self.device} and {self.cpus:g} CPU"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster, with its free devices and CPUs."""

    id: str
    address: str
    devices: float
    cpus: float
    head: bool = False  # whether the front end is on it

    def room(self, needs: EngineNeeds) -> int:
        """Return how many engines fit."""
        room = int(self.cpus / needs.cpus)
        if needs.world_size:
            room = min(room, int(self.devices) // needs.world_size)
        return room


def place_engines(nodes: Sequence[Node], engine_count: int, local_engine_count: int, needs: EngineNeeds) -> list[Node]:
    """Return the node of each engine: local engines on the head node, remote engines packed on the remaining nodes.

    Nodes with the most room come first, so that few nodes have engines.
    """
    places: list[Node] = []
    remote = []
    where = "a head node, which is missing,"
    room = 0
    for node in nodes:
        if node.head:
            places = [node] * local_engine_count
            where = f"the head node {node.address}"
            room = node.room(needs)
        else:
            remote.append(node)
    if room < local_engine_count:
        raise _too_small(f"{local_engine_count} engines are to run on {where} with room for {room}", nodes, needs)
    for node in sorted(remote, key=lambda node: (-node.room(needs), node.id)):
        room = node.room(needs)
        if needs.pack_strategy == "strict" and local_engine_count:
            room = local_engine_count * (room >= local_engine_count)
        places += [node] * min(room, engine_count - len(places))
    if len(places) < engine_count:
        missing = f"{engine_count - local_engine_count} engines are to run on other nodes than the head"
        raise _too_small(f"{missing}, with room for {len(places) - local_engine_count}", nodes, needs)
    return places


def _too_small(shortage: str, nodes: Sequence[Node], needs: EngineNeeds) -> EngineStartupError:
    free = []
    for node in nodes:
        name = f"{node.address} (head)" if node.head else node.address
        free.append(f"{name}: {node.devices:g} {needs.device}, {node.cpus:g} CPU")
    packed = ""
    if needs.pack_strategy != "fill":
        packed = f", {needs.pack_strategy!r} packed"
    found = "; ".join(free) or "no nodes"
    return EngineStartupError(f"the cluster is too small: {shortage}. Each needs {needs}{packed}. Free are: {found}")
