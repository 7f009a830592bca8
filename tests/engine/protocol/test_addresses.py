"""Participants of a startup: identities, addresses, and texts of their progress."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aioshm.engine import (
    ConstantList,
    CoreEngine,
    CoreEngineState,
    StartupProgress,
    Waiting,
    get_engine_client_zmq_addr,
)
from aioshm.engine.client.liveness import engine_of
from aioshm.engine.endpoints import check_handshake_address
from aioshm.engine.protocol.addresses import PHASES, describe_failure, engine_index
from aioshm.errors import SharedMemoryError
from aioshm.process.watch import ProcessExit

NEW, CONNECTED, READY = CoreEngineState


class TestCoreEngine:
    @pytest.mark.parametrize(
        ("index", "identity"), [(0, b"\0\0"), (1, b"\x01\0"), (255, b"\xff\0"), (256, b"\0\x01"), (65535, b"\xff\xff")]
    )
    def test_its_identity_is_its_index(self, index: int, identity: bytes) -> None:
        assert CoreEngine(index).identity == identity

    @pytest.mark.parametrize(
        ("index", "error"),
        [(-1, ValueError), (65536, ValueError), ("0", TypeError), (True, TypeError), (1.0, TypeError)],
    )
    def test_a_bad_index_is_named(self, index: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=f"index .*{index!r}"):
            CoreEngine(index)


class TestConstantList:
    def test_reads_as_a_list(self) -> None:
        items = [1, 2, 3]
        view = ConstantList(items)
        assert isinstance(view, Sequence)
        assert (list(view), len(view), view[0], view[1:]) == ([1, 2, 3], 3, 1, [2, 3])
        assert view == items
        assert pickle.loads(pickle.dumps(view)) == view != (1, 2, 3)
        assert repr(view) == "ConstantList([1, 2, 3])"
        items.append(4)
        assert view == [1, 2, 3, 4]

    @pytest.mark.parametrize(
        "change",
        [
            lambda view: view.append(1),
            lambda view: view.pop(0),
            lambda view: view.sort(key=str),
            lambda view: operator.setitem(view, 0, 9),
            lambda view: operator.delitem(view, 0),
            lambda view: operator.iadd(view, [1]),
            lambda view: hash(view),
        ],
    )
    def test_every_change_is_refused(self, change: Any) -> None:
        items = [1, 2]
        with pytest.raises(TypeError):
            change(ConstantList(items))
        assert items == [1, 2]


class TestClientAddress:
    def test_local_addresses_are_new_paths_in_a_private_directory(self, runtime_dir: Path) -> None:
        first, second = (get_engine_client_zmq_addr(True, "ignored", 1) for _ in range(2))
        assert first != second
        for address in (first, second):
            assert Path(address.removeprefix("ipc://")).parent == runtime_dir
        assert runtime_dir.stat().st_mode & 0o777 == 0o700

    def test_a_directory_that_is_too_deep_is_named(self, monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
        monkeypatch.setenv("AIOSHM_RUNTIME_DIR", str(runtime_dir / ("x" * 100)))
        with pytest.raises(SharedMemoryError, match="AIOSHM_RUNTIME_DIR"):
            get_engine_client_zmq_addr(True, "")

    @pytest.mark.parametrize(
        ("host", "port", "address"),
        [
            ("10.0.0.5", 5555, "tcp://10.0.0.5:5555"),
            ("::1", 5555, "tcp://[::1]:5555"),
            ("[::1]", 0, "tcp://[::1]:0"),
            ("node-3", 65535, "tcp://node-3:65535"),
        ],
    )
    def test_others(self, host: str, port: int, address: str) -> None:
        assert get_engine_client_zmq_addr(False, host, port) == address

    @pytest.mark.parametrize(
        ("host", "port", "error"),
        [
            ("", 1, ValueError),
            (None, 1, ValueError),
            ("h", -1, ValueError),
            ("h", 65536, ValueError),
            ("h", "1", TypeError),
            ("h", True, TypeError),
        ],
    )
    def test_invalid_host_or_port_is_refused(self, host: Any, port: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=r"^(host|port) must be"):
            get_engine_client_zmq_addr(False, host, port)

    @pytest.mark.parametrize("address", ["", "tcp://", "inproc://here", "127.0.0.1:5", 5, None])
    def test_handshake_address_that_cannot_be_bound_is_refused(self, address: Any) -> None:
        with pytest.raises((TypeError, ValueError), match=r"^handshake_address must be"):
            check_handshake_address(address)


def test_progress_names_waiting_engines() -> None:
    waiting = (Waiting(1, NEW, 12.3, 4711), Waiting(2, CONNECTED, 3.0), Waiting(3, NEW, 12.3, 4713))
    assert str(StartupProgress(4, 2, 1, waiting)) == (
        "2 of 4 engines connected, 1 ready; waiting for engines 1 (pid 4711, before HELLO, 12 s), "
        "2 (connected, 3 s), 3 (pid 4713, before HELLO, 12 s)"
    )
    assert str(StartupProgress(4, 4, 4)) == "4 of 4 engines connected, 4 ready"
    many = tuple(Waiting(index, NEW, 1.0) for index in range(1000))
    assert str(StartupProgress(1000, 0, 0, many)).endswith("7 (before HELLO, 1 s) and 992 more")


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
def test_exit_is_described(found: ProcessExit, state: CoreEngineState | None, text: str) -> None:
    assert found.describe("" if state is None else PHASES[state]) == text
    assert engine_of(found) == (1 if found.managed else None)


@pytest.mark.parametrize(
    ("name", "index"), [("EngineCore_12", 12), ("EngineCore_DP0", 0), ("EngineCore", None), ("Engine-1-a", None)]
)
def test_rank_is_at_the_end_of_a_name(name: str, index: int | None) -> None:
    assert engine_index(name) == index


def test_text_of_a_failure() -> None:
    progress = StartupProgress(2, 1, 0)
    assert describe_failure("no progress for 5 s", [], progress, {}) == (
        "engine startup failed: no progress for 5 s (1 of 2 engines connected, 0 ready)"
    )
    assert describe_failure("", ["A died", "B died"], progress, {"A": ["one", "two"]}) == (
        "engine startup failed: A died, B died (1 of 2 engines connected, 0 ready)\n"
        "last lines of A's stderr:\n  one\n  two"
    )
