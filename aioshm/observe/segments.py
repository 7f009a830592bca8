"""Finds the shared memory of this library by the descriptors of this user's processes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from aioshm.observe.proc import PROC, check_proc
from aioshm.ring.segment import NAME_PREFIX

LOOK_AGAIN_S = 10.0
"""Seconds after which a process is read again whose number of descriptors did not change."""

BLOCK = 512
"""Bytes, in st_blocks; see stat(2)."""

LOOKING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Flags to open a ring with. Memory never blocks: O_NONBLOCK marks a descriptor that belongs to no end."""

_OURS = re.compile(rf"/memfd:aioshm|/dev/shm/{NAME_PREFIX}")


@dataclass(slots=True)
class Segment:
    """A segment that processes have open; one path under ``/proc`` for each holder."""

    link: str
    identity: tuple[int, int]  # device and inode
    blocks: int  # bytes in use
    holders: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def open(self) -> int:
        """Open the segment through a holder that still runs, or raise `FileNotFoundError`."""
        for path in self.paths:
            with suppress(OSError):
                fd = os.open(path, LOOKING)
                status = os.fstat(fd)
                if (status.st_dev, status.st_ino) == self.identity:
                    return fd
                os.close(fd)  # the holder has opened something else meanwhile
        raise FileNotFoundError(f"nobody has {self.link} open any more")


class _Seen(NamedTuple):
    """The segments that a process had open."""

    key: tuple[int, int] | None  # inode of /proc/PID, number of descriptors; None: the kernel does not count them
    at: float
    segments: Mapping[str, tuple[str, tuple[int, int]]]  # link and identity, by path


class SegmentFinder:
    """Finds the segments that this user's processes have open; `find` remembers unchanged ones."""

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def find(self) -> tuple[list[Segment], int]:
        """Return all segments, and the number of unreadable processes."""
        check_proc()
        before, self._seen = self._seen, {}
        found: dict[tuple[int, int], Segment] = {}
        user, skipped, now = os.geteuid(), 0, monotonic()
        for name in os.listdir(PROC):
            if not name.isdigit():
                continue
            pid = int(name)
            try:
                home = os.stat(f"{PROC}/{name}")
                if home.st_uid != user:
                    skipped += 1
                    continue
                count = os.stat(f"{PROC}/{name}/fd").st_size
                key = (home.st_ino, count) if count else None
                seen = before.get(pid)
                if seen is None or key is None or seen.key != key or now - seen.at > LOOK_AGAIN_S:
                    seen = _look_at(pid, key, now)
                if not _note(pid, seen, found):
                    seen = _look_at(pid, key, now)
                    _note(pid, seen, found)
                self._seen[pid] = seen
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                continue
            except OSError:
                skipped += 1
        return list(found.values()), skipped


def _look_at(pid: int, key: tuple[int, int] | None, now: float) -> _Seen:
    """Find the segments among the descriptors of a process; raise `OSError` if it ended or is forbidden."""
    folder = f"{PROC}/{pid}/fd"
    segments: dict[str, tuple[str, tuple[int, int]]] = {}
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        with suppress(OSError):  # it was closed meanwhile
            link = os.readlink(path)
            if _OURS.match(link) and not _is_looked_at(folder, name):
                status = os.stat(path)
                segments[path] = link, (status.st_dev, status.st_ino)
    return _Seen(key, now, segments)


def _is_looked_at(folder: str, name: str) -> bool:
    """Return whether a descriptor was opened with `LOOKING`; raise `OSError` if it was closed meanwhile."""
    with open(f"{folder}info/{name}") as info:
        flags = next(line for line in info if line.startswith("flags:"))
    return int(flags.split()[1], 8) & (os.O_ACCMODE | os.O_NONBLOCK) == LOOKING & ~os.O_CLOEXEC


def _note(pid: int, seen: _Seen, found: dict[tuple[int, int], Segment]) -> bool:
    """Add the segments of a process to ``found``; return whether all of them still are the same."""
    all_there = True
    for path, (link, identity) in seen.segments.items():
        try:
            status = os.stat(path)
        except OSError:
            all_there = False
            continue
        if (status.st_dev, status.st_ino) != identity:
            all_there = False
            continue
        segment = found.setdefault(identity, Segment(link, identity, status.st_blocks * BLOCK))
        if pid not in segment.holders:
            segment.holders.append(pid)
            segment.paths.append(path)
    return all_there
