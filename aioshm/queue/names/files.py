"""Files that one process owns by a flock(2) lock, written under a draft name and then renamed.

A crash leaves an unlocked draft or file, which the next process removes.
"""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from aioshm.process.limits import detach_when_forked

MAX_BYTES = 1 << 20
"""The most that a file may contain."""

_MODE = 0o600
_DRAFT = ".draft"
_DRAFT_NAME = 100  # characters of the final name in a draft's name


class NotOurs(Exception):
    """The path is not a regular file of this user that no other user can read."""


class OwnFile:
    """A file that this process owns; its descriptor holds the lock."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        detach_when_forked(self)

    def read(self) -> bytes:
        return read(self._fd)

    def replace(self, content: bytes, *, durable: bool = False) -> None:
        """Replace the content; the lock is held throughout, and a failure changes nothing."""
        draft = _new_draft(self.path, content, durable)
        try:
            draft.path.rename(self.path)
        except BaseException:
            draft.release(remove=True)
            raise
        os.close(self._fd)
        self._fd = draft._fd
        draft._fd = -1

    def release(self, *, remove: bool = False) -> None:
        """Release the file for the next owner. Idempotent."""
        if self._fd < 0:
            return
        if remove:
            with suppress(OSError):
                if _is_at(self._fd, self.path):
                    self.path.unlink()
        self.detach_after_fork()

    def detach_after_fork(self) -> None:
        """Close the descriptor; in a forked child, the parent keeps the lock."""
        fd = self._fd
        self._fd = -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.release()


def create(path: Path, content: bytes, *, durable: bool = False) -> OwnFile | None:
    """Create and own a file; None if it exists."""
    draft = _new_draft(path, content, durable)
    try:
        os.link(draft.path, path)
    except FileExistsError:
        draft.release(remove=True)
        return None
    except BaseException:
        draft.release(remove=True)
        raise
    draft.path.unlink(missing_ok=True)
    draft.path = path
    return draft


def take(path: Path) -> OwnFile | None:
    """Open and lock an existing file; return None if another process has locked it."""
    while True:
        fd = open_own(path, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, path):
                return OwnFile(path, fd)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # another process was faster, and has replaced the file


def open_own(path: Path, flags: int) -> int:
    """Open a file; raise `NotOurs` unless it is private to this user."""
    _check(path.lstat())  # first: opening a device may have effects
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check(os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read(fd: int) -> bytes:
    """Return the content of an open file, up to one byte more than `MAX_BYTES`."""
    content = b""
    while len(content) <= MAX_BYTES and (part := os.pread(fd, MAX_BYTES + 1 - len(content), len(content))):
        content += part
    return content


def sweep(directory: Path, pattern: str) -> None:
    """Remove files without an owner, such as the drafts of killed processes."""
    for path in directory.glob(pattern):
        with suppress(OSError, NotOurs):
            stale = take(path)
            if stale is not None:
                stale.release(remove=True)


def drafts(name: str = "*") -> str:
    """Return the pattern of the drafts for a file; by default, for any file."""
    if name != "*":
        name = glob.escape(name[:_DRAFT_NAME])
    return f".{name}.*{_DRAFT}"


def _new_draft(path: Path, content: bytes, durable: bool) -> OwnFile:
    """Write a draft beside the final file, and own it."""
    while True:
        draft = path.with_name(f".{path.name[:_DRAFT_NAME]}.{secrets.token_hex(8)}{_DRAFT}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = OwnFile(draft, fd := os.open(draft, flags, _MODE))
        try:
            _lock(fd)
            if not os.fstat(fd).st_nlink:  # a sweep has removed the draft before the lock
                file.release()
                continue
            os.fchmod(fd, _MODE)  # the umask may differ
            _write(fd, content)
            if durable:
                os.fsync(fd)
        except BaseException:
            file.release(remove=True)
            raise
        return file


def _lock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_EX)  # a sweep holds the lock for an instant


def _write(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def _is_at(fd: int, path: Path) -> bool:
    """Return whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


_own_uid = os.geteuid


def _check(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise NotOurs("it is no regular file")
    own = _own_uid()
    if found.st_uid != own:
        raise NotOurs(f"it belongs to uid {found.st_uid}, this process runs as uid {own}")
    if found.st_mode & 0o077:
        raise NotOurs(f"others may use it: its mode is {stat.S_IMODE(found.st_mode):04o} instead of 0600")
