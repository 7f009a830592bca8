from __future__ import annotations

import platform
import threading

import pytest
from rings import python

from aioshm.ring import cores, reference
from aioshm.ring.cores import memory_fence

CORES_ON = """
import os, platform, sys
os.environ["AIOSHM_NATIVE"] = "0"
platform.machine = lambda: sys.argv[1]
from aioshm.ring import ShmRingBuffer, cores
ring = ShmRingBuffer(1, 64, 1)
print(cores.WriterBase.reorders, cores.ReaderBase.reorders, cores.FULL_FENCE)
ring.close()
"""


def test_this_machine() -> None:
    x86 = platform.machine().lower() in {"x86_64", "amd64", "i686", "i386", "x86"}
    assert cores.STRONG_ORDER is x86


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "aarch64", "arm64", "riscv64", "ppc64le", ""])
def test_a_machine_not_known_to_keep_order_gets_the_fenced_cores(machine: str) -> None:
    out, err = python(CORES_ON, machine).communicate()
    assert out == ("False False True\n" if machine in {"x86_64", "AMD64"} else "True True False\n")
    assert err == ""


def test_a_fence_is_passed_by_many_threads_at_once() -> None:
    passed = []

    def pass_many() -> None:
        for _ in range(2000):
            memory_fence()
        passed.append(True)

    threads = [threading.Thread(target=pass_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert passed == [True] * 4


@pytest.mark.parametrize(("strong", "round_trips"), [(True, 1), (False, 2)])
def test_a_fence_of_the_twin_is_a_release_and_then_an_acquire_where_stores_are_reordered(
    monkeypatch: pytest.MonkeyPatch, strong: bool, round_trips: int
) -> None:
    """One round trip is an acquire and then a release: what is on either side of it may change places within."""
    steps: list[str] = []

    class Noted:
        def __enter__(self) -> None:
            steps.append("acquire")

        def __exit__(self, *_: object) -> None:
            steps.append("release")

    monkeypatch.setattr(reference, "Lock", Noted)
    monkeypatch.setattr(reference, "STRONG_ORDER", strong)
    reference.memory_fence()
    assert steps == ["acquire", "release"] * round_trips


def test_the_recheck_bounds_a_wait_to_milliseconds() -> None:
    assert 0 < cores.RECHECK_S <= 0.05
