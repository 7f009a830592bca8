"""A contestant: two functions that open the ends of a line, and how their calls are made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from benchmarks.framework.workload import Workload


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
        links: The connections with the line's other ends.
        args: The arguments of `make`.
    """

    make: Callable[..., Opened]
    links: Sequence[Any]
    args: tuple[Any, ...]

    def open(self) -> Opened:
        """Return the port, or an awaitable for it."""
        return self.make(*self.args)

    def leave(self) -> None:
        """Close this process' copies of the connections, so that the death of the process that opens it is noticed."""
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
        modules: It takes part where these can be imported.
        link: Makes the two ends of the connection between the writer and one reader.
        bounded: Whether it bounds the messages under way to one reader, and to several.
        leased: Whether readers lease the messages of a stream.
        copies: Whether a message of more bytes takes more time.
    """

    name: str
    writer: Callable[..., Opened]
    reader: Callable[..., Opened]
    awaited: bool
    modules: Sequence[str] = ()
    link: Callable[[Workload], tuple[Any, Any]] = pipe
    bounded: tuple[bool, bool] = (True, True)
    leased: bool = False
    copies: bool = True

    def line(self, workload: Workload, n_reader: int) -> tuple[End, list[End]]:
        """Return the ends of a new line: the writer's, and the readers' by rank."""
        links = [self.link(workload) for _ in range(n_reader)]
        ours = [to_reader for to_reader, _ in links]
        readers = [End(self.reader, [link], (link, workload, rank)) for rank, (_, link) in enumerate(links)]
        return End(self.writer, ours, (ours, workload)), readers

    def missing(self) -> str | None:
        """Return why it cannot take part, or None if it can."""
        lacking = [name for name in self.modules if find_spec(name) is None]
        return f"{lacking[0]} is not installed; `make bench-rivals` gets it" if lacking else None


def hand(links: Sequence[Connection], what: Any) -> None:
    """Give every reader an object, with which it opens its end."""
    for link in links:
        link.send(what)
    close_all(links)


def handed(link: Connection) -> Any:
    """Return the object that the writer gives this reader. Blocks: nothing else runs yet in this process."""
    what = link.recv()
    link.close()
    return what


def close_all(parts: Iterable[Any]) -> None:
    """Close every one of these."""
    for part in parts:
        part.close()
