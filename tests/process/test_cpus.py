from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from aioshm.config import Options
from aioshm.process import placement
from aioshm.process.placement import usable_cpus
from aioshm.wait import poller
from aioshm.wait.policy import WaitMode

pytestmark = pytest.mark.opens_nothing


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


def v2(root: Path, text: str) -> Path:
    (root / "cpu.max").write_text(text)
    return root


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000\n", 8),
        ("400000 100000\n", 4),
        ("100000 100000\n", 1),
        ("150000 100000\n", 1),
        ("299999 100000\n", 2),
        ("1 100000\n", 1),
        ("6400000 100000\n", 8),
        *((no_quota, 8) for no_quota in ("", "max", "a b", "1 2 3", "100000 0", "nan 1")),
    ],
)
def test_quota_of_the_cgroup_limits_the_cpus(tmp_path: Path, text: str, expected: int) -> None:
    assert usable_cpus(v2(tmp_path, text)) == expected


def test_the_cpus_of_other_ends_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = {0: {1}, 11: {1}, 12: {2}, 13: {2, 3}}

    def affinity(pid: int) -> set[int]:
        if pid not in pinned:
            raise ProcessLookupError
        return pinned[pid]

    monkeypatch.setattr(os, "sched_getaffinity", affinity, raising=False)
    nowhere = tmp_path / "nothing"
    assert usable_cpus(nowhere) == 1
    assert usable_cpus(nowhere, pids=[11]) == 1
    assert usable_cpus(nowhere, pids=[12]) == 2
    assert usable_cpus(nowhere, pids=iter([11, 12, 13])) == 3
    assert usable_cpus(nowhere, pids=[99, 12]) == 2  # one is gone, or in another pid namespace
    assert usable_cpus(v2(tmp_path, "200000 100000\n"), pids=[12, 13]) == 2


class TestPlaces:
    """Where the process is not at the root: the quota of every level counts."""

    def usable(self, root: Path, *lines: str) -> int:
        places = root / "places"
        places.write_text("".join(f"{line}\n" for line in lines))
        placement._quota.cache_clear()
        return usable_cpus(root / "cgroup", own_cgroup=places)

    def quota(self, root: Path, folder: str, text: str) -> None:
        (root / "cgroup" / folder).mkdir(parents=True, exist_ok=True)
        v2(root / "cgroup" / folder, text)

    def test_the_tightest_level_counts(self, tmp_path: Path) -> None:
        self.quota(tmp_path, "pod/container", "max 100000")
        self.quota(tmp_path, "pod", "350000 100000")
        assert self.usable(tmp_path, "0::/pod/container") == 3
        self.quota(tmp_path, "pod/container", "150000 100000")
        assert self.usable(tmp_path, "0::/pod/container") == 1
        assert self.usable(tmp_path, "0::/pod") == 3

    @pytest.mark.parametrize("lines", [("0::/not/mounted/here",), ("0::/../../elsewhere",), ("1:cpu:/x",), ()])
    def test_a_path_that_leads_nowhere_leaves_the_root(self, tmp_path: Path, lines: tuple[str, ...]) -> None:
        self.quota(tmp_path, ".", "200000 100000")
        assert self.usable(tmp_path, *lines) == 2


@pytest.mark.parametrize(("quota", "others", "crowded"), [(4, 3, False), (4, 4, True), (2, 1, False), (1, 1, True)])
def test_more_ends_than_the_quota_are_crowded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: int, others: int, crowded: bool
) -> None:
    fake = partial(usable_cpus, v2(tmp_path, f"{quota}00000 100000"), own_cgroup=tmp_path / "nothing")
    monkeypatch.setattr(poller, "usable_cpus", fake)
    policy = poller.policy_for(range(1, 1 + others), Options())
    at_ns, naps = 1_000_000_000, []
    for count in range(1, 30):
        at_ns += 5_000
        naps.append(policy.begin(count, at_ns, at_ns).mode is WaitMode.NAP)
    assert any(naps) is crowded
