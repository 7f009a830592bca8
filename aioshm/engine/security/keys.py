"""The keys of a front end, its coordinator and its engines, for TCP.

All keys are derived from one secret of front ends and the coordinator. An engine has only the keys of its rank: a
ZeroMQ CURVE key pair (RFC 26), which identifies the engine, and a secret name for its sockets in place of the rank.
Each process that is started for a rank is an incarnation with keys and a name of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import zmq
from zmq.utils import z85

from aioshm.arguments import check_int
from aioshm.config import engine_keys_path
from aioshm.engine.protocol.addresses import identity
from aioshm.errors import RoleError
from aioshm.zeromq.endpoint import CurveKeys

SECRET_BYTES = 32
_NAME_BYTES = 16
_INCARNATION_BYTES = 8
_PERSON = b"aioshm-engines"
_FILE_MODE = 0o600
_MAX_FILE_BYTES = 1 << 16
_ATTRIBUTE = "aioshm_engine_keys"  # of the process object that multiprocessing sends to a new process


class EngineCredentials(msgspec.Struct, frozen=True, tag="aioshm-engine-credentials"):
    """The keys of one engine for TCP; from `EngineKeys.for_engine`.

    Attributes:
        rank: The engine's rank.
        name: The ZeroMQ identity of its sockets where keys are in use.
        public: Its public key.
        secret: Its secret key.
        front_end: The public key of the front end.
        coordinator: The public key of the coordinator.
        incarnation: The number of the rank's process, from 0 on.
    """

    rank: int
    name: bytes
    public: bytes
    secret: bytes
    front_end: bytes
    coordinator: bytes
    incarnation: int = 0

    def for_engine(self, rank: int) -> EngineCredentials:
        """Return these credentials; raise `RoleError` if they are of an engine with another rank."""
        if rank != self.rank:
            raise RoleError(f"these are the keys of engine {self.rank}, and engine {rank} needs its own")
        return self

    def to_front_end(self) -> CurveKeys:
        """Return the keys for a connection to a front end."""
        return CurveKeys(public=self.public, secret=self.secret, server=self.front_end)

    def to_coordinator(self) -> CurveKeys:
        """Return the keys for a connection to the coordinator."""
        return CurveKeys(public=self.public, secret=self.secret, server=self.coordinator)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a new file that only this user can read, for `EngineKeys.load` on the engine's host.

        Raises:
            FileExistsError, OSError: The file exists, or cannot be written.
        """
        _write(path, self)

    def __repr__(self) -> str:
        return f"<EngineCredentials of engine {self.rank}>"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return no fields: rich would show those of a struct, and these are secret."""
        return []


class EngineKeys(msgspec.Struct, frozen=True, tag="aioshm-engine-keys"):
    """The keys of one deployment: its front ends, its coordinator and its engines.

    A program that starts everything needs none: the managers of processes and actors pass keys on. Engines that are
    started by hand on other hosts get a file:

        keys = EngineKeys.generate()                                  # on the front end's host
        keys.for_engine(3).save("engine-3.keys")                      # mode 0600; copy it to the other host
        EngineClient(addresses, 4, ClientOptions(keys=keys))          # and all other options with keys there

        AIOSHM_ENGINE_KEYS=engine-3.keys python engine.py             # on the engine's host, or
        run_engine_core(engine, address, 3, handshake=HandshakeOptions(keys=EngineKeys.load("engine-3.keys")))

    A holder of one engine's keys can pose as the engine, and a holder of all keys as any engine. A restarted engine
    gets the keys of its next incarnation. Earlier keys become void then; with an `EngineSupervisor`, as soon as the
    death is known.

    Attributes:
        secret: 32 random bytes, from which all keys are derived.

    Raises:
        ValueError: The secret has another length.
    """

    secret: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes):
            raise TypeError(f"secret must be bytes, not {type(self.secret).__name__}")
        if len(self.secret) != SECRET_BYTES:
            raise ValueError(f"secret must be {SECRET_BYTES} bytes, not {len(self.secret)}")

    @classmethod
    def generate(cls) -> EngineKeys:
        """Create new keys."""
        return cls(os.urandom(SECRET_BYTES))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EngineKeys | EngineCredentials:
        """Read saved keys: all, or one engine's.

        Raises:
            OSError: The file cannot be read.
            PermissionError: The file belongs to another user, or others can read it.
            ValueError: The file has no keys.
        """
        return _read(path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a new file that only this user can read, for front ends on other hosts.

        Raises:
            FileExistsError, OSError: The file exists, or cannot be written.
        """
        _write(path, self)

    @property
    def front_end(self) -> CurveKeys:
        """The keys of front ends."""
        return self._pair(b"front end")

    @property
    def coordinator(self) -> CurveKeys:
        """The keys of the coordinator."""
        return self._pair(b"coordinator")

    def to_coordinator(self) -> CurveKeys:
        """Return the keys with which a front end connects to the coordinator."""
        return replace(self.front_end, server=self.coordinator.public)

    def to_front_end(self) -> CurveKeys:
        """Return the keys with which a front end connects to the launching process."""
        return replace(self.front_end, server=self.front_end.public)

    def for_engine(self, rank: int, incarnation: int = 0) -> EngineCredentials:
        """Return the keys of one engine.

        Args:
            rank: Its rank.
            incarnation: The number of the rank's process, from 0 on.

        Raises:
            TypeError, ValueError: The rank or the incarnation is invalid.
        """
        pair = self.of_engine(rank, incarnation)
        return EngineCredentials(
            rank,
            self.name(rank, incarnation),
            pair.public,
            pair.secret,
            self.front_end.public,
            self.coordinator.public,
            incarnation,
        )

    def of_engine(self, rank: int, incarnation: int = 0) -> CurveKeys:
        """Return the key pair of an engine."""
        return self._pair(b"engine" + _incarnated(rank, incarnation))

    def name(self, rank: int, incarnation: int = 0) -> bytes:
        """Return the ZeroMQ identity of an engine's sockets where keys are in use."""
        return identity(rank) + self._derived(b"name" + _incarnated(rank, incarnation))[:_NAME_BYTES]

    def _pair(self, owner: bytes) -> CurveKeys:
        secret = z85.encode(self._derived(owner))
        return CurveKeys(public=zmq.curve_public(secret), secret=secret)

    def _derived(self, purpose: bytes) -> bytes:
        return blake2b(purpose, key=self.secret, digest_size=SECRET_BYTES, person=_PERSON).digest()

    def __repr__(self) -> str:
        return "<EngineKeys>"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return no fields: rich would show those of a struct, and these are secret."""
        return []


AnyKeys: TypeAlias = EngineKeys | EngineCredentials
_decode: Callable[[bytes], AnyKeys] = msgspec.json.Decoder(EngineKeys | EngineCredentials).decode


def _incarnated(rank: int, incarnation: int) -> bytes:
    check_int("incarnation", incarnation, minimum=0)
    if not incarnation:  # as in files from before there were incarnations
        return identity(rank)
    return identity(rank) + incarnation.to_bytes(_INCARNATION_BYTES, "little")


_lock = threading.Lock()
_created: EngineKeys | None = None


def keys_for_front_end(given: object = None) -> EngineKeys:
    """Return the given keys, or this process's own, created if necessary."""
    global _created
    keys = _checked(given) or own_keys()
    if keys is None:
        with _lock:
            _created = keys = _created or EngineKeys.generate()
    if isinstance(keys, EngineCredentials):
        raise RoleError(f"a front end needs all keys, EngineKeys, and has only those of engine {keys.rank}")
    _require_curve()
    return keys


def keys_for_engine(rank: int, given: object = None) -> EngineCredentials:
    """Return the given keys of an engine, or else this process's own."""
    keys = _checked(given) or own_keys()
    if keys is None:
        raise RoleError(
            f"engine {rank} has no keys to connect over TCP with: start it with CoreEngineProcManager or "
            "CoreEngineActorManager, give it keys=EngineKeys.load(...) or the path of a file of them in "
            "AIOSHM_ENGINE_KEYS, or, where the front end does not encrypt, secure=False"
        )
    _require_curve()
    return keys.for_engine(rank)


def own_keys() -> AnyKeys | None:
    """Return the keys of this process: inherited, created, or from the file in ``AIOSHM_ENGINE_KEYS``."""
    inherited = getattr(multiprocessing.current_process(), _ATTRIBUTE, None)
    if inherited is not None:
        return _decode(inherited)
    path = engine_keys_path()
    if _created is not None or path is None:
        return _created
    return _read(path)


def keys_to_hand_over(given: object, rank: int | None = None, incarnation: int = 0) -> AnyKeys | None:
    """Return the keys for a new process: an engine's own, or all for a front end; None without keys."""
    if given is None and (not can_encrypt() or isinstance(own_keys(), EngineCredentials)):
        return None  # the process can run without keys; if not, it raises
    if rank is None:
        return keys_for_front_end(given)
    if isinstance(given, EngineCredentials):
        return given.for_engine(rank)
    return keys_for_front_end(given).for_engine(rank, incarnation)


def as_attributes(keys: AnyKeys | None) -> dict[str, bytes]:
    """Return the attributes by which a process object carries keys to a new process, through its pipe; see `Job`.

    As plain bytes: a process that needs no keys imports nothing for them.
    """
    return {} if keys is None else {_ATTRIBUTE: msgspec.json.encode(keys)}


def can_encrypt() -> bool:
    """Return whether ZeroMQ was built with CURVE."""
    return bool(zmq.has("curve"))


def _require_curve() -> None:
    if not can_encrypt():
        raise RuntimeError("this ZeroMQ cannot encrypt: install a wheel of pyzmq, or use secure=False")


def _checked(given: object) -> AnyKeys | None:
    if given is not None and not isinstance(given, EngineKeys | EngineCredentials):
        raise TypeError(f"keys must be EngineKeys, or EngineCredentials for an engine, not {given!r}")
    return given


def _write(path: str | os.PathLike[str], keys: AnyKeys) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE), "wb") as stream:
        stream.write(msgspec.json.encode(keys) + b"\n")


def _read(path: str | os.PathLike[str]) -> AnyKeys:
    with Path(path).open("rb") as stream:
        found = os.fstat(stream.fileno())
        if found.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{os.fspath(path)} must be this user's alone: chmod 600, and chown to this user")
        text = stream.read(_MAX_FILE_BYTES)
    try:
        return _decode(text)
    except ValueError as error:  # of msgspec, or the file is no UTF-8
        raise ValueError(f"{os.fspath(path)} holds no keys of engines: {error}") from None
