"""The names of queues: one file per name in the runtime directory, with the writer's handle."""

from __future__ import annotations

import errno
import glob
import os
import re
import socket
from pathlib import Path
from time import monotonic, sleep

import msgspec

from aioshm.arguments import shown
from aioshm.errors import HandleError, NameTaken, OutOfDescriptors, SharedMemoryError
from aioshm.lifeline.sockets import secure_directory, sockaddr
from aioshm.process.limits import naming_limits
from aioshm.queue.handle import Handle
from aioshm.queue.names import files

MAX_NAME = 100
"""Characters in a name."""

PATIENCE_S = 0.1
"""How long to wait for a locked name without a listening writer, which is closing, or is just being checked."""

_PAUSE_S = 0.005

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+@-]*")
_SUFFIX = ".queue"


class Registration(msgspec.Struct, frozen=True, kw_only=True, tag="aioshm-name"):
    """The content of a name's file; the handle may be another release's."""

    name: str
    pid: int
    lifeline: str
    handle: msgspec.Raw


_decoder = msgspec.json.Decoder(Registration)


def check_name(name: object) -> str:
    """Check a queue's name."""
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {shown(name)}")
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise ValueError(
            f"name must be 1 to {MAX_NAME} letters, digits and characters of '._:+@-', the first a letter or digit, "
            f"not {shown(name)}"
        )
    return name


def register(name: str, runtime_dir: str, handle: Handle) -> files.OwnFile:
    """Register a name for a writer, replacing a dead writer's registration."""
    path = _path(name, runtime_dir)
    registration = Registration(
        name=name, pid=os.getpid(), lifeline=handle.lifeline, handle=msgspec.Raw(handle.to_json().encode())
    )
    content = msgspec.json.encode(registration)
    try:
        with naming_limits(f"a writer of the name {name!r}"):
            secure_directory(path.parent)
            _sweep(path)
            return _take(name, path, content)
    except files.NotOurs as refusal:
        raise SharedMemoryError(errno.EACCES, f"{path}: {refusal}: remove it") from None
    except (SharedMemoryError, OutOfDescriptors):
        raise
    except OSError as error:
        raise SharedMemoryError(
            error.errno,
            f"cannot write {path}: {error.strerror}: make room there, or set AIOSHM_RUNTIME_DIR to another directory",
        ) from None


def _take(name: str, path: Path, content: bytes) -> files.OwnFile:
    patient_until = monotonic() + PATIENCE_S
    while (made := files.create(path, content)) is None:
        try:
            stale = files.take(path)
        except FileNotFoundError:  # the writer has just released the name
            continue
        if stale is not None:
            try:
                stale.replace(content)
            except BaseException:
                stale.release()
                raise
            return stale
        owner = _owner(path)
        if (owner is not None and _listens(owner.lifeline)) or monotonic() >= patient_until:
            raise NameTaken(name, owner.pid if owner else 0, str(path))
        sleep(_PAUSE_S)
    return made


class NamedWriters:
    """Finds the present writer of a name."""

    def __init__(self, name: str, runtime_dir: str) -> None:
        self._name = name
        self._path = _path(name, runtime_dir)
        self._latest: Registration | None = None
        self._past: Registration | None = None  # of the latest writer that is gone
        self._looked_at: tuple[int, int] | None = None  # inode and time of the file of that writer
        with naming_limits(f"a reader of the name {name!r}"):
            secure_directory(self._path.parent)

    def find(self) -> Handle | None:
        """Return the handle of the name's writer; None: no writer, or one that was `left`."""
        try:
            found = self._path.lstat()
        except OSError:
            return None
        stamp = found.st_ino, found.st_mtime_ns
        if stamp == self._looked_at:
            return None
        self._latest = registration = self._read()
        if registration is None or (self._past is not None and self._past.lifeline == registration.lifeline):
            self._looked_at = stamp
            return None
        try:
            handle = Handle.from_json(bytes(registration.handle))
            handle.check_version()
            handle.check_local()
        except HandleError as error:
            if not _listens(registration.lifeline):
                self.left()
                return None
            raise HandleError(f"{self._path}: {error}") from None
        return handle

    def left(self) -> None:
        """Note that the writer of the latest handle is gone."""
        self._past = self._latest

    def awaited(self) -> str:
        """Describe the awaited writer."""
        where = f"of the name {self._name!r} in {self._path.parent}"
        if self._past is None:
            return f"there is no writer {where}: start it, with the same AIOSHM_RUNTIME_DIR"
        return f"the writer {where} (pid {self._past.pid}, at {self._past.lifeline}) is gone, and no other has come"

    def _read(self) -> Registration | None:
        try:
            with naming_limits(f"a reader of the name {self._name!r}"):
                registration = _read(self._path)
        except FileNotFoundError:
            return None
        except (files.NotOurs, msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise HandleError(f"{self._path} is no registration of a writer's name: {error}: remove it") from None
        except OutOfDescriptors:
            raise
        except OSError as error:
            raise HandleError(f"{self._path} cannot be read: {error.strerror}") from None
        if registration.name != self._name:
            raise HandleError(f"{self._path} is the registration of the name {registration.name!r}: remove it")
        return registration


def _path(name: str, runtime_dir: str) -> Path:
    return Path(runtime_dir) / f"{name}{_SUFFIX}"


def _read(path: Path) -> Registration:
    fd = files.open_own(path, os.O_RDONLY)
    try:
        return _decoder.decode(files.read(fd))
    finally:
        os.close(fd)


def _sweep(own: Path) -> None:
    """Remove names and drafts of killed processes."""
    files.sweep(own.parent, files.drafts())
    for path in own.parent.glob(f"*{_SUFFIX}"):
        owner = None if path == own else _owner(path)
        if owner is not None and f"{owner.name}{_SUFFIX}" == path.name and not _listens(owner.lifeline):
            files.sweep(own.parent, glob.escape(path.name))


def _owner(path: Path) -> Registration | None:
    """Return the registration in a file; None if unreadable."""
    try:
        return _read(path)
    except (OSError, files.NotOurs, msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _listens(lifeline: str) -> bool:
    """Return whether a process accepts connections there."""
    with naming_limits(f"a look at {lifeline}"):
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with probe:
        probe.setblocking(False)
        try:
            probe.connect(sockaddr(lifeline))
        except BlockingIOError:  # the backlog is full
            return True
        except (OSError, ValueError):
            return False
    return True
