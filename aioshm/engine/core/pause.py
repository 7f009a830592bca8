"""The pause of an engine: the order in force, held requests, and unanswered orders. No I/O."""

from __future__ import annotations

from typing import Any, NamedTuple

from aioshm.engine.protocol.control import NO_ORDER, PauseOrder


class Owner(NamedTuple):
    """The client of an open request, and the number of this submission: an id may be submitted again."""

    client: int
    generation: int


class Pause:
    """What an engine knows about its pause."""

    def __init__(self) -> None:
        self.order: PauseOrder = NO_ORDER
        self.clients: set[int] = set()  # aioshm's clients, which are notified of orders
        self.held: list[tuple[Owner, str, Any]] = []  # requests with their ids, in the order of their arrival
        self.unanswered: list[tuple[int, int]] = []  # orders: clients and call ids

    @property
    def on(self) -> bool:
        """Whether the engine is paused, or about to pause."""
        return bool(self.order.mode)

    def drop(self, client: int, request_ids: set[str] | None = None) -> set[str]:
        """Drop held requests of a client, with these ids or all; return their ids."""
        found = {
            request_id
            for owner, request_id, _ in self.held
            if owner.client == client and (request_ids is None or request_id in request_ids)
        }
        self.held = [each for each in self.held if each[0].client != client or each[1] not in found]
        return found

    def lose(self, client: int) -> None:
        """Forget a client that is gone."""
        self.clients.discard(client)
        self.drop(client)
        self.unanswered = [each for each in self.unanswered if each[0] != client]
