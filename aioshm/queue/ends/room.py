"""Room for messages: the writer's waits for slots and chunks of the ring, and for the window of the remote readers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from aioshm.codec import Encoded
from aioshm.codec.frames import message_bytes
from aioshm.errors import MessageTooLarge
from aioshm.queue.local.readers import LocalReaders
from aioshm.queue.state import EndState
from aioshm.wait.limits import Stall, seconds, settle

if TYPE_CHECKING:  # a queue that has only local readers does not import ZeroMQ
    from aioshm.queue.remote.readers import RemoteReaders

logger: logging.Logger = logging.getLogger("aioshm.queue")

EVICT_POLL_S = 0.05
"""How often a writer with a full window checks whether a remote reader is slow enough to be evicted."""


class Need(NamedTuple):
    """Room for ``slots`` messages: chunks of the sizes ``large``, and ``nbytes`` in the window."""

    slots: int
    large: Sequence[int]
    nbytes: int = 0


class Room:
    """Checks and awaits room for messages; names the readers that leave none."""

    def __init__(self, state: EndState, ring: LocalReaders, network: RemoteReaders | None) -> None:
        options = state.options
        layout = ring.ring.layout
        self._state = state
        self._ring = ring
        self._network = network
        self._core = ring.ring
        self._max_message_bytes = options.max_message_bytes
        self._inline_bytes = layout.inline_bytes
        # Shorter encoded messages need one slot and no chunk.
        self._small_bytes = min(layout.inline_bytes, options.max_message_bytes)
        self._stall: Stall | None = None
        self._stalled_at = -1
        self._wanted = Need(1, ())  # of the waiting call

    # Checking

    def checked_size(self, message: Encoded) -> int:
        """Return the size of a message's body, or raise `MessageTooLarge`."""
        return checked_size(self._max_message_bytes, message)

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
            nbytes = self._network.flow.window_bytes(*map(message_bytes, messages))
        return Need(max(1, len(messages)), large, nbytes)

    def need_of_bytes(self, nbytes: int) -> Need:
        """Return the room that a message of ``nbytes`` needs."""
        in_window = 0
        if self._network is not None:
            in_window = self._network.flow.window_bytes(nbytes)
        return Need(1, self._ring.ring.large(nbytes), in_window)

    def has(self, need: Need) -> bool:
        """Return whether there is room now."""
        return self.window_has(need) and self._ring.free(need.slots, need.large)

    def window_has(self, need: Need) -> bool:
        """Return whether `remote_window` has room; evict remote readers that are too slow."""
        network = self._network
        if network is None or network.flow.room(need.slots, need.nbytes):
            return True
        return network.evict_slow() and network.flow.room(need.slots, need.nbytes)

    # Waiting

    async def wait(self, need: Need, deadline: float | None) -> None:
        """Wait for progress of the readers that leave no room; call again while room is missing."""
        if self._network is None or self._network.flow.room(need.slots, need.nbytes):
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

    # Reporting

    def why_full(self, message: Encoded) -> str:
        """Describe the lack of room for a message, and the readers that cause it."""
        need = self.need([message])
        if self._window_is_full(need):
            return f"the window of the remote readers is full: {self._laggards(need)}"
        return f"no {self._lacking(need)} is free: {self._laggards(need)}"

    def _lacking(self, need: Need) -> str:
        if self._ring.ring.free(need.slots):
            return "chunk"
        return "slot"

    def _window_is_full(self, need: Need) -> bool:
        """Return whether the window lacks room for any message, or the ring has room and so the window lacks it."""
        network = self._network
        return network is not None and (not network.flow.room(need.slots, 0) or self._ring.free(need.slots, need.large))

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


def checked_size(most: int, message: Encoded) -> int:
    """Return the size of a message's body, or raise `MessageTooLarge`."""
    size = message_bytes(message)
    if size > most:
        raise MessageTooLarge(f"the message has {size} bytes, options.max_message_bytes allows {most}")
    return size
