"""Forwards the standard error of processes, and keeps the last lines."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aioshm.process.limits import start_thread

KEPT_BYTES = 16 << 10
"""Bytes of the end of each stream that are kept."""
FLUSH_S = 1.0
"""How long forwarding may take at the end."""

_READ_BYTES = 1 << 16
_READS = 16  # of one stream in a row


class _Stream:
    def __init__(self) -> None:
        self.last = b""
        self.cut = False

    def keep(self, data: bytes) -> None:
        whole = self.last + data
        self.last = whole[-KEPT_BYTES:]
        self.cut = self.cut or len(whole) > KEPT_BYTES


class StderrRelay:
    """Writes the standard error of processes to that of this process at construction.

    Each process writes into a pipe; one thread reads all pipes. If nobody reads the standard error
    of this process, the processes block as if they had inherited it.
    """

    def __init__(self) -> None:
        self._named: dict[str, _Stream] = {}
        self._open: dict[int, _Stream] = {}  # by descriptor, also those of forgotten processes
        self._waiting: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._wake_in, self._wake_out = os.pipe()
        try:
            self._out = _standard_error()
        except BaseException:
            os.close(self._wake_in)
            os.close(self._wake_out)
            raise

    @contextmanager
    def pipe(self, name: str) -> Iterator[int]:
        """Return a descriptor for a process to inherit within the block; replaces a former pipe of that name."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        with self._lock:
            self._named[name] = self._open[reader] = _Stream()
        try:
            if self._thread is None:
                self._thread = start_thread(self._run, name="aioshm-stderr", what="forwarding standard error")
            os.write(self._wake_out, b"\0")
            yield writer
        finally:
            os.close(writer)

    def last_lines(self, name: str, count: int) -> list[str]:
        """Return the last lines that a process has written up to now, also directly after its exit."""
        with self._lock:
            stream = self._named[name]
            idle = not self._waiting
            for fd, each in [*self._open.items()]:
                if each is stream:
                    self._read(fd)
            if idle and self._waiting and not self._closing:  # the thread may be about to wait for this stream
                os.write(self._wake_out, b"\0")
            lines = stream.last.decode(errors="replace").splitlines()
        if stream.cut and len(lines) > 1:
            del lines[0]  # half a line
        return lines[-count:]

    def forget(self, name: str) -> None:
        """Drop the last lines of a process; later output is still forwarded."""
        with self._lock:
            self._named.pop(name, None)

    def close(self, wait: bool = True) -> None:
        """Forward all remaining lines and end; ``wait`` for the end, for `FLUSH_S` at most. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.write(self._wake_out, b"\0")
        if self._thread is None:
            self._close_all()
        elif wait:
            self._thread.join(FLUSH_S)

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._lock:
                closing = self._closing
                poller = select.poll()
                for fd in (self._wake_in, *self._open):
                    poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(0 if closing else None)}
            if self._wake_in in ready:
                os.read(self._wake_in, _READ_BYTES)
            with self._lock:
                for fd in ready & self._open.keys():
                    self._read(fd)
            self._forward()
        self._close_all()

    def _read(self, fd: int) -> None:
        for _ in range(_READS):
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                del self._open[fd]
                os.close(fd)
                return
            self._open[fd].keep(data)
            self._waiting.append(data)

    def _forward(self) -> None:
        while self._waiting:
            data = self._waiting.popleft()
            with suppress(OSError):  # the reader is gone, or the disk is full
                while data:
                    data = data[os.write(self._out, data) :]

    def _close_all(self) -> None:
        with self._lock:
            for fd in (*self._open, self._wake_in, self._wake_out, self._out):
                os.close(fd)
            self._open.clear()


def _standard_error() -> int:
    try:
        return os.dup(2)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)  # this process has no standard error
