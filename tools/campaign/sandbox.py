"""Namespaces of the campaign: processes, mounts with little room, a network, monotonic clocks."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from aioshm import Options
from aioshm.lifeline.sockets import new_address

ROOM = "size=64m,mode=0700"
"""What the disk of the sandbox holds, and its shared memory."""
LONGEST = 107 - len("/disk/aioshm/.lifeline") - 32
"""How long the path of the directory may be, as those of sockets are bounded."""
INSIDE = "AIOSHM_CAMPAIGN_INSIDE"
_UNSHARE = ("unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc")
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def enter() -> int | None:
    """Run this command again in namespaces, and return its exit status; None: this is that one, or there are none."""
    if INSIDE in os.environ or subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode:
        return None
    command = [*_UNSHARE, sys.executable, "-m", "tools.campaign", *sys.argv[1:]]
    return subprocess.run(command, env=os.environ | {INSIDE: "1"}, check=False).returncode


class Sandbox:
    """Where the campaign happens."""

    def __init__(self, work: Path) -> None:
        self.disk = work / "disk"
        self.disk.mkdir(mode=0o700)
        self.whole = INSIDE in os.environ  # in namespaces: then whatever is left behind is the campaign's
        self.lacks: list[str] = []
        self._filled: list[Path] = []
        if self.whole:
            _interface_up()
            for place in (self.disk, Path("/dev/shm")):
                subprocess.run(["mount", "-t", "tmpfs", "-o", ROOM, "campaign", str(place)], check=True)
        else:
            self.lacks.append("no namespaces (unshare is refused): no full disks, leftovers are looked for by name")
        done = subprocess.run(["unshare", "--time", "--fork", "true"], capture_output=True, check=False)
        self._has_time = not done.returncode
        if not self._has_time:
            self.lacks.append("no time namespaces: monotonic clocks do not differ")
        for variable in ("XDG_RUNTIME_DIR", "TMPDIR"):
            os.environ[variable] = str(self.disk)

    def other_clock(self, chance: random.Random) -> int:
        """Return by how many seconds the monotonic clock of a process is moved."""
        if not self._has_time:
            return 0
        uptime = int(float(Path("/proc/uptime").read_text().split()[0]))
        return max(1 - uptime, chance.choice([-1, 1]) * chance.randrange(1, 1000))

    # Disks

    def fill(self) -> None:
        """Leave no room on the disk and in shared memory."""
        for place in (self.disk, Path("/dev/shm")) if self.whole else ():
            path = place / "filler"
            self._filled.append(path)
            with suppress(OSError), path.open("wb") as file:
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()

    def clear(self) -> None:
        """Make room again."""
        while self._filled:
            self._filled.pop().unlink(missing_ok=True)

    # Leftovers

    def left(self) -> list[str]:
        """Return what is there once every process has ended: files, shared memory, sockets."""
        directory = self.disk / "aioshm"
        if directory.exists():  # the next queue removes the socket files of killed ones, if they are 10 s old
            new_address(Options(lifeline="directory", runtime_dir=str(directory)), b"", "campaign")
        found = [str(path) for path in self.disk.rglob("*") if not path.is_dir()]
        if self.whole:
            found += [str(path) for path in Path("/dev/shm").iterdir()]
            lines = Path("/proc/net/unix").read_text().splitlines()[1:]
            found += [line.split()[-1] for line in lines if len(line.split()) > 7]
        return found

    def leave(self) -> None:
        """Unmount the disk, so that its directory can be removed; everything that had files there has ended."""
        if self.whole:
            subprocess.run(["umount", "--lazy", str(self.disk)], check=True)


def _interface_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
