"""Create, map and pass a segment of shared memory: an anonymous memfd, or a named POSIX segment."""

from __future__ import annotations

import _posixshmem  # the base of multiprocessing.shared_memory, without its resource tracker
import errno
import fcntl
import mmap
import os
import secrets
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from aioshm.config import Backing
from aioshm.errors import HandleError, OutOfDescriptors, SharedMemoryError
from aioshm.process.limits import is_out_of_descriptors, why_no_descriptor
from aioshm.ring.mapping import address_of, map_memory, map_shared

SHM_DIR = Path("/dev/shm")
MIB = 1 << 20
NAME_PREFIX = "aioshm-"
OVERFLOW_LABEL = "aioshm-overflow-"  # then the first digits of the queue's id
CAN_ALLOCATE = hasattr(os, "posix_fallocate")

# Linux 5.14: fault pages in without touching their content (madvise(2)); Python has no names for them.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23


class Segment:
    """One mapping of a segment; the descriptor is passed on (memfd) or locked (named)."""

    def __init__(self, fd: int, size: int, name: str | None) -> None:
        self.fd: int = fd
        self.size: int = size
        # The POSIX name without its slash, or None for a memfd.
        self.name = name
        self._owner_pid = 0  # of the process that removes the name
        try:
            actual = os.fstat(fd).st_size
            if actual < size:  # mapped beyond its end, a touch would be a SIGBUS
                raise HandleError(f"the segment has {actual} bytes, its layout needs {size}")
            self._map = map_shared(fd, size)
        except OSError as error:
            os.close(fd)
            raise refused(error, f"{size / MIB:.1f} MiB of shared memory cannot be mapped") from None
        except BaseException:
            os.close(fd)
            raise
        self.view: memoryview = memoryview(self._map)

    @classmethod
    def create(
        cls,
        size: int,
        backing: Backing,
        *,
        may_grow: bool = False,
        label: str = "aioshm",
        sparse: tuple[int, int] = (0, 0),
    ) -> Segment:
        """Create a segment of zeros; ``sparse``: the range that needs `allocate` if it is named."""
        if backing == "memfd":
            return cls._create_memfd(size, may_grow, label)
        return cls._create_named(size, sparse)

    @classmethod
    def open(cls, name: str, size: int) -> Segment:
        """Map an existing named segment of this user."""
        try:
            fd = _posixshmem.shm_open(f"/{name}", os.O_RDWR, mode=0o600)
        except OSError as error:
            raise HandleError(f"shared memory segment {name!r} cannot be opened: {error.strerror}") from None
        if os.fstat(fd).st_uid != os.geteuid():
            os.close(fd)
            raise HandleError(f"shared memory segment {name!r} belongs to another user")
        segment = cls(fd, size, name)
        _hold(fd)
        return segment

    @classmethod
    def _create_memfd(cls, size: int, may_grow: bool, label: str) -> Segment:
        check_memory(size)
        fd = -1
        try:
            fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, size)
        except (OSError, OverflowError) as error:
            if fd >= 0:
                os.close(fd)
            raise cannot_create(size, "memfd", error) from None
        # Sealed: a reader that truncated it would turn the next access of every other end into a SIGBUS.
        seals = fcntl.F_SEAL_SHRINK
        if not may_grow:
            seals |= fcntl.F_SEAL_GROW
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)
        return cls._mapped(fd, size, None, "memfd")

    @classmethod
    def _mapped(cls, fd: int, size: int, name: str | None, backing: Backing) -> Segment:
        try:
            return cls(fd, size, name)
        except SharedMemoryError as error:
            raise cannot_create(size, backing, OSError(error.errno, os.strerror(error.errno or 0))) from None

    @classmethod
    def _create_named(cls, size: int, sparse: tuple[int, int]) -> Segment:
        for orphan in orphans():
            remove_orphan(orphan)
        check_shm_dir(size)
        start, end = sparse
        if not CAN_ALLOCATE:
            start = end = 0
        name, fd = _new_name(size)
        try:
            try:
                if start:
                    _allocate(fd, 0, start)
                _allocate(fd, end, size - end)
            except (OSError, OverflowError) as error:
                os.close(fd)
                raise cannot_create(size, "named", error) from None
            segment = cls._mapped(fd, size, name, "named")
        except BaseException:
            _posixshmem.shm_unlink(f"/{name}")
            raise
        segment._owner_pid = os.getpid()
        return segment

    def allocate(self, offset: int, length: int) -> None:
        """Allocate memory for a range of a named segment that was created ``sparse``."""
        try:
            _allocate(self.fd, offset, length)
        except OSError:
            for orphan in orphans():
                remove_orphan(orphan)
            try:
                _allocate(self.fd, offset, length)
            except OSError as error:
                raise cannot_create(length, "named", error) from None

    def protect(self, offset: int, length: int) -> None:
        """Make whole pages, and if possible the descriptor, read-only in this process for good."""
        try:
            readonly = self._reopened()
            if readonly is not None:
                if self.name is not None:
                    _hold(readonly)
                os.close(self.fd)
                self.fd = readonly
            map_memory(address_of(self._map) + offset, length, mmap.PROT_READ, mmap.MAP_SHARED, self.fd, offset)
        except OSError as error:
            raise refused(error, "the ring's slots cannot be mapped read-only") from None

    def readonly_fd(self) -> int:
        """Return a new descriptor of the segment, read-only where the system has such."""
        try:
            readonly = self._reopened()
            if readonly is None:
                readonly = os.dup(self.fd)
            return readonly
        except OSError as error:
            raise refused(error, "there is no descriptor to pass to the readers") from None

    def _reopened(self) -> int | None:
        """Return a new, read-only descriptor; None where there is none."""
        with suppress(FileNotFoundError):
            return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        if self.name is None:
            return None
        with suppress(FileNotFoundError):  # it may have been unlinked
            fd: int = _posixshmem.shm_open(f"/{self.name}", os.O_RDONLY, mode=0o600)
            if os.path.sameopenfile(fd, self.fd):
                return fd
            os.close(fd)
        return None

    def grow(self, size: int) -> bool:
        """Enlarge and remap the segment, if possible; no view of it may exist in this process."""
        check_memory(size)
        try:
            if self.name is None:
                os.ftruncate(self.fd, size)
            else:
                _allocate(self.fd, 0, size)
            grown = map_shared(self.fd, size)
        except OSError:
            return False
        self.view.release()
        self._map.close()
        self._map = grown
        self.view = memoryview(self._map)
        self.size = size
        return True

    def forget(self) -> None:
        """Return the pages to the system where possible (madvise(2)); all bytes may be zeros afterwards."""
        if hasattr(mmap, "MADV_REMOVE"):
            with suppress(OSError):
                self._map.madvise(mmap.MADV_REMOVE)

    def prefault(self, offset: int, length: int, *, write: bool) -> None:
        """Fault in the pages of a range (from Linux 5.14 on)."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        end = min(offset + length, self.size)
        advice = _MADV_POPULATE_READ
        if write:
            advice = _MADV_POPULATE_WRITE
        if sys.platform == "linux":
            with suppress(OSError):  # an older kernel
                self._map.madvise(advice, start, end - start)

    def unlink(self) -> None:
        """Remove the name, if this process created it; mappings live on. Idempotent."""
        if self._owner_pid == os.getpid() and self.name is not None:  # not in a forked child
            self._owner_pid = 0
            try:
                _posixshmem.shm_unlink(f"/{self.name}")
            except FileNotFoundError:
                pass

    def __del__(self) -> None:
        if getattr(self, "view", None) is not None and self.fd >= 0:
            warnings.warn(f"the segment {self.name or 'memfd'} was not closed", ResourceWarning, 2, self)
            self.close()

    def close(self) -> None:
        """Unmap, as soon as no view of the memory is held any more. Idempotent."""
        if self.fd < 0:
            return
        self.unlink()
        os.close(self.fd)
        self.fd = -1
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            pass  # a view is still held; the mapping goes when it is released


def _new_name(size: int) -> tuple[str, int]:
    """Create an empty named segment and hold it; return its name and descriptor."""
    while True:
        name = NAME_PREFIX + secrets.token_hex(8)
        try:
            fd = _posixshmem.shm_open(f"/{name}", os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        except OSError as error:
            raise cannot_create(size, "named", error) from None
        _hold(fd)
        if os.fstat(fd).st_nlink:
            return name, fd
        os.close(fd)  # another process, which removes orphans, was faster than the lock


def orphans() -> list[str]:
    """Return the names of this user's named segments that no process has open."""
    return [name for name in _named_segments() if _is_orphan(name)]


def remove_orphan(name: str) -> bool:
    """Unlink a segment unless some process holds it; return whether it was removed."""
    return _is_orphan(name, remove=True)


def _named_segments() -> list[str]:
    try:
        names = os.listdir(SHM_DIR)
    except FileNotFoundError:
        return []  # macOS keeps no directory of them
    mine = os.geteuid()
    return sorted(name for name in names if name.startswith(NAME_PREFIX) and _owner(SHM_DIR / name) == mine)


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except FileNotFoundError:
        return None


def _is_orphan(name: str, *, remove: bool = False) -> bool:
    """Return whether no process holds a segment, which ``remove`` unlinks under its lock."""
    # A lock rather than a pid: pids mean nothing across containers that share /dev/shm.
    try:
        fd = _posixshmem.shm_open(f"/{name}", os.O_RDWR, mode=0o600)
    except OSError:  # gone, or not for this process to open now
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if remove:
            _posixshmem.shm_unlink(f"/{name}")
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        os.close(fd)
    return True


def _hold(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # waits only for a process that looks for orphans, and for an instant
    except OSError:
        pass  # macOS knows no lock on shared memory, and has no directory to sweep


def _allocate(fd: int, offset: int, length: int) -> None:
    if CAN_ALLOCATE:
        os.posix_fallocate(fd, offset, length)  # a full /dev/shm is an error here, not a SIGBUS at some later store
    else:
        os.ftruncate(fd, offset + length)


# Errors: how much is needed, how much is free, a remedy


def check_memory(size: int) -> None:
    """Refuse a segment that is larger than this machine's memory."""
    try:
        if size <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            return
    except (OSError, ValueError):  # unknown on this system
        pass
    try:
        import psutil  # costs 12 ms: only large segments pay for it

        memory = psutil.virtual_memory()
        swap = psutil.swap_memory()
    except (ImportError, OSError):
        return  # unknown without /proc, or without a descriptor to read it
    # Pages are committed when touched, so only segments that can never fit are refused.
    if size > memory.total + swap.total:
        raise _too_large(size, memory.available, "this machine", "use fewer or smaller chunks")


def check_shm_dir(size: int) -> None:
    """Refuse a named segment that is larger than ``/dev/shm``."""
    if SHM_DIR.is_dir():
        fs = os.statvfs(SHM_DIR)
        if size > fs.f_blocks * fs.f_frsize:
            raise cannot_create(size, "named", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def cannot_create(size: int, backing: Backing, error: OSError | OverflowError) -> SharedMemoryError | OutOfDescriptors:
    """Return the error for a segment of ``size`` bytes that cannot be created."""
    if not isinstance(error, OverflowError) and error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
        return refused(error, f"cannot create {_mib(size)} MiB of shared memory")
    remedy = "use fewer or smaller chunks"
    if backing == "named" and SHM_DIR.is_dir():
        fs = os.statvfs(SHM_DIR)
        if fs.f_files and not fs.f_favail:
            return SharedMemoryError(
                errno.ENOSPC,
                f"cannot create a file in {SHM_DIR}: all of its {fs.f_files} inodes are in use: remove files there "
                "(aioshm doctor --clean removes what dead processes left), mount it with more (nr_inodes), or set "
                "backing='memfd'",
            )
        remedy += (
            ", remove files there (aioshm ls lists the queues in use, aioshm doctor --clean removes what dead "
            "processes left), enlarge it (docker: --shm-size), or set backing='memfd'"
        )
        return _too_large(size, fs.f_bavail * fs.f_frsize, str(SHM_DIR), remedy)
    remedy += ", or raise the limits of this process (ulimit -f, -v) or of its container (memory)"
    return _too_large(size, _available(), "this machine", remedy)


def refused(error: OSError, action: str) -> SharedMemoryError | OutOfDescriptors:
    """Return the error for another refusal of the system, with a remedy; ``action``: the operation that failed."""
    if is_out_of_descriptors(error):
        return OutOfDescriptors(error.errno, f"{action}: {why_no_descriptor(error.errno, 'this process')}")
    remedies = {
        errno.ENOMEM: "this process has too much mapped: raise its limit (ulimit -v, sysctl vm.max_map_count)",
        errno.ENOSYS: "the system does not support memfd: set AIOSHM_BACKING=named, or backing='named' in the options",
        errno.EPERM: "let the container's seccomp profile allow it, or set AIOSHM_BACKING=named",
        errno.EACCES: "check the permissions of /dev/shm, and the seccomp profile of the container",
    }
    text = f"{action}: {error.strerror or error}"
    remedy = remedies.get(error.errno or 0)
    if remedy:
        text += f": {remedy}"
    return SharedMemoryError(error.errno, text)


def _available() -> int | None:
    try:
        import psutil

        return int(psutil.virtual_memory().available)
    except (ImportError, OSError):
        return None  # without /proc, or without a descriptor to read it, it is unknown


def _too_large(size: int, free: int | None, where: str, remedy: str) -> SharedMemoryError:
    has = "too little"
    if free is not None:
        has = f"{free / MIB:.1f} MiB"
    return SharedMemoryError(
        errno.ENOSPC, f"{_mib(size)} MiB of shared memory are needed, {where} has {has} free: {remedy}"
    )


def _mib(size: int) -> str:
    try:
        return f"{size / MIB:.1f}"
    except OverflowError:
        return "more than 1e300"
