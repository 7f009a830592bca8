"""The messages: the same for every contestant, each with a number, and each checked on arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

Codec = Literal["pickle", "msgpack", "raw", "array", "tensor"]
"""How objects become bytes. ``"array"`` and ``"tensor"`` are pickle with the memory beside it, not in it."""

KIB = 1 << 10
MIB = 1 << 20

HEAD, TAIL = 17, 71
"""The first and the last element of a block."""


class WrongMessageError(Exception):
    """A message arrived damaged or out of order."""


@dataclass(frozen=True)
class Workload:
    """A kind of message, and how the measuring loops number and check it at little cost.

    Attributes:
        name: As reports call it.
        codec: How it travels.
        nbytes: About its size.
        key: The index of the number in the message.
        mask: The bits of the number that the message holds.
        body: The index of the part whose length is checked; None for the message itself.
        length: The length of that part.
        tail: The last element of that part; None if it is not checked.
        make: Returns the object to send. It gets another number for each message; bytes are made for each number.
        slots: Messages under way at most, where a rival bounds them.
        chunk_bytes: The largest message, where a rival bounds it.
    """

    name: str
    codec: Codec
    nbytes: int
    key: str | int
    mask: int
    body: str | int | None
    length: int
    tail: int | None
    make: Callable[..., Any]
    slots: int
    chunk_bytes: int

    def numbered(self, numbers: Iterable[int]) -> Iterator[Any]:
        """Yield a message for each number, often the same object again."""
        mask = self.mask
        if self.body is None:
            made = [self.make(number) for number in range(mask + 1)]
            for number in numbers:
                yield made[number & mask]
        else:
            message, key = self.make(), self.key
            for number in numbers:
                message[key] = number & mask
                yield message

    def check(self, message: Any, number: int) -> None:
        """Raise `WrongMessageError` unless this is the message with this number."""
        part = message if self.body is None else message[self.body]
        if message[self.key] != number & self.mask or len(part) != self.length:
            raise self.wrong(message, number)
        if self.tail is not None and part[-1] != self.tail:
            raise self.wrong(message, number)

    def wrong(self, message: Any, number: int) -> WrongMessageError:
        """Return the error for a message that is not the one with this number."""
        return WrongMessageError(f"{self.name}: expected number {number}, got {str(message)[:200]}")


def small_dict(codec: Codec = "pickle") -> Workload:
    """Return a dict of four fields, one of them a list of 16 numbers."""
    name = "small dict" if codec == "pickle" else f"small dict, {codec}"
    return Workload(name, codec, 128, "n", -1, "l", 16, None, _dict, 256, 64 * KIB)


def plain_bytes(nbytes: int) -> Workload:
    """Return so many bytes, made beforehand; the first one is the number's last bits."""
    make = partial(_bytes, nbytes)
    return Workload(f"{_size(nbytes)}, raw", "raw", nbytes, 0, 255, None, nbytes, TAIL, make, 256, 64 * KIB)


def block(nbytes: int, *, slots: int = 10, chunk_bytes: int = 24 * MIB) -> Workload:
    """Return a number and an array, or a bytearray where pickle copies an array into its stream."""
    codec: Codec = "array" if nbytes >= 64 * KIB else "pickle"
    make = partial(_block, nbytes, codec)
    return Workload(_size(nbytes), codec, nbytes, 0, -1, 1, nbytes, TAIL, make, slots, chunk_bytes)


def tensor(nbytes: int, *, slots: int = 10, chunk_bytes: int = 24 * MIB) -> Workload:
    """Return a number and a torch tensor, by default for a ring of vLLM's default size."""
    made = block(nbytes, slots=slots, chunk_bytes=chunk_bytes)
    return replace(made, name=f"{made.name} tensor", codec="tensor", make=partial(_block, nbytes, "tensor"))


def loaned(nbytes: int) -> Workload:
    """Return a tensor of which only the first and the last element are checked."""
    name = f"{_size(nbytes)}, loaned"
    return Workload(name, "tensor", nbytes, 0, 1, None, nbytes, TAIL, partial(_marked, nbytes), 10, 24 * MIB)


def _size(nbytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def _dict() -> dict[str, Any]:
    return {"n": 0, "b": "hello", "c": 3.5, "l": list(range(16))}


def _bytes(nbytes: int, number: int) -> bytes:
    return bytes([number]) + bytes(nbytes - 2) + bytes([TAIL])


def _block(nbytes: int, codec: Codec) -> list[Any]:
    memory: Any
    if codec == "tensor":
        import torch

        memory = torch.zeros(nbytes, dtype=torch.uint8)
    elif codec == "array":
        import numpy as np

        memory = np.zeros(nbytes, np.uint8)
    else:
        memory = bytearray(nbytes)
    memory[0], memory[-1] = HEAD, TAIL
    return [0, memory]


def _marked(nbytes: int, number: int) -> Any:
    memory = _block(nbytes, "tensor")[1]
    memory[0] = number
    return memory


SMALL_DICT = small_dict()
