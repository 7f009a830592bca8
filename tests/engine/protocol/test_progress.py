"""What is said of a startup, without one."""

from __future__ import annotations

import pytest

from aioshm.engine import CoreEngineState, StartupProgress, Waiting
from aioshm.engine.client.liveness import engine_of
from aioshm.engine.protocol.addresses import PHASES, describe_failure, engine_index
from aioshm.process.watch import ProcessExit

NEW, CONNECTED, READY = CoreEngineState


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Replace the check of the other tests: nothing is opened or started here."""


def test_one_line_says_who_is_waited_for() -> None:
    waiting = (Waiting(1, NEW, 12.3, 4711), Waiting(2, CONNECTED, 3.0), Waiting(3, NEW, 12.3, 4713))
    assert str(StartupProgress(4, 2, 1, waiting)) == (
        "2 of 4 engines connected, 1 ready; waiting for engines 1 (pid 4711, before HELLO, 12 s), "
        "2 (connected, 3 s), 3 (pid 4713, before HELLO, 12 s)"
    )
    assert str(StartupProgress(4, 4, 4)) == "4 of 4 engines connected, 4 ready"


def test_many_are_counted() -> None:
    waiting = tuple(Waiting(index, NEW, 1.0) for index in range(1000))
    text = str(StartupProgress(1000, 0, 0, waiting))
    assert text.endswith("7 (before HELLO, 1 s) and 992 more")
    assert len(text) < 400


@pytest.mark.parametrize(
    ("found", "state", "text"),
    [
        (ProcessExit("EngineCore_1", 7, 3, True), NEW, "EngineCore_1 (pid 7, before HELLO) exited with code 3"),
        (ProcessExit("EngineCore_1", None, 0, True), READY, "EngineCore_1 (ready) exited with code 0"),
        (ProcessExit("EngineCore_1", 7, -9, True), CONNECTED, "EngineCore_1 (pid 7, connected) was killed by SIGKILL"),
        (ProcessExit("DPCoordinator", 7, -15), None, "DPCoordinator (pid 7) was killed by SIGTERM"),
        (ProcessExit("DPCoordinator", 7, -63), None, "DPCoordinator (pid 7) was killed by signal 63"),
        (ProcessExit("DPCoordinator", None, None), None, "DPCoordinator exited; its exit code is not known"),
    ],
)
def test_what_became_of_a_process(found: ProcessExit, state: CoreEngineState | None, text: str) -> None:
    assert found.describe("" if state is None else PHASES[state]) == text
    assert engine_of(found) == (1 if found.managed else None)


@pytest.mark.parametrize(
    ("name", "index"), [("EngineCore_12", 12), ("EngineCore_DP0", 0), ("EngineCore", None), ("Engine-1-a", None)]
)
def test_the_rank_in_a_name(name: str, index: int | None) -> None:
    assert engine_index(name) == index


def test_the_text_of_a_failure() -> None:
    progress = StartupProgress(2, 1, 0)
    assert describe_failure("no progress for 5 s", [], progress, {}) == (
        "engine startup failed: no progress for 5 s (1 of 2 engines connected, 0 ready)"
    )
    assert describe_failure("", ["A died", "B died"], progress, {"A": ["one", "two"]}) == (
        "engine startup failed: A died, B died (1 of 2 engines connected, 0 ready)\n"
        "last lines of A's stderr:\n  one\n  two"
    )
