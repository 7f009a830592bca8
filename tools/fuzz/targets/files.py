"""Handles, and the files that writers leave for others: identities, names, keys."""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from aioshm.config import Options
from aioshm.engine.security import keys
from aioshm.errors import HandleError, IdentityError
from aioshm.queue.handle import Handle, RemoteAddress, as_handle
from aioshm.queue.names import identity as identities
from aioshm.queue.names.registry import NamedWriters, Registration
from aioshm.ring.layout import VERSION
from tools.fuzz.target import Target, attempt

_REMOTE = RemoteAddress(
    data="tcp://10.0.0.1:1",
    control="tcp://10.0.0.1:2",
    ranks=(1,),
    server_key=b"k" * 40,
    client_public=b"k" * 40,
    client_secret=b"k" * 40,
)
_HANDLE = Handle(
    version=VERSION,
    queue_id=b"q" * 16,
    token=b"t" * 32,
    host="host",
    uid=0,
    n_reader=2,
    local_reader_ranks=(0,),
    max_chunk_bytes=1 << 20,
    max_chunks=10,
    slots=16,
    inline_bytes=64,
    lifeline="@lifeline",
    segment=None,
    codec="pickle",
    connect_ip=None,
    remote=_REMOTE,
    options=Options(),
)


def handles(data: bytes) -> None:
    """Read a handle's JSON; what is one comes back by JSON and by pickle, and can be looked at."""
    handle = attempt(HandleError, Handle.from_json, data)
    if handle is None:
        return
    assert as_handle(handle.to_json()) == handle
    assert pickle.loads(pickle.dumps(handle)) == handle
    attempt(HandleError, handle.check_version)
    attempt(HandleError, handle.check_local)
    if (remote := handle.remote) is not None:
        attempt(HandleError, lambda: remote.check(encrypted=False))
    assert len(repr(handle)) < 1000 + len(handle.label)


def identity_files(data: bytes) -> None:
    """Read the file of a writer's identity."""
    content = attempt(IdentityError, identities._checked, Path("identity"), data)
    if content is not None:
        assert identities._checked(Path("identity"), identities._encode(content)) == content


def key_files(data: bytes) -> None:
    """Read the file of engines' keys, and use them."""
    found = attempt((ValueError, msgspec.MsgspecError), keys._decode, data)
    if isinstance(found, keys.EngineKeys):
        assert keys._decode(msgspec.json.encode(found)) == found


class _Directory:
    """The runtime directory of names, made when it is first wanted."""

    path: Path | None = None

    def of(self) -> Path:
        if self.path is None:
            self.path = Path(tempfile.mkdtemp(prefix="aioshm-fuzz-"))
            atexit.register(shutil.rmtree, self.path, ignore_errors=True)
        return self.path


_directory = _Directory()


def name_files(data: bytes) -> None:
    """Look up a name whose file says anything."""
    path = _directory.of() / "fuzzed.queue"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    writers = NamedWriters("fuzzed", str(path.parent))
    attempt(HandleError, writers.find)
    assert writers.awaited()


def _handle_seeds() -> Iterator[bytes]:
    yield _HANDLE.to_json().encode()
    yield msgspec.json.encode(msgspec.structs.replace(_HANDLE, remote=None, name="steps", segment="/aioshm-x"))
    yield b"{}"


def _identity_seeds() -> Iterator[bytes]:
    plain = identities._Content(token=b"t" * identities.TOKEN_BYTES, data=1, control=2, pid=3)
    yield identities._encode(plain)
    server, client = (
        identities._Pair(zmq.curve_public(secret), secret) for secret in (z85.encode(b"s" * 32), z85.encode(b"c" * 32))
    )
    yield identities._encode(msgspec.structs.replace(plain, server=server, client=client))


def _key_seeds() -> Iterator[bytes]:
    made = keys.EngineKeys(b"s" * keys.SECRET_BYTES)
    yield msgspec.json.encode(made)
    yield msgspec.json.encode(made.for_engine(1))


def _name_seeds() -> Iterator[bytes]:
    handle = msgspec.Raw(_HANDLE.to_json().encode())
    yield msgspec.json.encode(Registration(name="fuzzed", pid=1, lifeline="@nobody", handle=handle))
    yield msgspec.json.encode(Registration(name="other", pid=1, lifeline="/no/where", handle=handle))


TARGETS = (
    Target("handles", handles, _handle_seeds),
    Target("identities", identity_files, _identity_seeds),
    Target("keys", key_files, _key_seeds),
    Target("names", name_files, _name_seeds),
)
