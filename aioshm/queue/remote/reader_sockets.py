"""A remote reader's sockets, see ``sockets.py``, and the messages that come in parts."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence

import msgspec
import zmq

from aioshm.config import Options
from aioshm.queue.remote import wire
from aioshm.queue.remote.data_sockets import Connection, DataSubscriber, MessageMemory
from aioshm.zeromq.endpoint import CurveKeys, attach, limit_frames, open_socket
from aioshm.zeromq.pump import Pump, whole
from aioshm.zeromq.sockets import CONTROL_HWM, Sockets


class ReaderSockets:
    """SUB and DEALER, connected to a writer's; made on the loop that they belong to.

    Raises:
        OSError: The endpoints are malformed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        data: str,
        control: str,
        keys: CurveKeys | None,
        options: Options,
        on_data: Callable[[memoryview, memoryview | None], None],
        on_message: Callable[[bytes], None],
        on_change: Callable[[], None],
    ) -> None:
        self._on_message, self._on_change = on_message, on_change
        # Two with a monitor each, which is two more, and a connection.
        self._sockets = Sockets("a remote reader", count=6, connections=2)
        context, add = self._sockets.context, self._sockets.add
        try:
            self._data = DataSubscriber(
                self._sockets,
                data,
                on_data,
                curve=keys,
                silence_s=options.remote_timeout,
                max_frame_bytes=wire.MAX_FRAME_BYTES,
            )
            self._dealer = add(
                open_socket(
                    context,
                    zmq.DEALER,
                    control,
                    bind=False,
                    hwm=CONTROL_HWM,
                    curve=keys,
                    silence_s=options.remote_timeout,
                    heartbeats=True,
                )
            )
            self.control_connection: Connection = Connection(self._dealer)
            add(self.control_connection.pair)
            self._dealer.setsockopt(zmq.ROUTING_ID, b"\x01" + secrets.token_bytes(15))
            limit_frames(self._dealer, wire.MAX_CONTROL_BYTES)
            attach(self._dealer, control, bind=False)
        except BaseException:
            self._sockets.close()
            raise
        self.data_connection: Connection = self._data.connection
        self._control = Pump.of_messages(loop, self._dealer, self._take, whole(self._dealer))
        self._monitors = [
            Pump(loop, connection.pair, self._look_at_connections)
            for connection in (self.data_connection, self.control_connection)
        ]

    def subscribe(self, topics: Sequence[bytes]) -> None:
        """Receive what begins with these, too."""
        if not self._sockets.closed:
            self._data.subscribe(topics)

    def send(self, message: wire.Control) -> bool:
        """Send a control message; return False if too many wait already."""
        if self._sockets.closed:
            return False
        # What made the descriptor readable may be noticed, and forgotten, by a call that sends.
        self._control.run_soon()
        try:
            self._dealer.send(message.pack(), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    @property
    def closed(self) -> bool:
        """Whether this was closed."""
        return self._sockets.closed

    def look(self) -> None:
        """Read some of the data that has come, without waiting for the loop to find it."""
        if not self._sockets.closed:
            self._data.inbox.look()

    def look_at_all(self) -> None:
        """Read whatever has come, and what has become of the connections."""
        while not self._sockets.closed and any([self._data.inbox.look(), self._control.work()]):
            pass
        self._look_at_connections()

    def close(self) -> None:
        """Close everything; what was not sent yet is forgotten. Idempotent."""
        if self._sockets.closed:
            return
        for pump in (self._control, *self._monitors):
            pump.pause()
        self._data.inbox.close()
        self._sockets.close()

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) == 1:  # one of another form is some stranger's: nobody else misses it
            self._on_message(frames[0])

    def _look_at_connections(self) -> None:
        # What had arrived when a connection ended is there when its end is told: so it is read first.
        self.look()
        self._control.run()
        if not self._sockets.closed and (self.data_connection.changed() | self.control_connection.changed()):
            self._on_change()


class Assembly:
    """Puts the parts of a message together, which come in their order.

    What a connection did not deliver to its end comes again from its beginning, over the next one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._memory: MessageMemory | None = None
        self._seq = 0
        self._filled = 0

    def add(self, part: wire.Data) -> wire.Data | None:
        """Take the next part; return the message once it is whole.

        Raises:
            WireError: The message is larger than a writer may send.
            OSError: There is no memory for it.
        """
        if part.offset == 0:
            self.clear()
            if part.total > self._max_bytes:
                raise wire.WireError(f"a message of {part.total} bytes, more than {self._max_bytes}")
            self._memory = MessageMemory(part.total)
            self._seq = part.seq
        memory = self._memory
        if memory is None or (part.seq, part.offset, part.total) != (self._seq, self._filled, len(memory)):
            self.clear()  # its beginning went to a connection that has ended
            return None
        self._filled += len(part.body)
        memory[part.offset : self._filled] = part.body
        if self._filled < part.total:
            return None
        self.clear()
        return msgspec.structs.replace(part, body=memoryview(memory), offset=0)

    def clear(self) -> None:
        """Drop a message that is not whole."""
        self._memory = None
        self._filled = 0
