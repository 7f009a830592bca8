"""The connection to Ray, the nodes of the cluster, the node of each engine, and placement groups."""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from aioshm.errors import EngineStartupError

PackStrategy: TypeAlias = Literal["fill", "strict"]


NODE_LABEL = "ray.io/node-id"
STALE_S = 1.0
"""How long Ray may take to notice that released resources are free."""

_REMOVED_S = 5.0
_RESERVED_S = 5.0
_POLL_S = 0.02

_lock = threading.Lock()
_users = 0
_connected_here = False


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


def require_ray() -> Any:
    """Return the ``ray`` package, or raise an ImportError that names the extra."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ImportError(f"engines as Ray actors need ray: pip install 'aioshm[ray]' ({error})") from error


def connect(options: Mapping[str, Any]) -> None:
    """Use this process's connection to Ray; without a connection call ``ray.init(**options)``."""
    global _users, _connected_here
    ray = require_ray()
    with _lock:
        if not ray.is_initialized():
            ray.init(**options)
            _connected_here = True
        _users += 1


def disconnect() -> None:
    """Release the connection; the last user closes a connection that `connect` created."""
    global _users, _connected_here
    with _lock:
        _users -= 1
        if _users == 0 and _connected_here:
            _connected_here = False
            require_ray().shutdown()


def nodes(device: str) -> list[Node]:
    """Return the living nodes, with their free resources."""
    ray = require_ray()
    available = importlib.import_module("ray._private.state").available_resources_per_node()
    head = ray.get_runtime_context().get_node_id()
    found = []
    for node in ray.nodes():
        free = available.get(node["NodeID"])
        if node["Alive"] and free is not None:
            is_head = node["NodeID"] == head
            address = node["NodeManagerAddress"]
            found.append(Node(node["NodeID"], address, free.get(device, 0.0), free.get("CPU", 0.0), head=is_head))
    return found


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


def create_dp_placement_groups(
    engine_count: int, local_engine_count: int, needs: EngineNeeds | None = None, *, timeout: float
) -> tuple[list[Any], list[int]]:
    """Reserve room for engines: local engines on the node of this process, remote engines packed on other nodes.

    Args:
        engine_count: The number of engines.
        local_engine_count: How many of them are local, the first ones.
        needs: The needs of each.
        timeout: Seconds until Ray must have reserved the room.

    Returns:
        The placement group of each engine, named ``dp_rank_0`` and so on, and its rank on its node.

    Raises:
        EngineStartupError: The cluster is too small, or Ray has not reserved the room in time.
        TypeError, ValueError: An argument is invalid.
    """
    needs = needs or EngineNeeds()
    stale_until = time.monotonic() + STALE_S
    while True:
        try:
            places = place_engines(nodes(needs.device), engine_count, local_engine_count, needs)
            break
        except EngineStartupError:
            if time.monotonic() > stale_until:
                raise
            time.sleep(_POLL_S)
    groups: list[Any] = []
    try:
        for rank, node in enumerate(places):
            groups.append(_group_on(node, rank, needs))
        await_groups(groups, time.monotonic() + timeout)
    except BaseException:
        remove_groups(groups)
        raise
    return groups, [places[:rank].count(node) for rank, node in enumerate(places)]


def reserve_room(rank: int, local: bool, needs: EngineNeeds) -> Any:
    """Reserve room for one engine: local on this node, else on another node if any has room."""
    found = nodes(needs.device)
    try:
        node = place_engines(found, 1, int(local), needs)[0]
    except EngineStartupError as too_small:
        try:
            node = place_engines(found, 1, 1, needs)[0]
        except EngineStartupError:
            raise too_small from None
    group = _group_on(node, rank, needs)
    if not group.wait(_RESERVED_S):  # another engine took the room, or the node has left
        remove_groups([group], wait=False)
        raise EngineStartupError(f"node {node.address} has room for {needs}, and Ray has not reserved it")
    return group


def _group_on(node: Node, rank: int, needs: EngineNeeds) -> Any:
    bundles = needs.bundles()
    return require_ray().util.placement_group(
        bundles,
        strategy="STRICT_PACK",
        name=f"dp_rank_{rank}",
        bundle_label_selector=[{NODE_LABEL: node.id}] * len(bundles),
    )


def trouble_of(group: Any) -> str:
    """Return why nothing can start in a placement group now, or ""."""
    table = _table(group)
    state = table.get("state") or "REMOVED"
    if state != "CREATED":
        return f"its placement group is {state}: {group.bundle_specs}"
    alive = {node["NodeID"] for node in require_ray().nodes() if node["Alive"]}
    lost = set(table["bundles_to_node_id"].values()) - alive
    if not lost:
        return ""
    return f"its placement group is on node {', '.join(sorted(lost))}, which has left the cluster"


def await_groups(groups: Sequence[Any], deadline: float) -> None:
    """Wait until placement groups are reserved."""
    for rank, group in enumerate(groups):
        if not group.wait(max(0.0, deadline - time.monotonic())):
            raise EngineStartupError(
                f"the placement group of engine {rank} was not reserved in time: {group.bundle_specs}"
            )


def node_of(group: Any) -> str:
    """Return the id of the node that the last bundle of a placement group is on."""
    return str(_table(group)["bundles_to_node_id"][len(group.bundle_specs) - 1])


def remove_groups(groups: Iterable[Any], wait: bool = True) -> None:
    """Remove placement groups; with ``wait``, block until their room is free."""
    groups = list(groups)
    for group in groups:
        require_ray().util.remove_placement_group(group)
    deadline = time.monotonic() + _REMOVED_S
    while wait and time.monotonic() < deadline:
        if all(_table(group).get("state") in (None, "REMOVED") for group in groups):
            return
        time.sleep(_POLL_S)


def _table(group: Any) -> dict[str, Any]:
    table: dict[str, Any] = require_ray().util.placement_group_table(group)
    return table
