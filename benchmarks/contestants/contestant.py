"""What a contestant is: two functions that open the ends of a line, and how what they return is called."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from benchmarks.framework.workload import Codec, Workload

SMALL_CODECS: frozenset[Codec] = frozenset({"pickle", "msgpack", "raw"})
ALL_CODECS: frozenset[Codec] = SMALL_CODECS | {"array", "tensor"}


@dataclass(frozen=True)
class Port:
    """An open end.

    Attributes:
        call: Sends a message, or returns the next one; awaited if the contestant is.
        close: Closes it; awaited if the contestant is and it returns an awaitable.
        lease: Returns a block that has the next message, if there is such a thing.
        copied: Returns how many bytes of messages it has copied, if it knows.
    """

    call: Callable[..., Any]
    close: Callable[[], Awaitable[None] | None]
    lease: Callable[[], Any] | None = None
    copied: Callable[[], int] | None = None


Opened: TypeAlias = Port | Coroutine[Any, Any, Port]
"""A port, returned once no message can be lost any more; awaited only where the contestant is."""


@dataclass(frozen=True)
class End:
    """One end of a line, not opened yet. Can be an argument of a spawned process.

    Attributes:
        make: Opens it, in the process that uses it, while every other end of the line is opened, too.
        links: What connects it with the line's other ends.
        args: What else `make` takes.
    """

    make: Callable[..., Opened]
    links: Sequence[Any]
    args: tuple[Any, ...]

    def open(self) -> Opened:
        """Return the port, or what has to be awaited for it."""
        return self.make(*self.args)

    def leave(self) -> None:
        """Close what this process holds of an end that another one opens, so that its death is noticed."""
        close_all(link for link in self.links if isinstance(link, Connection))


def pipe(_workload: Workload) -> tuple[Any, Any]:
    """Return the ends of a pipe: for the writer, and for the reader."""
    receiver, sender = Pipe(duplex=False)
    return sender, receiver


@dataclass(frozen=True)
class Contestant:
    """One way to carry messages.

    Attributes:
        name: As reports call it.
        writer: Opens the sending end: ``writer(links, workload)``, with a link for each reader.
        reader: Opens a receiving end: ``reader(link, workload, rank)``.
        awaited: Whether its calls are awaited, on an event loop; the others are called in a plain loop.
        module: What has to be importable for it.
        package: Which distribution has that module.
        codecs: What it carries.
        link: Makes the two ends of what connects the writer with one reader.
        lacks: Returns what the installed version has not got yet for a codec.
        bounded: Whether it bounds what is under way to one reader, and to several.
        leased: Whether readers lease the messages of a stream.
        copies: Whether a message of more bytes takes more time.
    """

    name: str
    writer: Callable[..., Opened]
    reader: Callable[..., Opened]
    awaited: bool
    module: str
    package: str
    codecs: frozenset[Codec]
    link: Callable[[Workload], tuple[Any, Any]] = pipe
    lacks: Callable[[Codec], str | None] = lambda _codec: None
    bounded: tuple[bool, bool] = (True, True)
    leased: bool = False
    copies: bool = True

    def line(self, workload: Workload, n_reader: int) -> tuple[End, list[End]]:
        """Return the ends of a new line: the writer's, and the readers' by rank."""
        links = [self.link(workload) for _ in range(n_reader)]
        ours = [to_reader for to_reader, _ in links]
        readers = [End(self.reader, [link], (link, workload, rank)) for rank, (_, link) in enumerate(links)]
        return End(self.writer, ours, (ours, workload)), readers

    def missing(self, codec: Codec) -> str | None:
        """Return why it cannot take part, or None if it can."""
        try:
            found = find_spec(self.module) is not None
        except ModuleNotFoundError:  # a parent package is not there
            found = False
        if not found:
            hint = "" if self.name.startswith("aioshm") else "; `make bench-rivals` gets it"
            return f"{self.package} is not installed{hint}"
        return self.lacks(codec)


def hand(links: Sequence[Connection], what: Any) -> None:
    """Give every reader what it needs to open its end."""
    for link in links:
        link.send(what)
    close_all(links)


def handed(link: Connection) -> Any:
    """Return what the writer gives this reader. Blocks: nothing else goes on yet that this could hold up."""
    what = link.recv()
    link.close()
    return what


def close_all(parts: Iterable[Any]) -> None:
    """Close every one of these."""
    for part in parts:
        part.close()
