"""A cluster of two simulated nodes, which all tests of this folder share: it takes ten seconds to start."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray_targets import GPUS, HEAD_CHIPS, NODE
from support import eventually

_NODE_DEATH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 5}
"""So that it takes a second, not fifteen, until a node that is gone is known to be. One that is slow has ten."""


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves something reserved; Ray keeps idle processes for later."""
    yield
    if "ray_cluster" in request.fixturenames:
        import ray

        def all_returned() -> bool:
            total = ray.cluster_resources()
            free = ray.available_resources()
            return all(free.get(each) == total.get(each) for each in ("CPU", "GPU", "chip"))

        eventually(all_returned, "the return of what was reserved")


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[Any]:
    """Have ``cluster``, to which nodes may be added, and ``other``, the node that is not the head."""
    import ray
    from ray.cluster_utils import Cluster

    handler = signal.getsignal(signal.SIGTERM)  # Ray puts its own in the place
    head = {
        "num_gpus": GPUS["head"],
        "resources": {"chip": HEAD_CHIPS},
        "include_dashboard": False,
        "_system_config": _NODE_DEATH,
        **NODE,
    }
    with pytest.MonkeyPatch.context() as patch:
        # What nodes start has to find the targets.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # or it writes a token into the home directory
        made = Cluster(initialize_head=True, head_node_args=head)
        try:
            other = made.add_node(num_gpus=GPUS["other"], **NODE)
            made.wait_for_nodes()
            ray.init(address=made.address, log_to_driver=False)
            yield SimpleNamespace(cluster=made, other=other)
        finally:
            ray.shutdown()
            made.shutdown()
            signal.signal(signal.SIGTERM, handler)
