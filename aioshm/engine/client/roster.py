"""The engines of a client: which get requests, which are dead or leave, and what becomes of what those had."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from aioshm.engine.client.pending import Pending
from aioshm.engine.protocol.balance import LoadBalancer
from aioshm.engine.protocol.envelopes import EnvelopeDecoder
from aioshm.engine.protocol.messages import EngineCoreRequestType
from aioshm.engine.protocol.payloads import Frame
from aioshm.engine.protocol.registrations import Registrations
from aioshm.errors import EngineDead

_ADD = EngineCoreRequestType.ADD.value

Send: TypeAlias = Callable[[int, bytes, list[Frame]], None]


class Roster:
    """Says which engine gets a request, and ends or moves the requests of those that are gone. No I/O of its own."""

    def __init__(self, ranks: Iterable[int], client_index: int, n_clients: int, output_type: Any) -> None:
        self.engines: Registrations = Registrations(ranks)  # the engines, and what they have said
        n_engines = len(self.engines.ranks)
        self.balance: LoadBalancer = LoadBalancer(n_engines, n_engines * client_index // n_clients, n_clients)
        self.pending: Pending = Pending(EnvelopeDecoder(output_type), self.balance, self.engines.ranks)
        self.deaths: dict[int, EngineDead] = {}
        self.died: int = 0  # how many have died in all
        self.leaving: set[int] = set()  # the ranks of engines that get nothing more

    # Who gets a request

    def choose(self, rank: int | None) -> int:
        """Return the position of the engine that gets the next request: that of this rank, or the least busy one."""
        if rank is not None:
            if rank in self.deaths:
                raise again(self.deaths[rank])
            if rank in self.leaving:
                raise EngineDead(f"engine {rank} is being taken out of service", engine=rank)
            return self.engines.position(rank)
        if self.balance.choices:
            return self.balance.choose()
        raise self._nobody()

    def all_positions(self) -> list[int]:
        """Return the positions of the engines that live, and stay."""
        if not self.balance.choices:
            raise self._nobody()
        return self.balance.choices.copy()

    def _nobody(self) -> EngineDead:
        if len(self.deaths) == 1:
            return again(*self.deaths.values())
        last = next(reversed(self.deaths.values()), None)
        said = [str(error) for error in self.deaths.values()] or [
            f"engine {rank} {'is being taken out of service' if rank in self.leaving else 'cannot be reached'}"
            for rank in self.engines.ranks
        ]
        return EngineDead(
            f"no engine is left: {'; '.join(said)}",
            engine=self.engines.ranks[0] if last is None else last.engine,
            pid=None if last is None else last.pid,
        )

    def take_in(self, rank: int) -> None:
        """Let an engine that has registered get requests, unless it leaves."""
        if rank not in self.leaving:
            self.balance.take_in(self.engines.position(rank))

    def leave_out(self, rank: int) -> None:
        """Let an engine get no more requests that others can have."""
        self.balance.leave_out(self.engines.position(rank))

    # Engines that die

    def go_on_without(self, rank: int, error: EngineDead, send: Send) -> tuple[int, int]:
        """Fail what only a dead engine could have finished, and send to others what it had not begun."""
        position = self.engines.position(rank)
        self.engines.died(rank)
        self.balance.leave_out(position)
        self.deaths[rank] = error
        self.died += 1
        its_own = self.pending.by_engine().get(position, [])
        moved = [request_id for request_id in its_own if self._resubmit(request_id, send)]
        for request_id in its_own:
            if request_id not in moved:
                self.pending.finish(request_id, lambda: again(error))
        self.pending.fail_calls(position, lambda: again(error))
        return len(its_own) - len(moved), len(moved)

    def _resubmit(self, request_id: str, send: Send) -> bool:
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

    # Engines that leave

    def begin_to_leave(self, rank: int) -> int:
        """Let an engine get nothing more; return its position."""
        position = self.engines.position(rank)
        self.leaving.add(rank)
        self.balance.leave_out(position)
        return position

    def stay(self, rank: int) -> None:
        """Let an engine that was to leave get requests again."""
        self.leaving.discard(rank)
        if rank in self.engines.ready:
            self.balance.take_in(self.engines.position(rank))

    def busy(self) -> list[int]:
        """Return the ranks of those that leave and have not finished what they have."""
        return [rank for rank in sorted(self.leaving) if self._is_busy(self.engines.position(rank))]

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
        position, rank = len(self.engines.ranks) - 1, self.engines.ranks[-1]
        gone = EngineDead(f"engine {rank} was taken out of service", engine=rank)
        for request_id in self.pending.by_engine().get(position, []):
            self.pending.finish(request_id, lambda: again(gone))
        self.pending.fail_calls(position, lambda: again(gone))
        self.deaths.pop(rank, None)
        self.engines.remove_last()
        self.leaving.discard(rank)
        self.balance.resize(len(self.engines.ranks))
        return rank


def again(error: EngineDead) -> EngineDead:
    """Return the same error once more: each call that raises it has its own traceback."""
    return EngineDead(*error.args, engine=error.engine, pid=error.pid)
