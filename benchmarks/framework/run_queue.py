"""How long the kernel lets a thread wait for a CPU, which is no fault of what runs in it."""

from __future__ import annotations

import os
from typing import Self


class RunQueue:
    """Tells how long this thread has been runnable while others had the CPU. Always 0 where the kernel does not say."""

    def __enter__(self) -> Self:
        try:
            self._fd: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._fd = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def waited_s(self) -> float:
        """Return it, in seconds."""
        if self._fd is None:
            return 0.0
        return int(os.pread(self._fd, 100, 0).split()[1]) / 1e9
