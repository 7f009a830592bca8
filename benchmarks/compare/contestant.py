"""What a contestant provides: two kinds of ends, each opened in the process that uses it, and how it is called."""

from __future__ import annotations

import secrets
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

Codec = Literal["pickle", "msgpack", "raw", "tensor"]


@dataclass(frozen=True)
class Job:
    """What a line has to carry.

    Attributes:
        codec: How objects become bytes. ``"tensor"`` is pickle with the tensor's memory beside it, not in it.
        n_reader: Readers.
        nbytes: About what a message occupies.
        slots: How many messages may be under way, where the contestant bounds that by number.
        chunk_bytes: Room for one, where the contestant has slots.
    """

    codec: Codec
    n_reader: int
    nbytes: int
    slots: int
    chunk_bytes: int


@dataclass(frozen=True)
class Port:
    """An open end.

    Attributes:
        call: Sends a message, or returns the next one; awaited if the contestant is.
        close: Closes it; awaited if the contestant is and it returns an awaitable.
    """

    call: Callable[..., Any]
    close: Callable[[], Awaitable[None] | None]


class End(ABC):
    """Becomes a port. Can be an argument of a spawned process."""

    @abstractmethod
    def open(self) -> Port | Coroutine[Any, Any, Port]:
        """Return the port once no message can be lost any more; every other end of the line opens meanwhile.

        Only where the contestant is awaited it may be a coroutine: the others run without an event loop.
        """

    def leave(self) -> None:  # noqa: B027  # nothing to do for most
        """Close what this process holds of an end that another one opens, so that its death is noticed."""


@dataclass(frozen=True)
class Line:
    """The ends of one line, not opened yet."""

    writer: End
    readers: Sequence[End]


@dataclass(frozen=True)
class Contestant:
    """One way to carry messages.

    Attributes:
        name: As reports call it.
        line: Makes a line.
        awaited: Whether its calls are awaited, on uvloop; the others are called in a plain loop.
        module: What has to be importable for it.
        package: Which distribution has that module.
        codecs: What it carries.
        lacks: Returns what the installed version has not got yet for a codec.
    """

    name: str
    line: Callable[[Job], Line]
    awaited: bool
    module: str
    package: str
    codecs: frozenset[Codec]
    lacks: Callable[[Codec], str | None] = lambda _codec: None

    def missing(self, codec: Codec) -> str | None:
        """Return why it cannot take part, or None if it can."""
        try:
            found = find_spec(self.module) is not None
        except ModuleNotFoundError:  # a parent package is not there
            found = False
        return self.lacks(codec) if found else f"{self.package} is not installed"


ALL_CODECS: frozenset[Codec] = frozenset({"pickle", "msgpack", "raw", "tensor"})
SMALL_CODECS: frozenset[Codec] = frozenset({"pickle", "msgpack", "raw"})


def ipc_address() -> str:
    """Return an address for a socket that leaves no file behind (on Linux), however the processes end."""
    name = f"aioshm-compare-{secrets.token_hex(8)}"
    return f"ipc://@{name}" if sys.platform == "linux" else f"ipc://{Path(tempfile.gettempdir()) / name}"
