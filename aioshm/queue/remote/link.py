"""A remote reader's connection to its writer: attaching, asking, acknowledging, noticing what becomes of it."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from collections.abc import Callable
from time import monotonic

from aioshm.config import SlowReader
from aioshm.errors import (
    AioshmError,
    HandleError,
    NoPlaceVacant,
    OutOfDescriptors,
    PeerClosed,
    ReaderEvicted,
    SharedMemoryError,
)
from aioshm.logs import LogLimiter
from aioshm.process.limits import shortage
from aioshm.queue.handle import Handle, RemoteAddress
from aioshm.queue.remote import wire
from aioshm.queue.remote.known_writer import KnownWriter
from aioshm.queue.remote.reader_sockets import Assembly, ReaderSockets
from aioshm.queue.remote.window import ReceiveWindow
from aioshm.queue.state import EndState
from aioshm.ring.layout import VERSION
from aioshm.wait.limits import settle
from aioshm.wait.policy import Policy
from aioshm.wait.poller import Poller

logger: logging.Logger = logging.getLogger("aioshm.queue")

ACKNOWLEDGE_S = 0.02
"""How long after the latest message the writer learns that it was finished with, if it does not wait for that."""

GOODBYE_S = 1.0
"""How long a closing reader waits for the writer to have heard its goodbye."""

CLOSED_LOOP_POLL_S = 0.005
"""How often a reader looks at its sockets when it closes after its event loop."""

RETRY_S = 0.05  # while too many control messages wait to be sent
COMPLAINT_S = 10.0  # between two warnings of bad messages


class WriterLink:
    """Connects when it is first awaited, and puts what arrives in its window.

    Raises:
        HandleError: The handle is damaged, or not encrypted where these options demand it.
    """

    def __init__(
        self,
        state: EndState,
        handle: Handle,
        remote: RemoteAddress,
        rank: int,
        slow: SlowReader,
        history: int = 0,
        *,
        patient: bool = False,
    ) -> None:
        _check(remote, encrypted=state.options.secure)
        self._state = state
        self._handle = handle
        self._remote = remote
        self.rank: int = rank
        self._slow = slow
        self._history = history
        self._patient = patient
        self._topic = remote.topic
        options = handle.options  # the writer's, not this end's own
        self.window: ReceiveWindow[wire.Data] = ReceiveWindow(
            options.remote_window, options.remote_window_bytes, skips=slow == "skip"
        )
        self._assembly = Assembly(max(options.max_message_bytes, handle.max_chunk_bytes))
        self.sockets: ReaderSockets | None = None
        # Once the writer is gone: makes the error that comes when everything has been read.
        self.gone: Callable[[], AioshmError] | None = None
        # Whether the writer has closed the queue, and what is not here will not come.
        self.left_behind: bool = False
        self.twice: int = 0  # how many messages came again
        self.writer: KnownWriter = KnownWriter(state, handle, remote, rank)
        self._goodbye: asyncio.Future[None] | None = None
        self._released = False  # whether the writer waits for this end no more
        self._acknowledging: asyncio.TimerHandle | None = None
        self._checking: asyncio.TimerHandle | None = None
        self._introducing: asyncio.TimerHandle | None = None
        self._connections = 0
        self._limiter = LogLimiter(COMPLAINT_S)

    # Attaching

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Connect, unless that was done.

        Raises:
            HandleError: The endpoints are malformed.
            OutOfDescriptors, OutOfThreads: The sockets cannot be had.
        """
        if self.sockets is not None:
            return
        remote, state = self._remote, self._state
        self.writer.heard = monotonic()
        try:
            self.sockets = self.writer.sockets = ReaderSockets(
                loop,
                remote.data,
                remote.control,
                remote.keys,
                state.options,
                self._on_data,
                self._on_message,
                self._on_connections,
            )
        except OutOfDescriptors:
            raise
        except OSError as error:
            raise HandleError(f"not a handle: {error}") from None
        flag = memoryview(bytearray(1))  # its parked flag, at which nobody else looks
        state.poller = Poller(loop, flag, Policy(may_spin=False), state.core.spin)
        self._check_connections()

    def _introduce(self) -> None:
        """Say who this is, and whatever the writer may not have heard: the connection is new."""
        if self._introducing is not None:
            self._introducing.cancel()
            self._introducing = None
        self.window.ask_again()
        admitted, leaving = self.writer.welcome is not None, self._goodbye is not None
        if self._tell(self._hello(leaving=leaving and not admitted)):
            if admitted:
                self._acknowledge()
                self._ask_for_missing()
            if leaving:
                self._tell(wire.Leave())

    def _hello(self, *, leaving: bool = False) -> wire.Hello:
        handle = self._handle
        return wire.Hello(
            VERSION,
            handle.queue_id,
            handle.token,
            self.rank,
            os.getpid(),
            platform.node(),
            self.writer.proven,
            self._slow,
            self._topic,
            self._history,
            admitted=self.writer.welcome is not None,
            leaving=leaving,
        )

    def _tell(self, message: wire.Control) -> bool:
        """Send a control message; where that cannot be done now, everything is said again a little later."""
        assert self.sockets is not None
        if self.sockets.send(message):
            return True
        if self.sockets.closed:
            return False
        loop = self._state.loop
        if self._introducing is None and loop is not None and not loop.is_closed():
            self._introducing = loop.call_later(RETRY_S, self._introduce)
        return False

    # What the sockets tell

    def _on_connections(self) -> None:
        assert self.sockets is not None
        data, control = self.sockets.data_connection, self.sockets.control_connection
        if control.connections > self._connections:
            self._connections = control.connections
            self._introduce()
        if control.refused or data.refused:
            self.give_up(lambda: HandleError(f"{self._state!r}: the writer does not let the handle's key in"))
        self._check_connections()

    def _on_data(self, head: memoryview, body: memoryview | None) -> None:
        try:
            data = self._whole(wire.parse_data(head, body))
            if data is None:
                return
            if data.kind == wire.MARK:
                self.window.marked(data.seq)
                if not self.writer.proven:
                    self.writer.proven = True
                    self._tell(wire.Proven())
            elif not self.window.arrived(data.seq, data, len(data.body)):
                self.twice += 1
                return
        except wire.WireError as error:
            self._complain(error)
            return
        self._ask_for_missing()
        if self.window.ready:
            self._state.wake()
        if self.window.skips:
            self._acknowledge_soon()
        if self.window.end is not None:
            self._finish_if_complete()

    def _whole(self, data: wire.Data) -> wire.Data | None:
        """Return a message once all its parts have arrived; None if parts are missing, or it is a duplicate."""
        if len(data.body) == data.total:
            self._assembly.clear()
            return data
        if self.window.has(data.seq):
            self.twice += not data.offset
            return None
        try:
            return self._assembly.add(data)
        except OSError as error:
            number, text = error.errno or 0, f"{self._state!r}: message {data.seq} of {data.total} bytes does not fit"
            why = "raise the limits of this process (ulimit -v) or of its container (memory)"
            self.give_up(lambda: SharedMemoryError(number, f"{text} into memory: {why}"))
            return None

    def _on_message(self, data: bytes) -> None:
        try:
            message = wire.parse_from_writer(data)
        except wire.WireError as error:
            self._complain(error)
            return
        self.writer.heard = monotonic()
        if isinstance(message, wire.Tick):
            self._acknowledge()
        elif isinstance(message, wire.Welcome):
            self._welcomed(message)
        elif isinstance(message, wire.Wait):
            self.writer.why_not_yet = message.reason
        elif isinstance(message, wire.Renewed):
            self._renew(message.topic)
        elif isinstance(message, wire.Go):
            self._state.ready = True
            self._state.reopen()
            self._state.interrupt()
        elif isinstance(message, wire.Lost):
            self.window.lost(message.first, message.last)
            self._state.wake()
            self._finish_if_complete()
        elif isinstance(message, wire.Closing):
            self.window.ends(message.end)
            if not self._finish_if_complete():
                self._acknowledge()  # what is missing may take its time; this end is there
        else:
            if isinstance(message, wire.Refused):
                self._on_refused(message)
                if self.gone is None:
                    return
            self._released = True
            if self._goodbye is not None and not self._goodbye.done():
                self._goodbye.set_result(None)

    def _welcomed(self, welcome: wire.Welcome) -> None:
        """Begin with the first message that is this reader's, unless that was done."""
        if self.writer.welcome is not None:
            if self.writer.proven:  # which the writer may have been told while it did not know this reader
                self._tell(wire.Proven())
            return
        assert self.sockets is not None
        self.writer.welcome = welcome
        self.rank = welcome.rank
        self.window.begin(welcome.first)
        self._state.rates.begin(monotonic(), welcome.first)
        self.sockets.subscribe([wire.address(self._topic), wire.address(self._topic, self.rank)])

    def _renew(self, topic: bytes) -> None:
        """Read what another writer sends that has taken the place of the handle's, unless this end has read any."""
        if topic == self._topic:  # it has answered two greetings
            return
        if self.writer.welcome is not None:
            self.give_up(self.writer.death("another writer has taken its place"))
            return
        self._topic = topic
        self._introduce()

    def _on_refused(self, message: wire.Refused) -> None:
        if message.closed and self._patient and self.writer.welcome is None:
            self.writer.why_not_yet = message.reason  # there will be another one, to which this then has a connection
        elif message.closed:
            self.give_up(self._closed_by_writer)
        elif message.full:
            self.give_up(lambda: NoPlaceVacant(f"{self._state!r}: {message.reason}"))
        elif message.reason == wire.DISMISSED:
            self.give_up(lambda: ReaderEvicted(f"{self._state!r}: {message.reason}"))
        elif message.reason == wire.TOO_SLOW:
            what = "the queue goes on without this reader; a larger remote_window allows longer pauses"
            self.give_up(lambda: ReaderEvicted(f"{self._state!r}: too slow: {what}"))
        elif message.evicted:
            self.give_up(self.writer.death(f"it has given this reader up: {message.reason}"))
        elif self.writer.welcome is None:
            self.give_up(lambda: HandleError(f"{self._state!r}: the writer refuses it: {message.reason}"))
        else:
            self.give_up(self.writer.death(f"it does not know this reader any more: {message.reason}"))

    def _finish_if_complete(self) -> bool:
        if not self.window.complete:
            return False
        self._tell(wire.Finished())
        self.gone = self._closed_by_writer
        self._state.interrupt()
        return True

    def _closed_by_writer(self) -> AioshmError:
        return PeerClosed(f"{self._state!r}: the writer has closed the queue")

    def _complain(self, error: wire.WireError) -> None:
        held_back = self._limiter.admit()
        if held_back is not None:
            logger.warning("%r: dropped what no writer sends: %s (and %d more)", self._state, error, held_back)

    # What this end has to tell

    def _ask_for_missing(self) -> None:
        """Ask for the messages that will not come by themselves."""
        runs = self.window.to_ask_for()
        if runs:
            self._tell(wire.Resend(runs))

    def _acknowledge(self) -> None:
        """Tell the writer which messages this end has finished with."""
        if self.writer.welcome is None:
            return
        if self._acknowledging is not None:
            self._acknowledging.cancel()
            self._acknowledging = None
        if self._tell(wire.Acknowledge(self.window.released)):
            self.window.acknowledged()

    def finished_one(self) -> None:
        """Let go of the first message in line."""
        self.window.finished()
        self._acknowledge_soon()

    def _acknowledge_soon(self) -> None:
        if self.gone is not None:
            return
        if self.window.must_acknowledge():
            self._acknowledge()
        elif self._acknowledging is None:
            assert self._state.loop is not None
            self._acknowledging = self._state.loop.call_later(ACKNOWLEDGE_S, self._acknowledge)

    # Whether the writer is still there

    def _check_connections(self) -> None:
        """Give the writer up if a connection has been down, and it has been silent, for too long."""
        if self._checking is not None:
            self._checking.cancel()
            self._checking = None
        state = self._state
        if self.sockets is None or self.gone is not None or state.refusal is not None:
            return
        assert state.loop is not None
        timeout, now = state.options.remote_timeout, monotonic()
        due: list[tuple[float, str]] = []
        control, data = self.sockets.control_connection.down_since, self.sockets.data_connection.down_since
        if control is not None:
            # A program that does not run its loop says nothing; a connection that is down is not yet its end.
            due.append((max(self.writer.heard + timeout, control + timeout / 2), "it is not to be reached"))
        if data is not None:
            due.append((data + timeout, "its data port is not to be reached"))
        if not due or (self._patient and self.writer.welcome is None):
            return
        at, why = min(due)
        if now < at:
            self._checking = state.loop.call_later(at - now, self._look_and_check)
            return
        if self.writer.welcome is None:
            lacking = shortage(f"{state!r}")  # ZeroMQ tries again for ever, and does not say why
            where = self._remote.control if control is not None else self._remote.data
            self.give_up(
                lambda: lacking or HandleError(f"nobody answers at {where}: is the writer gone, or the port closed?")
            )
        else:
            self.give_up(self.writer.death(f"{why}, for {timeout:g} s"))

    def _look_and_check(self) -> None:
        assert self.sockets is not None
        self._checking = None
        self.sockets.look_at_all()  # what came while the loop was busy counts
        self._check_connections()

    def give_up(self, error: Callable[[], AioshmError]) -> None:
        """Take the writer for gone: what has arrived can be read, then there is the error.

        One that has closed the queue did not die, whatever became of it since: what it sent last is lost, if anything.
        """
        if self.gone is not None:
            return
        self._assembly.clear()
        self.left_behind = self.window.end is not None
        self.gone = self._closed_by_writer if self.left_behind else error
        self._state.interrupt()

    def ask_writer(self) -> bool:
        """Greet the writer once more: its event loop answers each greeting."""
        if not self.writer.reachable:
            return False
        if self.writer.owes_nothing:
            self.writer.asked = monotonic()
            assert self._state.loop is not None
            self._state.loop.call_soon_threadsafe(lambda: self._tell(self._hello()))  # a blocking merge asks, too
        return True

    # Closing

    def announce_close(self) -> None:
        """Tell the writer that this reader leaves, unless it knows or is gone."""
        there = self.gone is None or self.window.complete
        if self._patient and not self._connections:  # nobody was there: nobody counts on this reader
            there = False
        if self.sockets is not None and there and not self._released:
            assert self._state.loop is not None
            self._goodbye = self._state.loop.create_future()
            if self.writer.welcome is None:
                self._introduce()  # so that it knows who leaves, and waits for nobody
            else:
                self._tell(wire.Leave())

    def close(self) -> None:
        """Give everything back, but what the goodbye still needs."""
        for timer in (self._acknowledging, self._checking, self._introducing):
            if timer is not None:
                timer.cancel()
        self._assembly.clear()
        if self.sockets is not None and self._goodbye is None:
            self.sockets.close()

    def finished(self) -> bool:
        """Return whether `finish` has nothing to do."""
        return self._goodbye is None or self.sockets is None or self.sockets.closed

    async def finish(self) -> None:
        """Wait until the writer has heard the goodbye, if that does not take long; then close the sockets."""
        if self._goodbye is None or self.sockets is None or self.sockets.closed:
            return
        deadline = monotonic() + GOODBYE_S
        try:
            while self._goodbye.get_loop().is_closed() and not self._goodbye.done() and monotonic() < deadline:
                self.sockets.look_at_all()  # which nobody else does any more
                await asyncio.sleep(CLOSED_LOOP_POLL_S)
            await settle(self._goodbye, deadline=deadline)
        except TimeoutError:
            pass  # it will find out by itself
        finally:
            self.sockets.close()


def _check(remote: RemoteAddress, *, encrypted: bool) -> None:
    keys = (remote.server_key, remote.client_public, remote.client_secret)
    if len(remote.topic) != wire.SECRET_BYTES or any(key is not None and len(key) != 40 for key in keys):
        raise HandleError("not a handle: its topic or its keys are damaged")
    for endpoint in (remote.data, remote.control):
        if not endpoint.startswith("tcp://"):
            raise HandleError(f"not a handle: {endpoint!r} is no TCP endpoint")
    if encrypted and remote.keys is None:
        raise HandleError("the queue is not encrypted; this reader's options say secure=True")
