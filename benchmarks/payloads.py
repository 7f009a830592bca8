"""What the benchmarks send: the same objects for every contestant, and each message checked on arrival."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

KIB = 1 << 10
MIB = 1 << 20

_ARRAY_BYTES = 64 * KIB
"""From here on a block is a NumPy array, which pickle can leave out of its stream; below, it is a bytearray."""

_SMALL_DICT = {"a": 1, "b": "hello", "c": 3.5, "l": list(range(16))}
_PADDING = bytes(56)
_BYTES_KINDS = 7


class WrongMessageError(Exception):
    """A message arrived damaged or out of order."""


@dataclass(frozen=True)
class Payload(ABC):
    """One kind of message.

    Attributes:
        name: As reports call it.
        nbytes: About what it occupies.
        slots: How many of them may be under way, where the contestant bounds that.
        chunk_bytes: Room for one.
    """

    name: str
    nbytes: int
    slots: int
    chunk_bytes: int

    @abstractmethod
    def message(self, number: int) -> Any:
        """Return a message that carries its number. It may be sent while the next one is made."""

    @abstractmethod
    def check(self, message: Any, number: int) -> None:
        """Raise `WrongMessageError` unless this is that message."""


class SmallDict(Payload):
    """A dict of a few fields."""

    def message(self, number: int) -> dict[str, Any]:
        return {**_SMALL_DICT, "n": number}

    def check(self, message: Any, number: int) -> None:
        if message["n"] != number or len(message["l"]) != 16:
            raise WrongMessageError(f"expected number {number}, got {message!r}")


class ShortBytes(Payload):
    """64 bytes."""

    def message(self, number: int) -> bytes:
        return number.to_bytes(8, "little") + _PADDING

    def check(self, message: Any, number: int) -> None:
        if len(message) != 64 or int.from_bytes(message[:8], "little") != number:
            raise WrongMessageError(f"expected number {number}, got {message!r}")


class Block(Payload):
    """A number and a block of memory."""

    def message(self, number: int) -> tuple[int, Any]:
        return number, _block(self.nbytes)

    def check(self, message: Any, number: int) -> None:
        found, block = message
        if found != number or len(block) != self.nbytes or block[0] != 17 or block[-1] != 71:
            raise WrongMessageError(f"expected number {number} and {self.nbytes} bytes, got {found} and {len(block)}")


class Bytes(Payload):
    """Plain bytes that carry the last digits of their number; made beforehand, so that making costs nothing."""

    def message(self, number: int) -> bytes:
        return _bytes(self.nbytes, number % _BYTES_KINDS)

    def check(self, message: Any, number: int) -> None:
        wanted = number % _BYTES_KINDS
        if len(message) != self.nbytes or message[0] != wanted or message[-1] != wanted:
            raise WrongMessageError(f"expected message {wanted} of {self.nbytes} bytes, got {len(message)}")


@cache
def _bytes(nbytes: int, kind: int) -> bytes:
    return bytes([kind]) * nbytes


@cache
def _block(nbytes: int) -> Any:
    block: Any = bytearray(nbytes) if nbytes < _ARRAY_BYTES else np.zeros(nbytes, np.uint8)
    block[0], block[-1] = 17, 71
    return block


SMALL_DICT = SmallDict("small dict", 128, 512, 64 * KIB)
SHORT_BYTES = ShortBytes("64 B", 64, 512, 64 * KIB)
BLOCK_4K = Block("4 KiB", 4 * KIB, 512, 64 * KIB)
BLOCK_1M = Block("1 MiB", MIB, 16, 2 * MIB)
BLOCK_16M = Block("16 MiB", 16 * MIB, 10, 24 * MIB)
BYTES_4K = Bytes("4 KiB", 4 * KIB, 512, 64 * KIB)
BYTES_4M = Bytes("4 MiB", 4 * MIB, 10, 8 * MIB)

PAYLOADS = [SMALL_DICT, BLOCK_4K, BLOCK_1M, BLOCK_16M]
QUICK_PAYLOADS = [SMALL_DICT, BLOCK_1M]
