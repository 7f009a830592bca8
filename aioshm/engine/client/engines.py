"""The engines of a client: which have registered, which get requests, which are leaving, which are dead."""

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

Send = Callable[[int, bytes, list[Frame]], None]


class Engines:
    """Chooses the engine for each request, and fails or resubmits the requests of dead engines. No I/O."""

    def __init__(
        self, ranks: Iterable[int], client_index: int = 0, n_clients: int = 1, output_type: Any = None
    ) -> None:
        self.ranks: list[int] = list(ranks)
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"engines must be some, each with a rank of its own, not {self.ranks}")
        self.names: dict[int, bytes] = {rank: identity(rank) for rank in self.ranks}  # the ZeroMQ identities
        self.ready: dict[int, dict[str, Any]] = {}  # registrations, by rank
        self.deaths: dict[int, EngineDead] = {}  # by rank: dead engines, while others continue
        self.died: int = 0  # how many engines have died in total
        self.leaving: set[int] = set()  # the ranks of engines that get no more requests
        # Clients begin with different engines, so that not all of them choose the same one.
        first = len(self.ranks) * client_index // n_clients
        self.balance: LoadBalancer = LoadBalancer(self.ranks, first, n_clients)
        self.pending: Pending = Pending(EnvelopeDecoder(output_type), self.balance)

    @property
    def missing(self) -> list[int]:
        """The ranks of engines that have not registered."""
        return [rank for rank in self.ranks if rank not in self.ready]

    @property
    def stats_address(self) -> str | None:
        """The address at which the coordinator publishes its counts, if an engine has reported one."""
        said = (fields.get("dp_stats_address") for fields in self.ready.values())
        return next((address for address in said if isinstance(address, str)), None)

    # Registrations

    def recognise(self, sender: bytes, rank: int | None, name: bytes) -> None:
        """Check a sender's identity against the name in its keys, and expect that name from now on."""
        if rank is None:
            raise ValueError("its keys are void: that incarnation of the engine is dead")
        if sender != name and sender in self.names.values():
            raise ValueError(f"it has the keys of engine {rank}, and another one's name")
        if sender == name and rank in self.names:
            self.names[rank] = name

    def may_come(self, sender: bytes) -> bool:
        """Return whether an identity is well-formed and not an engine's yet, so that a new engine may use it."""
        return len(sender) == IDENTITY_BYTES and sender not in self.names.values()

    def register(self, sender: bytes, frames: Sequence[bytes]) -> int:
        """Accept a registration: a map, or (vLLM before 0.10) an empty frame; return the engine's rank."""
        rank = next((rank for rank, name in self.names.items() if name == sender), None)
        if rank is None:
            raise ValueError(f"an unknown engine; expected one of {self.ranks}")
        self.ready[rank] = {} if frames == [b""] else decode_single(_map, frames, MAX_REGISTRATION_BYTES)
        return rank

    # Choosing an engine for a request

    def choose(self, rank: int | None) -> int:
        """Return the rank of the engine for the next request: the wanted one, or the least busy."""
        if rank is None:
            if not self.balance.choices:
                raise self._none_left()
            return self.balance.choose()
        if rank in self.deaths:
            raise again(self.deaths[rank])
        if rank in self.leaving:
            raise EngineDead(f"engine {rank} is being taken out of service", engine=rank)
        if rank not in self.names:
            raise ValueError(f"engine must be the rank of one of {self.ranks}, not {rank!r}")
        return rank

    def in_service(self) -> list[int]:
        """Return the ranks of the engines that get requests: alive and not leaving."""
        if not self.balance.choices:
            raise self._none_left()
        return [rank for rank in self.ranks if rank in self.balance.choices]

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
        """Start to send requests to an engine that has registered, unless the engine is leaving."""
        if rank not in self.leaving:
            self.balance.take_in(rank)

    # Engines that die

    def go_on_without(self, rank: int, error: EngineDead, send: Send) -> tuple[int, int]:
        """Resubmit a dead engine's requests that brought no output yet to other engines, and fail the rest.

        Returns how many requests failed, and how many were resubmitted.
        """
        self.ready.pop(rank, None)
        self.balance.leave_out(rank)
        self.deaths[rank] = error
        self.died += 1
        its_own = self.pending.of_engine(rank)
        moved = [request_id for request_id in its_own if self._resubmit(request_id, send)]
        self.pending.fail_engine(rank, lambda: again(error))
        return len(its_own) - len(moved), len(moved)

    def _resubmit(self, request_id: str, send: Send) -> bool:
        """Resubmit a dead engine's request if it has brought no output yet; return whether it was sent."""
        inbox = self.pending.inboxes[request_id]
        if inbox.request is None:
            return False
        # Skip engines that had this request before: late output of the dead process must not pass for its successor's.
        tried = {inbox.engine, *inbox.tried}
        while choices := [rank for rank in self.balance.choices if rank not in tried]:
            rank = self.balance.choose(choices)
            tried.add(rank)
            generation, frames = self.pending.new_generation(rank, inbox.request)
            try:
                send(rank, _ADD, frames)
            except EngineDead:
                continue  # the death of this engine will be reported soon
            self.pending.move(request_id, rank, generation)
            return True
        return False

    # More engines, or fewer

    def add(self, rank: int, name: bytes) -> None:
        """Expect one more engine; ``name`` is its ZeroMQ identity."""
        if rank in self.names:
            raise ValueError(f"rank must be that of no engine, not {rank}")
        self.ranks.append(rank)
        self.names[rank] = name
        self.balance.add(rank)

    def begin_to_leave(self, rank: int) -> None:
        """Mark an engine as leaving, so that it gets no more requests."""
        self.leaving.add(rank)
        self.balance.leave_out(rank)

    def stay(self, rank: int) -> None:
        """Cancel the leaving of an engine, so that it gets requests again."""
        self.leaving.discard(rank)
        if rank in self.ready:
            self.take_in(rank)

    def busy(self) -> list[int]:
        """Return the ranks of leaving engines that still have requests or calls."""
        return [rank for rank in sorted(self.leaving) if self._is_busy(rank)]

    def _is_busy(self, rank: int) -> bool:
        return self.balance.in_flight[rank] > 0 or any(not each.done() for each in self.pending.calls_of(rank))

    async def drain(self, rank: int) -> None:
        """Mark an engine as leaving, and wait until its requests and calls are done. Cancelling undoes the mark."""
        self.begin_to_leave(rank)
        idle = asyncio.Event()

        def notice(now_idle: int) -> None:
            if now_idle == rank:
                idle.set()

        try:
            self.pending.idle = notice
            if self.balance.in_flight[rank]:
                await idle.wait()
            if answers := self.pending.calls_of(rank):
                await asyncio.wait(answers)
        except BaseException:
            self.stay(rank)
            raise
        finally:
            self.pending.idle = None

    def remove_last(self) -> int:
        """Remove the last engine, and fail its remaining requests and calls; return its rank."""
        rank = self.ranks.pop()
        gone = EngineDead(f"engine {rank} was taken out of service", engine=rank)
        self.pending.fail_engine(rank, lambda: again(gone))
        del self.names[rank]
        self.ready.pop(rank, None)
        self.deaths.pop(rank, None)
        self.leaving.discard(rank)
        self.balance.remove(rank)
        return rank


def again(error: EngineDead) -> EngineDead:
    """Return a copy of an error, so that each call that raises it has its own traceback."""
    return EngineDead(*error.args, engine=error.engine, pid=error.pid)
