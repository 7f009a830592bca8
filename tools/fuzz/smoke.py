"""Runs targets without atheris: over their seeds, what is kept, and random changes of both."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tools.fuzz.target import Target

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
