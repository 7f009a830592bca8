"""The processes of a `WorkerGroup`: started, connected, watched, named when one exits, and stopped."""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from aioshm.config import Options
from aioshm.engine.workers.worker import (
    FAILURE,
    LoopFactory,
    Message,
    MessageCodec,
    receive_line,
    run_worker,
    send_line,
)
from aioshm.errors import AioshmError, EndClosed, PeerClosed, PeerDied, RemoteFailure, WorkerDied
from aioshm.lifeline.sockets import sweep_leftovers
from aioshm.process.background import completed
from aioshm.process.child import Child
from aioshm.process.manager import Job, ProcessManager
from aioshm.process.placement import Placement, place_of
from aioshm.process.proc import HUNG_STATES, process_state
from aioshm.process.restart import Life, RankInfo, Restart
from aioshm.process.stalls import ProgressWatch
from aioshm.process.stopping import ashutdown
from aioshm.process.watch import ProcessExit, ProcessWatch
from aioshm.queue import MessageQueue
from aioshm.queue.ends.writer import Writer

if TYPE_CHECKING:
    from aioshm.engine.workers.calls import Call
    from aioshm.engine.workers.session import Session

T = TypeVar("T")

EXIT_WITHIN_S = 5.0
"""How long a process that starts may take to exit after its socket or queue has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of a `WorkerGroup`."""

    worker: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    n_workers: int
    name: str
    options: Options
    sizes: tuple[int, int]  # bytes of a chunk, and number of chunks, of each queue
    ready_timeout: float | None
    shutdown_timeout: float
    capture_stderr: bool
    loop_factory: LoopFactory | None
    restart: Restart | None
    standbys: int
    max_workers: int
    placement: Placement | None


class WorkerProcess:
    """One process: the worker of a rank, or a standby without a rank."""

    requests: MessageQueue  # with the calls of this worker only; once created
    replies: MessageQueue  # with all answers of the worker; once created

    def __init__(self, process: Child, sock: socket.socket) -> None:
        self.process = process
        self.name: str = process.name
        self.pid: int = process.pid or 0
        self.exited: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Event = asyncio.Event()  # set at the exit, or before at the end of a queue
        self.outbox: deque[tuple[Message, Call]] = deque()  # messages that wait for room in `requests`
        self._socket_closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._handle = ""
        self._queues = AsyncExitStack()  # closes the queues, once created
        sock.setblocking(False)
        self._socket = sock
        self._forgotten = weakref.finalize(self, sock.close)  # no second warning: an unclosed group gives one

    async def wait_imported(self) -> None:
        """Wait until the process has imported everything: then it sends the handle of its queue of answers."""
        if not self._handle:
            self._handle = str(await self._unless_exited(receive_line(self._socket)))

    async def create(self, rank: int, broadcasts: str, settings: Settings) -> RemoteFailure | None:
        """Create the worker's object, and open its queues; return the exception of its constructor.

        Raises EOFError if the process is ending: the reason is in its standard error.
        """
        await self.wait_imported()
        try:
            return await self._unless_exited(self._create(rank, broadcasts, settings))
        except (PeerClosed, PeerDied):
            raise EOFError from None

    async def _create(self, rank: int, broadcasts: str, settings: Settings) -> RemoteFailure | None:
        options = msgspec.structs.replace(
            settings.options, on_reader_death="raise", max_readers=None, slow_reader="block", prefault_bytes=0
        )
        async with AsyncExitStack() as unused:
            replies = MessageQueue.create_from_handle(self._handle, 0, codec=MessageCodec(), options=options)
            unused.push_async_callback(replies.aclose)
            requests = MessageQueue(1, 1, None, *settings.sizes, codec=MessageCodec(), options=options)
            unused.push_async_callback(requests.aclose)
            cast(Writer, requests.end).label(f"{self.name}.calls")
            await send_line(self._socket, (rank, broadcasts, requests.export_handle().to_json()))
            await requests.wait_until_ready()
            await replies.wait_until_ready()
            kind, _, _, failure = await replies.dequeue(indefinite=True)
            if kind == FAILURE:
                return RemoteFailure(*failure)
            self._queues = unused.pop_all()
            self.requests = requests
            self.replies = replies
            return None

    async def _unless_exited(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, self.exited, self._socket_closed), return_when=asyncio.FIRST_COMPLETED)
            if self._socket_closed.done():
                raise EndClosed("the group of workers was closed")
            if task.done():
                return task.result()
            raise EOFError
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        """Close the queues. Idempotent."""
        await self._queues.aclose()

    def forget(self) -> None:
        """Close the socket, on its loop or without a running loop. Idempotent."""
        if self._socket.fileno() >= 0:
            loop = asyncio._get_running_loop()
            if loop is not None:
                self._socket_closed.set_result(None)
                loop.remove_reader(self._socket)
                loop.remove_writer(self._socket)
            self._forgotten()

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


class Rank(Life):
    """The worker of one rank: its processes one by one, its state and its calls."""

    def __init__(
        self, rank: int, name: str, restart: Restart, on_change: Callable[[RankInfo], object] | None = None
    ) -> None:
        super().__init__(rank, restart, on_change)
        self.name: str = name
        self.process: WorkerProcess | None = None  # after a death the dead process, until its replacement
        self.present: bool = False  # whether its process takes calls
        self.leaving: bool = False  # whether scaling down removes this worker
        self.queue: deque[Call] = deque()  # its own calls, not sent yet
        self.sent: set[Call] = set()  # calls that are not answered, and streams that have not ended
        self.idle_since: int = 0
        self.joined: int = 0  # the last call of all that was sent before the process was ready
        self.last_call: int = 0  # the last of its own calls that was sent to the process

    def take_process(self, process: WorkerProcess) -> None:
        """Note the process that is to become this worker."""
        self.process = process
        self.pid = process.pid

    @property
    def idle(self) -> bool:
        """Whether a call of any worker may be sent to this worker."""
        return self.present and self.state == "running" and not (self.leaving or self.sent)

    @property
    def has_stream(self) -> bool:
        """Whether a stream of this worker has not ended."""
        return any(call.stream for call in self.sent)

    def describe(self) -> str:
        """Name the worker, with its state if it makes no progress or cannot run."""
        if self.process is None:
            return f"{self.name}, which is being started"
        known = [f"pid {self.pid}"]
        if self.state in ("stalled", "stopped"):
            known += filter(None, (self.state, self.where))
        elif (state := process_state(self.process.pid)) in HUNG_STATES:
            known.append(state)
        return f"{self.process.name} ({', '.join(known)})"


class WorkerProcesses:
    """All processes of a group, standbys included."""

    def __init__(self, settings: Settings, session: Session) -> None:
        self._settings = settings
        self._processes: dict[str, WorkerProcess] = {}
        self._session = session
        self.ready_timeout = settings.ready_timeout
        self._manager = ProcessManager(
            run_worker, (), shutdown_timeout=settings.shutdown_timeout, capture_stderr=settings.capture_stderr
        )
        this = weakref.proxy(self)  # the loop references the watches
        self._watch = ProcessWatch(manager=self._manager, on_exit=lambda: this._exited())
        self.progress = ProgressWatch(
            settings.options.stall_warning_s,
            settings.restart,
            lambda watched: this._session.health_changed(watched),
        )

    def start(self, name: str, construction: bytes, rank: int = 0) -> WorkerProcess:
        """Start a worker, or a standby, which has the placement of any rank.

        Blocks for milliseconds. Not in a thread: the kernel ends with this process only processes
        that its main thread has started.
        """
        settings = self._settings
        ours, theirs = socket.socketpair()
        with ExitStack() as unused, theirs:
            unused.enter_context(ours)
            arguments = (theirs, construction, settings.sizes, settings.options, settings.loop_factory)
            process = self._manager.start_more(Job(name, arguments, place=place_of(settings.placement, rank)))
            unused.pop_all()
        worker = self._processes[name] = WorkerProcess(process, ours)
        self._watch.add([process], self._manager)
        return worker

    async def prepare(self, worker: WorkerProcess, work: Coroutine[Any, Any, RemoteFailure | None], what: str) -> str:
        """Run a step of a new process; return "", or after its exit the cause of a failure."""
        within_s = self.ready_timeout
        cause = ""
        try:
            async with asyncio.timeout(within_s):
                failure = await work
            if failure is None:
                return ""
            cause = f"{worker} could not be created: {failure}"
        except TimeoutError:
            cause = f"{worker} was not {what} after {within_s:g} s, and was killed"
        except AioshmError as error:  # some are an OSError, too
            cause = f"cannot attach to the queues of {worker}: {error}"
        except (EOFError, OSError):
            await asyncio.wait([worker.exited], timeout=EXIT_WITHIN_S)
        exited = await self.kill_now(worker)
        return cause or exited.describe()

    async def kill_now(self, worker: WorkerProcess, after_s: float = 0) -> ProcessExit:
        """Wait for an exit for that many seconds, then kill the process; return the exit."""
        if not worker.exited.done():
            await asyncio.wait([worker.exited], timeout=after_s)
            worker.process.kill()
            await asyncio.wait([worker.exited])
        return worker.exited.result()

    def discard(self, worker: WorkerProcess) -> None:
        """Remove a process that has exited; raise RoleError if the process still runs."""
        worker.forget()
        self._manager.discard(worker.process)
        self._processes.pop(worker.name, None)

    async def stop_worker(self, worker: WorkerProcess) -> None:
        """Wait for a worker to exit; stop the process after ``shutdown_timeout``."""
        worker.forget()
        try:
            await asyncio.wait([worker.exited], timeout=self._settings.shutdown_timeout)
        finally:
            self._processes.pop(worker.name, None)  # not before: the exit is reported by the name
            await self._manager.stop(worker.name)

    def death(self, rank: Rank, story: str = "") -> WorkerDied:
        """Return the error for a worker without a process."""
        if rank.process is None:
            return WorkerDied(rank.rank, rank.name, None, None, story)
        found = rank.process.exited.result()
        text = found.describe()
        if story:
            text += f"; {story}"
        tail = []
        with suppress(ValueError):  # the process was discarded, and no other process could be started
            tail = self._manager.last_lines(found.name)
        if not found.reason:
            return WorkerDied(rank.rank, found.name, found.pid, found.exitcode, text, tail)
        error = WorkerDied(rank.rank, found.name, found.pid, found.exitcode, text)
        error.last_lines = tail  # the stacks; the text has the line of Python
        return error

    def forget(self) -> None:
        """Stop watching the processes, and close their sockets. Idempotent."""
        self._watch.close()
        self.progress.close()
        for worker in self._processes.values():
            worker.forget()

    async def stop(self, closing: asyncio.Task[None], patience: float) -> None:
        """Wait until the queues are closed, then for the processes to exit by themselves, then stop them."""
        try:
            await completed(closing)
            with ProcessWatch(self._manager.processes) as watch:
                await watch.all_exited(asyncio.get_running_loop().time() + patience)
        except asyncio.CancelledError:
            await ashutdown(self._manager.processes, 0)
            raise
        finally:
            self.forget()
            try:
                await self._manager.aclose()
            finally:
                sweep_leftovers()

    def _exited(self) -> None:
        for each in self._watch.take():
            worker = self._processes.get(each.name)
            if worker is not None and worker.pid == each.pid and not worker.exited.done():
                worker.exited.set_result(each)
                worker.ended.set()
                self._session.news.set()
