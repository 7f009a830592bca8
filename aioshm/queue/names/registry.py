"""The names of queues: one file per name in the runtime directory, with the writer's handle."""

from __future__ import annotations

import errno
import os
import re
import socket
from contextlib import suppress
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

PATIENCE_S, _PAUSE_S = 0.1, 0.005
"""For how long a name is waited for that is locked, though nobody listens: its writer is closing, or another process
looks whether it is stale."""

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
    """Return a queue's name, checked."""
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
            patient_until = monotonic() + PATIENCE_S
            while (made := files.create(path, content)) is None:
                try:
                    made = files.take(path)
                except FileNotFoundError:  # its writer has let go of it
                    continue
                if made is None:
                    owner = _owner(path)
                    if (owner is not None and _listens(owner.lifeline)) or monotonic() >= patient_until:
                        raise NameTaken(name, 0 if owner is None else owner.pid, str(path))
                    sleep(_PAUSE_S)
                    continue
                try:
                    made.replace(content)
                except BaseException:
                    made.release()
                    raise
                break
    except files.NotOurs as refusal:
        raise SharedMemoryError(errno.EACCES, f"{path}: {refusal}: remove it") from None
    except (SharedMemoryError, OutOfDescriptors):
        raise
    except OSError as error:
        raise SharedMemoryError(
            error.errno,
            f"cannot write {path}: {error.strerror}: make room there, or set AIOSHM_RUNTIME_DIR to another directory",
        ) from None
    return made


class NamedWriters:
    """The writers of one name, one after the other."""

    def __init__(self, name: str, runtime_dir: str) -> None:
        self._name = name
        self._path = _path(name, runtime_dir)
        self._latest: Registration | None = None
        self._past: Registration | None = None  # of the writer that is gone
        self._looked_at: tuple[int, int] | None = None  # the file that is known to be its
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
    files.sweep(own.parent)
    with suppress(OSError):
        for found in os.listdir(own.parent):
            path = own.parent / found
            if path == own or not found.endswith(_SUFFIX):
                continue
            owner = _owner(path)
            if owner is None or f"{owner.name}{_SUFFIX}" != found or _listens(owner.lifeline):
                continue  # in use, or nothing of ours
            with suppress(OSError, files.NotOurs):
                stale = files.take(path)
                if stale is not None:
                    stale.release(remove=True)


def _owner(path: Path) -> Registration | None:
    """Return the present or latest owner of a name; None where unreadable."""
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
        except BlockingIOError:  # too many others do so
            return True
        except (OSError, ValueError):
            return False
    return True
