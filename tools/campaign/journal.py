"""One file per process: what it did, in records that a kill at any moment leaves whole."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

_LENGTH_BYTES = 4


class Record(NamedTuple):
    """What was noted."""

    at: float
    kind: str
    rest: list[Any]


class Journal:
    """A process' own file. Each record is one write to a file that is only appended to."""

    def __init__(self, path: Path) -> None:
        self.offset = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._encoder = msgspec.msgpack.Encoder()

    def now(self) -> float:
        """Return the time, on the clock of those whose clocks are not moved."""
        return time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - self.offset

    def note(self, kind: str, *rest: object) -> None:
        """Write a record."""
        body = self._encoder.encode((self.now(), kind, *rest))
        os.write(self._file, len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def failed(self, error: BaseException) -> None:
        """Note an error, and which kinds of errors it is."""
        self.note("error", [kind.__name__ for kind in type(error).__mro__], str(error), getattr(error, "errno", None))


def read(path: Path) -> Iterator[Record]:
    """Yield what is in a journal; the last record may have been cut off."""
    data, at = path.read_bytes(), 0
    while at + _LENGTH_BYTES <= len(data):
        end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        if end > len(data):
            return
        when, kind, *rest = msgspec.msgpack.decode(data[at + _LENGTH_BYTES : end])
        yield Record(when, kind, rest)
        at = end
