"""Forwards the standard error of processes, and keeps the last lines.

Each process writes into a pipe. One thread reads all pipes, and never blocks: if nobody reads the standard error of
this process, the thread drops output, with a note. So no process is blocked.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aioshm.process.limits import start_thread

KEPT_BYTES = 16 << 10
"""Bytes of the end of each stream that are kept."""
WAITING_BYTES = 1 << 20
"""Bytes that may wait to be forwarded."""
FLUSH_S = 0.5
"""How long forwarding may take at the end."""

_READ_BYTES = 1 << 16
_READS = 16  # of one stream in a row
_WRITE_BYTES = select.PIPE_BUF  # a pipe that poll(2) calls writable takes as many without blocking (pipe(7))


class _Stream:
    def __init__(self, fd: int) -> None:
        self.fd = fd  # -1 after its end
        self.last = b""
        self.cut = False

    def keep(self, data: bytes) -> None:
        whole = self.last + data
        self.last = whole[-KEPT_BYTES:]
        self.cut = self.cut or len(whole) > KEPT_BYTES

    def end(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class StderrRelay:
    """Writes the standard error of processes to that of this process at construction."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._unnamed: list[_Stream] = []  # forwarded until they end; nobody asks for their last lines
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped_bytes = 0
        self._lock = threading.Lock()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._out = _standard_error()
        try:
            self._wake_in, self._wake_out = os.pipe()
        except BaseException:
            if self._out >= 0:
                os.close(self._out)
            raise
        os.set_blocking(self._wake_out, False)

    @contextmanager
    def pipe(self, name: str) -> Iterator[int]:
        """Return a descriptor for a process to inherit within the block; replaces a former pipe of that name."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        with self._lock:
            self._unname(name)
            self._streams[name] = _Stream(reader)
        try:
            if self._thread is None:
                self._thread = start_thread(self._run, name="aioshm-stderr", what="forwarding standard error")
            self._wake()
            yield writer
        finally:
            os.close(writer)

    def last_lines(self, name: str, count: int) -> list[str]:
        """Return the last lines that a process has written up to now, also directly after its exit."""
        with self._lock:
            stream = self._streams[name]
            self._read(stream)
            last = stream.last
            cut = stream.cut
        self._wake()
        lines = last.decode(errors="replace").splitlines()
        if cut and len(lines) > 1:
            del lines[0]  # half a line
        return lines[-count:]

    def forget(self, name: str) -> None:
        """Drop the last lines of a process; later output is still forwarded."""
        with self._lock:
            self._unname(name)

    def _unname(self, name: str) -> None:
        self._unnamed = [stream for stream in self._unnamed if stream.fd >= 0]
        former = self._streams.pop(name, None)
        if former is not None and former.fd >= 0:  # descendants of a dead process may still write there
            self._unnamed.append(former)

    def _all(self) -> list[_Stream]:
        return [*self._streams.values(), *self._unnamed]

    def close(self, wait: bool = True) -> None:
        """Forward all remaining lines and end; ``wait`` for the end, for about `FLUSH_S` at most. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        if self._thread is None:
            self._close_all()
        elif wait:
            self._thread.join(2 * FLUSH_S)  # a write blocks only if another process has just filled the pipe

    def _run(self) -> None:
        self._thread = threading.current_thread()  # even if a signal handler interrupted the start
        while not self._closing:
            self._step(None)
        with self._lock:
            for stream in self._all():
                self._read(stream)
                stream.end()
        deadline = time.monotonic() + FLUSH_S
        while self._waiting and (left := deadline - time.monotonic()) > 0:
            self._step(left)
        self._close_all()

    def _step(self, timeout: float | None) -> None:
        """Wait, and read and write once; with a timeout do not wait for `_wake`."""
        poller = select.poll()
        if timeout is None:
            poller.register(self._wake_in, select.POLLIN)
        with self._lock:
            for stream in self._all():
                if stream.fd >= 0:
                    poller.register(stream.fd, select.POLLIN)
        if self._waiting:
            poller.register(self._out, select.POLLOUT)
        timeout_ms = None if timeout is None else timeout * 1000
        ready = {fd for fd, _ in poller.poll(timeout_ms)}
        if self._wake_in in ready:
            os.read(self._wake_in, _READ_BYTES)
        with self._lock:
            for stream in self._all():  # another thread may have read, and ended, some of them by now
                if stream.fd in ready:
                    self._read(stream)
        if self._out in ready:
            self._forward()

    def _read(self, stream: _Stream) -> None:
        for _ in range(_READS):
            if stream.fd < 0:
                return
            try:
                data = os.read(stream.fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                stream.end()
                return
            stream.keep(data)
            if self._out >= 0:
                self._waiting.append(data)
                self._waiting_bytes += len(data)
            while self._waiting_bytes > WAITING_BYTES:
                dropped = len(self._waiting.popleft())
                self._waiting_bytes -= dropped
                self._dropped_bytes += dropped

    def _forward(self) -> None:
        with self._lock:
            if self._dropped_bytes:
                note = b"\n[aioshm: left out %d bytes of standard error: nobody reads it]\n" % self._dropped_bytes
                self._waiting.appendleft(note)
                self._waiting_bytes += len(note)
                self._dropped_bytes = 0
            data = self._waiting.popleft()
            self._waiting_bytes -= len(data)
        try:
            rest = data[os.write(self._out, data[:_WRITE_BYTES]) :]
        except OSError:  # the reader is gone, or the disk is full
            return
        if rest:
            with self._lock:
                self._waiting.appendleft(rest)
                self._waiting_bytes += len(rest)

    def _wake(self) -> None:
        with self._lock:
            if self._wake_out >= 0:
                with suppress(BlockingIOError):  # the pipe is full: the thread wakes anyway
                    os.write(self._wake_out, b"\0")

    def _close_all(self) -> None:
        with self._lock:
            for stream in self._all():
                stream.end()
            for fd in (self._wake_in, self._wake_out, self._out):
                if fd >= 0:
                    os.close(fd)
            self._wake_in = -1
            self._wake_out = -1
            self._out = -1


def _standard_error() -> int:
    try:
        return os.dup(2)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return -1  # this process has no standard error
