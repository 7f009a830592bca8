"""A process as it may be watched, which is none of multiprocessing's."""

from __future__ import annotations

import os
import subprocess
import sys


class FakeProcess:
    """What is needed of a process, around one of ``subprocess``."""

    def __init__(self, name: str, *command: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self.sentinel = os.pidfd_open(self.pid)
        self._said: tuple[str, str] | None = None

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def said(self) -> tuple[str, str]:
        """Return what it wrote, after its end."""
        if self._said is None:
            self._said = self._process.communicate(timeout=10)
        return self._said

    def kill(self) -> None:
        self._process.kill()
        self.said()
