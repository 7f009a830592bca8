"""What the demo sends, message by message, and how a reader checks each. Pure: no queue, no clock but the caller's.

A message is ``(number, sent_ns, content)``. What it must be, each process works out for itself: the lines from its own
reading of the input, the tensors from the number.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

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


class Phase:
    """A run of messages of one kind; their contents are the lines of the input, again and again.

    Args:
        name: For people.
        first: The number of its first message.
        lines: The lines.
        count: How many messages it has.
        paced: Whether there is time between them, so that none waits behind another: then ``sent_ns`` is told.
    """

    def __init__(self, name: str, first: int, lines: Sequence[bytes], count: int, *, paced: bool = False) -> None:
        self.name = name
        self.first = first
        self.paced = paced
        self._lines = lines
        self._count = count

    def __len__(self) -> int:
        return self._count

    def size(self, index: int) -> int:
        """Return the size of a message's content in bytes."""
        return len(self._lines[index % len(self._lines)])

    def content(self, index: int) -> Any:
        """Return a message's content."""
        return self._lines[index % len(self._lines)]

    def difference(self, index: int, found: Any) -> str | None:
        """Return what distinguishes ``found`` from a message's content, or None."""
        wanted = self.content(index)
        return None if found == wanted else f"is {_shown(found)}, not {_shown(wanted)}"

    def make(self, index: int, now_ns: int) -> tuple[int, int, Any]:
        """Return a message."""
        return self.first + index, now_ns if self.paced else 0, self.content(index)

    def check(self, index: int, message: Any) -> None:
        """Check a received message in full.

        Raises:
            Mismatch: It is another one, or not what was sent.
        """
        number = self.first + index
        wrong: str | None
        if not (isinstance(message, tuple) and len(message) == 3 and isinstance(message[1], int)):
            wrong = f"is {_shown(message)}"
        elif message[0] != number or bool(message[1]) != self.paced:
            wrong = f"has number and time {_shown(message[:2])}"
        else:
            wrong = self.difference(index, message[2])
        if wrong is not None:
            raise Mismatch(f"message {number} ({self.name}) {wrong}")


class Tensors(Phase):
    """Tensors of all sizes, mixed, so that those through the ring and those past it take turns."""

    def __init__(self, first: int, blocks: Blocks) -> None:
        self._sizes = [size for size, count in TENSOR_SIZES for _ in range(count)]
        super().__init__("tensors", first, (), len(self._sizes))
        self._blocks = blocks
        random.Random(SEED).shuffle(self._sizes)

    def size(self, index: int) -> int:
        return self._sizes[index]

    def content(self, index: int) -> Any:
        return self._blocks.make(self.first + index, self._sizes[index])

    def difference(self, index: int, found: Any) -> str | None:
        return self._blocks.difference(self.first + index, self._sizes[index], found)


def split_lines(text: bytes) -> list[bytes]:
    """Return the lines of a text with their ends, blank ones too: joined, they are the text again."""
    return text.splitlines(keepends=True)


def outline(n_lines: int, repeat: int) -> dict[str, int]:
    """Return the phases' names and how many messages each has."""
    n_tensors = sum(count for _, count in TENSOR_SIZES)
    return {"lines": n_lines * repeat, "paced": PACED_MESSAGES, "tensors": n_tensors}


def make_script(lines: Sequence[bytes], repeat: int, blocks: Blocks) -> list[Phase]:
    """Return the phases, one after the other."""
    text = Phase("lines", 0, lines, len(lines) * repeat)
    paced = Phase("paced", len(text), lines, PACED_MESSAGES, paced=True)
    return [text, paced, Tensors(len(text) + len(paced), blocks)]


def _shown(thing: Any) -> str:
    text = repr(thing)
    return text if len(text) <= 60 else f"{text[:60]}..."
