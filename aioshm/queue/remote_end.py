"""A remote reader's end while it attaches to its queue, and what it hears of the writer; see ``remote_reader.py``."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import platform
from abc import ABC
from collections.abc import Callable
from time import monotonic
from typing import cast

import msgspec

from aioshm.codec import Codec
from aioshm.config import Options
from aioshm.errors import AioshmError, HandleError, OutOfDescriptors, PeerDied, QueueClosed
from aioshm.logs import LogLimiter
from aioshm.process.limits import shortage
from aioshm.queue import wire
from aioshm.queue.delivery import ReceiveWindow
from aioshm.queue.end import BLOCKING_TURN_NS, NotAttached, deadline_after
from aioshm.queue.handle import Handle, RemoteAddress
from aioshm.queue.inquiry import findings
from aioshm.queue.reader_end import ReaderEnd
from aioshm.queue.reader_sockets import ReaderSockets
from aioshm.queue.stats import QueueStats
from aioshm.queue.wide_writer import check_safety
from aioshm.ring.atomics import ReaderCore
from aioshm.ring.layout import VERSION
from aioshm.wait.line import settle
from aioshm.wait.poller import Poller
from aioshm.wait.predictor import Predictor
from aioshm.wait.stall import seconds

logger = logging.getLogger("aioshm.queue")

ACKNOWLEDGE_S = 0.02
"""How long after the latest message the writer learns that it was finished with, if it does not wait for that."""

GOODBYE_S = 1.0
"""How long a closing reader waits for the writer to have heard its goodbye."""

CLOSED_LOOP_POLL_S = 0.005
"""How often a reader looks at its sockets when it closes after its event loop."""

RETRY_S = 0.05  # while too many control messages wait to be sent
COMPLAINT_S = 10.0  # between two warnings of bad messages


class RemoteEnd(ReaderEnd, ABC):
    """Connects when it is first awaited."""

    _blocking_turn_ns = BLOCKING_TURN_NS

    def __init__(self, handle: Handle, rank: int, codec: str | Codec | None, options: Options | None) -> None:
        self._core = cast(ReaderCore, NotAttached())
        self._sockets: ReaderSockets | None = None
        self._flag = memoryview(bytearray(1))  # its parked flag, at which nobody else looks
        self._going: asyncio.Future[None] | None = None
        self._goodbye: asyncio.Future[None] | None = None
        self._left_behind = False  # whether the writer has closed the queue, and what is not here will not come
        self._released = False  # whether the writer waits for this end no more
        self._acknowledging: asyncio.TimerHandle | None = None
        self._checking: asyncio.TimerHandle | None = None
        self._introducing: asyncio.TimerHandle | None = None
        self._welcome: wire.Welcome | None = None
        self._proven = False
        self._refused: str | None = None
        self._heard = 0.0
        self._asked = 0.0
        self._connections = 0
        self._twice = 0
        self._limiter = LogLimiter(COMPLAINT_S)
        super().__init__(handle, rank, codec, options)
        try:
            self._check_handle(self._remote)
        except BaseException:
            self._dismantled = True
            raise
        window = handle.options  # the writer's, not this end's own
        self._window: ReceiveWindow[wire.Data] = ReceiveWindow(window.remote_window, window.remote_window_bytes)

    @property
    def _remote(self) -> RemoteAddress:
        remote = self._handle.remote
        assert remote is not None
        return remote

    def _check_handle(self, remote: RemoteAddress) -> None:
        keys = (remote.server_key, remote.client_public, remote.client_secret)
        if len(remote.topic) != wire.SECRET_BYTES or any(key is not None and len(key) != 40 for key in keys):
            raise HandleError("not a handle: its topic or its keys are damaged")
        for endpoint in (remote.data, remote.control):
            if not endpoint.startswith("tcp://"):
                raise HandleError(f"not a handle: {endpoint!r} is no TCP endpoint")
        if self._options.secure and remote.keys is None:
            raise HandleError("the queue is not encrypted; this reader's options say secure=True")
        check_safety(self._codec, remote.keys is not None, self._options)

    # Attaching

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        await self._become_ready(deadline_after(timeout))

    async def _become_ready(self, deadline: float | None, cancel: asyncio.Event | None = None) -> None:
        self._start_attaching()
        stall = self._inquiry()
        try:
            while not self._ready and self._writer_gone is None:
                if self._going is None or self._going.done():
                    self._going = asyncio.get_running_loop().create_future()
                await settle(self._going, deadline=deadline, cancel=cancel, stall=stall)
                self._check_usable()
        except TimeoutError:
            raise shortage(f"{self!r}") or TimeoutError(f"{self!r}: {self._why_not_ready()}") from None
        if not self._ready:
            assert self._writer_gone is not None
            raise self._writer_gone()
        self._reopen()

    def _start_attaching(self) -> None:
        loop = self._bind()
        if self._sockets is None:
            self._connect(loop)

    def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        remote, handle = self._remote, self._handle
        self._heard = monotonic()
        # What the writer may send is not for this end's options to say. ZeroMQ would never connect again.
        largest = max(handle.options.max_message_bytes, handle.max_chunk_bytes)
        try:
            self._sockets = ReaderSockets(
                loop,
                remote.data,
                remote.control,
                remote.keys,
                [wire.address(remote.topic), wire.address(remote.topic, self._rank)],
                msgspec.structs.replace(self._options, max_message_bytes=largest),
                self._on_data,
                self._on_message,
                self._on_connections,
            )
        except OutOfDescriptors:
            raise
        except OSError as error:
            raise HandleError(f"not a handle: {error}") from None
        predictor = Predictor(may_spin=False, crowded=False, max_spin_cpu=0.0)
        self._poller = Poller(loop, self._flag, predictor, "park", _cannot_spin)
        self._check_connections()

    def _introduce(self) -> None:
        """Say who this is, and whatever the writer may not have heard: the connection is new."""
        if self._introducing is not None:
            self._introducing.cancel()
            self._introducing = None
        self._window.ask_again()
        if self._tell(self._hello()):
            self._acknowledge()
            self._ask()
            if self._goodbye is not None:
                self._tell(wire.Leave())

    def _hello(self) -> wire.Hello:
        handle = self._handle
        return wire.Hello(
            VERSION, handle.queue_id, handle.token, self._rank, os.getpid(), platform.node(), self._proven
        )

    def _tell(self, message: wire.Control) -> bool:
        """Send a control message; where that cannot be done now, everything is said again a little later."""
        assert self._sockets is not None
        if self._sockets.send(message):
            return True
        if self._sockets.closed:
            return False
        if self._introducing is None and self._loop is not None and not self._loop.is_closed():
            self._introducing = self._loop.call_later(RETRY_S, self._introduce)
        return False

    # What the sockets tell

    def _on_connections(self) -> None:
        assert self._sockets is not None
        data, control = self._sockets.data_connection, self._sockets.control_connection
        if control.connections > self._connections:
            self._connections = control.connections
            self._introduce()
        if control.refused or data.refused:
            self._give_up(lambda: HandleError(f"{self!r}: the writer does not let the handle's key in"))
        self._check_connections()

    def _on_data(self, head: memoryview, body: memoryview | None) -> None:
        try:
            data = wire.parse_data(head, body)
            if data.kind == wire.MARK:
                self._window.marked(data.seq)
                if not self._proven:
                    self._proven = True
                    self._tell(wire.Proven())
            elif not self._window.arrived(data.seq, data, len(data.body)):
                self._twice += 1
                return
        except wire.WireError as error:
            self._complain(error)
            return
        self._ask()
        if self._window.ready:
            self._wake()
        if self._window.end is not None:
            self._finish_if_complete()

    def _on_message(self, data: bytes) -> None:
        try:
            message = wire.parse_from_writer(data)
        except wire.WireError as error:
            self._complain(error)
            return
        self._heard = monotonic()
        if isinstance(message, wire.Tick):
            self._acknowledge()
        elif isinstance(message, wire.Welcome):
            self._welcome = message
        elif isinstance(message, wire.Go):
            self._ready = True
            self._reopen()
            self._interrupt()
        elif isinstance(message, wire.Lost):
            self._window.lost(message.first, message.last)
            self._wake()
            self._finish_if_complete()
        elif isinstance(message, wire.Closing):
            self._window.ends(message.end)
            if not self._finish_if_complete():
                self._acknowledge()  # what is missing may take its time; this end is there
        else:
            if isinstance(message, wire.Refused):
                self._on_refused(message)
            self._released = True
            if self._goodbye is not None and not self._goodbye.done():
                self._goodbye.set_result(None)

    def _on_refused(self, message: wire.Refused) -> None:
        if message.evicted:
            self._give_up(self._died(f"it has given this reader up: {message.reason}"))
        elif self._welcome is None:
            self._give_up(lambda: HandleError(f"{self!r}: the writer refuses it: {message.reason}"))
        else:
            self._give_up(self._died(f"it does not know this reader any more: {message.reason}"))

    def _finish_if_complete(self) -> bool:
        if not self._window.complete:
            return False
        self._tell(wire.Finished())
        self._writer_gone = self._closed_by_writer
        self._interrupt()
        return True

    def _closed_by_writer(self) -> AioshmError:
        return QueueClosed(f"{self!r}: the writer has closed the queue")

    def _complain(self, error: wire.WireError) -> None:
        held_back = self._limiter.admit()
        if held_back is not None:
            logger.warning("%r: dropped what no writer sends: %s (and %d more)", self, error, held_back)

    # What this end has to tell

    def _ask(self) -> None:
        """Ask for what will not come by itself."""
        runs = self._window.to_ask_for()
        if runs:
            self._tell(wire.Resend(runs))

    def _acknowledge(self) -> None:
        """Tell the writer what this end has finished with."""
        if self._acknowledging is not None:
            self._acknowledging.cancel()
            self._acknowledging = None
        if self._tell(wire.Acknowledge(self._window.taken)):
            self._window.acknowledged()

    def _finished_one(self) -> None:
        """Let go of the first message in line."""
        self._window.finished()
        if self._writer_gone is not None:
            return
        if self._window.must_acknowledge():
            self._acknowledge()
        elif self._acknowledging is None:
            assert self._loop is not None
            self._acknowledging = self._loop.call_later(ACKNOWLEDGE_S, self._acknowledge)

    # Whether the writer is still there

    def _check_connections(self) -> None:
        """Give the writer up if a connection has been down, and it has been silent, for too long."""
        if self._checking is not None:
            self._checking.cancel()
            self._checking = None
        if self._sockets is None or self._writer_gone is not None or self._refusal is not None:
            return
        assert self._loop is not None
        timeout, now = self._options.remote_timeout, monotonic()
        due: list[tuple[float, str]] = []
        control, data = self._sockets.control_connection.down_since, self._sockets.data_connection.down_since
        if control is not None:
            # A program that does not run its loop says nothing; a connection that is down is not yet its end.
            due.append((max(self._heard + timeout, control + timeout / 2), "it is not to be reached"))
        if data is not None:
            due.append((data + timeout, "its data port is not to be reached"))
        if not due:
            return
        at, why = min(due)
        if now < at:
            self._checking = self._loop.call_later(at - now, self._look_and_check)
            return
        if self._welcome is None:
            lacking = shortage(f"{self!r}")  # ZeroMQ tries again for ever, and does not say why
            where = self._remote.control if control is not None else self._remote.data
            self._give_up(
                lambda: lacking or HandleError(f"nobody answers at {where}: is the writer gone, or the port closed?")
            )
        else:
            self._give_up(self._died(f"{why}, for {timeout:g} s"))

    def _look_and_check(self) -> None:
        assert self._sockets is not None
        self._checking = None
        self._sockets.look_at_all()  # what came while the loop was busy counts
        self._check_connections()

    def _give_up(self, error: Callable[[], AioshmError]) -> None:
        """Take the writer for gone: what has arrived can be read, then there is the error.

        One that has closed the queue did not die, whatever became of it since: what it sent last is lost, if anything.
        """
        if self._writer_gone is not None:
            return
        self._left_behind = self._window.end is not None
        self._writer_gone = self._closed_by_writer if self._left_behind else error
        self._interrupt()

    def _died(self, detail: str) -> Callable[[], AioshmError]:
        pid = 0 if self._welcome is None else self._welcome.pid
        where = self._remote.control if self._welcome is None else f"{self._welcome.host}, {self._remote.control}"
        return functools.partial(PeerDied, -1, pid, "writer", f"queue {self._name} on {where}: {detail}")

    def _why_not_ready(self) -> str:
        remote, sockets = self._remote, self._sockets
        if sockets is None or not sockets.control_connection.up:
            return f"no connection to {remote.control}: does the writer run there, and is the port open?"
        if self._welcome is None:
            return f"the writer at {remote.control} does not answer: does its event loop run, in wait_until_ready()?"
        if not self._proven:
            return f"nothing comes from {remote.data}: is the port open?"
        return "other readers are missing"

    # What is known of the writer

    def _progress(self) -> int:
        return self._window.taken

    def _ask_writer(self) -> bool:
        """Greet the writer once more: its event loop answers each greeting."""
        sockets = self._sockets
        if self._welcome is None or sockets is None or not sockets.control_connection.up:
            return False
        if self._heard >= self._asked:
            self._asked = monotonic()
            self._tell(self._hello())
        return True

    def _findings(self) -> tuple[int, str]:
        """Return at which level to log what is known of the writer, and the words."""
        welcome, sockets, now = self._welcome, self._sockets, monotonic()
        heard = f", last heard of {seconds(now - self._heard)} ago"
        if welcome is None or sockets is None:
            return logging.WARNING, self._why_not_ready()
        who = f"the writer (pid {welcome.pid} on {welcome.host}{heard})"
        if not (sockets.control_connection.up and sockets.data_connection.up):
            return logging.WARNING, f"no connection to the writer at {self._remote.control}{heard}"
        silent_s = None if self._heard >= self._asked else now - self._asked
        return findings(who, "", silent_s, self._handle.answers)

    def _report_not_ready(self, waited_s: float) -> None:
        about = "" if self._welcome is None else f"; {self._findings()[1]}"
        logger.warning("%r: waited %s: %s%s", self, seconds(waited_s), self._why_not_ready(), about)

    # Telling about itself

    def _current_stats(self) -> QueueStats:
        reconnects = 0
        if self._sockets is not None:
            each = (self._sockets.data_connection.connections, self._sockets.control_connection.connections)
            reconnects = sum(max(0, connections - 1) for connections in each)
        return msgspec.structs.replace(
            self._stats(None, self._rank, self._window.next - self._window.taken, 0),
            messages=self._window.taken,
            resent=self._twice,
            reconnects=reconnects,
        )

    # Closing (see `End`)

    def _interrupt(self) -> None:
        self._wake()
        if self._going is not None and not self._going.done() and not self._going.get_loop().is_closed():
            self._going.set_result(None)

    def _say_goodbye(self) -> None:
        there = self._writer_gone is None or self._window.complete
        if self._sockets is not None and there and not self._released:
            assert self._loop is not None
            self._goodbye = self._loop.create_future()
            if self._welcome is None:
                self._introduce()  # so that it knows who leaves, and waits for nobody
            else:
                self._tell(wire.Leave())

    def _dismantle(self) -> None:
        for timer in (self._acknowledging, self._checking, self._introducing):
            if timer is not None:
                timer.cancel()
        if self._sockets is not None and self._goodbye is None:
            self._sockets.close()

    def _finished(self) -> bool:
        return self._goodbye is None or self._sockets is None or self._sockets.closed

    async def _finish(self) -> None:
        if self._goodbye is None or self._sockets is None or self._sockets.closed:
            return
        deadline = monotonic() + GOODBYE_S
        try:
            while self._goodbye.get_loop().is_closed() and not self._goodbye.done() and monotonic() < deadline:
                self._sockets.look_at_all()  # which nobody else does any more
                await asyncio.sleep(CLOSED_LOOP_POLL_S)
            await settle(self._goodbye, deadline=deadline)
        except TimeoutError:
            pass  # it will find out by itself
        finally:
            self._sockets.close()

    def _abandon(self) -> None:
        """Do nothing: ZeroMQ's sockets know that they are another process'."""


def _cannot_spin(_ns: int) -> bool:
    return False
