"""Errors for want of shared memory: how much was asked for, how much is free, what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from aioshm.config import Backing
from aioshm.errors import OutOfDescriptors, SharedMemoryError
from aioshm.process.limits import is_out_of_descriptors, why_no_descriptor

SHM_DIR = Path("/dev/shm")
MIB = 1 << 20


def check_memory(size: int) -> None:
    """Refuse a segment that is larger than this machine's memory."""
    try:
        if size <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            return
    except (OSError, ValueError):  # this system does not say
        pass
    try:
        import psutil  # costs 12 ms: only what is large pays for it

        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    except (ImportError, OSError):
        return  # without /proc, or without a descriptor to read it, it is unknown
    # Pages are committed when touched, so only what can never fit is refused.
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


def refused(error: OSError, what: str) -> SharedMemoryError | OutOfDescriptors:
    """Return the error for another refusal of the system, with what to do."""
    if is_out_of_descriptors(error):
        return OutOfDescriptors(error.errno, f"{what}: {why_no_descriptor(error.errno, 'this process')}")
    remedies = {
        errno.ENOMEM: "this process has too much mapped: raise its limit (ulimit -v, sysctl vm.max_map_count)",
        errno.ENOSYS: "this system has none of that kind: set AIOSHM_BACKING=named, or backing='named' in the options",
        errno.EPERM: "let the container's seccomp profile allow it, or set AIOSHM_BACKING=named",
        errno.EACCES: "look at the permissions of /dev/shm, and at the seccomp profile of the container",
    }
    said = error.strerror or str(error)
    remedy = remedies.get(error.errno or 0)
    return SharedMemoryError(error.errno, f"{what}: {said}{f': {remedy}' if remedy else ''}")


def _available() -> int | None:
    try:
        import psutil

        return int(psutil.virtual_memory().available)
    except (ImportError, OSError):
        return None  # without /proc, or without a descriptor to read it, it is unknown


def _too_large(size: int, free: int | None, where: str, remedy: str) -> SharedMemoryError:
    has = "too little" if free is None else f"{free / MIB:.1f} MiB"
    return SharedMemoryError(
        errno.ENOSPC, f"{_mib(size)} MiB of shared memory are needed, {where} has {has} free: {remedy}"
    )


def _mib(size: int) -> str:
    try:
        return f"{size / MIB:.1f}"
    except OverflowError:
        return "more than 1e300"
