"""Callbacks of an event loop for a ZeroMQ socket that may have something to do.

A ZeroMQ descriptor is edge-triggered: it turns readable when the socket's state *may* have changed, and only once, so
the callback must read until there is nothing left, or come back by itself (``zmq_getsockopt(3)``, ZMQ_FD).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from aioshm.process.limits import abandon_when_forked


class Watch:
    """Calls ``callback`` on the loop whenever the socket may have something to do.

    ``descriptor`` is a duplicate of the socket's, for one whose own is watched by somebody else on this loop.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: zmq.Socket[bytes],
        callback: Callable[[], None],
        descriptor: int | None = None,
    ) -> None:
        self._loop = loop
        self._descriptor = int(socket.getsockopt(zmq.FD)) if descriptor is None else descriptor
        self._callback = callback
        self._watching = False
        abandon_when_forked(self)
        self.resume()

    @property
    def paused(self) -> bool:
        """Whether it calls nobody at present."""
        return not self._watching

    def resume(self) -> None:
        """Watch again, beginning with one call: the descriptor tells nothing about what came meanwhile."""
        if not self._watching:
            self._watching = True
            self._loop.add_reader(self._descriptor, self._callback)
            self._loop.call_soon(self._call)

    def pause(self) -> None:
        """Stop calling; safe on a closed loop."""
        if self._watching:
            self._watching = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)

    def abandon_in_child(self) -> None:
        """Leave the loop alone: it shares with the parent's what it waits by."""
        self._watching = False

    def _call(self) -> None:
        if self._watching:
            self._callback()
