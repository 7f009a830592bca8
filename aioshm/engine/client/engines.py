"""The engines of a client: which registered, which get requests, which leave, which are dead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from aioshm.engine.client.pending import Pending
from aioshm.engine.protocol.addresses import IDENTITY_BYTES, identity
from aioshm.engine.protocol.balance import LoadBalancer
from aioshm.engine.protocol.messages import EngineCoreRequestType, EnvelopeDecoder, decode_single
from aioshm.engine.protocol.payloads import Frame
from aioshm.errors import EngineDead

MAX_REGISTRATION_BYTES = 1 << 20

_ADD = EngineCoreRequestType.ADD.value
_map: msgspec.msgpack.Decoder[dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any])


class Engines:
    """Decides which engine gets a request, and ends or moves the requests of those that are gone. No I/O."""

    def __init__(
        self, ranks: Iterable[int], client_index: int = 0, n_clients: int = 1, output_type: Any = None
    ) -> None:
        self.ranks: list[int] = list(ranks)  # an engine's place in this list is its position
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"engines must be some, each with a rank of its own, not {self.ranks}")
        self.identities: list[bytes] = [identity(rank) for rank in self.ranks]  # of their sockets, by position
        self.ready: dict[int, dict[str, Any]] = {}  # registrations, by rank
        self.deaths: dict[int, EngineDead] = {}  # of engines that are not back, by rank, if the others go on
        self.died: int = 0  # in all
        self.leaving: set[int] = set()  # the ranks of engines that get nothing more
        # Clients that begin with different engines do not all choose the same.
        first = len(self.ranks) * client_index // n_clients
        self.balance: LoadBalancer = LoadBalancer(len(self.ranks), first, n_clients)
        self.pending: Pending = Pending(EnvelopeDecoder(output_type), self.balance, self.ranks)

    @property
    def missing(self) -> list[int]:
        """The ranks of those that have not registered."""
        return [rank for rank in self.ranks if rank not in self.ready]

    @property
    def stats_address(self) -> str | None:
        """Where the coordinator's counts are published, if an engine passes that on."""
        said = (fields.get("dp_stats_address") for fields in self.ready.values())
        return next((address for address in said if isinstance(address, str)), None)

    def position(self, rank: int) -> int:
        """Return an engine's position."""
        try:
            return self.ranks.index(rank)
        except ValueError:
            raise ValueError(f"engine must be the rank of one of {self.ranks}, not {rank!r}") from None

    # Registrations

    def recognise(self, sender: bytes, rank: int | None, name: bytes) -> None:
        """Make sure that an engine has the name that its keys say, and is called so from now on."""
        if rank is None:
            raise ValueError("its keys are void: that incarnation of the engine is dead")
        if sender != name and sender in self.identities:
            raise ValueError(f"it has the keys of engine {rank}, and another one's name")
        if sender == name and rank in self.ranks:
            self.identities[self.ranks.index(rank)] = name

    def may_come(self, sender: bytes) -> bool:
        """Tell whether an engine may be called this, although none is yet."""
        return len(sender) == IDENTITY_BYTES and sender not in self.identities

    def register(self, sender: bytes, frames: Sequence[bytes]) -> int:
        """Take a registration: a map, or nothing as releases of vLLM before 0.10 send; return the engine's rank."""
        if sender not in self.identities:
            raise ValueError(f"an unknown engine; expected one of {self.ranks}")
        fields = {} if frames == [b""] else decode_single(_map, frames, MAX_REGISTRATION_BYTES)
        rank = self.ranks[self.identities.index(sender)]
        self.ready[rank] = fields
        return rank

    # Which one gets a request

    def choose(self, rank: int | None) -> int:
        """Return the position of the engine that gets the next request: that of this rank, or the least busy one."""
        if rank is None:
            if not self.balance.choices:
                raise self._none_left()
            return self.balance.choose()
        if rank in self.deaths:
            raise again(self.deaths[rank])
        if rank in self.leaving:
            raise EngineDead(f"engine {rank} is being taken out of service", engine=rank)
        return self.position(rank)

    def all_positions(self) -> list[int]:
        """Return the positions of the engines that live, and stay."""
        if not self.balance.choices:
            raise self._none_left()
        return self.balance.choices.copy()

    def _none_left(self) -> EngineDead:
        if len(self.deaths) == 1:
            return again(*self.deaths.values())
        last = next(reversed(self.deaths.values()), None)
        said = [str(error) for error in self.deaths.values()] or [
            f"engine {rank} {'is being taken out of service' if rank in self.leaving else 'cannot be reached'}"
            for rank in self.ranks
        ]
        return EngineDead(
            f"no engine is left: {'; '.join(said)}",
            engine=self.ranks[0] if last is None else last.engine,
            pid=None if last is None else last.pid,
        )

    def take_in(self, rank: int) -> None:
        """Let an engine that has registered get requests, unless it leaves."""
        if rank not in self.leaving:
            self.balance.take_in(self.position(rank))

    def leave_out(self, rank: int) -> None:
        """Let an engine get no more requests that others can have."""
        self.balance.leave_out(self.position(rank))

    # Engines that die

    def go_on_without(
        self, rank: int, error: EngineDead, send: Callable[[int, bytes, list[Frame]], None]
    ) -> tuple[int, int]:
        """Fail what only a dead engine could have finished, and send to others what it had not begun.

        Returns how many requests failed, and how many other engines got.
        """
        position = self.position(rank)
        self.ready.pop(rank, None)
        self.balance.leave_out(position)
        self.deaths[rank] = error
        self.died += 1
        its_own = self.pending.by_engine().get(position, [])
        moved = [request_id for request_id in its_own if self._resubmit(request_id, send)]
        self._fail_all_at(position, error)
        return len(its_own) - len(moved), len(moved)

    def _resubmit(self, request_id: str, send: Callable[[int, bytes, list[Frame]], None]) -> bool:
        """Send a request of a dead engine to another one, if it has brought nothing yet; return whether it was sent."""
        inbox = self.pending.inboxes[request_id]
        if inbox.request is None:
            return False
        # Not to one that has had it before: what its dead process may have sent must not be taken for the new one's.
        tried = {inbox.position, *inbox.tried}
        while choices := [position for position in self.balance.choices if position not in tried]:
            position = self.balance.choose(choices)
            tried.add(position)
            generation, frames = self.pending.new_generation(position, inbox.request)
            try:
                send(position, _ADD, frames)
            except EngineDead:
                continue  # its own death is told soon
            self.pending.move(request_id, position, generation)
            return True
        return False

    def _fail_all_at(self, position: int, error: EngineDead) -> None:
        for request_id in self.pending.by_engine().get(position, []):
            self.pending.finish(request_id, lambda: again(error))
        self.pending.fail_calls(lambda: again(error), position)

    # More engines, or fewer

    def add(self, rank: int, name: bytes) -> None:
        """Expect one more engine, in the last position; ``name`` is what its socket is called."""
        if rank in self.ranks:
            raise ValueError(f"rank must be that of no engine, not {rank}")
        self.ranks.append(rank)
        self.identities.append(name)
        self.balance.resize(len(self.ranks))

    def begin_to_leave(self, rank: int) -> int:
        """Let an engine get nothing more; return its position."""
        self.leaving.add(rank)
        self.leave_out(rank)
        return self.position(rank)

    def stay(self, rank: int) -> None:
        """Let an engine that was to leave get requests again."""
        self.leaving.discard(rank)
        if rank in self.ready:
            self.take_in(rank)

    def busy(self) -> list[int]:
        """Return the ranks of those that leave and have not finished what they have."""
        return [rank for rank in sorted(self.leaving) if self._is_busy(self.position(rank))]

    def _is_busy(self, position: int) -> bool:
        return self.balance.in_flight[position] > 0 or any(not each.done() for each in self.pending.calls_of(position))

    async def drain(self, rank: int) -> None:
        """Give an engine no more requests, and wait until it has finished what it has; cancelling this changes that."""
        position = self.begin_to_leave(rank)
        idle = asyncio.Event()

        def notice(now_idle: int) -> None:
            if now_idle == position:
                idle.set()

        try:
            self.pending.idle = notice
            if self.balance.in_flight[position]:
                await idle.wait()
            if answers := self.pending.calls_of(position):
                await asyncio.wait(answers)
        except BaseException:
            self.stay(rank)
            raise
        finally:
            self.pending.idle = None

    def remove_last(self) -> int:
        """Have the last engine no more, and fail what it still has; return its rank."""
        rank = self.ranks[-1]
        gone = EngineDead(f"engine {rank} was taken out of service", engine=rank)
        self._fail_all_at(len(self.ranks) - 1, gone)
        self.ranks.pop()
        self.identities.pop()
        self.ready.pop(rank, None)
        self.deaths.pop(rank, None)
        self.leaving.discard(rank)
        self.balance.resize(len(self.ranks))
        return rank


def again(error: EngineDead) -> EngineDead:
    """Return the same error once more: each call that raises it has its own traceback."""
    return EngineDead(*error.args, engine=error.engine, pid=error.pid)
