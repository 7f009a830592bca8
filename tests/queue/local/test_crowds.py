"""Ends that are more than their CPUs: a spin hands the CPU on, whichever end it is."""

from __future__ import annotations

import pytest
from merging import asleep, poller_of, queues
from pairs import attached

from aioshm import merge
from aioshm.wait import poller as poller_module

pytestmark = pytest.mark.slow_on_uvloop


@pytest.fixture(params=[(2, True), (3, False)], ids=["more ends than CPUs", "as many"])
def crowded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let the ends of this process seem to be in three, which have two CPUs, or three."""
    cpus, crowded = request.param
    monkeypatch.setattr(poller_module, "_apart", lambda _: True)
    monkeypatch.setattr(poller_module, "usable_cpus", lambda **_: cpus)
    return bool(crowded)


async def test_a_spin_of_either_end_hands_its_cpu_on(crowded: bool) -> None:
    async with attached(2) as (writer, readers):
        for mq in (writer, *readers):
            assert mq.end.state.core.spin_yields is crowded
            assert mq.end.state.poller is not None
            assert mq.end.state.poller.policy.crowded is crowded
        await writer.enqueue("x")
        assert [await reader.dequeue() for reader in readers] == ["x", "x"]


async def test_so_does_that_of_a_merge(crowded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller_module, "usable_cpus", lambda **_: 1 if crowded else 2)  # both writers are one process
    async with queues(2, wait="park") as (writers, readers), merge(readers) as merged:
        waiting = await asleep(merged)
        poller = poller_of(merged)
        await writers[1].enqueue("x")
        assert await waiting == (1, "x")
        assert merged._shared.yields is crowded
        assert poller.policy.crowded is crowded
