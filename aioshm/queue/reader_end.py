"""What every reader's end has, wherever the writer is: a handle, a rank, a codec, what became of the writer."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any

from aioshm.codec import Codec, get_codec
from aioshm.config import Options, check_int
from aioshm.errors import AioshmError, HandleError
from aioshm.queue.end import End
from aioshm.queue.handle import Handle


class ReaderEnd(End, ABC):
    """An end that receives."""

    _side = "reader"

    receive: Callable[[], Any]
    """Returns the next message, or `NOTHING` or `ELSEWHERE` if there is more to do than to take it."""

    def __init__(self, handle: Handle, rank: int, codec: str | Codec | None, options: Options | None) -> None:
        if options is not None and not isinstance(options, Options):
            raise TypeError(f"options must be an Options or None, not {options!r}")
        handle.check_version()
        self._check_rank(handle, check_int("rank", rank, minimum=0))
        self._codec = _codec_for(handle, codec)
        self._handle = handle
        self._rank = rank
        # Set once the writer is gone: what to raise when everything it published has been read.
        self._writer_gone: Callable[[], AioshmError] | None = None
        super().__init__(handle.queue_id, handle.options if options is None else options)

    def _check_rank(self, handle: Handle, rank: int) -> None:
        """Refuse a rank that this class of reader cannot have."""

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
