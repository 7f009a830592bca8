"""The other processes of a benchmark: each plays a role, takes orders, and never outlives this one."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self, TypeAlias

REPLY_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 20.0

Role: TypeAlias = Callable[..., Coroutine[Any, Any, None] | None]
"""``async def role(boss, *args)``, importable by its name; a plain ``def`` plays without an event loop."""


class BenchmarkError(Exception):
    """A benchmark could not be finished; the text says why."""


class Boss:
    """The benchmark, as a role sees it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def order(self) -> Any:
        """Wait for the next order; None asks the role to end."""
        await readable(self._connection.fileno())
        return self._connection.recv()

    def plain_order(self) -> Any:
        """Block until the next order; None asks the role to end."""
        return self._connection.recv()

    def reply(self, answer: Any) -> None:
        """Answer an order."""
        self._connection.send(answer)


async def readable(fd: int) -> None:
    """Return once this file descriptor can be read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


class Hand:
    """One process, as the benchmark sees it."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process = process
        self._connection = connection

    def order(self, order: Any) -> None:
        """Send an order; None asks the process to end."""
        self._connection.send(order)

    def has_replied(self) -> bool:
        """Return whether `reply` would not have to wait."""
        return self._connection.poll()

    async def reply(self) -> Any:
        """Wait for its answer.

        Raises:
            BenchmarkError: It failed or died, or says nothing for `REPLY_TIMEOUT_S`.
        """
        name = self.process.name
        try:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await readable(self._connection.fileno())  # also when it died: the other end is closed then
            os.set_blocking(self._connection.fileno(), True)  # libuv has changed that; the rest of the answer may come
            answer = self._connection.recv()
        except TimeoutError:
            raise BenchmarkError(f"{name} has said nothing for {REPLY_TIMEOUT_S:g} s") from None
        except (EOFError, ConnectionError):
            self.process.join(EXIT_TIMEOUT_S)
            raise BenchmarkError(f"{name} died with exit code {self.process.exitcode}") from None
        if isinstance(answer, _Failure):
            raise BenchmarkError(f"{name} failed:\n{answer.text}")
        return answer


class Crew:
    """The processes of one run; leaving the block ends them, kindly if it succeeded.

    Their temporary files, and the sockets that some contestants never remove, go with them.

    Args:
        loop_factory: What makes the event loop that each role runs on.
    """

    def __init__(self, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self._loop_factory = loop_factory
        # Processes that are forked from one that has imported everything are there far sooner than spawned ones.
        self._forking, self._spawning = (multiprocessing.get_context(method) for method in ("forkserver", "spawn"))
        self._forking.set_forkserver_preload(["benchmarks.framework.stage", "benchmarks.contestants"])
        self._hands: list[Hand] = []
        self._directory = tempfile.mkdtemp(prefix="crew-")  # short, as paths of sockets have to be

    def start(self, name: str, role: Role, *args: Any, has_children: bool = False, spawned: bool = False) -> Hand:
        """Start a process that plays a role.

        With children, the role must end them when this process is lost. A spawned process shares no memory with others;
        a forked one copies each page when it first writes there.
        """
        context: Any = self._spawning if has_children or spawned else self._forking
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_play,
            args=(theirs, self._directory, self._loop_factory, role, args),
            name=name,
            daemon=not has_children,
        )
        process.start()
        theirs.close()
        hand = Hand(process, ours)
        self._hands.append(hand)
        return hand

    async def dismiss(self, hands: Sequence[Hand]) -> None:
        """Ask these to end, and wait until they have.

        Raises:
            BenchmarkError: One does not, or fails.
        """
        for hand in hands:
            hand.order(None)
        for hand in hands:
            try:
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await readable(hand.process.sentinel)
            except TimeoutError:
                raise BenchmarkError(f"{hand.process.name} does not end") from None
            hand.process.join()
            if hand.process.exitcode != 0:
                await hand.reply()  # raises

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hand in self._hands:
            hand.process.kill()  # not terminate(): they have nothing to put in order
        for hand in self._hands:
            hand.process.join(EXIT_TIMEOUT_S)
        shutil.rmtree(self._directory, ignore_errors=True)


class _Failure:
    """The traceback that a role ended with."""

    def __init__(self, text: str) -> None:
        self.text = text


def _play(
    connection: Connection,
    directory: str,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    role: Role,
    args: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the benchmark ends us
    threading.Thread(target=_die_with_parent, args=(directory,), name="die-with-parent", daemon=True).start()
    tempfile.tempdir = directory
    boss = Boss(connection)
    if not inspect.iscoroutinefunction(role):
        with _reporting(connection):
            role(boss, *args)
        return

    async def perform() -> None:
        with _reporting(connection):  # before the ends close, so that the reason is there when their peers notice
            await role(boss, *args)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(perform())


@contextmanager
def _reporting(connection: Connection) -> Iterator[None]:
    """Send the traceback of a failure to the benchmark, and end with exit code 1."""
    try:
        yield
    except Exception:
        connection.send(_Failure(traceback.format_exc()))
        sys.exit(1)


def _die_with_parent(directory: str) -> None:
    """End this process with its parent, however that ends and whatever we are blocked in. Sleeps until then.

    Remove the directory, too: nobody else is left to do so.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)
