"""Queries Ray for nodes, and reserves room on them."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aioshm.engine.ray.placement import EngineNeeds, Node, Place, place_engines
from aioshm.errors import EngineStartupError

NODE_LABEL = "ray.io/node-id"
STALE_S = 1.0
"""How long Ray may take to notice that released resources are free."""

_REMOVED_S = 5.0
_RESERVED_S = 5.0
_LOOK_S = 0.02


def require_ray() -> Any:
    """Return the ``ray`` package."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ImportError(f"engines as Ray actors need ray: pip install 'aioshm[ray]' ({error})") from error


class RayConnection:
    """This process's connection to Ray: created if missing, and closed by its last user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._ours = False

    def open(self, options: Mapping[str, Any]) -> None:
        """Use the connection; create it by ``ray.init(**options)`` if missing."""
        ray = require_ray()
        with self._lock:
            if not ray.is_initialized():
                ray.init(**options)
                self._ours = True
            self._users += 1

    def close(self) -> None:
        """Release the connection."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._ours:
                self._ours = False
                require_ray().shutdown()


connection: RayConnection = RayConnection()


def nodes(device: str) -> list[Node]:
    """Return the living nodes, with their free resources."""
    ray = require_ray()
    available = importlib.import_module("ray._private.state").available_resources_per_node()
    head = ray.get_runtime_context().get_node_id()
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            free.get(device, 0.0),
            free.get("CPU", 0.0),
            head=node["NodeID"] == head,
        )
        for node in ray.nodes()
        if node["Alive"] and (free := available.get(node["NodeID"])) is not None
    ]


def create_dp_placement_groups(
    engine_count: int, local_engine_count: int, needs: EngineNeeds | None = None, *, timeout: float
) -> tuple[list[Any], list[int]]:
    """Reserve room for engines: local ones on the node of this process, the others packed on the other nodes.

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
    places = _place(engine_count, local_engine_count, needs)
    groups: list[Any] = []
    try:
        for rank, place in enumerate(places):
            groups.append(_group_on(place.node.id, rank, needs))
        await_groups(groups, time.monotonic() + timeout)
    except BaseException:
        remove_groups(groups)
        raise
    return groups, [place.local_rank for place in places]


def _group_on(node_id: str, rank: int, needs: EngineNeeds) -> Any:
    bundles = needs.bundles()
    return require_ray().util.placement_group(
        bundles,
        strategy="STRICT_PACK",
        name=f"dp_rank_{rank}",
        bundle_label_selector=[{NODE_LABEL: node_id}] * len(bundles),
    )


def group_where_there_is_room(rank: int, local: bool, needs: EngineNeeds) -> Any:
    """Reserve room for one engine: local on this node, else on another node if any has room."""
    found = nodes(needs.device)
    try:
        place = place_engines(found, 1, int(local), needs)[0]
    except EngineStartupError as too_small:
        try:
            place = place_engines(found, 1, 1, needs)[0]
        except EngineStartupError:
            raise too_small from None
    group = _group_on(place.node.id, rank, needs)
    if not group.wait(_RESERVED_S):  # others were faster, or the node has left
        remove_groups([group], wait=False)
        raise EngineStartupError(f"node {place.node.address} has room for {needs}, and Ray has not reserved it")
    return group


def trouble_of(group: Any) -> str:
    """Return why nothing can start in a placement group now, or ""."""
    table = importlib.import_module("ray.util").placement_group_table(group)
    state = table.get("state")
    if state in (None, "REMOVED"):
        raise EngineStartupError("its placement group was removed")
    if state != "CREATED":
        return f"its placement group is {state}: Ray has no room for {group.bundle_specs}"
    alive = {node["NodeID"] for node in require_ray().nodes() if node["Alive"]}
    lost = set(table["bundles_to_node_id"].values()) - alive
    return f"its placement group is on node {', '.join(sorted(lost))}, which has left the cluster" if lost else ""


def _place(engine_count: int, local_engine_count: int, needs: EngineNeeds) -> list[Place]:
    deadline = time.monotonic() + STALE_S
    while True:
        try:
            return place_engines(nodes(needs.device), engine_count, local_engine_count, needs)
        except EngineStartupError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_S)


def await_groups(groups: Sequence[Any], deadline: float) -> None:
    """Wait until placement groups are reserved."""
    for rank, group in enumerate(groups):
        if not group.wait(max(0.0, deadline - time.monotonic())):
            raise EngineStartupError(
                f"the placement group of engine {rank} was not reserved in time: {group.bundle_specs}"
            )


def nodes_of(groups: Sequence[Any]) -> list[str]:
    """Return the ids of the nodes that the last bundles of placement groups are on."""
    table = importlib.import_module("ray.util").placement_group_table
    return [table(group)["bundles_to_node_id"][len(group.bundle_specs) - 1] for group in groups]


def remove_groups(groups: Iterable[Any], wait: bool = True) -> None:
    """Remove placement groups; with ``wait``, block until their room is free."""
    util = importlib.import_module("ray.util")
    groups = list(groups)
    for group in groups:
        util.remove_placement_group(group)
    deadline = time.monotonic() + _REMOVED_S
    while wait and any(util.placement_group_table(group).get("state") not in (None, "REMOVED") for group in groups):
        if time.monotonic() > deadline:
            return
        time.sleep(_LOOK_S)
