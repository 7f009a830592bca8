"""Reads an XPUB socket in a thread, where strangers may make that take long, while its loop does something else.

What peers do reaches a socket as commands that whichever thread uses it next has to carry out. Its descriptor tells
that there are some: then nobody but the thread touches the socket until they are done.
"""

from __future__ import annotations

import asyncio
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from aioshm.errors import OutOfThreads
from aioshm.events.publish.subscriptions import Subscriptions
from aioshm.process.threads import start_thread
from aioshm.zeromq.pump import Pump

# For so long at a time: batches wait meanwhile.
_TURN_S = 0.002


class ReadingApart:
    """Reads what peers of an XPUB socket subscribe to.

    Args:
        socket: The XPUB socket.
        subscriptions: What reads it.
        on_ready: Called on the loop when the socket may be used again after `ready` said that it may not.
    """

    def __init__(self, socket: zmq.Socket[bytes], subscriptions: Subscriptions, on_ready: Callable[[], None]) -> None:
        self._subscriptions = subscriptions
        self._on_ready = on_ready
        self._socket = socket
        self._poll = select.poll()
        self._poll.register(int(socket.getsockopt(zmq.FD)), select.POLLIN)
        self._pump: Pump | None = None
        self._lock = threading.Lock()  # held while the thread reads
        self._busy = self._awaited = self._closed = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read what comes, from now on, for ``loop``."""
        self._loop = loop
        self._pump = Pump(loop, self._socket, self.look)

    def ready(self) -> bool:
        """Return whether the loop may use the socket now; if not, ``on_ready`` follows."""
        self.look()
        self._awaited = self._busy
        return not self._busy

    def look(self, *, listen: bool = False) -> None:
        """Read what has come: here if that is brief, else in the thread, which takes the GIL from a busy loop.

        Args:
            listen: Read also where the descriptor tells of nothing: sending carries out commands, too, and what they
                brought is there to be read. That takes no walk any more.
        """
        if self._busy or self._closed or self._pump is None:
            return
        told = bool(self._poll.poll(0))
        if told and not self._subscriptions.brief:
            self._read()
        elif (told or listen) and self._subscriptions.read():
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self.look(listen=True)

    def _read(self) -> None:
        if self._busy or self._closed or self._pump is None:
            return
        try:
            self._busy = True
            start_thread(self._work, name="aioshm-events-subscriptions", what="reading many subscriptions")
        except OutOfThreads:
            self._busy = False
            self._subscriptions.read()
        else:
            self._pump.pause()

    def close(self) -> None:
        """Wait until the thread has left the socket alone. Idempotent."""
        self._closed = True
        if self._pump is not None:
            self._pump.pause()
        with self._lock:
            return

    def _work(self) -> None:
        more = False
        try:
            with self._lock:
                until = time.monotonic() + _TURN_S
                more = not self._closed
                while more and time.monotonic() < until:
                    more = not self._closed and self._subscriptions.read()
        finally:
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(self._done, more)

    def _done(self, more: bool) -> None:
        self._busy = False
        if self._closed:
            return
        assert self._pump is not None
        self._pump.resume()
        if more:
            self._loop.call_soon(self._read)
        if self._awaited:
            self._awaited = False
            self._on_ready()
