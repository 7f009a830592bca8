"""Processes that are started together, watched together and stopped together; and their standard error."""

from __future__ import annotations

import logging
import os
import select
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import util
from typing import Any, NamedTuple

from aioshm.arguments import check_int, check_plain, check_seconds
from aioshm.closing import AsyncClosing, Closing
from aioshm.errors import RoleError
from aioshm.process.background import give_back
from aioshm.process.child import Child
from aioshm.process.limits import naming_limits, start_thread
from aioshm.process.placement import Place
from aioshm.process.stopping import SHUTDOWN_TIMEOUT_S, ashutdown, shutdown
from aioshm.process.watch import ProcessWatch

LAST_LINES = 20
"""Default of `ProcessManager.last_lines`."""

KEPT_BYTES = 16 << 10
"""Bytes of the end of each stream that are kept."""
FLUSH_S = 1.0
"""How long forwarding may take at the end."""

_READ_BYTES = 1 << 16
_READS = 16  # of one stream in a row

_EXIT_PRIORITY = 10  # any from 0 on is before multiprocessing joins what still runs, when Python ends

_log = logging.getLogger("aioshm.engine")


class Job(NamedTuple):
    """The work of one process.

    ``attributes`` are set on its ``multiprocessing.current_process()``; ``place`` comes from `Placement.of`.
    """

    name: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    attributes: Mapping[str, Any] = {}
    place: Place | None = None


class ProcessManager(Closing, AsyncClosing):
    """Processes that are started together, watched together and stopped together; a context manager of either kind.

    The processes exit when this process does, however it ends; their own children do if they call `die_with_parent`.
    Each process leads a process group, and ignores SIGINT: Ctrl-C is for this process only, and `close` stops them.

    Args:
        target: What each process runs; importable in it, without side effects.
        jobs: One for each process.
        shutdown_timeout: Seconds that all together may take to exit after SIGTERM, before they are killed.
        capture_stderr: Whether to keep the last lines of each standard error for `last_lines`. The output still
            appears on the standard error of this process, through a pipe.

    Attributes:
        processes: The processes, in the order of the jobs; their exit codes stay known after `close`.

    Raises:
        OutOfDescriptors, OutOfThreads: A limit of this process; processes that were started have been killed.
        TypeError, ValueError: An argument is invalid; the text names it.
        Exception: A process could not be started; all others have been killed.
    """

    def __init__(
        self,
        target: Callable[..., object],
        jobs: Sequence[Job],
        *,
        shutdown_timeout: float = SHUTDOWN_TIMEOUT_S,
        capture_stderr: bool = True,
    ) -> None:
        self.processes: list[Child] = []
        self._target = check_plain("target", target)
        self._jobs: dict[str, Job] = {}
        self._starting = threading.Lock()  # processes may be started in threads
        self._pid = os.getpid()
        self._shutdown_timeout = check_seconds("shutdown_timeout", shutdown_timeout, zero=True)
        self._relay: StderrRelay | None = None
        if capture_stderr:
            with naming_limits(type(self).__name__):
                self._relay = StderrRelay()
        self._closed = False
        self._closing = False
        self._forgotten = util.Finalize(
            self,
            _end_forgotten,
            (type(self).__name__, self.processes, self._relay, shutdown_timeout),
            exitpriority=_EXIT_PRIORITY,
        )
        try:
            with naming_limits(type(self).__name__):
                for job in jobs:
                    self.processes.append(self._start(job))
        except BaseException:
            self._shutdown_timeout = 0
            self.close()
            raise
        if self.processes:
            _log.debug("started %s", ", ".join(f"{process.name} (pid {process.pid})" for process in self.processes))

    def _start(self, job: Job) -> Child:
        with nullcontext() if self._relay is None else self._relay.pipe(job.name) as stderr:
            child = Child(self._target, job.name, job.args, job.kwargs, stderr=stderr, place=job.place)
            vars(child).update(job.attributes)
            child.start()
        self._jobs[job.name] = job
        return child

    def start_more(self, job: Job) -> Child:
        """Start one more process, and return it. Blocks for a few milliseconds; may be called in a thread.

        Raises:
            OutOfDescriptors, OutOfThreads: A limit of this process.
            RoleError: The manager is closed.
            ValueError: Another process has that name.
            Exception: The process could not be started.
        """
        with self._starting:
            self._check_open()
            if any(process.name == job.name for process in self.processes):
                raise ValueError(f"job.name must be new, and {job.name!r} is the name of a process")
            with naming_limits(type(self).__name__):
                self.processes.append(self._start(job))
            return self.processes[-1]

    def start_again(self, name: str, job: Job | None = None) -> Child:
        """Replace a process that has exited by a new one, and return it; see `start_more`.

        Args:
            name: The name of the process.
            job: The work of the new process; None: the work of the process before.

        Raises:
            RoleError: The manager is closed, or the process still runs.
            ValueError: There is no such process.
        """
        with self._starting:
            self._check_open()
            index = self._index(name)
            former = self.processes[index]
            if former.exitcode is None and not former.survives_kill:
                raise RoleError(f"{name} (pid {former.pid}) still runs: start it again after its exit")
            with naming_limits(type(self).__name__):
                self.processes[index] = self._start(job or self._jobs[name])
            former.release()
            return self.processes[index]

    async def stop(self, name: str) -> None:
        """Stop a process, see `ashutdown`, and remove it; cancelling this kills the process.

        Raises:
            ValueError: There is no such process.
        """
        process = self.processes[self._index(name)]
        try:
            await ashutdown([process], self._shutdown_timeout)
        finally:
            if process in self.processes and process.exitcode is not None:
                self._remove(process)

    def discard(self, process: Child) -> None:
        """Remove a process that has exited, if this manager has it.

        Raises:
            RoleError: The process still runs.
        """
        if process in self.processes:
            if process.exitcode is None:
                raise RoleError(f"{process.name} (pid {process.pid}) still runs: stop it first")
            self._remove(process)

    def _remove(self, process: Child) -> None:
        self.processes.remove(process)
        del self._jobs[process.name]
        if self._relay is not None:
            self._relay.forget(process.name)
        process.release()

    def _index(self, name: str) -> int:
        for index, process in enumerate(self.processes):
            if process.name == name:
                return index
        raise ValueError(f"name must be the name of a process, not {name!r}")

    def _check_open(self) -> None:
        if self._closed or self._closing:
            raise RoleError(f"this {type(self).__name__} is closed, and starts no more processes")

    def sentinels(self) -> list[int]:
        """Return a descriptor for each process, readable after its exit; an empty list after `close`.

        A loop has one callback for each descriptor: duplicate them to wait beside `join_first`.
        """
        if self._closed:
            return []
        return [process.sentinel for process in self.processes]

    def finished_procs(self) -> dict[str, int]:
        """Return the exit codes of the processes that have exited, by name; ``-n`` for one killed by signal ``n``."""
        return {process.name: code for process in self.processes if (code := process.exitcode) is not None}

    async def join_first(self) -> dict[str, int]:
        """Wait until a process has exited; return `finished_procs`.

        Returns immediately without processes, or when the manager is closed. Cancelling this changes nothing.
        """
        with ProcessWatch(self.processes) as watch:
            await watch.next()
        return self.finished_procs()

    def last_lines(self, name: str, count: int = LAST_LINES) -> list[str]:
        """Return the last lines that a process has written to its standard error.

        Args:
            name: The name of the process.
            count: The largest number of lines, within the last 16 KiB.

        Raises:
            ValueError: There is no such process.
        """
        self._index(name)
        check_int("count", count, minimum=1)
        if self._relay is None:
            return []
        return self._relay.last_lines(name, count)

    def close(self) -> None:
        """Stop the processes, see `shutdown`. Idempotent; blocks."""
        if self._pid != os.getpid():  # a forked child's copy: the processes are the parent's
            return
        if not self._closed:
            self._begin_to_close()
            shutdown(self.processes, self._shutdown_timeout)
            if self._relay is not None:
                self._relay.close()
            self._release()

    def shutdown(self, timeout: float | None = None) -> None:
        """Close the manager; vLLM's name for `close`.

        Args:
            timeout: Seconds until the processes are killed; None: ``shutdown_timeout``.
        """
        if timeout is not None:
            self._shutdown_timeout = check_seconds("timeout", timeout, zero=True)
        self.close()

    async def aclose(self) -> None:
        """Stop the processes, see `ashutdown`. Idempotent; cancelling this kills them."""
        if self._closed or self._pid != os.getpid():
            return
        self._begin_to_close()
        try:
            await ashutdown(self.processes, self._shutdown_timeout)
            if self._relay is not None:
                await give_back(self._relay.close)
        finally:
            self._release()

    def _begin_to_close(self) -> None:
        with self._starting:  # wait for processes that another thread starts now, and stop them
            self._closing = True

    def _release(self) -> None:
        self._closed = True
        self._forgotten.cancel()
        if self._relay is not None:
            self._relay.close(wait=False)
        for process in self.processes:
            process.release()

    def __repr__(self) -> str:
        names = ", ".join(process.name for process in self.processes)
        return f"<{type(self).__name__} of {names or 'no processes'}>"


def _end_forgotten(kind: str, processes: list[Child], relay: StderrRelay | None, shutdown_timeout: float) -> None:
    if util.is_exiting():
        shutdown(processes, shutdown_timeout)
    else:  # the garbage collector may run in the loop's thread
        shutdown(processes, 0)
    if relay is not None:
        relay.close()
    for process in processes:
        process.release()
    warnings.warn(f"a {kind} was not closed: use `async with`, or await aclose()", ResourceWarning, stacklevel=2)


class StderrRelay:
    """Writes the standard error of processes to that of this process at construction.

    Each process writes into a pipe; one thread reads all pipes. If nobody reads the standard error
    of this process, the processes block as if they had inherited it.
    """

    def __init__(self) -> None:
        self._named: dict[str, bytearray] = {}  # the end of each stream; one byte more than is kept: it was cut
        self._open: dict[int, bytearray] = {}  # by descriptor, also those of forgotten processes
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
            self._named[name] = self._open[reader] = bytearray()
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
            lines = stream[-KEPT_BYTES:].decode(errors="replace").splitlines()
        if len(stream) > KEPT_BYTES and len(lines) > 1:
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
            self._open[fd] += data
            del self._open[fd][: -KEPT_BYTES - 1]
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
