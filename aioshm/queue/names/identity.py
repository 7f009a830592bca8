"""A writer's identity in a file: the ports, keys and token of the writer and its successors."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import zmq
from msgspec import Meta

from aioshm.arguments import shown
from aioshm.config import Options
from aioshm.errors import IdentityError, NameTaken, OutOfDescriptors, SharedMemoryError
from aioshm.process.limits import naming_limits
from aioshm.process.proc import process_state
from aioshm.queue.names import files
from aioshm.zeromq.endpoint import CurveKeys

logger: logging.Logger = logging.getLogger("aioshm.queue")

TOKEN_BYTES = 32

_Key: TypeAlias = Annotated[bytes, Meta(min_length=40, max_length=40)]
_Token: TypeAlias = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
_Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535)]


class _Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A CURVE key pair."""

    public: _Key
    secret: _Key

    def keys(self, server: bytes | None = None) -> CurveKeys:
        return CurveKeys(public=self.public, secret=self.secret, server=server)

    def check(self) -> None:
        """Raise `ValueError` unless the keys match."""
        try:
            public = zmq.curve_public(self.secret)
        except zmq.ZMQError as error:
            raise ValueError(f"a secret key: {error}") from None
        if public != self.public:
            raise ValueError("keys that do not belong together")


class _Content(msgspec.Struct, frozen=True, kw_only=True, tag="aioshm-identity", forbid_unknown_fields=True):
    """The content of an identity's file."""

    token: _Token
    data: _Port = 0  # 0: no port yet
    control: _Port = 0
    server: _Pair | None = None  # None: connections are not encrypted
    client: _Pair | None = None
    pid: int = 0  # of the present or latest owner, in its own pid namespace


_decoder = msgspec.json.Decoder(_Content)


class Identity:
    """The token, ports and keys that successive writers share; owned while a writer lives."""

    def __init__(self, file: files.OwnFile, content: _Content) -> None:
        self.path: Path = file.path
        self._file = file
        self._content = content
        self.token: bytes = content.token
        self.server: CurveKeys | None = None  # None: connections are not encrypted
        self.client: CurveKeys | None = None
        if content.server is not None and content.client is not None:
            self.server = content.server.keys()
            self.client = content.client.keys(content.server.public)

    @classmethod
    def of_file(cls, path: str | os.PathLike[str], options: Options) -> Identity:
        """Acquire the identity in a file; create a missing file."""
        if not isinstance(path, (str, os.PathLike)) or isinstance(name := os.fspath(path), bytes):
            raise TypeError(f"identity must be a path as a str or PathLike, not {shown(path)}")
        if not name or "\0" in name:
            raise ValueError(f"identity must be a path, not {shown(path)}")
        where = Path(name).absolute()  # the working directory may change
        try:
            with naming_limits(f"a writer with the identity {where}"):
                file = _acquire(where, options)
        except files.NotOurs as refusal:
            raise IdentityError(f"identity {where}: {refusal}") from None
        except (SharedMemoryError, OutOfDescriptors):
            raise
        except OSError as error:
            raise SharedMemoryError(error.errno, f"identity {where}: {error.strerror}") from None
        try:
            content = _checked(where, file.read())
            has_keys = content.server is not None
            if options.secure != has_keys:
                raise IdentityError(
                    f"identity {where} was made {'with' * has_keys or 'without'} keys, and options.secure is "
                    f"{options.secure}: take another one"
                )
            return cls(file, content)
        except BaseException:
            file.release()
            raise

    @property
    def ports(self) -> tuple[int, int]:
        """The ports of data and control; zeros until there are some."""
        return self._content.data, self._content.control

    def keep(self, data: int, control: int) -> None:
        """Store the writer's ports for later writers, and the owner's pid."""
        new = msgspec.structs.replace(self._content, data=data, control=control, pid=os.getpid())
        try:
            with naming_limits(f"a writer with the identity {self.path}"):
                self._file.replace(_encode(new), durable=True)
        except OSError as error:
            if self.ports == (data, control):  # only the owner in the file is outdated
                logger.debug("identity %s: %s", self.path, error)
            elif isinstance(error, OutOfDescriptors):
                raise
            else:
                raise SharedMemoryError(error.errno, f"identity {self.path}: {error.strerror}") from None
        self._content = new

    def release(self) -> None:
        """Release the identity for the next writer. Idempotent."""
        self._file.release()


def _acquire(path: Path, options: Options) -> files.OwnFile:
    while True:
        try:
            file = files.take(path)
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise
            file = files.create(path, _encode(_new(options)), durable=True)
            if file is None:  # another process was faster
                continue
        if file is None:
            raise NameTaken(str(path), _owner(path), str(path))
        files.sweep(path.parent, files.drafts(path.name))
        return file


def _new(options: Options) -> _Content:
    token = secrets.token_bytes(TOKEN_BYTES)
    if not options.secure:
        return _Content(token=token)
    server = CurveKeys.generate()
    client = CurveKeys.generate()
    return _Content(token=token, server=_Pair(server.public, server.secret), client=_Pair(client.public, client.secret))


def _encode(content: _Content) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def _checked(path: Path, text: bytes) -> _Content:
    """Parse and check an identity's content."""
    try:
        content = _decoder.decode(text)
        _check(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise IdentityError(
            f"identity {path} is damaged: {error}: put a copy in its place, or remove it, and give readers new handles"
        ) from None
    return content


def _check(content: _Content) -> None:
    ports = content.data, content.control
    if any(ports) and (not all(ports) or content.data == content.control):
        raise ValueError(f"the ports {ports}")
    if (content.server is None) != (content.client is None):
        raise ValueError("keys of one side only")
    for pair in (content.server, content.client):
        if pair is not None:
            pair.check()


def _owner(path: Path) -> int:
    """Return the pid of an identity's owner; 0 if unknown."""
    try:
        fd = files.open_own(path, os.O_RDONLY)
        try:
            pid = _checked(path, files.read(fd)).pid
        finally:
            os.close(fd)
    except (OSError, files.NotOurs, IdentityError):
        return 0
    if pid <= 0 or process_state(pid) == "gone":
        return 0
    return pid
