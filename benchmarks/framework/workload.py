"""What is sent: the same messages for every contestant, each with a number, and each checked on arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

Codec = Literal["pickle", "msgpack", "raw", "array", "tensor"]
"""How objects become bytes. ``"array"`` and ``"tensor"`` are pickle with the array's memory beside it, not in it."""

KIB = 1 << 10
MIB = 1 << 20

HEAD, TAIL = 17, 71
"""The first and the last element of a block."""


class WrongMessageError(Exception):
    """A message arrived damaged or out of order."""


@dataclass(frozen=True)
class Workload:
    """A kind of message, and how the measuring loops number and check it with next to no work of their own.

    Attributes:
        name: As reports call it.
        codec: How it travels.
        nbytes: About what it occupies.
        key: Where in the message the number is.
        mask: Which bits of the number are there.
        body: Where the part is whose length is checked; None for the message itself.
        length: What that length must be.
        tail: What that part's last element must be; None if that is not looked at.
        make: Returns the object to send, which gets another number for each message; bytes are made for each number.
        slots: How many messages may be under way, where a contestant bounds that.
        chunk_bytes: Room for one.
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
        """Yield a message for each number, often the same object again; one may be under way while the next is made."""
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


def plain_bytes(
    nbytes: int, codec: Codec = "raw", *, kinds: int = 256, slots: int = 256, chunk_bytes: int = 64 * KIB
) -> Workload:
    """Return that many bytes, of which the first is the number's last bits; made beforehand, so that costs nothing."""
    make = partial(_bytes, nbytes)
    name = f"{_size(nbytes)}, raw" if codec == "raw" else _size(nbytes)
    return Workload(name, codec, nbytes, 0, kinds - 1, None, nbytes, TAIL, make, slots, chunk_bytes)


def block(nbytes: int, *, slots: int, chunk_bytes: int) -> Workload:
    """Return a number and an array, or a bytearray where pickle would not leave an array out of its stream."""
    codec: Codec = "array" if nbytes >= 64 * KIB else "pickle"
    make = partial(_block, nbytes, codec)
    return Workload(_size(nbytes), codec, nbytes, 0, -1, 1, nbytes, TAIL, make, slots, chunk_bytes)


def tensor(nbytes: int, *, slots: int = 10, chunk_bytes: int = 24 * MIB) -> Workload:
    """Return a torch tensor, by default for a ring of the size that both aioshm and vLLM default to."""
    made = block(nbytes, slots=slots, chunk_bytes=chunk_bytes)
    return replace(made, name=f"{made.name} tensor", codec="tensor", make=partial(_block, nbytes, "tensor"))


def marked(nbytes: int, codec: Codec = "tensor") -> Workload:
    """Return an array, or a tensor, of which only the first and the last element are looked at."""
    make = partial(_marked, nbytes, codec)
    return Workload(
        f"{_size(nbytes)}, loaned", codec, nbytes, 0, 1, None, nbytes, TAIL, make, slots=10, chunk_bytes=24 * MIB
    )


def lone_array(nbytes: int, *, slots: int, chunk_bytes: int) -> Workload:
    """Return an array, and nothing beside it, of which the first element and the last are looked at."""
    return replace(marked(nbytes, "array"), name=f"{_size(nbytes)} array", slots=slots, chunk_bytes=chunk_bytes)


def usual(quick: bool) -> list[Workload]:
    """Return the messages of most benchmarks."""
    return QUICK if quick else USUAL


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


def _marked(nbytes: int, codec: Codec, number: int) -> Any:
    memory = _block(nbytes, codec)[1]
    memory[0] = number
    return memory


class Marks:
    """Looks up what is looked at of messages of `marked`: asking a tensor for two elements takes longer than a loan."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int, int]] = {}

    def of(self, message: Any) -> tuple[Any, int, int]:
        """Return a message, which is kept, its first element and its last."""
        known = self._known.get(id(message))
        if known is None:
            known = self._known[id(message)] = message, int(message[0]), int(message[-1])
        return known


SMALL_DICT = small_dict()
SHORT_BYTES = plain_bytes(64, "pickle", slots=512)
BLOCK_1M = block(MIB, slots=16, chunk_bytes=2 * MIB)
BYTES_4K = replace(plain_bytes(4 * KIB, kinds=8, slots=512), name="4 KiB")
BYTES_4M = replace(plain_bytes(4 * MIB, kinds=8, slots=10, chunk_bytes=8 * MIB), name="4 MiB")
USUAL = [
    SMALL_DICT,
    block(4 * KIB, slots=512, chunk_bytes=64 * KIB),
    BLOCK_1M,
    block(16 * MIB, slots=10, chunk_bytes=24 * MIB),
]
QUICK = [SMALL_DICT, BLOCK_1M]
