"""How long the kernel lets threads wait for a CPU, which is no fault of what runs in them."""

from __future__ import annotations

import os
from typing import Self


class RunQueue:
    """Tells how long a thread has been runnable while others had the CPU. Always 0 where the kernel does not say.

    Args:
        pid: Of the process whose main thread that is; None: it is this thread.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._path = "/proc/thread-self/schedstat" if pid is None else f"/proc/{pid}/task/{pid}/schedstat"

    def __enter__(self) -> Self:
        try:
            self._fd: int | None = os.open(self._path, os.O_RDONLY)
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
