"""Blocking ends in threads and processes of their own, and the other face for them to talk to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aioshm import Options, blocking

SCRIPT = Path(__file__).with_name("child.py")

READS: dict[str, Any] = {
    "dequeue": lambda reader: reader.dequeue(),
    "cancellable": lambda reader: reader.dequeue(cancel=threading.Event()),
    "many": lambda reader: reader.dequeue_many(3),
    "lease": lambda reader: reader.lease().__enter__(),
    "acquire_read": lambda reader: reader.acquire_read().__enter__(),
    "merge": lambda reader: next(blocking.merge({0: reader})),
}
"""The calls that wait for a message."""

WRITES: dict[str, Any] = {
    "enqueue": lambda writer: writer.enqueue("x"),
    "many": lambda writer: writer.enqueue_many(["x", "y"]),
    "acquire_write": lambda writer: writer.acquire_write().__enter__(),
    "loan": lambda writer: writer.loan(8).__enter__(),
}
"""The calls that wait for room."""


class Thread:
    """Runs a function; `result` hands on what it returned or raised."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._outcome: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function, arguments))
        self._thread.start()

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            self._outcome = function(*arguments)
        except BaseException as error:
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self, within_s: float = 20) -> Any:
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "the thread did not end"
        if self._error is not None:
            raise self._error
        return self._outcome


def interrupt_after(wait: Callable[..., object], *arguments: Any) -> Thread:
    """Send SIGUSR1 to this process once a call, which another thread makes, has returned; return the thread."""

    def interrupt() -> None:
        wait(*arguments)
        os.kill(os.getpid(), signal.SIGUSR1)

    return Thread(interrupt)


def make_writer(
    n_reader: int = 1, *, chunk: int = 4096, chunks: int = 4, codec: Any = "pickle", **options: Any
) -> blocking.MessageQueue:
    return blocking.MessageQueue(
        n_reader,
        n_reader,
        max_chunk_bytes=chunk,
        max_chunks=chunks,
        slots=chunks,
        codec=codec,
        options=Options(**options),
    )


@contextmanager
def reading(read: Callable[[blocking.MessageQueue], Any], **arguments: Any) -> Iterator[tuple[Any, Thread]]:
    """Give a ready writer to the block, whose reader is in another thread, where ``read`` gets it."""
    with make_writer(**arguments) as writer:
        handle = writer.export_handle()

        def run() -> Any:
            with blocking.MessageQueue.create_from_handle(handle, 0) as reader:
                reader.wait_until_ready(10)
                return read(reader)

        thread = Thread(run)
        try:
            writer.wait_until_ready(10)
            yield writer, thread
        finally:
            writer.close()
            thread._thread.join(20)


@contextmanager
def pair(*, remote: bool = False, **arguments: Any) -> Iterator[tuple[blocking.MessageQueue, blocking.MessageQueue]]:
    """Give a writer and its reader, both ready, to the block; ``arguments`` as of `make_writer`."""
    if remote:
        options = Options(remote_window=2)
        writer = blocking.MessageQueue(1, 0, connect_ip="127.0.0.1", options=options, max_chunk_bytes=4096)
    else:
        writer = make_writer(**arguments)
    with writer, blocking.MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        ready = Thread(writer.wait_until_ready, 20)
        reader.wait_until_ready(20)
        ready.result()
        yield writer, reader


@contextmanager
def handling(handler: Any, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals during the block: SIGUSR1, or these."""
    before = [(number, signal.signal(number, handler)) for number in numbers or (signal.SIGUSR1,)]
    try:
        yield
    finally:
        for number, handler_before in before:
            signal.signal(number, handler_before)


class Child:
    """A running ``child.py`` in a role of the blocking API."""

    def __init__(self, role: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), f"{role}_blocking", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def says(self, beginning: str = "") -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().rstrip("\n")
        assert line.startswith(beginning), f"the child said {line!r} instead of {beginning!r}"
        return line

    def end(self) -> tuple[int, str]:
        """Return the exit status and what is left on standard error."""
        assert self.process.stderr is not None
        status = self.process.wait(20)
        return status, self.process.stderr.read()


@contextmanager
def child(*arguments: str) -> Iterator[Child]:
    running = Child(*arguments)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.communicate()
