"""A remote reader's source: attaches to the writer over TCP, acknowledges, receives, detects the writer's end."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import platform
from collections.abc import Callable
from time import monotonic
from typing import Any

import msgspec

from aioshm.codec import Codec
from aioshm.config import SlowReader
from aioshm.errors import (
    AioshmError,
    HandleError,
    MessagesLost,
    NoPlaceVacant,
    OutOfDescriptors,
    PeerClosed,
    PeerDied,
    ReaderEvicted,
    SharedMemoryError,
)
from aioshm.logs import LogLimiter
from aioshm.process.limits import shortage
from aioshm.queue.handle import Handle, RemoteAddress
from aioshm.queue.remote import wire
from aioshm.queue.remote.messages import Assembly, Decoder
from aioshm.queue.remote.sockets import ReaderSockets
from aioshm.queue.remote.window import Missing, ReceiveWindow
from aioshm.queue.source import OpenedMessage, Source, findings
from aioshm.queue.state import EndState
from aioshm.queue.stats import QueueStats
from aioshm.ring.cores import EMPTY
from aioshm.ring.layout import VERSION
from aioshm.wait.limits import seconds
from aioshm.wait.policy import Policy
from aioshm.wait.poller import Poller

logger: logging.Logger = logging.getLogger("aioshm.queue")

ACKNOWLEDGE_S = 0.02
"""The longest delay of an acknowledgement that the writer does not wait for."""

GOODBYE_S = 1.0
"""How long a closing reader waits for the writer's reply."""

GOODBYE_POLL_S = 0.002

RETRY_S = 0.05
"""The pause before another greeting, after one that could not be sent or that the writer could not decide on."""

COMPLAINT_S = 10.0  # between two warnings of malformed messages
_MALFORMED = "%r: dropped a malformed message: %s"


class NetworkSource(Source):
    """The messages of a writer on another host; connects when the reader is first awaited.

    Raises:
        HandleError: The handle is damaged, or not encrypted although this reader's options demand encryption.
    """

    # Creates the error that follows the last message; None: the writer is there.
    gone: Callable[[], AioshmError] | None = None

    def __init__(
        self,
        state: EndState,
        handle: Handle,
        remote: RemoteAddress,
        rank: int,
        codec: Codec,
        slow: SlowReader,
        history: int = 0,
        *,
        patient: bool = False,
    ) -> None:
        remote.check(encrypted=state.options.secure)
        self._state = state
        self._handle = handle
        self._remote = remote
        # True: wait for a writer, however long none listens at the address.
        self._patient = patient
        self._hello = wire.Hello(
            VERSION, handle.queue_id, handle.token, rank, os.getpid(), platform.node(), False, slow, history=history
        )
        self.window: ReceiveWindow = ReceiveWindow(0, 0, skips=slow == "skip")  # the welcome has the bounds
        self._assembly = Assembly()
        self._decoder = Decoder(codec, state.raw_message, traced=handle.options.trace_context)
        self.sockets: ReaderSockets | None = None
        # The writer's introduction; None: not admitted yet.
        self.welcome: wire.Welcome | None = None
        self._admitted = 0.0  # the time of the welcome, by the monotonic clock
        self._proven = False  # a mark has arrived: the data connection works
        self._heard = 0.0  # the time of the writer's latest message, by the monotonic clock
        self._asked = 0.0  # the time of the latest greeting by `ask_writer`
        self._why_not_yet = ""  # the writer's reason for not deciding on the admission yet
        # True if the writer closed the queue, and messages that have not arrived are lost.
        self.left_behind: bool = False
        self._resent = 0  # messages dropped on arrival: duplicates, or behind a gap
        self._leaving = False
        self._released = False  # the writer does not wait for this reader
        self._handshakes = 0  # of the control connection, answered by a greeting
        self._timers: dict[Callable[[], object], asyncio.TimerHandle] = {}
        self._limiter = LogLimiter(COMPLAINT_S)
        self.receive: Callable[[], Any] = self._receive

    # Attaching

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.sockets is not None:
            return
        state = self._state
        self._heard = monotonic()
        try:
            self.sockets = ReaderSockets(self, self._remote, state.options)
        except OutOfDescriptors:
            raise
        except OSError as error:  # a malformed address
            raise HandleError(f"not a handle: {error}") from None
        parked = memoryview(bytearray(1))  # no peer reads this flag: sockets wake the reader
        state.poller = Poller(loop, parked, Policy(may_spin=False), state.core.spin)
        self._check_writer()

    def _introduce(self) -> None:
        """Send everything that the writer may not have received."""
        self._cancel(self._introduce)
        if self._leaving:
            self._send(wire.Leave())
            return
        self.window.ask_again()
        if self._send(self._hello) and self.welcome is not None:
            self._acknowledge()
            self._ask_for_missing()

    def _send(self, message: wire.Control) -> bool:
        """Send a control message; if too many wait already, introduce this reader again later."""
        assert self.sockets is not None
        if self.sockets.send(message):
            return True
        if not self.sockets.closed:
            self._later(RETRY_S, self._introduce)
        return False

    def _later(self, delay_s: float, callback: Callable[[], object]) -> None:
        """Call back later, unless the same callback is pending."""
        loop = self._state.loop
        if callback not in self._timers and loop is not None and not loop.is_closed():
            self._timers[callback] = loop.call_later(delay_s, callback)

    def _cancel(self, callback: Callable[[], object]) -> None:
        timer = self._timers.pop(callback, None)
        if timer is not None:
            timer.cancel()

    # Events of the sockets

    def check_connections(self) -> None:
        """Handle a change of the connections."""
        assert self.sockets is not None
        control = self.sockets.control_connection
        if control.handshakes > self._handshakes:
            self._handshakes = control.handshakes
            self._introduce()
        if control.refused or self.sockets.data_connection.refused:
            self.give_up(lambda: HandleError(f"{self._state!r}: the writer refuses the handle's key"))
        self._check_writer()

    def receive_data(self, head: memoryview, body: memoryview | None) -> None:
        """Handle a data message."""
        try:
            data = wire.parse_data(head, body)
            if data.kind == wire.MARK:
                self.window.marked(data.seq)
                if not self._proven and not self._leaving:  # a greeting after the goodbye would attach the reader again
                    self._proven = True
                    self._hello = msgspec.structs.replace(self._hello, proven=True)
                    self._send(self._hello)
            elif not self.window.expects(data.seq):
                self._resent += not data.offset
            elif (whole := self._assembly.add(data)) is not None:
                self.window.arrived(whole, whole.total)
        except wire.WireError as error:
            self._limiter.warn(logger, _MALFORMED, self._state, error)
            return
        except SharedMemoryError as error:
            self.give_up(functools.partial(SharedMemoryError, error.errno, f"{self._state!r}: {error.strerror}"))
            return
        self._ask_for_missing()
        if self.window.ready:
            self._state.wake()
        if self.window.skips:
            self._acknowledge_soon()
        if self.window.end is not None:
            self._finish_if_complete()

    def receive_control(self, data: bytes) -> None:
        """Handle a control message."""
        try:
            message = wire.parse_from_writer(data)
        except wire.WireError as error:
            self._limiter.warn(logger, _MALFORMED, self._state, error)
            return
        self._heard = monotonic()
        if isinstance(message, wire.Tick):
            self._acknowledge()
        elif isinstance(message, wire.Welcome):
            self._on_welcome(message)
        elif isinstance(message, wire.Wait):
            self._why_not_yet = message.reason
            self._later(RETRY_S, self._introduce)
        elif isinstance(message, wire.Go):
            self._state.ready = True
            self._state.reopen()
            self._state.interrupt()
        elif isinstance(message, wire.Closing):
            self.window.end = message.end
            if not self._finish_if_complete():
                self._acknowledge()  # missing messages may take long; this shows that the reader lives
        elif isinstance(message, wire.Refused):
            self._on_refused(message)
        else:
            self._released = True

    def _on_welcome(self, welcome: wire.Welcome) -> None:
        """Subscribe, unless this is the reply to a later greeting."""
        if self.welcome is not None or self._leaving:
            return
        assert self.sockets is not None
        self.welcome = welcome
        self._admitted = monotonic()
        self._hello = msgspec.structs.replace(self._hello, rank=welcome.rank, topic=welcome.topic)
        self.window.max_messages = welcome.window
        self.window.max_bytes = welcome.window_bytes
        self.window.begin(welcome.first)
        self._state.rates.begin(monotonic(), welcome.first)
        self.sockets.subscribe([wire.address(welcome.topic), wire.address(welcome.topic, welcome.rank)])
        self._check_writer()

    def _on_refused(self, message: wire.Refused) -> None:
        state = self._state
        reason = message.reason
        if message.closed and self._patient and self.welcome is None:
            self._why_not_yet = reason  # the next writer listens at the same address
            return
        self._released = True
        if self.sockets is not None and self.welcome is not None:
            self.sockets.end_data()
        if message.closed:
            self.give_up(self._closed_by_writer)
        elif message.full:
            self.give_up(lambda: NoPlaceVacant(f"{state!r}: {reason}"))
        elif reason in (wire.DISMISSED, wire.TOO_SLOW):
            self.give_up(lambda: ReaderEvicted(f"{state!r}: {reason}"))
        elif message.evicted or self.welcome is not None:
            self.give_up(self._death(f"it has given this reader up: {reason}"))
        else:
            self.give_up(lambda: HandleError(f"{state!r}: the writer refuses it: {reason}"))

    def _finish_if_complete(self) -> bool:
        if not self.window.complete:
            return False
        self._send(wire.Finished())
        self.gone = self._closed_by_writer
        self._state.interrupt()
        return True

    def _closed_by_writer(self) -> AioshmError:
        return PeerClosed(f"{self._state!r}: the writer has closed the queue")

    # Requests and acknowledgements

    def _ask_for_missing(self) -> None:
        first = self.window.to_ask_for()
        if first is not None:
            self._send(wire.Resend(first))

    def _acknowledge(self) -> None:
        self._cancel(self._acknowledge)
        if self.welcome is not None and self._send(wire.Acknowledge(self.window.released)):
            self.window.acknowledged()

    def remove_first(self) -> None:
        """Remove the first message, which was consumed."""
        self._state.count_turn()
        self.window.finished()
        self._acknowledge_soon()

    def _acknowledge_soon(self) -> None:
        if self.gone is not None:
            return
        if self.window.must_acknowledge():
            self._acknowledge()
        else:
            self._later(ACKNOWLEDGE_S, self._acknowledge)

    # Receiving

    def _receive(self) -> Any:
        """Return the next message, or `EMPTY` if there is none, or the slow path has to decide."""
        return self.take() if self._state.core.passes() else EMPTY

    def poll(self) -> bool:
        window = self.window
        if not window.ready and self.sockets is not None:
            self.sockets.look()
            if self.left_behind and not window.ready and window.end is not None:
                window.lose(window.end)
        return bool(window.ready)

    def has_message(self) -> bool:
        return bool(self.window.ready)

    def take(self) -> Any:
        return self._first() if self.poll() else EMPTY

    def _first(self) -> Any:
        """Return and remove the first message; remove it also if decoding fails."""
        try:
            return self._decoder.decode(self._next())
        finally:
            self.remove_first()

    def _next(self) -> wire.Data:
        """Return the first message, or raise `MessagesLost`; note its trace context."""
        message = self.window.ready[0][0]
        if isinstance(message, Missing):
            if not self.window.skips:
                raise MessagesLost(message.first, message.last)
            why = "this reader was too slow, and the writer does not wait for it"
            raise MessagesLost(message.first, message.last, why)
        self._state.core.garbled += self._decoder.note_trace(message)
        return message

    def take_many(self, most: int, /) -> list[Any]:
        batch = [self._first()]
        while len(batch) < most and self._state.core.budget > 0 and self.poll():
            try:
                batch.append(self._decoder.decode(self._next()))
            except Exception:  # the next call raises it
                break
            self.remove_first()
        return batch

    def open_block(self, *, decoded: bool) -> OpenedMessage | None:
        try:
            message = self._next()
            raw = message.body.toreadonly()
            value = raw
            if decoded:
                value = self._decoder.view(message)
        except BaseException:
            self.remove_first()
            raise
        self.window.held = True

        def close(undo: bool) -> None:
            self.window.held = False
            if not decoded:
                raw.release()
            if not undo:
                self.remove_first()

        return OpenedMessage(value, close)

    def traces(self, most: int, /) -> list[bytes]:
        return self._decoder.traces(most)

    # The writer

    def _check_writer(self) -> None:
        """Give the writer up after too long without a data connection, or without control connection and message."""
        self._cancel(self._look_and_check)
        state = self._state
        sockets = self.sockets
        if sockets is None or self.gone is not None or state.refusal is not None:
            return
        if self._patient and self.welcome is None:
            return
        timeout = state.options.remote_timeout
        control = sockets.control_connection.down_since
        data = sockets.data_connection.down_since
        due: list[tuple[float, str]] = []
        if control is not None:
            # A live writer's connection may be down for a moment, and a writer that does not run its loop is silent.
            due.append((max(self._heard + timeout, control + timeout / 2), "it is not to be reached"))
        if data is not None:
            due.append((max(self._admitted, data) + timeout, "its data port is not to be reached"))
        if not due:
            return
        at, why = min(due)
        now = monotonic()
        if now < at:
            self._later(at - now, self._look_and_check)
            return
        if self.welcome is not None and (self._proven or control is not None):
            self.give_up(self._death(f"{why}, for {timeout:g} s"))
            return
        lacking = shortage(f"{state!r}")  # ZeroMQ retries for ever, without an error
        endpoint = self._remote.data if control is None else self._remote.control
        text = f"nobody answers at {endpoint}: is the writer gone, or the port closed?"
        self.give_up(lambda: lacking or HandleError(text))

    def _look_and_check(self) -> None:
        assert self.sockets is not None
        self.sockets.look_at_all()  # messages that arrived while the loop was busy count
        self._check_writer()

    def give_up(self, error: Callable[[], AioshmError]) -> None:
        """Stop waiting for the writer; after the received messages, calls raise the error.

        A writer that announced the end of the queue counts as closed, even if its last messages are lost.
        """
        if self.gone is not None:
            return
        self._assembly.clear()
        self.left_behind = self.window.end is not None
        self.gone = self._closed_by_writer if self.left_behind else error
        self.announce_close()  # a writer that is still there does not wait for this reader
        self._state.interrupt()

    def ask_writer(self) -> bool:
        """Greet the writer once more: its event loop replies to each greeting. Any thread may call this."""
        if self.welcome is None or self.sockets is None or self.sockets.control_connection.down_since is not None:
            return False
        if self._heard >= self._asked:
            self._asked = monotonic()
            assert self._state.loop is not None
            self._state.loop.call_soon_threadsafe(lambda: self._send(self._hello))
        return True

    def _death(self, detail: str) -> Callable[[], AioshmError]:
        """Return a factory of the error for a dead writer."""
        pid = 0
        where = self._remote.control
        if self.welcome is not None:
            pid = self.welcome.pid
            where = f"{self.welcome.host}, {where}"
        return functools.partial(PeerDied, -1, pid, "writer", f"queue {self._state.name} on {where}: {detail}")

    @property
    def writer_pid(self) -> int:
        welcome = self.welcome
        return 0 if welcome is None else welcome.pid

    @property
    def progress(self) -> int:
        return self.window.taken

    def _obstacle(self) -> str:
        """Describe the obstacle to becoming ready."""
        endpoint = self._remote.control
        if self.sockets is None or self.sockets.control_connection.down_since is not None:
            return f"no connection to {endpoint}: does the writer run there, and is the port open?"
        if self.welcome is None and self._why_not_yet:
            return f"the writer at {endpoint} does not admit it yet: {self._why_not_yet}"
        if self.welcome is None:
            return f"the writer at {endpoint} does not answer: does its event loop run, in wait_until_ready()?"
        if not self._proven:
            return f"nothing comes from {self._remote.data}: is the port open?"
        return "other readers are missing"

    def too_late(self) -> Exception:
        return shortage(f"{self._state!r}") or TimeoutError(f"{self._state!r}: {self._obstacle()}")

    def report_waiting(self, waited_s: float) -> None:
        state = self._state
        waited = seconds(waited_s)
        level, about = self._findings()
        if state.ready:
            text = "%r, rank %d: waited %s for message %d: %s"
            logger.log(level, text, state, self._hello.rank, waited, self.progress, about)
            return
        if self.welcome is not None:
            about = f"{self._obstacle()}; {about}"
        logger.warning("%r: waited %s: %s", state, waited, about)

    def _findings(self) -> tuple[int, str]:
        """Return log level and text about the writer."""
        if self.welcome is None or self.sockets is None:
            return logging.WARNING, self._obstacle()
        now = monotonic()
        heard = f", last heard of {seconds(now - self._heard)} ago"
        for connection, endpoint in (
            (self.sockets.control_connection, self._remote.control),
            (self.sockets.data_connection, self._remote.data),
        ):
            if connection.down_since is not None:
                return logging.WARNING, f"no connection to the writer at {endpoint}{heard}"
        writer = f"the writer (pid {self.welcome.pid} on {self.welcome.host}{heard})"
        silent_s = now - self._asked if self._heard < self._asked else None
        return findings(writer, "", silent_s, self._handle.answers)

    def stats(self) -> QueueStats:
        window = self.window
        return self._state.new_stats(
            "reader",
            self._hello.rank,
            messages=window.taken,
            backlog=window.next - window.taken,
            bytes=window.nbytes,
            resent=self._resent,
            reconnects=0 if self.sockets is None else self.sockets.reconnects,
        )

    # Closing

    def announce_close(self) -> None:
        """Notify a writer that may have received this reader's greeting."""
        if self.sockets is None or self._released or not self._handshakes:
            return
        connected = self.sockets.control_connection.down_since is None
        if connected or self.gone is None or self.window.complete:
            self._leaving = True
            self._send(wire.Leave())

    def close(self) -> None:
        """Release everything that the goodbye does not need."""
        for timer in self._timers.values():
            timer.cancel()
        self._assembly.clear()
        if self.sockets is not None and not self._leaving:
            self.sockets.close()

    def finished(self) -> bool:
        """Return whether `finish` has nothing to do."""
        return not self._leaving or self.sockets is None or self.sockets.closed

    async def finish(self) -> None:
        """Wait a short time for the writer's reply to the goodbye, then close the sockets."""
        if self.sockets is None or self.finished():
            return
        deadline = monotonic() + GOODBYE_S
        try:
            while not self._released and monotonic() < deadline:
                self.sockets.look_at_all()  # the owning loop may be closed already
                await asyncio.sleep(GOODBYE_POLL_S)
        finally:
            self.sockets.close()
