"""What a fuzz target is, what it makes values of, and how it runs without atheris."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

CORPUS = Path(__file__).parent / "corpus"
MAX_KEPT_BYTES = 1024
"""Of one input that is kept in the repository."""

T = TypeVar("T")


@dataclass(frozen=True)
class Target:
    """A decoder, or several that get the same bytes."""

    name: str
    run: Callable[[bytes], object]
    seeds: Callable[[], Iterable[bytes]]
    native: bool = False

    @property
    def kept(self) -> Path:
        """Where inputs are kept that fuzzing has found: one a line, in base64."""
        return CORPUS / f"{self.name}.txt"

    def inputs(self) -> Iterator[bytes]:
        """Yield the seeds and what is kept."""
        yield from self.seeds()
        if self.kept.exists():
            yield from map(base64.b64decode, self.kept.read_text().split())


def attempt(errors: type[Exception] | tuple[type[Exception], ...], function: Callable[..., T], *args: Any) -> T | None:
    """Return what a function returns; None where it raises one of the errors that it documents, which must say why."""
    try:
        return function(*args)
    except errors as error:
        said = error
    text = str(said)
    assert text, f"{type(said).__name__} says nothing"
    text.encode()  # what a log takes
    return None


class Pieces:
    """Takes values from the front of an input; zeros where it is at its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def number(self, below: int) -> int:
        """Return a number below a bound, of one byte or two."""
        size = 1 if below <= 256 else 2
        return int.from_bytes(self.take(size), "little") % below

    def wide(self) -> int:
        """Return 64 bits."""
        return int.from_bytes(self.take(8), "little")

    def take(self, size: int) -> bytes:
        """Return so many bytes, fewer at the end."""
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def some(self, most: int = 255) -> bytes:
        """Return a run of bytes whose length comes first."""
        return self.take(self.number(most + 1))

    def rest(self) -> bytes:
        """Return all that is left."""
        return self.take(len(self._data))

    def frames(self) -> list[bytes]:
        """Return the frames of a message: how many, then all but the last with their length."""
        count = self.number(6)
        return [*(self.some() for _ in range(count - 1)), self.rest()] if count else []


def framed(*frames: bytes) -> bytes:
    """Return the input of which `Pieces.frames` makes these; all but the last have at most 255 bytes."""
    return bytes([len(frames)]) + b"".join(bytes([len(frame)]) + frame for frame in frames[:-1]) + frames[-1]


_TELLING = (b"\x00", b"\xff", b"\x7f\xff\xff\xff", b"\xff" * 8, b"\xc1", b"\x91" * 40, b"\xdd\xff\xff\xff\xff", b"\x80")


def smoke(target: Target, changes: int, seed: int = 0) -> int:
    """Run a target over every input, and over so many changed ones; return over how many in all.

    The changes are the same each time.
    """
    inputs = list(target.inputs())
    count = 0
    for data in (*inputs, *_changed(inputs, changes, seed)):
        count += 1
        try:
            target.run(data)
        except Exception as error:
            raise AssertionError(f"{target.name} fails on {data!r}: {error!r}") from error
    return count


def _changed(inputs: list[bytes], changes: int, seed: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    for _ in range(changes):
        data = bytearray(chance.choice(inputs))
        for _ in range(chance.randint(1, 4)):
            at = chance.randint(0, len(data))
            how = chance.randrange(5)
            if how == 0 and data:
                data[min(at, len(data) - 1)] ^= 1 << chance.randrange(8)
            elif how == 1:
                data[at:at] = chance.choice(_TELLING)
            elif how == 2:
                del data[at : at + chance.randint(1, 8)]
            elif how == 3:
                data[at : at + 1] = chance.randbytes(1)
            else:
                other = chance.choice(inputs)
                data[at:] = other[min(at, len(other)) :]
        yield bytes(data)
