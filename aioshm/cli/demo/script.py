"""What the demo sends, message by message, and how a reader checks each. Pure: no queue, no clock but the caller's.

Every message begins with its number. What else it must be, each process works out for itself: the lines from its own
reading of the input, the tensors from the number.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from aioshm.cli.demo.blocks import SEED, Blocks

LINES_WANTED = 20_000
PACED_MESSAGES = 500
PACE_S = 0.002

_KIB, _MIB = 1 << 10, 1 << 20
TENSOR_SIZES = (
    *((4 * _KIB, 96), (64 * _KIB, 96), (1 * _MIB, 64), (4 * _MIB, 24), (16 * _MIB, 8)),  # through the ring
    *((32 * _MIB, 4), (48 * _MIB, 2)),  # larger than a slot
)
"""Sizes in bytes, and how many of each."""

MAX_TENSOR_BYTES = max(size for size, _ in TENSOR_SIZES)


class Mismatch(Exception):
    """A message is not what it must be; the text says which and what differs."""

    def __init__(self, number: int, phase: str, detail: str) -> None:
        super().__init__(f"message {number} ({phase}) {detail}")


class Phase(ABC):
    """A run of messages of one kind.

    Args:
        first: The number of its first message.
    """

    name: ClassVar[str]
    paced: ClassVar[bool] = False

    def __init__(self, first: int) -> None:
        self.first = first

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def payload_bytes(self, index: int) -> int:
        """Return the size of a message's content."""

    @abstractmethod
    def make(self, index: int, now_ns: int) -> tuple[Any, ...]:
        """Return a message."""

    @abstractmethod
    def check(self, index: int, message: Any) -> None:
        """Check a received message in full.

        Raises:
            Mismatch: It is another one, or not what was sent.
        """

    def _mismatch(self, index: int, detail: str) -> Mismatch:
        return Mismatch(self.first + index, self.name, detail)


class Lines(Phase):
    """Every line of the input, as often as wanted."""

    name = "lines"

    def __init__(self, first: int, lines: Sequence[bytes], repeat: int) -> None:
        super().__init__(first)
        self._lines = lines
        self._repeat = repeat

    def __len__(self) -> int:
        return len(self._lines) * self._repeat

    def payload_bytes(self, index: int) -> int:
        return len(self._lines[index % len(self._lines)])

    def make(self, index: int, now_ns: int) -> tuple[int, bytes]:
        return self.first + index, self._lines[index % len(self._lines)]

    def check(self, index: int, message: Any) -> None:
        wanted = self.make(index, 0)
        if message != wanted:
            raise self._mismatch(index, f"is {_shown(message)}, not {_shown(wanted)}")


class Paced(Phase):
    """Lines of the input with time between them: what a message takes when none waits before it."""

    name = "paced"
    paced = True

    def __init__(self, first: int, lines: Sequence[bytes]) -> None:
        super().__init__(first)
        self._lines = lines

    def __len__(self) -> int:
        return PACED_MESSAGES

    def payload_bytes(self, index: int) -> int:
        return len(self._lines[index % len(self._lines)])

    def make(self, index: int, now_ns: int) -> tuple[int, int, bytes]:
        return self.first + index, now_ns, self._lines[index % len(self._lines)]

    def check(self, index: int, message: Any) -> None:
        sent_ns = message[1] if isinstance(message, tuple) and len(message) == 3 else 0
        wanted = self.make(index, sent_ns)
        if message != wanted:
            raise self._mismatch(index, f"is {_shown(message)}, not {_shown(wanted)}")


class Tensors(Phase):
    """Tensors of all sizes, mixed, so that those through the ring and those past it take turns."""

    name = "tensors"

    def __init__(self, first: int, blocks: Blocks) -> None:
        super().__init__(first)
        self._blocks = blocks
        self._sizes = [size for size, count in TENSOR_SIZES for _ in range(count)]
        random.Random(SEED).shuffle(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def payload_bytes(self, index: int) -> int:
        return self._sizes[index]

    def make(self, index: int, now_ns: int) -> tuple[int, Any]:
        number = self.first + index
        return number, self._blocks.make(number, self._sizes[index])

    def check(self, index: int, message: Any) -> None:
        number = self.first + index
        if not (isinstance(message, tuple) and len(message) == 2):
            raise self._mismatch(index, f"is {_shown(message)}")
        if message[0] != number:
            raise self._mismatch(index, f"has number {_shown(message[0])}")
        difference = self._blocks.difference(number, self._sizes[index], message[1])
        if difference is not None:
            raise self._mismatch(index, difference)


def split_lines(text: bytes) -> list[bytes]:
    """Return the lines of a text with their ends, blank ones too: joined, they are the text again."""
    return text.splitlines(keepends=True)


def make_script(lines: Sequence[bytes], repeat: int, blocks: Blocks) -> list[Phase]:
    """Return the phases, one after the other."""
    text = Lines(0, lines, repeat)
    paced = Paced(len(text), lines)
    return [text, paced, Tensors(paced.first + len(paced), blocks)]


def outline(n_lines: int, repeat: int) -> dict[str, int]:
    """Return the phases' names and how many messages each has."""
    return {
        Lines.name: n_lines * repeat,
        Paced.name: PACED_MESSAGES,
        Tensors.name: sum(count for _, count in TENSOR_SIZES),
    }


def _shown(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) <= 60 else f"{text[:60]}..."
