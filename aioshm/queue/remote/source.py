"""A remote reader's source: takes, decodes and counts messages."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from aioshm.codec import Codec, cannot_decode, loads_of, view_of
from aioshm.codec.base import own_copy
from aioshm.codec.frames import INLINE, RAW, split_body
from aioshm.config import SlowReader
from aioshm.errors import AioshmError, CodecError, MessagesLost
from aioshm.process.limits import shortage
from aioshm.queue.handle import Handle, RemoteAddress
from aioshm.queue.remote import wire
from aioshm.queue.remote.link import WriterLink
from aioshm.queue.remote.window import Missing
from aioshm.queue.source import OpenedMessage, Source, findings
from aioshm.queue.state import EndState
from aioshm.queue.stats import QueueStats
from aioshm.queue.tracing import NO_TRACE, is_trace
from aioshm.ring.cores import EMPTY
from aioshm.ring.layout import TRAIL
from aioshm.wait.limits import seconds

logger: logging.Logger = logging.getLogger("aioshm.queue")

COPY_BYTES = 16 * 1024
"""Longer messages are decoded in place."""


class NetworkSource(Source):
    """The messages of a writer on another host.

    Raises:
        HandleError: The handle is damaged, or not encrypted although this reader's options demand encryption.
    """

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
        self.link: WriterLink = WriterLink(state, handle, remote, rank, slow, history, patient=patient)
        self._window = self.link.window
        self._state = state
        self._handle = handle
        self._remote = remote
        self._codec = codec
        self._loads = loads_of(codec)
        self._view = view_of(codec)
        self._trail: deque[bytes] | None = None
        if handle.options.trace_context:
            self._trail = deque(maxlen=TRAIL)
        self._noted = -1  # number of the message whose trace context was recorded last
        self._bytes = 0
        self.receive: Callable[[], Any] = self._receive

    @property
    def gone(self) -> Callable[[], AioshmError] | None:
        return self.link.gone

    # Attaching

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.link.start(loop)

    def too_late(self) -> Exception:
        return shortage(f"{self._state!r}") or TimeoutError(f"{self._state!r}: {self._obstacle()}")

    # Receiving

    def _receive(self) -> Any:
        """Return the next message, or `EMPTY` if there is none, or the slow path has to decide."""
        if not self._state.core.passes() or not self.poll():
            return EMPTY
        return self._first()

    def _receive_at_hand(self) -> Any:
        """As `_receive`, without polling the sockets."""
        if self._window.ready and self._state.core.passes():
            return self._first()
        return EMPTY

    def quick(self) -> Callable[[], Any]:
        return self._receive_at_hand

    def poll(self) -> bool:
        window = self._window
        link = self.link
        if not window.ready and link.sockets is not None:
            link.sockets.look()
            if link.left_behind and not window.ready and window.end is not None:
                window.lose(window.end)
        return bool(window.ready)

    def has_message(self) -> bool:
        return bool(self._window.ready)

    def take(self) -> Any:
        return self._first() if self.poll() else EMPTY

    def _first(self) -> Any:
        """Return and remove the first message; remove it also if decoding fails."""
        message = self._window.ready[0][0]
        try:
            if isinstance(message, Missing):
                raise self._lost(message)
            self._note_trace(message)
            return self._decoded(message)
        finally:
            self._done()

    def take_many(self, most: int, /) -> list[Any]:
        batch = [self._first()]
        ready = self._window.ready
        while len(batch) < most and self._state.core.budget > 0 and self.poll():
            message = ready[0][0]
            if isinstance(message, Missing):
                break
            try:
                batch.append(self._decoded(message))
            except CodecError:
                break
            self._note_trace(message)
            self._done()
        return batch

    def open_block(self, *, decoded: bool) -> OpenedMessage | None:
        message = self._window.ready[0][0]
        try:
            if isinstance(message, Missing):
                raise self._lost(message)
            self._note_trace(message)
            raw = message.body.toreadonly()
            value = raw
            if decoded:
                value = self._decoded_view(message)
        except BaseException:
            self._done()
            raise
        self._window.held = True

        def close(undo: bool) -> None:
            self._window.held = False
            if not decoded:
                raw.release()
            if not undo:
                self._done()

        return OpenedMessage(value, close)

    def _lost(self, missing: Missing) -> MessagesLost:
        if self._window.skips:
            why = "this reader was too slow, and the writer does not wait for it"
            return MessagesLost(missing.first, missing.last, why)
        return MessagesLost(missing.first, missing.last)

    def _done(self) -> None:
        """Remove the first message."""
        message = self._window.ready[0][0]
        if not isinstance(message, Missing):
            self._bytes += len(message.body)
        self._state.count_turn()
        self.link.finished_one()

    def _note_trace(self, data: wire.Data) -> None:
        """Record the trace context of a taken message."""
        if self._trail is None or self._noted == data.seq:
            return
        self._noted = data.seq
        trace = data.trace or NO_TRACE
        if trace != NO_TRACE and not is_trace(trace):
            self._state.core.garbled += 1
            trace = NO_TRACE
        self._trail.append(trace)

    def traces(self, most: int, /) -> list[bytes]:
        if self._trail is None or not most:
            return []
        return list(self._trail)[-most:]

    def _decoded(self, data: wire.Data) -> Any:
        if data.kind == RAW:
            return bytearray(data.body)
        self._check_codec(data)
        if data.n_buffers or data.main_bytes > COPY_BYTES:
            main, buffers = split_body(data.body, data.n_buffers, data.main_bytes)
            return self._codec.decode(main, buffers)
        try:
            return self._loads(bytes(data.body))
        except Exception as error:
            raise cannot_decode(error, self._codec.name) from error

    def _decoded_view(self, data: wire.Data) -> Any:
        """Decode a message in place, read-only."""
        body = data.body
        if data.n_buffers:
            body = memoryview(own_copy(body))  # ZeroMQ's memory may be unaligned
        body = body.toreadonly()
        if data.kind == RAW:
            return body
        self._check_codec(data)
        main, buffers = split_body(body, data.n_buffers, data.main_bytes)
        return self._view(main, buffers)

    def _check_codec(self, data: wire.Data) -> None:
        if data.kind != INLINE or data.codec != self._codec.code:
            raise CodecError(
                f"message {data.seq} has codec {data.codec}, the queue has {self._codec.code} ({self._codec.name!r})"
            )

    # The writer

    @property
    def writer_pid(self) -> int:
        welcome = self.link.welcome
        return 0 if welcome is None else welcome.pid

    @property
    def progress(self) -> int:
        return self._window.taken

    def ask_writer(self) -> bool:
        return self.link.ask_writer()

    def _obstacle(self) -> str:
        """Describe the obstacle to becoming ready."""
        link = self.link
        endpoint = self._remote.control
        if link.sockets is None or not link.sockets.control_connection.up:
            return f"no connection to {endpoint}: does the writer run there, and is the port open?"
        if link.welcome is None and link.why_not_yet:
            return f"the writer at {endpoint} does not admit it yet: {link.why_not_yet}"
        if link.welcome is None:
            return f"the writer at {endpoint} does not answer: does its event loop run, in wait_until_ready()?"
        if not link.proven:
            return f"nothing comes from {self._remote.data}: is the port open?"
        return "other readers are missing"

    def report_waiting(self, waited_s: float) -> None:
        state = self._state
        waited = seconds(waited_s)
        level, about = self._findings()
        if state.ready:
            text = "%r, rank %d: waited %s for message %d: %s"
            logger.log(level, text, state, self.link.rank, waited, self.progress, about)
        elif self.link.welcome is None:
            logger.warning("%r: waited %s: %s", state, waited, self._obstacle())
        else:
            logger.warning("%r: waited %s: %s; %s", state, waited, self._obstacle(), about)

    def _findings(self) -> tuple[int, str]:
        """Return log level and text about the writer."""
        link = self.link
        if link.welcome is None or link.sockets is None:
            return logging.WARNING, self._obstacle()
        now = monotonic()
        heard = f", last heard of {seconds(now - link.heard)} ago"
        if not (link.sockets.control_connection.up and link.sockets.data_connection.up):
            return logging.WARNING, f"no connection to the writer at {self._remote.control}{heard}"
        writer = f"the writer (pid {link.welcome.pid} on {link.welcome.host}{heard})"
        silent_s = now - link.asked if link.heard < link.asked else None
        return findings(writer, "", silent_s, self._handle.answers)

    def stats(self) -> QueueStats:
        window = self._window
        return self._state.new_stats(
            "reader",
            self.link.rank,
            messages=window.taken,
            backlog=window.next - window.taken,
            bytes=self._bytes,
            resent=self.link.twice,
            reconnects=self.link.reconnects,
        )

    # Closing

    def announce_close(self) -> None:
        self.link.announce_close()

    def close(self) -> None:
        self.link.close()

    def finished(self) -> bool:
        return self.link.finished()

    async def finish(self) -> None:
        await self.link.finish()
