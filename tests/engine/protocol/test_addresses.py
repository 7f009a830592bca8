"""Participants of a startup: identities, addresses, and texts of their progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aioshm.engine import CoreEngine, CoreEngineState, StartupProgress, Waiting, get_engine_client_zmq_addr
from aioshm.engine.client.liveness import engine_of
from aioshm.engine.protocol.addresses import engine_index
from aioshm.engine.security.bound_sockets import check_handshake_address
from aioshm.errors import SharedMemoryError
from aioshm.process.watch import ProcessExit

NEW, CONNECTED, READY = CoreEngineState


def test_identity_is_the_index_in_two_bytes() -> None:
    for index, identity in ((0, b"\0\0"), (255, b"\xff\0"), (256, b"\0\x01"), (65535, b"\xff\xff")):
        assert CoreEngine(index).identity == identity
    for wrong, error in ((-1, ValueError), (65536, ValueError), ("0", TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"index .*{wrong!r}"):
            CoreEngine(wrong)  # type: ignore[arg-type]


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

    def test_other_addresses_have_host_and_port(self) -> None:
        for host, port, address in (
            ("10.0.0.5", 5555, "tcp://10.0.0.5:5555"),
            ("::1", 5555, "tcp://[::1]:5555"),
            ("[::1]", 0, "tcp://[::1]:0"),
        ):
            assert get_engine_client_zmq_addr(False, host, port) == address
        wrong: list[tuple[Any, Any, type[Exception]]] = [
            ("", 1, ValueError),
            (None, 1, ValueError),
            ("h", -1, ValueError),
            ("h", 65536, ValueError),
            ("h", "1", TypeError),
        ]
        for host, port, error in wrong:
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


def test_exit_of_an_engine_is_described_with_its_phase() -> None:
    found = ProcessExit("EngineCore_1", 7, 3, True)
    assert found.describe(NEW.value) == "EngineCore_1 (pid 7, before HELLO) exited with code 3"
    assert engine_of(found) == 1
    found = ProcessExit("DPCoordinator", 7, -63)
    assert found.describe() == "DPCoordinator (pid 7) was killed by signal 63"
    assert engine_of(found) is None


@pytest.mark.parametrize(
    ("name", "index"), [("EngineCore_12", 12), ("EngineCore_DP0", 0), ("EngineCore", None), ("Engine-1-a", None)]
)
def test_rank_is_at_the_end_of_a_name(name: str, index: int | None) -> None:
    assert engine_index(name) == index
