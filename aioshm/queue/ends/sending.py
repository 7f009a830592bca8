"""Sends encoded messages: waits for room, then publishes to the local and the remote readers."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from time import monotonic, monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from aioshm.codec import Codec, Encoded
from aioshm.codec.frames import INLINE, RAW, pack_header, plain, write_body
from aioshm.codec.raw import RawCodec
from aioshm.errors import MessageTooLarge
from aioshm.queue.encoded import message_bytes, parts_of
from aioshm.queue.ends.lag import LagWatch
from aioshm.queue.local.loans import Extent, Placed
from aioshm.queue.local.readers import LocalReaders
from aioshm.queue.state import EndState
from aioshm.queue.tracing import NO_TRACE, current_trace
from aioshm.ring.layout import Layout
from aioshm.ring.slot import Slot, Slots
from aioshm.wait.limits import Stall, seconds, settle

if TYPE_CHECKING:  # who has local readers only needs no ZeroMQ
    from aioshm.queue.remote.outgoing import Outgoing
    from aioshm.queue.remote.readers import RemoteReaders

logger: logging.Logger = logging.getLogger("aioshm.queue")

EVICT_POLL_S = 0.05
"""How often a full window looks whether a remote reader is too slow by now to be waited for."""

ZEROMQ_POLL_S = 0.002
"""How often a full window looks whether ZeroMQ has let go of what was sent; it tells nobody."""


class Need(NamedTuple):
    """Room in the ring for ``slots`` messages; ``large``: the sizes of those that take a chunk."""

    slots: int
    large: Sequence[int]


class Sender:
    """Publishes messages: packs for the network, puts in the ring, sends over the network."""

    def __init__(
        self,
        state: EndState,
        ring: LocalReaders,
        network: RemoteReaders | None,
        codec: Codec,
    ) -> None:
        self._state = state
        self._ring = ring
        self._network = network
        # Bytes of the messages that went over the network only.
        self.bytes_beside: int = 0
        self._core = core = ring.ring.core
        self._code = codec.code
        self._chunk_bytes = ring.ring.layout.max_chunk_bytes
        self._inline_bytes = ring.ring.layout.inline_bytes
        self._small_bytes = min(self._inline_bytes, state.options.max_message_bytes)
        self._max_message_bytes = state.options.max_message_bytes
        options = state.options
        self._lag = LagWatch(options.lag_warning_s, options.stall_warning_s, self._report_lag)
        self._stall: Stall | None = None
        self._stalled_at = -1
        self._wanted = Need(1, ())  # the room that the waiting call needs
        has_readers = bool(ring.ranks) or network is not None
        self.encode: Callable[[Any], Encoded] = codec.encode if has_readers else _checked_only(codec)
        self._current_trace = current_trace() if state.options.trace_context else None
        if self._current_trace is not None:  # the core asks for no context itself, but encodes each message
            self.encode = _tracing(self.encode, weakref.WeakMethod(self._note_trace))
        self._as_it_is = isinstance(codec, RawCodec) and has_readers and self._current_trace is None
        self.bind(ring.wake_readers)
        if network is None:
            core.bind_out_of_band(
                _filling(codec.code, ring.ring.slots), functools.partial(_checked_size, self._max_message_bytes)
            )
        # Returns None: sent. False: the fast path is shut. Else the encoded message: there is no
        # room, or it is no ordinary message.
        self.send: Callable[[Any], Any] = core.send if network is None else functools.partial(self._send, network)

    def bind(self, on_parked: Callable[[], object]) -> None:
        """Set the core's encoder and its callback for a sleeping reader."""
        self._core.bind(self.encode, plain(self._code), self._as_it_is, on_parked)

    def _send(self, network: RemoteReaders, obj: Any) -> Any:
        if not self._core.passes():
            return False
        message = self.encode(obj)
        return None if network.flow.room_for(message) and self._publish(network, message) else message

    # Trace contexts

    @property
    def traces(self) -> bool:
        """Whether messages have trace contexts."""
        return self._current_trace is not None

    def _note_trace(self) -> None:
        """Give the next message the context of the current span."""
        if self._current_trace is not None:
            self._core.trace = self._current_trace()

    def _trace(self) -> bytes:
        """Return the next message's context for the network."""
        return b"" if self._current_trace is None or (trace := self._core.trace) == NO_TRACE else trace

    # Publishing

    def put(self, message: Encoded) -> bool:
        """Publish a message to all readers, or return False, to none, if there is no room."""
        network = self._network
        self._note_trace()
        if network is None:
            return self._put(message)
        return _room_for(network, message) and self._publish(network, message)

    def put_all(self, messages: list[Encoded]) -> None:
        """Publish messages for which there is room."""
        network, core = self._network, self._core
        self._note_trace()
        if network is not None:
            for message in messages:
                published = self._publish(network, message)
                assert published  # there is room
            return
        sent = 0
        while sent < len(messages):
            done = core.put_many(messages, sent)
            if not done:  # no ordinary message
                published = self._put(messages[sent])
                assert published  # there is room
            sent += done or 1

    def put_raw(self, slot: Slot, nbytes: int) -> None:
        """Publish the claimed slot, of which the caller's block has filled so many bytes."""
        network = self._network
        self._note_trace()
        if network is None:
            self._ring.put_raw(slot, nbytes)
            return
        if network.flow.window.idle:
            self._ring.put_raw(slot, nbytes)
            network.flow.window.skip()
            return
        content = [bytes(slot.body[:nbytes])]
        outgoing = network.flow.outbox.pack(RAW, 0, self._core.seq, content, (), nbytes, self._trace())
        self._core.copied += nbytes
        self._ring.put_raw(slot, nbytes)
        network.flow.publish(outgoing)

    def pack(self, message: Encoded) -> Outgoing | None:
        """Return a copy of an encoded message for the network; None: there is no network."""
        network = self._network
        if network is None:
            return None
        parts, buffers = parts_of(message)
        size = message_bytes(message)
        self._core.copied += size
        self._note_trace()
        return network.flow.outbox.pack(INLINE, self._code, self._core.seq, parts, buffers, size, self._trace())

    def put_placed(self, slot: Slot, extent: Extent, placed: Placed, outgoing: Outgoing | None) -> None:
        """Publish a message in its place, and its `pack`, as `LocalReaders.put_placed`."""
        network = self._network
        self._note_trace()
        try:
            self._ring.put_placed(slot, extent, placed, self._code)
        except BaseException:
            if network is not None and outgoing is not None:
                network.flow.outbox.let_go([outgoing])
            raise
        if network is not None and outgoing is not None:
            network.flow.publish(outgoing)

    def _publish(self, network: RemoteReaders, message: Encoded) -> bool:
        """Publish a message that the window has room for, or return False if the ring has none."""
        size = self.checked_size(message)
        if self._ring.ranks and not self._ring.free(*self.need([message])):  # without local readers there is room
            return False
        window = network.flow.window
        if not window.readers and window.idle:  # whoever comes is not to have it
            if published := self._put(message if self._ring.ranks else b""):
                window.skip()
                self.bytes_beside += 0 if self._ring.ranks else size
            return published
        # First what may fail: then either all readers get it, or none.
        parts, buffers = parts_of(message)
        outgoing = network.flow.outbox.pack(INLINE, self._code, self._core.seq, parts, buffers, size, self._trace())
        self._core.copied += size
        if not self._put(message if self._ring.ranks else b""):  # without local readers only to be counted
            network.flow.outbox.let_go([outgoing])
            return False
        self.bytes_beside += 0 if self._ring.ranks else size
        network.flow.publish(outgoing)
        return True

    def _put(self, message: Encoded) -> bool:
        if isinstance(message, bytes) and len(message) <= self._chunk_bytes:
            return self._core.put(message) or (self._ring.free(*self.need([message])) and self._core.put(message))
        return self._ring.put(message, self.checked_size(message), self._code)

    def checked_size(self, message: Encoded) -> int:
        """Return the size of a message's body, or raise `MessageTooLarge`."""
        return _checked_size(self._max_message_bytes, message)

    # Room

    def claim(self, nbytes: int) -> Slot | None:
        """Return the next slot for ``nbytes``, or None while there is no room."""
        self._state.check_usable()
        network = self._network
        return self._ring.claim(nbytes) if network is None or self._room_for_bytes(network, nbytes) else None

    def _room_for_bytes(self, network: RemoteReaders, nbytes: int) -> bool:
        room = network.flow.room_for_bytes
        return room(nbytes) or (network.evict_slow() and room(nbytes))

    def parts(self, messages: list[Encoded], need: Need) -> list[list[Encoded]]:
        """Divide messages into runs for which there can be room."""
        layout = self._ring.ring.layout
        runs = [messages] if layout.holds(*need) else [list(run) for run in self._runs(layout, messages)]
        return runs if self._network is None else [part for run in runs for part in self._network.flow.parts(run)]

    def _runs(self, layout: Layout, messages: list[Encoded]) -> Iterator[list[Encoded]]:
        """Divide messages into runs that the ring can hold, each as long as possible."""
        run: list[Encoded] = []
        large: list[int] = []
        for message in messages:
            more = self.need([message]).large
            if run and not layout.holds(len(run) + 1, [*large, *more]):
                yield run
                run, large = [], []
            run.append(message)
            large += more
        yield run

    def has_room(self, messages: Sequence[Encoded], need: Need) -> bool:
        """Return whether all of some messages can be sent now."""
        network = self._network
        return (network is None or _room_for(network, *messages)) and self._ring.free(*need)

    def need(self, messages: Sequence[Encoded]) -> Need:
        """Return the room that some messages need in the ring."""
        large = []
        for message in messages:
            if type(message) is not bytes or len(message) > self._small_bytes:
                size = self.checked_size(message)
                if size > self._inline_bytes:
                    large.append(size)
        return Need(max(1, len(messages)), large if self._ring.ranks else ())  # without readers only to be counted

    def _window_is_full(self, need: Need) -> bool:
        """Return whether the window holds back what is not sent, whatever its size: it does where the ring does not."""
        network = self._network
        return network is not None and (not network.flow.room(need.slots, 0) or self._ring.free(*need))

    def why_full(self, message: Encoded) -> str:
        """Describe the lack of room, and the readers that cause it."""
        need = self.need([message])
        if self._window_is_full(need):
            return f"the window of the remote readers is full: {self.laggards(need)}"
        return f"no {self._lacking(need)} is free: {self.laggards(need)}"

    def _lacking(self, need: Need) -> str:
        return "chunk" if self._ring.ring.free(need.slots) else "slot"

    def _why_late(self, need: Need) -> str:
        """Describe the lack that lasted for too long."""
        what = self._lacking(need)
        if need.slots == 1:
            return f"no {what} became free"
        amount = need.slots if what == "slot" else len(need.large)
        return f"{amount} {what}s did not become free"

    def laggards(self, need: Need) -> str:
        """Name the readers that messages have to wait for."""
        # The window holds back, too, whom the ring would not.
        there = self._network.laggards() if self._network is not None and self._window_is_full(need) else []
        return ", ".join([*self._ring.laggards(*need), *there])

    # Waiting for room

    async def wait_for_room(self, messages: Sequence[Encoded], need: Need, deadline: float | None) -> None:
        """Wait for progress of the readers that block this; call again while room is missing."""
        network = self._network
        if network is None or network.flow.room_for(*messages):
            await self._wait_for_ring(need, deadline)
        else:
            await self._wait_for_window(network, lambda: _room_for(network, *messages), deadline)

    async def wait_for_bytes(self, nbytes: int, deadline: float | None) -> None:
        """Wait for progress that may let a slot for ``nbytes`` be claimed."""
        network = self._network
        if network is None or network.flow.room_for_bytes(nbytes):
            await self._wait_for_ring(Need(1, self._ring.ring.large(nbytes)), deadline)
        else:
            await self._wait_for_window(network, lambda: self._room_for_bytes(network, nbytes), deadline)

    async def _wait_for_ring(self, need: Need, deadline: float | None) -> None:
        state, core, ring = self._state, self._core, self._ring.ring
        poller, free = state.poller, self._ring.free
        assert poller is not None
        ring.want(*need)
        stall = self._stall_of_writing(need)
        began = monotonic()
        slowest = self._lag.slowest(began, self._ring.slowest, need)
        state.wake_peers()
        try:
            if await poller.wait(
                lambda: state.refusal is not None or free(*need),
                core.seq,
                core.published_ns,
                deadline=deadline,
                stall=stall,
            ):
                state.new_turn()
        except TimeoutError:
            raise TimeoutError(f"{state!r}: {self._why_late(need)}: {self.laggards(need)}") from None
        finally:
            stall.pause()
            if not state.dismantled:
                self._lag.waited(slowest, began, monotonic())
                ring.want_nothing()
                core.spin_ns = poller.inline_spin_ns

    async def _wait_for_window(self, network: RemoteReaders, look: Callable[[], bool], deadline: float | None) -> None:
        """Wait until the remote readers have finished with enough."""
        state = self._state
        stall = self._stall_of_writing(Need(1, ()))
        began = monotonic()
        slowest = self._lag.slowest(began, network.slowest, Need(1, ()))
        assert state.loop is not None
        try:
            while state.refusal is None and not look():
                news, timer = state.news(), None
                if network.flow.waits_for_zeromq():
                    timer = state.loop.call_later(ZEROMQ_POLL_S, state.interrupt)
                elif network.evicts:
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
            if not state.dismantled:
                self._lag.waited(slowest, began, monotonic())
        state.new_turn()

    def _stall_of_writing(self, wanted: Need) -> Stall:
        """Return the stall report of a wait for room, continued from an earlier call."""
        self._wanted = wanted
        if self._stall is not None and self._stalled_at == self._core.seq:
            self._stall.resume()
        else:
            self._stall, self._stalled_at = self._state.stall(self._report_laggards), self._core.seq
        return self._stall

    def _report_laggards(self, waited_s: float) -> None:
        text = "%r: waited %s to write message %d: not read by %s"
        logger.warning(text, self._state, seconds(waited_s), self._core.seq, self.laggards(self._wanted))

    def _report_lag(self, rank: int, held_s: float, waited_s: float) -> None:
        registry = self._ring.registry
        slot = registry.slots[rank]
        if slot.in_use:
            text = "%r: held back for %s by %s, %d messages behind: %.0f%% of that time went by waiting for it"
            share = 100 * waited_s / held_s
            logger.warning(text, self._state, seconds(held_s), slot.name, registry.lag(slot), share)


def _room_for(network: RemoteReaders, *messages: Encoded) -> bool:
    """Return whether the window has room for messages, once no reader is waited for that is too slow."""
    room = network.flow.room_for
    return room(*messages) or (network.evict_slow() and room(*messages))


def _checked_size(most: int, message: Encoded) -> int:
    size = message_bytes(message)
    if size > most:
        raise MessageTooLarge(f"the message has {size} bytes, options.max_message_bytes allows {most}")
    return size


def _filling(code: int, slots: Slots) -> Callable[[int, Encoded, int], bool]:
    """Return a function that fills slots for the core, without a reference cycle over the queue."""

    def fill(begin: int, message: Encoded, seq: int) -> bool:
        parts, buffers = parts_of(message)
        main_bytes = write_body(slots.body(begin), parts, buffers)
        pack_header(slots.bodies, begin, INLINE, code, 0, len(buffers), seq, monotonic_ns(), main_bytes)
        return True

    return fill


def _tracing(
    encode: Callable[[Any], Encoded], noting: Callable[[], Callable[[], object] | None]
) -> Callable[[Any], Encoded]:
    """Return an encoder that notes the trace context of each message, without a reference cycle."""

    def encode_and_note(obj: Any) -> Encoded:
        message = encode(obj)
        if (note := noting()) is not None:
            note()
        return message

    return encode_and_note


def _checked_only(codec: Codec) -> Callable[[Any], Encoded]:
    """Return an encoder for a queue without readers: raises the usual errors, keeps nothing."""

    def encode(obj: Any) -> Encoded:
        codec.encode(obj)
        return b""

    return encode
