"""Receiving from the network: what a remote reader does with the messages that its link has put in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from aioshm.codec import Codec, cannot_decode, loads_of, view_of
from aioshm.codec.buffers import own_copy
from aioshm.codec.frames import INLINE, RAW, split_body
from aioshm.config import SlowReader
from aioshm.errors import AioshmError, CodecError, MessagesLost
from aioshm.process.limits import shortage
from aioshm.queue.handle import Handle, RemoteAddress
from aioshm.queue.remote import wire
from aioshm.queue.remote.link import WriterLink
from aioshm.queue.remote.window import Missing
from aioshm.queue.source import Source, SourceBlock
from aioshm.queue.state import EndState
from aioshm.queue.stats import QueueStats
from aioshm.queue.tracing import NO_TRACE, is_trace
from aioshm.ring.cores import EMPTY
from aioshm.ring.layout import TRAIL

COPY_BYTES = 16 * 1024
"""Longer messages are decoded where they lie."""


class NetworkSource(Source):
    """The connection to a writer on another host; see `Source`.

    Raises:
        HandleError: The handle is damaged, or not encrypted where these options demand it.
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
        self._codec = codec
        self._loads = loads_of(codec)
        self._view = view_of(codec)
        self._core = state.core
        self._trail: deque[bytes] | None = deque(maxlen=TRAIL) if handle.options.trace_context else None
        self._noted = -1  # the message whose trace context was noted last
        self._bytes = 0
        self.receive: Callable[[], Any] = self._receive

    @property
    def gone(self) -> Callable[[], AioshmError] | None:
        return self.link.gone

    # Attaching

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.link.start(loop)

    def too_late(self) -> Exception:
        state = self._state
        return shortage(f"{state!r}") or TimeoutError(f"{state!r}: {self.link.writer.why_not_ready()}")

    # Receiving

    def _receive(self) -> Any:
        """Return the next message, or `EMPTY` if it is not there or needs more than a poll."""
        if not self._core.passes() or not self.poll():
            return EMPTY
        return self._first()

    def _receive_at_hand(self) -> Any:
        """Return the next message if the sockets have been read up to it, or `EMPTY`."""
        return self._first() if self._window.ready and self._core.passes() else EMPTY

    def quick(self) -> Callable[[], Any]:
        return self._receive_at_hand

    def poll(self) -> bool:
        window, link = self._window, self.link
        if not window.ready and link.sockets is not None:
            link.sockets.look()
            if link.left_behind and not window.ready:
                window.lost_the_rest()
        return bool(window.ready)

    def has_message(self) -> bool:
        return bool(self._window.ready)

    def take(self) -> Any:
        return self._first() if self.poll() else EMPTY

    def _first(self) -> Any:
        """Return the first message in line, which is there, and let go of it whatever it is."""
        message = self._window.ready[0][0]
        try:
            if isinstance(message, Missing):
                raise self._lost(message)
            self.note_trace(message)
            return self._decoded(message)
        finally:
            self.done()

    def take_many(self, most: int, /) -> list[Any]:
        batch = [self._first()]
        ready = self._window.ready
        while len(batch) < most and self._core.budget > 0 and self.poll():
            message = ready[0][0]
            if isinstance(message, Missing):
                break
            try:
                batch.append(self._decoded(message))
            except CodecError:
                break
            self.note_trace(message)
            self.done()
        return batch

    def open_block(self, *, decoded: bool) -> SourceBlock | None:
        message = self._window.ready[0][0]
        if isinstance(message, Missing):
            self.done()
            raise self._lost(message)
        self._window.held = True
        self.note_trace(message)
        return HeldData(self, message, decoded=decoded)

    def _lost(self, missing: Missing) -> MessagesLost:
        if self._window.skips:
            why = "this reader was too slow, and the writer does not wait for it"
            return MessagesLost(missing.first, missing.last, why)
        return MessagesLost(missing.first, missing.last)

    def let_go(self) -> None:
        """Note that no block has the first message in line any more."""
        self._window.held = False

    def done(self) -> None:
        """Finish with the first message in line."""
        message = self._window.ready[0][0]
        if not isinstance(message, Missing):
            self._bytes += len(message.body)
        self._state.count_turn()
        self.link.finished_one()

    def note_trace(self, data: wire.Data) -> None:
        """Note the trace context of a message that is taken."""
        if self._trail is None or self._noted == data.seq:
            return
        self._noted = data.seq
        trace = data.trace or NO_TRACE
        if trace != NO_TRACE and not is_trace(trace):
            self._core.garbled += 1
            trace = NO_TRACE
        self._trail.append(trace)

    def traces(self, most: int, /) -> list[bytes]:
        return [] if self._trail is None or not most else list(self._trail)[-most:]

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

    def seen(self, data: wire.Data) -> Any:
        """Decode a message where it lies."""
        # It is nobody else's memory, so views of it may live on; but ZeroMQ aligns it as it likes.
        body = (memoryview(own_copy(data.body)) if data.n_buffers else data.body).toreadonly()
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

    # What is known of the other ends

    @property
    def writer_pid(self) -> int:
        welcome = self.link.writer.welcome
        return 0 if welcome is None else welcome.pid

    @property
    def progress(self) -> int:
        return self._window.taken

    def ask_writer(self) -> bool:
        return self.link.ask_writer()

    def report_waiting(self, waited_s: float) -> None:
        self.link.writer.report_waiting(waited_s, self.progress)

    def stats(self) -> QueueStats:
        window, link = self._window, self.link
        return self._state.new_stats(
            "reader",
            link.rank,
            messages=window.taken,
            backlog=window.next - window.taken,
            bytes=self._bytes,
            resent=link.twice,
            reconnects=link.writer.reconnects,
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


class HeldData:
    """The first message in line, while a block has it: decoded, or as bytes for `acquire_read`."""

    def __init__(self, source: NetworkSource, data: wire.Data, *, decoded: bool) -> None:
        self._source = source
        self._data = data
        self._view = None if decoded else data.body.toreadonly()

    def open(self) -> Any:
        return self._source.seen(self._data) if self._view is None else self._view

    def close(self, *, undo: bool) -> None:
        if self._view is not None:
            self._view.release()
        self._source.let_go()
        if not undo:
            self._source.done()
