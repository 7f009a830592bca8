"""Shared memory of this library that processes of this user have open: found by their descriptors, again and again."""

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
"""After which a process is looked at again that seems to have opened and closed nothing."""

BLOCK = 512
"""Bytes, in st_blocks; see stat(2)."""

LOOKING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""How a ring is opened to be looked at. Memory never blocks: O_NONBLOCK only tells that this is none of its ends."""

_OURS = re.compile(rf"/memfd:aioshm|/dev/shm/{NAME_PREFIX}")


@dataclass(slots=True)
class Segment:
    """Shared memory of this library that some process has open.

    Attributes:
        link: What ``/proc`` shows it as.
        identity: Device and inode.
        blocks: What it occupies, in bytes.
        holders: Who has it open.
        paths: Descriptors to open it by, one of each holder.
    """

    link: str
    identity: tuple[int, int]
    blocks: int
    holders: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def open(self) -> int:
        """Open it to be looked at, by the descriptor of a holder that has not ended meanwhile.

        Raises:
            FileNotFoundError: Nobody has it open any more.
        """
        for path in self.paths:
            with suppress(OSError):
                fd = os.open(path, LOOKING)
                status = os.fstat(fd)
                if (status.st_dev, status.st_ino) == self.identity:
                    return fd
                os.close(fd)  # the holder has opened something else meanwhile
        raise FileNotFoundError(f"nobody has {self.link} open any more")


class _Seen(NamedTuple):
    """What a process had open.

    Attributes:
        key: Tells whether this is the same process, with as many descriptors; None: the kernel does not say.
        at: When it was looked at.
        links: What each of its descriptors shows that is a segment, by path.
        identities: Device and inode of each of them.
    """

    key: tuple[int, int] | None
    at: float
    links: Mapping[str, str]
    identities: Mapping[str, tuple[int, int]]


class SegmentFinder:
    """Finds the segments that processes of this user have open.

    Reading every descriptor of every process takes some ten milliseconds on a busy host. Who looks again keeps this: a
    process is looked at again when it has more descriptors or fewer (Linux 6.2 and newer tell without listing them), or
    one of its segments is not there any more, or after `LOOK_AGAIN_S`.
    """

    def __init__(self) -> None:
        self._seen: dict[int, _Seen] = {}

    def find(self) -> tuple[list[Segment], int]:
        """Return the segments that there are, and how many processes were skipped: they are others', or forbidden.

        Raises:
            NoProc: There is no ``/proc``.
        """
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
    """Find the segments among the descriptors of a process.

    Raises:
        OSError: It cannot be looked at; it has ended.
    """
    folder = f"{PROC}/{pid}/fd"
    links: dict[str, str] = {}
    identities: dict[str, tuple[int, int]] = {}
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        with suppress(OSError):  # it was closed meanwhile
            link = os.readlink(path)
            if _OURS.match(link) and not _is_looked_at(folder, name):
                status = os.stat(path)
                links[path], identities[path] = link, (status.st_dev, status.st_ino)
    return _Seen(key, now, links, identities)


def _is_looked_at(folder: str, name: str) -> bool:
    """Return whether a descriptor is that of somebody who only looks: a queue that nobody else has open has ended.

    Raises:
        OSError: It was closed meanwhile.
    """
    with open(f"{folder}info/{name}") as info:
        flags = next(line for line in info if line.startswith("flags:"))
    return int(flags.split()[1], 8) & (os.O_ACCMODE | os.O_NONBLOCK) == LOOKING & ~os.O_CLOEXEC


def _note(pid: int, seen: _Seen, found: dict[tuple[int, int], Segment]) -> bool:
    """Note the segments of a process; return whether they all are still what they were."""
    all_there = True
    for path, link in seen.links.items():
        try:
            status = os.stat(path)
        except OSError:
            all_there = False
            continue
        identity = status.st_dev, status.st_ino
        if identity != seen.identities[path]:
            all_there = False
            continue
        segment = found.setdefault(identity, Segment(link, identity, status.st_blocks * BLOCK))
        if pid not in segment.holders:
            segment.holders.append(pid)
            segment.paths.append(path)
    return all_there
