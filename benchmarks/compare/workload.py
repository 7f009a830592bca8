"""What is sent: one object that is kept and gets a new number for each message, the same for every contestant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.compare.contestant import Codec
from benchmarks.payloads import WrongMessageError

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class Workload:
    """A kind of message, and how the measuring loops number and check it with next to no work of their own.

    Attributes:
        name: As reports call it.
        codec: How it travels.
        nbytes: About what it occupies.
        key: Where in the message the number goes.
        mask: Which bits of the number go there.
        body: Where the part is whose length is checked; None for the message itself.
        length: What that length must be.
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
    slots: int
    chunk_bytes: int

    def make(self) -> Any:
        """Return the object to send."""
        if self.codec == "raw":
            return bytearray(self.nbytes)
        if self.codec == "tensor":
            import torch

            tensor = torch.zeros(self.nbytes, dtype=torch.uint8)
            tensor[0], tensor[-1] = 17, 71
            return [0, tensor]
        return {"n": 0, "b": "hello", "c": 3.5, "l": list(range(16))}

    def wrong(self, message: Any, number: int) -> WrongMessageError:
        """Return the error for a message that is not the one with this number."""
        return WrongMessageError(f"{self.name}: expected number {number}, got {str(message)[:200]}")


def small_dict(codec: Codec) -> Workload:
    """Return a dict of four fields, one of them a list of 16 numbers."""
    name = "small dict" if codec == "pickle" else f"small dict, {codec}"
    return Workload(name, codec, 128, "n", -1, "l", 16, 256, 64 * KIB)


def raw_bytes(nbytes: int) -> Workload:
    """Return that many bytes."""
    return Workload(f"{nbytes} B, raw", "raw", nbytes, 0, 255, None, nbytes, 256, 64 * KIB)


def tensor(nbytes: int, *, slots: int = 10, chunk_bytes: int = 24 * MIB) -> Workload:
    """Return a torch tensor, by default for a ring of the size that both aioshm and vLLM default to."""
    size = f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
    return Workload(f"{size} tensor", "tensor", nbytes, 0, -1, 1, nbytes, slots, chunk_bytes)
