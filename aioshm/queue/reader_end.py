"""What every reader's end has, wherever the writer is: a handle, a rank, a codec, what became of the writer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from aioshm.codec import Codec, Encoded, get_codec
from aioshm.config import Options, check_int
from aioshm.errors import AioshmError, HandleError
from aioshm.queue.end import End
from aioshm.queue.handle import Handle
from aioshm.queue.inquiry import Inquiry
from aioshm.queue.wire import MAX_RANK
from aioshm.ring import RingReader
from aioshm.wait.stall import Stall


class ReaderEnd(End, ABC):
    """An end that receives."""

    _side = "reader"

    receive: Callable[[], Any]
    """Returns the next message, or `NOTHING` or `ELSEWHERE` if there is more to do than to take it."""

    def __init__(self, handle: Handle, rank: int, codec: str | Codec | None, options: Options | None) -> None:
        if options is not None and not isinstance(options, Options):
            raise TypeError(f"options must be an Options or None, not {options!r}")
        handle.check_version()
        self._check_rank(handle, check_int("rank", rank, minimum=0, maximum=MAX_RANK))
        self._codec = _codec_for(handle, codec)
        self._handle = handle
        self._rank = rank
        # Set once the writer is gone: what to raise when everything it published has been read.
        self._writer_gone: Callable[[], AioshmError] | None = None
        self._reading: Stall | None = None
        self._reading_at = -1
        super().__init__(handle.queue_id, handle.options if options is None else options)

    def _check_rank(self, handle: Handle, rank: int) -> None:
        """Refuse a rank that this class of reader cannot have."""

    # What each kind of reader provides to whoever reads several at once, on this end's loop and in nobody's line

    @abstractmethod
    def _start_attaching(self) -> None:
        """Belong to the running loop and begin to attach, unless that was done; nothing waits for it."""

    @abstractmethod
    def _may_go_on(self) -> bool:
        """Return whether there is a message, or an end of them; asked of an end that is ready."""

    @abstractmethod
    def _poll(self) -> Any:
        """Return the next message, `NOTHING`, or `ELSEWHERE` if not all of it has arrived.

        Raises:
            CorruptSlot, CodecError, MessagesLost: The message was damaged; the next call returns the one behind it.
            SharedMemoryError, OutOfDescriptors: There is no room for it now; the next call tries again.
        """

    @abstractmethod
    def _progress(self) -> int:
        """Return how many messages this end has finished with."""

    @abstractmethod
    def _ask_writer(self) -> bool:
        """Ask whether the writer's event loop runs; return whether there is an answer to be waited for."""

    @abstractmethod
    def _report_waiting(self, waited_s: float) -> None:
        """Report what this end has been waiting for, and for how many seconds, with what is known of the writer."""

    def _inquiry(self) -> Stall:
        """Return what asks about the writer, and reports, while a wait lasts."""
        return self._stall(Inquiry(self._options.stall_warning_s, self._ask_writer, self._report_waiting))

    def _stall_of_reading(self) -> Stall:
        """Return what reports that the next message does not come; it goes on from an earlier call that gave up."""
        progress = self._progress()
        if self._reading is not None and self._reading_at == progress:
            self._reading.resume()
        else:
            self._reading, self._reading_at = self._inquiry(), progress
        return self._reading

    def _quick_receive(self) -> Callable[[], Any]:
        """Return what is `receive`, if possible without a look at sockets; asked of an end that is ready."""
        return self.receive

    def _annex_lost(self) -> AioshmError:
        """Return the error if the writer is gone and the next message is `ELSEWHERE`."""
        raise AssertionError("nothing can be elsewhere")

    def _own_ring(self) -> RingReader | None:
        """Return the ring that this end reads, if it reads one; asked of an end that is ready."""
        return None

    def _other_ends(self) -> list[int]:
        """Return the process of each other end that this one shares CPUs with, 0 where that is not known."""
        return []

    def encode(self, obj: Any) -> Encoded:
        """Encode an object that was received, as its sender did."""
        return self._codec.encode(obj)

    # Telling about itself

    @property
    def codec_name(self) -> str:
        """The codec's name."""
        return self._codec.name


def _codec_for(handle: Handle, codec: str | Codec | None) -> Codec:
    """Return the reader's codec: the one that the handle names, or the caller's own instance of it."""
    try:
        own = get_codec(handle.codec if codec is None else codec)
    except ValueError as error:
        if codec is None:
            raise HandleError(f"the handle's {error}") from None
        raise
    if own.name != handle.codec:
        raise ValueError(f"codec must be {handle.codec!r}, as the handle says, not {own.name!r}")
    return own
