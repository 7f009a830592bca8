"""Which engines have registered at a client, and what they have said. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from aioshm.engine.protocol.addresses import IDENTITY_BYTES, identity
from aioshm.process.guard import built

MAX_REGISTRATION_BYTES = 1 << 20

_decode_map = built(lambda: msgspec.msgpack.Decoder(dict[str, Any])).decode


class Registrations:
    """The engines that a client expects."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks: list[int] = list(ranks)  # an engine's place in this list is its position
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"engines must be some, each with a rank of its own, not {self.ranks}")
        self.identities: list[bytes] = [identity(rank) for rank in self.ranks]
        self.ready: dict[int, dict[str, Any]] = {}  # what each engine that has registered has said, by rank

    @property
    def missing(self) -> list[int]:
        """The ranks of those that have not registered."""
        return [rank for rank in self.ranks if rank not in self.ready]

    @property
    def stats_address(self) -> str | None:
        """Where the coordinator's counts are published, if an engine passes that on."""
        said = (fields.get("dp_stats_address") for fields in self.ready.values())
        return next((address for address in said if isinstance(address, str)), None)

    def recognise(self, sender: bytes, rank: int | None, name: bytes) -> None:
        """Make sure that an engine is called what it is by its keys, and call it so from now on."""
        if rank is None:
            raise ValueError("its keys are void: that incarnation of the engine is dead")
        if sender != name and sender in self.identities:
            raise ValueError(f"it has the keys of engine {rank}, and another one's name")
        if sender == name and rank in self.ranks:
            self.identities[self.ranks.index(rank)] = name

    def may_come(self, sender: bytes) -> bool:
        """Tell whether an engine may be called this, although none is yet."""
        return len(sender) == IDENTITY_BYTES and sender not in self.identities

    def take(self, sender: bytes, frames: Sequence[bytes]) -> int:
        """Take a registration: a map, or nothing as releases of vLLM before 0.10 send; return the engine's rank."""
        if sender not in self.identities:
            raise ValueError(f"an unknown engine; expected one of {self.ranks}")
        if len(frames) != 1:
            raise ValueError(f"a message of {len(frames)} payload frames")
        payload = frames[0]
        if len(payload) > MAX_REGISTRATION_BYTES:
            raise ValueError(f"{len(payload)} bytes, more than {MAX_REGISTRATION_BYTES}")
        try:
            fields = _decode_map(payload) if payload else {}
        except RecursionError as error:
            raise ValueError(str(error)) from None
        rank = self.ranks[self.identities.index(sender)]
        self.ready[rank] = fields
        return rank

    def add(self, rank: int, name: bytes) -> None:
        """Expect one more engine, in the last position; ``name`` is what its socket is called."""
        if rank in self.ranks:
            raise ValueError(f"rank must be that of no engine, not {rank}")
        self.ranks.append(rank)
        self.identities.append(name)

    def remove_last(self) -> int:
        """Expect the last engine no more; return its rank."""
        self.identities.pop()
        rank = self.ranks.pop()
        self.ready.pop(rank, None)
        return rank

    def died(self, rank: int) -> None:
        """Forget the registration of an engine that is gone."""
        self.ready.pop(rank, None)

    def position(self, rank: int) -> int:
        """Return an engine's position."""
        try:
            return self.ranks.index(rank)
        except ValueError:
            raise ValueError(f"engine must be the rank of one of {self.ranks}, not {rank!r}") from None
