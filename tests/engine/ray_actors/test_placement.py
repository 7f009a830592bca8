"""Local engines are on the head node, the others packed on the other nodes, or the text says what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from aioshm.engine import EngineNeeds
from aioshm.engine.ray.cluster import Node, place_engines
from aioshm.errors import EngineStartupError

HEAD = Node("h", "10.0.0.1", devices=4, cpus=8, head=True)
SMALL = Node("s", "10.0.0.2", devices=2, cpus=8)
LARGE = Node("l", "10.0.0.3", devices=8, cpus=8)
CLUSTER = [SMALL, HEAD, LARGE]


def places(*arguments: Any, **needs: Any) -> str:
    return "".join(node.id for node in place_engines(*arguments, EngineNeeds(**needs)))


class TestPlaces:
    @pytest.mark.parametrize(
        ("engines", "local", "needs", "expected"),
        [
            (1, 1, {}, "h"),
            (1, 0, {}, "l"),
            (3, 2, {}, "hhl"),
            (4, 1, {"world_size": 4}, None),
            (3, 1, {"world_size": 4}, "hll"),
            (4, 2, {"world_size": 2, "cpus": 7}, None),
            (7, 2, {"world_size": 2}, "hhlllls"),
            (3, 0, {"world_size": 0, "cpus": 4}, "lls"),
            (6, 2, {"world_size": 2, "pack_strategy": "strict"}, None),
            (4, 2, {"world_size": 2, "pack_strategy": "strict"}, "hhll"),
            (3, 1, {"world_size": 2, "pack_strategy": "strict"}, "hls"),
        ],
    )
    def test_are_as_documented(self, engines: int, local: int, needs: dict[str, Any], expected: Any) -> None:
        if expected is None:
            with pytest.raises(EngineStartupError, match=r"^the cluster is too small: "):
                places(CLUSTER, engines, local, **needs)
        else:
            assert places(CLUSTER, engines, local, **needs) == expected


class TestErrors:
    def test_too_few_devices_on_the_head(self) -> None:
        with pytest.raises(EngineStartupError) as caught:
            places(CLUSTER, 3, 3, world_size=2)
        assert str(caught.value) == (
            "the cluster is too small: 3 engines are to run on the head node 10.0.0.1 with room for 2. "
            "Each needs 2 GPU and 1 CPU. Free are: "
            "10.0.0.2: 2 GPU, 8 CPU; 10.0.0.1 (head): 4 GPU, 8 CPU; 10.0.0.3: 8 GPU, 8 CPU"
        )

    def test_no_nodes(self) -> None:
        with pytest.raises(EngineStartupError, match=r"a head node, which is missing.*no nodes"):
            places([], 1, 1)
        with pytest.raises(EngineStartupError, match="no nodes"):
            places([], 1, 0)

    @pytest.mark.parametrize(
        "needs", [{"world_size": -1}, {"world_size": "1"}, {"cpus": 0}, {"cpus": float("inf")}, {"pack_strategy": "x"}]
    )
    def test_bad_needs_are_named(self, needs: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(needs))):
            EngineNeeds(**needs)


class TestBundles:
    @pytest.mark.parametrize(
        ("needs", "bundles"),
        [
            ({}, [{"GPU": 1, "CPU": 1}]),
            ({"world_size": 4, "device": "TPU", "cpus": 2.5}, [{"TPU": 4, "CPU": 2.5}]),
            ({"world_size": 0}, [{"CPU": 1}]),
            ({"world_size": 2, "worker_bundles": True}, [{"GPU": 1}, {"GPU": 1}, {"CPU": 1}]),
        ],
    )
    def test_are_as_documented(self, needs: dict[str, Any], bundles: list[dict[str, float]]) -> None:
        assert EngineNeeds(**needs).bundles() == bundles
