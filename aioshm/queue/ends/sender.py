"""Publishes encoded messages to the local and the remote readers, and waits for room in the ring and in the window."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from aioshm.codec import Codec, Encoded
from aioshm.codec.frames import INLINE, RAW, message_bytes, pack_header, parts_of, plain, write_body
from aioshm.codec.registry import RawCodec
from aioshm.errors import MessageTooLarge
from aioshm.queue.local.loans import Extent, Placed
from aioshm.queue.local.readers import LocalReaders
from aioshm.queue.state import EndState
from aioshm.queue.tracing import NO_TRACE, current_trace
from aioshm.ring.layout import Layout
from aioshm.ring.slot import Slot, Slots
from aioshm.wait.limits import Stall, seconds, settle

if TYPE_CHECKING:  # a queue that has only local readers does not import ZeroMQ
    from aioshm.queue.remote.readers import RemoteReaders
    from aioshm.queue.remote.window import Outgoing


logger: logging.Logger = logging.getLogger("aioshm.queue")

EVICT_POLL_S = 0.05
"""How often a writer with a full window checks whether a remote reader is slow enough to be evicted."""


class Need(NamedTuple):
    """Room for ``slots`` messages: chunks of the sizes ``large``, and ``nbytes`` in the window."""

    slots: int
    large: Sequence[int]
    nbytes: int = 0


class Sender:
    """Publishes messages: packs them for the network, puts them in the ring, sends them over the network."""

    def __init__(self, state: EndState, ring: LocalReaders, network: RemoteReaders | None, codec: Codec) -> None:
        self._state = state
        self._ring = ring
        self._network = network
        # Bytes of the messages that went over the network only.
        self.network_bytes: int = 0
        self._core = core = ring.ring
        self._code = codec.code
        layout = ring.ring.layout
        self._chunk_bytes = layout.max_chunk_bytes
        self._inline_bytes = layout.inline_bytes
        self._max_message_bytes = state.options.max_message_bytes
        # Shorter encoded messages need one slot and no chunk.
        self._small_bytes = min(layout.inline_bytes, self._max_message_bytes)
        self._stall: Stall | None = None
        self._stalled_at = -1
        self._wanted = Need(1, ())  # of the waiting call
        self._current_trace: Callable[[], bytes] | None = None
        self.encode: Callable[[Any], Encoded] = codec.encode
        has_readers = bool(ring.ranks) or network is not None
        if not has_readers:
            self.encode = _checked_only(codec)
        self._takes_bytes = isinstance(codec, RawCodec) and has_readers
        if state.options.trace_context:
            self._current_trace = current_trace()
            # The core calls the encoder for each message, so the encoder sets the trace context.
            self.encode = _tracing(self.encode, weakref.WeakMethod(self.note_trace))
            self._takes_bytes = False
        self.bind(ring.wake_readers)
        # Returns None: sent. False: the fast path is shut. Else the encoded message: there is no
        # room, or the message needs more than a slot and a chunk.
        self.send: Callable[[Any], Any] = self._send
        if network is None:
            self.send = core.send
            core.bind_out_of_band(
                _filling(codec.code, ring.ring.slots), functools.partial(_checked_size, state.options.max_message_bytes)
            )

    def bind(self, on_parked: Callable[[], object]) -> None:
        """Set the core's encoder and its callback for a sleeping reader."""
        self._core.bind(self.encode, plain(self._code), self._takes_bytes, on_parked)

    def _send(self, obj: Any) -> Any:
        network = self._network
        assert network is not None
        if not self._core.passes():
            return False
        message = self.encode(obj)
        has_room = network.window.room(1, network.window_bytes(message_bytes(message)))
        if has_room and self._publish(network, message):
            return None
        return message

    # Trace contexts

    def note_trace(self) -> None:
        """Give the next message the context of the current span."""
        if self._current_trace is not None:
            self._core.trace = self._current_trace()

    def _trace(self) -> bytes:
        """Return the next message's context for the network."""
        if self._current_trace is None or self._core.trace == NO_TRACE:
            return b""
        return self._core.trace

    # Publishing

    def put(self, message: Encoded) -> bool:
        """Publish a message to all readers, or return False, to none, if there is no room."""
        network = self._network
        self.note_trace()
        if network is None:
            return self._put(message)
        return self.window_has(self.need([message])) and self._publish(network, message)

    async def put_waiting(self, messages: list[Encoded], deadline: float | None) -> None:
        """Publish messages as soon as there is room for all; call it with the call lock."""
        need = self.need(messages)
        while not self.has(need):
            await self.wait(need, deadline)
            self._state.check_usable()
        self.put_all(messages)

    def put_all(self, messages: list[Encoded]) -> None:
        """Publish messages for which there is room."""
        network = self._network
        self.note_trace()
        if network is not None:
            packed = [self.pack(message, ahead) for ahead, message in enumerate(messages)]  # first: this may fail
            for message, outgoing in zip(messages, packed, strict=True):
                published = self._publish(network, message, outgoing)
                assert published
            return
        sent = 0
        while sent < len(messages):
            count = self._core.put_many(messages, sent)
            if not count:  # the next message needs more than a slot and a chunk
                published = self._put(messages[sent])
                assert published
                count = 1
            sent += count

    async def claim(self, nbytes: int, deadline: float | None) -> Slot:
        """Return the next slot, with room for ``nbytes``, as soon as it is free; call it with the call lock."""
        need = self.need_of_bytes(nbytes)
        while True:
            self._state.check_usable()
            if self.window_has(need):
                slot = self._ring.claim(nbytes)
                if slot is not None:
                    return slot
            await self.wait(need, deadline)

    def put_raw(self, slot: Slot, nbytes: int) -> None:
        """Publish a claimed slot, of which the caller's block has filled ``nbytes``."""
        self.note_trace()
        outgoing = None
        if self._has_remote_readers:
            outgoing = self._packed(RAW, 0, [bytes(slot.body[:nbytes])], (), nbytes)
        self._ring.put_raw(slot, nbytes)
        if self._network is not None:
            self._network.publish(outgoing)

    def pack(self, message: Encoded, ahead: int = 0) -> Outgoing | None:
        """Return a copy of the next message, or of one behind it, for the network; None: no remote reader needs it."""
        if not self._has_remote_readers:
            return None
        self.note_trace()
        return self._packed(INLINE, self._code, *parts_of(message), message_bytes(message), ahead)

    @property
    def _has_remote_readers(self) -> bool:
        """Whether there are any, or may be some that ask for the history; later readers begin with later messages."""
        return self._network is not None and not self._network.window.idle

    def _packed(
        self,
        kind: int,
        code: int,
        parts: Sequence[bytes | memoryview],
        buffers: Sequence[memoryview],
        nbytes: int,
        ahead: int = 0,
    ) -> Outgoing:
        assert self._network is not None
        outgoing = self._network.pack(kind, code, self._core.seq + ahead, parts, buffers, nbytes, self._trace())
        self._core.copied += nbytes
        return outgoing

    def put_placed(self, slot: Slot, extent: Extent, placed: Placed, outgoing: Outgoing | None) -> None:
        """Publish a message in its place, and its `pack`, as `LocalReaders.put_placed`."""
        self.note_trace()
        self._ring.put_placed(slot, extent, placed, self._code)
        if self._network is not None:
            self._network.publish(outgoing)

    def _publish(self, network: RemoteReaders, message: Encoded, outgoing: Outgoing | None = None) -> bool:
        """Publish a message that the window has room for, and its `pack`, or return False if the ring has no room."""
        size = self.checked_size(message)
        in_ring = message
        network_bytes = 0
        if not self._ring.ranks:  # the ring only counts messages
            in_ring = b""
            network_bytes = size
        elif not self._ring_has(message):
            return False
        if outgoing is None:
            outgoing = self.pack(message)  # first, as packing may fail: either all readers get the message, or none
        if not self._put(in_ring):
            return False
        self.network_bytes += network_bytes
        network.publish(outgoing)
        return True

    def _put(self, message: Encoded) -> bool:
        """Put a message in the ring, or return False if there is no room."""
        if isinstance(message, bytes) and len(message) <= self._chunk_bytes:
            if self._core.put(message):
                return True
            return self._ring_has(message) and self._core.put(message)
        return self._ring.put(message, self.checked_size(message), self._code)

    def _ring_has(self, message: Encoded) -> bool:
        need = self.need([message])
        return self._ring.free(need.slots, need.large)

    # Batches

    def parts(self, messages: list[Encoded], need: Need) -> list[list[Encoded]]:
        """Divide messages into runs for which there can be room."""
        layout = self._ring.ring.layout
        runs = [messages]
        if not layout.holds(need.slots, need.large):
            runs = list(self._runs(layout, messages))
        if self._network is None:
            return runs
        return [part for run in runs for part in self._network.parts(run)]

    def _runs(self, layout: Layout, messages: list[Encoded]) -> Iterator[list[Encoded]]:
        """Divide messages into runs that the ring can hold, each as long as possible."""
        run: list[Encoded] = []
        large: list[int] = []
        for message in messages:
            more = self.need([message]).large
            if run and not layout.holds(len(run) + 1, [*large, *more]):
                yield run
                run = []
                large = []
            run.append(message)
            large += more
        yield run

    # Room

    def checked_size(self, message: Encoded) -> int:
        """Return the size of a message's body, or raise `MessageTooLarge`."""
        return _checked_size(self._max_message_bytes, message)

    def need(self, messages: Sequence[Encoded]) -> Need:
        """Return the room that messages need."""
        large = []
        for message in messages:
            if type(message) is not bytes or len(message) > self._small_bytes:
                size = self.checked_size(message)
                if size > self._inline_bytes:
                    large.append(size)
        if not self._ring.ranks:  # the ring only counts messages
            large = []
        nbytes = 0
        if self._network is not None:
            nbytes = self._network.window_bytes(*map(message_bytes, messages))
        return Need(max(1, len(messages)), large, nbytes)

    def need_of_bytes(self, nbytes: int) -> Need:
        """Return the room that a message of ``nbytes`` needs."""
        in_window = 0
        if self._network is not None:
            in_window = self._network.window_bytes(nbytes)
        return Need(1, self._ring.ring.large(nbytes), in_window)

    def has(self, need: Need) -> bool:
        """Return whether there is room now."""
        return self.window_has(need) and self._ring.free(need.slots, need.large)

    def window_has(self, need: Need) -> bool:
        """Return whether `remote_window` has room; evict remote readers that are too slow."""
        network = self._network
        if network is None or network.window.room(need.slots, need.nbytes):
            return True
        return network.evict_slow() and network.window.room(need.slots, need.nbytes)

    async def wait(self, need: Need, deadline: float | None) -> None:
        """Wait for progress of the readers that leave no room; call again while room is missing."""
        if self._network is None or self._network.window.room(need.slots, need.nbytes):
            await self._wait_for_ring(need, deadline)
        else:
            await self._wait_for_window(self._network, need, deadline)

    async def _wait_for_ring(self, need: Need, deadline: float | None) -> None:
        state = self._state
        core = self._core
        ring = self._ring.ring
        free = self._ring.free
        poller = state.poller
        assert poller is not None
        ring.want(need.slots, need.large)
        stall = self._stall_of_writing(need)
        state.wake_peers()
        try:
            if await poller.wait(
                lambda: state.refusal is not None or free(need.slots, need.large),
                core.seq,
                core.published_ns,
                deadline=deadline,
                stall=stall,
            ):
                state.new_turn()
        except TimeoutError:
            raise TimeoutError(f"{state!r}: no {self._lacking(need)} became free: {self._laggards(need)}") from None
        finally:
            stall.pause()
            if not state.dismantled:
                ring.spin_for()  # spins wait for the next slot again
                core.spin_ns = poller.inline_spin_ns

    async def _wait_for_window(self, network: RemoteReaders, need: Need, deadline: float | None) -> None:
        state = self._state
        assert state.loop is not None
        stall = self._stall_of_writing(Need(1, ()))
        try:
            while state.refusal is None and not self.window_has(need):
                news = state.news()
                timer = None
                if network.evicts:
                    timer = state.loop.call_later(EVICT_POLL_S, state.interrupt)
                try:
                    await settle(news, deadline=deadline, stall=stall)
                finally:
                    if timer is not None:
                        timer.cancel()
        except TimeoutError:
            laggards = ", ".join(network.laggards())
            raise TimeoutError(f"{state!r}: the window of the remote readers is full: {laggards}") from None
        finally:
            stall.pause()
        state.new_turn()

    def why_full(self, message: Encoded) -> str:
        """Describe the lack of room for a message, and the readers that cause it."""
        need = self.need([message])
        if self._window_is_full(need):
            return f"the window of the remote readers is full: {self._laggards(need)}"
        return f"no {self._lacking(need)} is free: {self._laggards(need) or 'a call waits for room, or a block has it'}"

    def _lacking(self, need: Need) -> str:
        if self._ring.ring.free(need.slots):
            return "chunk"
        return "slot"

    def _window_is_full(self, need: Need) -> bool:
        """Return whether the window lacks room for any message, or the ring has room and so the window lacks it."""
        network = self._network
        return network is not None and (
            not network.window.room(need.slots, 0) or self._ring.free(need.slots, need.large)
        )

    def _laggards(self, need: Need) -> str:
        """Name the readers that messages have to wait for."""
        names = self._ring.laggards(need.slots, need.large)
        if self._network is not None and self._window_is_full(need):
            names = [*names, *self._network.laggards()]
        return ", ".join(names)

    def _stall_of_writing(self, wanted: Need) -> Stall:
        """Return the stall report of a wait for room, continued from an earlier call."""
        self._wanted = wanted
        if self._stall is not None and self._stalled_at == self._core.seq:
            self._stall.resume()
        else:
            self._stall = self._state.stall(self._report_laggards)
            self._stalled_at = self._core.seq
        return self._stall

    def _report_laggards(self, waited_s: float) -> None:
        text = "%r: waited %s to write message %d: not read by %s"
        logger.warning(text, self._state, seconds(waited_s), self._core.seq, self._laggards(self._wanted))


def encode_all(encode: Callable[[Any], Encoded], objs: Iterable[Any]) -> list[Encoded]:
    """Encode objects; copy those of a generator, which may change an object to get the next."""
    if isinstance(objs, Collection):
        return list(map(encode, objs))
    return [_copied(encode(obj)) for obj in objs]


def _copied(message: Encoded) -> Encoded:
    """Return a message that shares no memory with the encoded object."""
    if isinstance(message, bytes):
        return message
    parts, buffers = message
    return list(map(bytes, parts)), [memoryview(bytes(buffer)) for buffer in buffers]


def _filling(code: int, slots: Slots) -> Callable[[int, Encoded, int], bool]:
    """Return a function that fills slots for the core, without a reference cycle over the queue."""

    def fill(begin: int, message: Encoded, seq: int) -> bool:
        parts, buffers = parts_of(message)
        main_bytes = write_body(slots.body(begin), parts, buffers)
        pack_header(slots.bodies, begin, INLINE, code, 0, len(buffers), seq, monotonic_ns(), main_bytes)
        return True

    return fill


def _tracing(
    encode: Callable[[Any], Encoded], note_trace: Callable[[], Callable[[], object] | None]
) -> Callable[[Any], Encoded]:
    """Return an encoder that notes the trace context of each message, without a reference cycle."""

    def encode_and_note(obj: Any) -> Encoded:
        message = encode(obj)
        if (note := note_trace()) is not None:
            note()
        return message

    return encode_and_note


def _checked_only(codec: Codec) -> Callable[[Any], Encoded]:
    """Return an encoder for a queue without readers: raises the usual errors, keeps nothing."""

    def encode(obj: Any) -> Encoded:
        codec.encode(obj)
        return b""

    return encode


def _checked_size(most: int, message: Encoded) -> int:
    """Return the size of a message's body, or raise `MessageTooLarge`."""
    size = message_bytes(message)
    if size > most:
        raise MessageTooLarge(f"the message has {size} bytes, options.max_message_bytes allows {most}")
    return size
