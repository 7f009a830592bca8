"""A writer's identity in a file: the ports, keys and token of the writer and its successors."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

import msgspec
import zmq

from aioshm.arguments import shown
from aioshm.config import Options
from aioshm.errors import IdentityError, NameTaken, OutOfDescriptors, SharedMemoryError
from aioshm.process.limits import naming_limits
from aioshm.process.state import process_state
from aioshm.queue.names import files
from aioshm.zeromq.curve import CurveKeys

logger: logging.Logger = logging.getLogger("aioshm.queue")

TOKEN_BYTES = 32
_KEY_BYTES = 40
MAX_PORT = 65535


class _Content(msgspec.Struct, frozen=True, kw_only=True, tag="aioshm-identity", forbid_unknown_fields=True):
    """The content of an identity's file."""

    token: bytes
    # 0 until the first writer has chosen its ports.
    data: int = 0
    control: int = 0
    # None where connections are not encrypted.
    server_public: bytes | None = None
    server_secret: bytes | None = None
    client_public: bytes | None = None
    client_secret: bytes | None = None
    # The present or latest owner, in its own pid namespace.
    pid: int = 0


_decoder = msgspec.json.Decoder(_Content)


class Identity:
    """The token, ports and keys that successive writers share; owned while a writer lives."""

    def __init__(self, file: files.OwnFile, content: _Content) -> None:
        self.path: Path = file.path
        self._file = file
        self._content = content
        self.token: bytes = content.token
        # None where connections are not encrypted.
        self.server: CurveKeys | None = None
        self.client: CurveKeys | None = None
        if content.server_public is not None:
            public, secret = content.client_public, content.client_secret
            assert content.server_secret is not None
            assert public is not None
            assert secret is not None
            self.server = CurveKeys(public=content.server_public, secret=content.server_secret)
            self.client = CurveKeys(public=public, secret=secret, server=content.server_public)

    @classmethod
    def of_file(cls, path: str | os.PathLike[str], options: Options) -> Identity:
        """Acquire the identity in a file, which is made if missing."""
        if not isinstance(path, (str, os.PathLike)) or isinstance(name := os.fspath(path), bytes):
            raise TypeError(f"identity must be a path as a str or PathLike, not {shown(path)}")
        if not name or "\0" in name:
            raise ValueError(f"identity must be a path, not {shown(path)}")
        where = Path(name).absolute()  # wherever this process changes to
        try:
            with naming_limits(f"a writer with the identity {where}"):
                file = _have(where, options)
        except files.NotOurs as refusal:
            raise IdentityError(f"identity {where}: {refusal}") from None
        except (SharedMemoryError, OutOfDescriptors):
            raise
        except OSError as error:
            raise SharedMemoryError(error.errno, f"identity {where}: {error.strerror}") from None
        try:
            content = _checked(where, file.read())
            if options.secure != (content.server_public is not None):
                made = "with" if content.server_public is not None else "without"
                raise IdentityError(
                    f"identity {where} was made {made} keys, and options.secure is {options.secure}: take another one"
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
            if self.ports == (data, control):  # the file is good as it is, but for who has it
                logger.debug("identity %s: %s", self.path, error)
            elif isinstance(error, OutOfDescriptors):
                raise
            else:
                raise SharedMemoryError(error.errno, f"identity {self.path}: {error.strerror}") from None
        self._content = new

    def release(self) -> None:
        """Release the identity for the next writer. Idempotent."""
        self._file.release()


def _have(path: Path, options: Options) -> files.OwnFile:
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
        files.sweep(path.parent, path.name)
        return file


def _new(options: Options) -> _Content:
    token = secrets.token_bytes(TOKEN_BYTES)
    if not options.secure:
        return _Content(token=token)
    server, client = CurveKeys.generate(), CurveKeys.generate()
    return _Content(
        token=token,
        server_public=server.public,
        server_secret=server.secret,
        client_public=client.public,
        client_secret=client.secret,
    )


def _encode(content: _Content) -> bytes:
    return msgspec.json.encode(content) + b"\n"


def _checked(path: Path, text: bytes) -> _Content:
    """Return an identity's content, checked."""
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
    if len(content.token) != TOKEN_BYTES:
        raise ValueError(f"a token of {len(content.token)} bytes")
    if any(ports) and not (all(0 < port <= MAX_PORT for port in ports) and content.data != content.control):
        raise ValueError(f"the ports {ports}")
    keys = content.server_public, content.server_secret, content.client_public, content.client_secret
    if any(key is not None for key in keys):
        _check_pair(content.server_public, content.server_secret)
        _check_pair(content.client_public, content.client_secret)


def _check_pair(public: bytes | None, secret: bytes | None) -> None:
    if public is None or secret is None or len(public) != _KEY_BYTES or len(secret) != _KEY_BYTES:
        raise ValueError(f"keys that are not of {_KEY_BYTES} bytes")
    try:
        belong = zmq.curve_public(secret) == public
    except (zmq.ZMQError, ValueError):
        belong = False
    if not belong:
        raise ValueError("keys that do not belong together")


def _owner(path: Path) -> int:
    """Return which process has an identity; 0 where that is not known."""
    try:
        fd = files.open_own(path, os.O_RDONLY)
        try:
            pid = _checked(path, files.read(fd)).pid
        finally:
            os.close(fd)
    except (OSError, files.NotOurs, IdentityError):
        return 0
    return pid if pid > 0 and process_state(pid) != "gone" else 0
