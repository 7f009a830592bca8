"""What a contestant provides: lines from one writer to some readers, each end opened in the process that uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.payloads import Payload


class Sender(ABC):
    """The sending end of a line.

    Attributes:
        send: Sends to every reader. The message is not changed afterwards. A method, or the contestant's own call
            where that needs nothing around it.
    """

    send: Callable[[Any], Awaitable[None]]

    @abstractmethod
    async def aclose(self) -> None:
        """Close it."""


class Receiver(ABC):
    """A receiving end of a line.

    Attributes:
        receive: Returns the next message. A method, or the contestant's own call where that needs nothing around it.
    """

    receive: Callable[[], Awaitable[Any]]

    @abstractmethod
    async def aclose(self) -> None:
        """Close it."""

    def parks(self) -> int | None:
        """Return how often this end has gone to sleep, if it knows."""
        return None


class WriterEnd(ABC):
    """Becomes the sender. Can be an argument of a spawned process."""

    @abstractmethod
    async def open(self) -> Sender:
        """Return the sender once no message can be lost any more; every reader opens its end meanwhile."""

    @abstractmethod
    def leave(self) -> None:
        """Close what this process holds of an end that another one opens, so that its death is noticed."""


class ReaderEnd(ABC):
    """Becomes a receiver. Can be an argument of a spawned process."""

    @abstractmethod
    async def open(self) -> Receiver:
        """Return the receiver once no message can be lost any more; the writer opens its end meanwhile."""

    @abstractmethod
    def leave(self) -> None:
        """Close what this process holds of an end that another one opens, so that its death is noticed."""


@dataclass(frozen=True)
class Line:
    """The ends of one line, not opened yet."""

    writer: WriterEnd
    readers: Sequence[ReaderEnd]


@dataclass(frozen=True)
class Rival:
    """A contestant.

    Attributes:
        name: As reports call it.
        line: Makes a line for a kind of message and a number of readers.
        blocks: Its calls block the event loop. They are called there all the same, which is the quickest way to use
            them: a thread beside the loop would only add to what they cost.
    """

    name: str
    line: Callable[[Payload, int], Line]
    blocks: bool
