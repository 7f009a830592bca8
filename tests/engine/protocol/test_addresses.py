"""Who takes part in a startup, what they are called, and where their sockets are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from aioshm.engine import (
    ConstantList,
    CoreEngine,
    CoreEngineState,
    EngineHandshakeMetadata,
    EngineZmqAddresses,
    get_engine_client_zmq_addr,
)
from aioshm.engine.endpoints import check_handshake_address
from aioshm.errors import SharedMemoryError


class TestCoreEngine:
    @pytest.mark.parametrize(
        ("index", "identity"), [(0, b"\0\0"), (1, b"\x01\0"), (255, b"\xff\0"), (256, b"\0\x01"), (65535, b"\xff\xff")]
    )
    def test_its_identity_is_its_index(self, index: int, identity: bytes) -> None:
        assert CoreEngine(index).identity == identity

    def test_is_new_and_local(self) -> None:
        engine = CoreEngine()
        assert (engine.index, engine.local, engine.state) == (0, True, CoreEngineState.NEW)
        assert not CoreEngine(3, False).local
        assert CoreEngine(index=3, local=False) != CoreEngine(index=3, local=False)

    @pytest.mark.parametrize(
        ("index", "error"),
        [(-1, ValueError), (65536, ValueError), ("0", TypeError), (True, TypeError), (1.0, TypeError)],
    )
    def test_a_bad_index_is_named(self, index: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=f"index .*{index!r}"):
            CoreEngine(index)

    def test_states(self) -> None:
        assert [state.name for state in CoreEngineState] == ["NEW", "CONNECTED", "READY"]


def test_addresses_and_metadata() -> None:
    addresses = EngineZmqAddresses(["in"], ["out"])
    assert (addresses.coordinator_input, addresses.coordinator_output) == (None, None)
    assert addresses.frontend_stats_publish_address is None
    addresses.inputs = ["tcp://127.0.0.1:4"]  # known once it is bound
    metadata = EngineHandshakeMetadata(addresses=addresses, parallel_config={"data_parallel_size": 2})
    assert copy.deepcopy(metadata) == metadata == pickle.loads(pickle.dumps(metadata))


class TestConstantList:
    def test_reads_as_a_list(self) -> None:
        items = [1, 2, 3]
        view = ConstantList(items)
        assert isinstance(view, Sequence)
        assert (list(view), len(view), view[0], view[-1], view[1:]) == ([1, 2, 3], 3, 1, 3, [2, 3])
        assert (2 in view, 5 in view, view.index(3), view.count(1)) == (True, False, 2, 1)
        assert list(reversed(view)) == [3, 2, 1]
        assert view == items
        assert view == ConstantList([1, 2, 3])
        assert view != [1]
        assert view != (1, 2, 3)
        assert repr(view) == "ConstantList([1, 2, 3])"
        assert pickle.loads(pickle.dumps(view)) == view
        with pytest.raises(IndexError):
            view[3]

    def test_shows_what_its_owner_changes(self) -> None:
        items = [1]
        view = ConstantList(items)
        items.append(2)
        assert view == [1, 2]

    @pytest.mark.parametrize(
        "change",
        [
            lambda view: view.append(1),
            lambda view: view.extend([1]),
            lambda view: view.insert(0, 1),
            lambda view: view.pop(),
            lambda view: view.pop(0),
            lambda view: view.remove(1),
            lambda view: view.clear(),
            lambda view: view.sort(key=str),
            lambda view: view.reverse(),
            lambda view: view.__setitem__(0, 9),
            lambda view: view.__setitem__(slice(None), []),
            lambda view: view.__delitem__(0),
            lambda view: view.__iadd__([1]),
            lambda view: view.__imul__(2),
            lambda view: hash(view),
        ],
    )
    def test_every_change_is_refused(self, change: Any) -> None:
        items = [1, 2]
        with pytest.raises(TypeError):
            change(ConstantList(items))
        assert items == [1, 2]

    def test_operators_refuse_too(self) -> None:
        view: Any = ConstantList([1])
        with pytest.raises(TypeError, match="cannot be changed"):
            view += [2]
        with pytest.raises(TypeError, match="cannot be changed"):
            view[0] = 2
        with pytest.raises(TypeError, match="cannot be changed"):
            del view[0]


class TestClientAddress:
    def test_local_ones_are_new_paths_in_a_private_directory(self, runtime_dir: Path) -> None:
        first, second = (get_engine_client_zmq_addr(True, "ignored", 1) for _ in range(2))
        assert first != second
        for address in (first, second):
            assert Path(address.removeprefix("ipc://")).parent == runtime_dir
        assert runtime_dir.stat().st_mode & 0o777 == 0o700

    def test_local_ones_can_be_bound(self, runtime_dir: Path) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(get_engine_client_zmq_addr(True, ""))
            assert len(list(runtime_dir.iterdir())) == 1

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

    def test_port_0_is_chosen_by_whoever_binds(self) -> None:
        address = get_engine_client_zmq_addr(False, "127.0.0.1")
        assert address == "tcp://127.0.0.1:0"
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.bind(address)
            assert not socket.getsockopt_string(zmq.LAST_ENDPOINT).endswith(":0")

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
    def test_what_makes_no_sense_is_refused(self, host: Any, port: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=r"^(host|port) must be"):
            get_engine_client_zmq_addr(False, host, port)

    @pytest.mark.parametrize("address", ["", "tcp://", "inproc://here", "127.0.0.1:5", 5, None])
    def test_a_handshake_address_is_one_that_can_be_bound(self, address: Any) -> None:
        with pytest.raises((TypeError, ValueError), match=r"^handshake_address must be"):
            check_handshake_address(address)
