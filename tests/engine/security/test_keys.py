"""Keys: derived, saved, handed to processes, and what is said where there are none."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from served_engine import Engine, ask, collected, served

from aioshm.config import Options
from aioshm.engine import (
    CoreEngineProcManager,
    EngineClient,
    EngineCredentials,
    EngineKeys,
    EngineZmqAddresses,
    ProcessManager,
    shake_hands,
)
from aioshm.engine.security.keys import (
    as_attributes,
    keys_for_engine,
    keys_for_front_end,
    keys_to_hand_over,
    own_keys,
)
from aioshm.errors import RoleError
from aioshm.process.manager import Job

pytestmark = pytest.mark.usefixtures("runtime_dir")

LOOPBACK = "tcp://127.0.0.1:0"


def over_tcp() -> EngineZmqAddresses:
    return EngineZmqAddresses([LOOPBACK], [LOOPBACK])


class TestKeys:
    def test_each_incarnation_of_an_engine_has_its_own_only(self) -> None:
        keys = EngineKeys.generate()
        one = keys.for_engine(1)
        made = [one, keys.for_engine(1, 1), keys.for_engine(2)]
        assert [each.incarnation for each in made] == [0, 1, 0]
        assert one == EngineKeys(keys.secret).for_engine(1) == keys.for_engine(1, 0)
        assert len({text for each in made for text in (each.public, each.secret, each.name)}) == 9
        with pytest.raises(ValueError, match="incarnation must be at least 0"):
            keys.for_engine(1, -1)
        assert (one.front_end, one.coordinator) == (keys.front_end.public, keys.coordinator.public)
        assert one.to_front_end().server == keys.front_end.public
        assert one.to_coordinator().server == keys.coordinator.public
        assert keys.front_end.secret not in repr(one).encode() + pickle.dumps(one)
        assert keys.secret not in pickle.dumps(one)
        assert one.for_engine(1) is one
        with pytest.raises(RoleError, match="the keys of engine 1, and engine 2 needs its own"):
            one.for_engine(2)

    def test_rich_shows_no_secret(self) -> None:
        keys = EngineKeys.generate()
        for each in (keys, keys.for_engine(1)):
            assert list(each.__rich_repr__()) == []

    def test_bad_secrets(self) -> None:
        with pytest.raises(ValueError, match="secret must be 32 bytes, not 3"):
            EngineKeys(b"abc")
        with pytest.raises(TypeError, match="secret must be bytes, not str"):
            EngineKeys("abc")  # type: ignore[arg-type]


class TestFiles:
    @pytest.mark.parametrize("one", [False, True])
    def test_there_and_back(self, one: bool, tmp_path: Path) -> None:
        keys: Any = EngineKeys.generate()
        keys = keys.for_engine(5, 1) if one else keys
        path = tmp_path / "keys"
        keys.save(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert EngineKeys.load(path) == keys
        with pytest.raises(FileExistsError):
            keys.save(path)

    def test_file_that_other_users_can_read_is_refused(self, tmp_path: Path) -> None:
        EngineKeys.generate().save(tmp_path / "keys")
        (tmp_path / "keys").chmod(0o640)
        with pytest.raises(PermissionError, match="must be this user's alone: chmod 600"):
            EngineKeys.load(tmp_path / "keys")

    @pytest.mark.parametrize(
        "text",
        [b"", b"{}", b"[]", b'{"type":"aioshm-engine-keys"}', b'{"type":"x","secret":"AA=="}', b'{"type":"\xff"}'],
    )
    def test_file_without_keys_is_refused(self, text: bytes, tmp_path: Path) -> None:
        path = tmp_path / "keys"
        path.touch(0o600)
        path.write_bytes(text)
        with pytest.raises(ValueError, match="keys holds no keys of engines"):
            EngineKeys.load(path)

    def test_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aioshm.engine.security.keys._created", None)
        keys = EngineKeys.generate()
        keys.for_engine(2).save(tmp_path / "keys")
        assert own_keys() is None
        monkeypatch.setenv("AIOSHM_ENGINE_KEYS", str(tmp_path / "keys"))
        assert keys_for_engine(2) == keys.for_engine(2)
        with pytest.raises(RoleError, match="keys of engine 2"):
            keys_for_engine(3)
        with pytest.raises(RoleError, match="a front end needs all keys, EngineKeys, and has only those of engine 2"):
            keys_for_front_end()


def tell_keys(**_: Any) -> None:
    """Print the keys of this process, unless arguments or environment hold them; the target of a process."""
    found = own_keys()
    shown = repr(found)
    if isinstance(found, EngineCredentials):
        shown = f"rank {found.rank}"
        for name in ("cmdline", "environ"):
            text = Path(f"/proc/self/{name}").read_bytes()
            assert found.secret not in text
            assert b"secret" not in text
    os.write(2, f"keys {shown}\n".encode())


class TestHandingOver:
    def said(self, manager: ProcessManager) -> list[str]:
        for process in manager.processes:
            process.join(20)
            assert process.exitcode == 0
        manager.close()
        return [manager.last_lines(process.name)[-1] for process in manager.processes]

    def test_engines_get_their_own(self) -> None:
        with CoreEngineProcManager(tell_keys, 2, 3, keys=EngineKeys.generate()) as manager:
            assert self.said(manager) == ["keys rank 3", "keys rank 4"]

    def test_front_ends_get_all_and_others_none(self) -> None:
        jobs = [Job("front end", attributes=as_attributes(keys_to_hand_over(None))), Job("other")]
        with ProcessManager(tell_keys, jobs) as manager:
            assert self.said(manager) == ["keys <EngineKeys>", "keys None"]

    def test_bad_keys(self) -> None:
        with pytest.raises(TypeError, match="keys must be EngineKeys, or EngineCredentials for an engine, not 'x'"):
            CoreEngineProcManager(tell_keys, 1, keys="x")  # type: ignore[arg-type]
        with pytest.raises(RoleError, match="keys of engine 1"):
            keys_to_hand_over(EngineKeys.generate().for_engine(1), 2)

    async def test_without_any(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aioshm.engine.security.keys._created", None)
        with pytest.raises(RoleError, match=r"engine 7 has no keys to connect.*EngineKeys\.load.*secure=F"):
            await shake_hands("tcp://127.0.0.1:1", 7, initialize=lambda metadata: None)

    async def test_where_zeromq_cannot_encrypt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("aioshm.engine.security.keys.can_encrypt", lambda: False)
        with pytest.raises(RuntimeError, match="cannot encrypt: install a wheel of pyzmq, or use secure=False"):
            EngineClient(over_tcp(), 1).open()
        with CoreEngineProcManager(tell_keys, 1) as manager:
            assert self.said(manager) == ["keys None"]


class TestOverTCP:
    async def test_options_of_both_ends_may_leave_encryption_out(self) -> None:
        async with served(
            Engine(), addresses=over_tcp(), handshake=LOOPBACK, secure=False, options=Options(secure=False)
        ) as serving:
            assert len(await collected(serving.client.submit(ask("a")))) == 3
            assert (await serving.client.call("add", 2, 3, engine=0)) == 5
