"""The published membership of engines, and the progress of front ends in other processes. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from aioshm.engine.protocol.addresses import MAX_INDEX
from aioshm.engine.protocol.messages import decode_single

MAX_MEMBERSHIP_BYTES = 16 << 20
"""Above what is said of all engines that there can be."""

_Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_INDEX)]


class Death(msgspec.Struct, array_like=True, frozen=True):
    """How an engine has died that is not back."""

    incarnation: int  # the number of the rank's process, from 0 on
    pid: int | None
    text: str  # what is known of it, for people


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """Why no engine will come back."""

    text: str  # for people
    engine: int | None = None  # the rank of the engine in a crash loop, if it was one
    pid: int | None = None  # the process id of its last process


class Membership(msgspec.Struct, array_like=True, frozen=True):
    """The present engines; each message is complete, and independent of earlier ones."""

    version: int  # grows with each change
    engines: dict[_Rank, int]  # the first incarnations whose keys are not void, by rank
    leaving: list[_Rank] = []
    deaths: dict[_Rank, Death] = {}  # how engines have died that are not back, by rank
    failure: Failure | None = None  # why no engine will come back, if so


class Progress(msgspec.Struct, array_like=True, frozen=True):
    """The progress of a front end, sent first of all and after every change."""

    version: int = 0  # the version of its membership; 0: none yet
    missing: list[_Rank] = []  # the ranks of engines that have not registered with it
    busy: list[_Rank] = []  # the ranks of leaving engines with unfinished requests of this front end


_membership = msgspec.msgpack.Decoder(Membership)
_progress = msgspec.msgpack.Decoder(Progress)
encode: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode


def decode_membership(frames: list[bytes]) -> Membership:
    """Decode a membership."""
    return decode_single(_membership, frames, MAX_MEMBERSHIP_BYTES)


def decode_progress(frames: list[bytes]) -> Progress:
    """Decode the progress of a front end."""
    return decode_single(_progress, frames, MAX_MEMBERSHIP_BYTES)
