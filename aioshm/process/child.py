"""Processes that exit with their starter, from their first instruction on.

`Child` is a process of ``multiprocessing``'s spawn method, started in another way (docs/explanation/platform-notes.md).
"""

from __future__ import annotations

import io
import multiprocessing.spawn
import operator
import os
import pickle
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, util
from multiprocessing.context import SpawnProcess, set_spawning_popen
from typing import IO, Any

from aioshm.process import parent, progress
from aioshm.process.placement import Place
from aioshm.process.stopping import leads_sessions, reap_left_by

STATUS_UNKNOWN = 255
"""The exit code of a process whose code another part of the program has taken; the same as asyncio's."""

_EXIT_PRIORITY = 0
"""When Python ends: after the managers stop their processes (10), before multiprocessing joins all (below 0)."""

ABORT_WITHIN_S = 2.0
"""How long a process may take to write its stacks, and its core where that is wanted, before SIGKILL."""

GONE_WITHIN_S = 30.0
"""How long a killed process may take to be gone. With much memory, or with a device, that takes seconds."""

_OWN_ATTRIBUTES = frozenset({"_stderr", "_place", "_launched", "progress", "reason", "is_stopping", "_killed_at"})
"""Attributes of the parent's object, which the new process does not get."""

_HAVE_WAITID = hasattr(os, "waitid")  # macOS: from Python 3.13 on


class Child(SpawnProcess):
    """One process.

    ``stderr`` becomes its standard error, None: the standard error of this process. ``place`` says where it runs.
    """

    def __init__(
        self,
        target: Callable[..., object],
        name: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        stderr: int | None = None,
        place: Place | None = None,
    ) -> None:
        super().__init__(target=target, name=name, args=args, kwargs=kwargs or {})
        self.progress: progress.Cell | None = None  # of the started process, which writes its progress there
        self.reason: str = ""  # why `end` has killed the process
        self.is_stopping: bool = False  # whether this process has sent SIGTERM
        self._stderr = stderr
        self._place = place or Place({})
        self._killed_at: float | None = None
        self._launched: _Popen | None = None

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 -- the name is multiprocessing's
        process_obj._launched = _Popen(process_obj)
        return process_obj._launched

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...], dict[str, Any]]:
        # The new process sees an ordinary SpawnProcess, and does not have to import this package.
        state = {name: value for name, value in vars(self).items() if name not in _OWN_ATTRIBUTES}
        if self.progress is not None:
            state[progress.ATTRIBUTE] = self.progress.fileno()
        return object.__new__, (SpawnProcess,), state

    def end(self, reason: str) -> None:
        """Kill the process for a reason, which is reported with its exit: with SIGABRT, and SIGKILL a little later.

        SIGABRT makes ``faulthandler`` write the stacks to the standard error. Blocks until then; call this in a
        thread. Of several reasons the first is reported.
        """
        if self.send_signal(signal.SIGABRT, reason):
            self.join(ABORT_WITHIN_S)
            self.kill()

    def terminate(self) -> None:
        super().terminate()
        self.is_stopping = True

    def kill(self) -> None:
        super().kill()
        self._killed_at = self._killed_at or time.monotonic()

    @property
    def survives_kill(self) -> bool:
        """Whether the process is not gone `GONE_WITHIN_S` after SIGKILL: it is in an uninterruptible sleep (D).

        The process runs no more code, and counts as exited.
        """
        if self._killed_at is None or time.monotonic() < self._killed_at + GONE_WITHIN_S:
            return False
        return self.exitcode is None

    def send_signal(self, number: int, reason: str = "") -> bool:
        """Send a signal, for a reason to report with the exit; return False if the process does not run."""
        if self._launched is None:
            return False
        with self._launched.reaping:  # who sees the exit sees the reason
            sent = self._launched.send(number)
            if sent:
                self.reason = self.reason or reason
        return sent

    @property
    def sentinel(self) -> int:
        if self._launched is None or self._launched.released:
            raise ValueError(f"{self.name} has no sentinel: the process was not started, or was released")
        return super().sentinel

    def release(self) -> None:
        """Close the descriptors of an exited process; the exit code stays. Idempotent."""
        if self._launched is not None and self._launched.poll() is not None:
            self._launched.close()


class _Popen(popen_spawn_posix.Popen):
    """Starts a process by ``subprocess``."""

    returncode: int | None

    def __init__(self, process_obj: Any) -> None:
        self._passed: list[int] = []
        self.reaping = threading.RLock()  # a signal handler may interrupt its holder
        super().__init__(process_obj)

    def duplicate_for_child(self, fd: int) -> int:
        self._passed.append(fd)
        return fd

    def _launch(self, process_obj: Any) -> None:
        tracker = resource_tracker.getfd()
        assert tracker is not None
        self.duplicate_for_child(tracker)
        with ExitStack() as theirs, ExitStack() as ours, ExitStack() as undo:
            process_obj.progress = ours.enter_context(closing(progress.Cell()))
            self.duplicate_for_child(process_obj.progress.fileno())
            message = self._store(process_obj, theirs.enter_context(_anonymous_file()))
            orders, orders_in = _pipe(theirs, ours)  # the new process detects the end of this process by this pipe
            ended_in, ended = _pipe(ours, theirs)
            self.duplicate_for_child(orders)
            self.duplicate_for_child(ended)
            place = process_obj._place
            command = _command(process_obj.name, place=place, tracker_fd=tracker, pipe_handle=orders)
            lead = {"start_new_session": True} if leads_sessions() else {"process_group": 0}
            with _sigint_blocked():  # the new process inherits the mask, until `boot`
                self._process = subprocess.Popen(
                    command,
                    pass_fds=self._passed,
                    stdin=subprocess.DEVNULL,
                    stderr=process_obj._stderr,
                    env=_environment(place),
                    **lead,
                )
                undo.callback(self._kill)
            self.pid = self._process.pid
            theirs.close()
            self.sentinel = self._exact_sentinel(ours, ended_in)
            # This does not block: an empty pipe takes PIPE_BUF bytes (pipe(7)), and the message has fewer.
            with suppress(BrokenPipeError):  # the process has exited already
                os.write(orders_in, message)
            self.finalizer = util.Finalize(self, _release, (self._process, ours.pop_all()), exitpriority=_EXIT_PRIORITY)
            undo.pop_all()
            if util.is_exiting():  # a daemon thread may come too late for Python to run the finalizer
                self.finalizer()

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _store(self, process_obj: Any, file: IO[bytes]) -> bytes:
        """Pickle the process's data into a file; return the short message that makes the process read it."""
        fd = self.duplicate_for_child(file.fileno())
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(_stored(fd, file.tell(), close=False), message)
            reduction.dump(multiprocessing.spawn.get_preparation_data(process_obj.name), file)
            reduction.dump(_stored(fd, file.tell(), close=True), message)
            reduction.dump(process_obj, file)
        finally:
            set_spawning_popen(None)
        file.flush()
        return message.getvalue()

    def _exact_sentinel(self, ours: ExitStack, pipe: int) -> int:
        try:
            sentinel = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            return pipe
        ours.callback(os.close, sentinel)
        return sentinel

    @property
    def released(self) -> bool:
        return self.finalizer is None or not self.finalizer.still_active()

    def send(self, number: int) -> bool:
        """Send a signal; return False if the process does not run: then its pid may be another process's."""
        with self.reaping:
            runs = self.poll() is None
            if runs:
                with suppress(ProcessLookupError):  # another part of the program has reaped the process just now
                    os.kill(self.pid, number)
        return runs

    def terminate(self) -> None:
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code, or None while the process runs; with a ``flag`` of 0, wait for the exit."""
        if self.returncode is None:
            if _HAVE_WAITID:
                self._reap(flag)
            elif flag:
                with self.reaping:
                    self.returncode = self._process.poll()
            else:
                self.returncode = self._process.wait()
        return self.returncode

    def _reap(self, flag: int) -> None:
        known = True
        try:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | flag) is None:
                return
        except ChildProcessError:  # another thread, or another part of the program, has reaped the process
            known = False
        with self.reaping:
            if self.returncode is not None:
                return
            if known:
                # The pid still belongs to this process, which is not reaped yet.
                with suppress(OSError):
                    os.killpg(self.pid, signal.SIGKILL)
                self.returncode = self._process.wait()
                reap_left_by(self.pid)
            else:
                self._process.wait()
                self.returncode = STATUS_UNKNOWN


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT in this thread until the end of the block."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _release(process: subprocess.Popen[bytes], ours: ExitStack) -> None:
    # When Python ends, multiprocessing waits without a timeout for processes that nobody has stopped.
    if util.is_exiting() and process.returncode is None:
        with suppress(OSError):
            os.kill(process.pid, signal.SIGKILL)
    ours.close()


class _Call:
    """Unpickles to the result of a call of the standard library."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._function = function
        self._args = args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._function, self._args


def _stored(fd: int, offset: int, *, close: bool) -> _Call:
    """Return an object that unpickles to the object at ``offset`` of an inherited file."""
    file = _Call(os.fdopen, fd, "rb", -1, None, None, None, close)
    seek = _Call(operator.methodcaller("seek", offset), file)
    load = _Call(pickle.load, file)
    return _Call(operator.getitem, (seek, load, _Call(operator.methodcaller("close"), file)), 1)


def _anonymous_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("process-arguments"), "wb")
    return tempfile.TemporaryFile()


def _pipe(reading: ExitStack, writing: ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe()
    reading.callback(os.close, reader)
    writing.callback(os.close, writer)
    return reader, writer


def _environment(place: Place) -> dict[str, str] | None:
    """Return the environment of a new process; None: this process's."""
    if not place.env:
        return None
    return {name: value for name, value in {**os.environ, **place.env}.items() if value is not None}


def _command(name: str, *, place: Place, **handles: int) -> list[str]:
    """Return the command line of ``multiprocessing``, preceded by a call of `parent.boot`.

    The name of the process comes last, for ``ps`` and ``aioshm who``.
    """
    command = list(multiprocessing.spawn.get_command_line(**handles))
    if "-c" in command:  # else the program is frozen, and the target has to call `die_with_parent`
        load = (
            "from importlib.util import module_from_spec, spec_from_file_location; "
            f"spec = spec_from_file_location('aioshm_parent', {parent.__file__!r}); "
            "parent = module_from_spec(spec); spec.loader.exec_module(parent); "
            f"parent.boot({os.getpid()}, {place.cpus}, {place.numa_node}); "
        )
        program = command.index("-c") + 1
        command[program] = load + command[program]
        command.append(name)
    return command
