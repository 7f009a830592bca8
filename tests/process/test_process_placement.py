"""Environment, CPUs and NUMA node of a process, set before it imports anything."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import placed
import pytest

from aioshm import Placement
from aioshm.process import parent, placement
from aioshm.process.child import Child
from aioshm.process.placement import NumaNode

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="macOS has no CPU affinity")
has_nodes = pytest.mark.skipif(not placement.numa_nodes(), reason="this kernel lists no NUMA nodes")


@pytest.fixture
def last_cpu() -> int:
    return max(os.sched_getaffinity(0))


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this process 8 CPUs in two NUMA nodes, of which the second has no allowed CPU."""
    monkeypatch.setattr(placement, "allowed_cpus", lambda: frozenset(range(4)))
    nodes = {0: NumaNode(frozenset({0, 1, 4, 5})), 1: NumaNode(frozenset({6, 7}))}
    monkeypatch.setattr(placement, "numa_nodes", lambda: nodes)


def told_by(tmp_path: Path, where: Placement, rank: int = 0) -> list[Any]:
    path = tmp_path / "told"
    child = Child(placed.tell_place, "placed", (str(path),), place=where.of(rank))
    child.start()
    child.join()
    child.release()
    assert child.exitcode == 3
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@on_linux
def test_process_has_its_environment_and_cpus_before_it_imports_the_target(
    tmp_path: Path, last_cpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNWANTED", "here")
    where = Placement(env=lambda rank: {"PLACED": f"as {rank}", "UNWANTED": None}, cpus={last_cpu})
    env, cpus, _, threads = told_by(tmp_path, where, 5)
    assert env == {"PLACED": "as 5", "UNWANTED": None}
    assert cpus == [last_cpu]
    assert threads == [[last_cpu]] * len(threads)
    assert os.environ["UNWANTED"] == "here"
    assert "PLACED" not in os.environ


@on_linux
@has_nodes
def test_process_prefers_the_memory_of_its_numa_node(tmp_path: Path) -> None:
    node = min(placement.numa_nodes())
    _, cpus, policies, _ = told_by(tmp_path, Placement(numa_node=node))
    assert set(cpus) <= placement.numa_nodes()[node].cpus
    if ctypes.CDLL(None).syscall(parent._SET_MEMPOLICY.get(os.uname().machine, -1), 0, None, 0) != 0:
        pytest.skip("the system lets nobody set a memory policy")
    assert f"prefer:{node}" in policies


@on_linux
def test_cpus_that_were_taken_away_end_the_process_with_the_reason() -> None:
    program = f"import runpy; runpy.run_path({parent.__file__!r})['boot'](0, (4095,))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "cannot run on the CPUs [4095] of the placement: [Errno 22] Invalid argument\n"


def test_values_are_found_once_for_each_rank_and_stay() -> None:
    calls: list[int] = []

    def env(rank: int) -> dict[str, str]:
        calls.append(rank)
        return {"PLACED": str(len(calls))}

    where = Placement(env=env)
    assert [where.of(rank).env["PLACED"] for rank in (0, 1, 0, 1)] == ["1", "2", "1", "2"]
    assert calls == [0, 1]
    values = {"PLACED": "1"}
    where = Placement(env=values)
    values["PLACED"] = "2"
    assert where.of(0).env == {"PLACED": "1"}


@pytest.mark.usefixtures("two_nodes")
class TestNodes:
    def test_cpus_and_node_are_intersected(self) -> None:
        assert Placement(numa_node=0).of(0).cpus == (0, 1)
        assert Placement(cpus=range(1, 4), numa_node=lambda rank: rank).of(0).cpus == (1,)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"cpus": [2, 3]}, "of rank 7: node 0 has CPUs 0-1,4-5, and none of them is among placement.cpus, 2-3"),
            ({"numa_node": 1}, "of rank 7: node 1 has CPUs 6-7, and none of them is among those allowed here, 0-3"),
            ({"numa_node": 4}, "placement.numa_node of rank 7: node 4 does not exist; the nodes are 0-1"),
            ({"cpus": [3, 4, 9]}, "placement.cpus of rank 7: 4,9 cannot be used here; allowed are 0-3"),
        ],
    )
    def test_impossible_place_is_an_error_that_lists_the_possible_ones(self, options: Any, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            Placement(**{"numa_node": 0, **options}).of(7)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"env": ["A"]}, TypeError, r"placement.env must be a mapping of names to strings or None, not \['A'\]"),
        ({"env": {"A": 1}}, TypeError, "placement.env must map names to strings or None, not 'A' to 1"),
        ({"env": {"A=B": "1"}}, ValueError, "placement.env cannot set 'A=B'"),
        ({"env": {"A": "\0"}}, ValueError, "placement.env cannot set 'A'"),
        ({"cpus": "0-3"}, TypeError, "placement.cpus must be a collection of ints, not '0-3'"),
        ({"cpus": 1}, TypeError, "placement.cpus must be a collection of ints, not 1"),
        ({"cpus": []}, ValueError, "placement.cpus must not be empty"),
        ({"cpus": ["1"]}, TypeError, "placement.cpus: a CPU must be an int, not '1'"),
        ({"cpus": [-1]}, ValueError, "placement.cpus: a CPU must be at least 0, not -1"),
        ({"numa_node": "0"}, TypeError, "placement.numa_node must be an int, not '0'"),
    ],
)
def test_wrong_value_is_an_error_that_names_placement(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Placement(**options)
    [(name, value)] = options.items()
    with pytest.raises(error, match=text.partition(":")[0].partition(" ")[0] + " of rank 3"):
        Placement(**{name: lambda rank: value}).of(3)


def test_error_of_a_callable_names_placement_and_rank() -> None:
    with pytest.raises(ValueError, match=r"placement.cpus of rank 2 failed: IndexError: "):
        Placement(cpus=lambda rank: [[0], [1]][rank]).of(2)
    with pytest.raises(TypeError, match=r"placement.env of rank 0 failed: TypeError: "):
        Placement(env=lambda: {"A": "1"}).of(0)  # type: ignore[arg-type, misc]


def test_without_affinity_cpus_are_an_error_and_env_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert Placement(env={"PLACED": "1"}).of(0).env == {"PLACED": "1"}
    for options in ({"cpus": [0]}, {"numa_node": 0}):
        with pytest.raises(ValueError, match=r"placement of rank 1: .* has no CPU affinity, .*; env works"):
            Placement(**options).of(1)  # type: ignore[arg-type]


def test_nodes_and_sockets_are_read_from_sysfs(tmp_path: Path) -> None:
    files = {
        "node/node10/cpulist": "",
        "node/node2/cpulist": "4-7,12\n",
        "node/node2/meminfo": "Node 2 MemTotal:  2048 kB\nNode 2 MemFree: 1024 kB\nNode 2 HugePages_Free: 1\n",
        "cpu/cpu0/topology/physical_package_id": "0\n",
        "cpu/cpu1/topology/physical_package_id": "1\n",
        "cpu/cpu10/topology/physical_package_id": "0\n",
        "cpu/cpu3/online": "0\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert placement.numa_nodes(tmp_path) == {
        2: NumaNode(frozenset({4, 5, 6, 7, 12}), 2 << 20, 1 << 20),
        10: NumaNode(frozenset()),
    }
    assert placement.sockets(tmp_path) == {0: {0, 10}, 1: {1}}
    assert (placement.numa_nodes(tmp_path / "none"), placement.sockets(tmp_path / "none")) == ({}, {})


@pytest.mark.parametrize("text", ["none", "0", "0-3,8", "1,3,5-6"])
def test_lists_of_cpus_are_shown_as_they_are_read(text: str) -> None:
    assert placement.show_ranges(placement.parse_cpus(text.replace("none", "\n"))) == text
