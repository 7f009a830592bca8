"""Protects the sockets that front ends and the coordinator bind: by keys over TCP, else by the peer's user id."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from zmq.utils import z85

from aioshm.engine.protocol.addresses import identity
from aioshm.engine.security.keys import EngineKeys, keys_for_front_end
from aioshm.zeromq.endpoint import CurveKeys, check_endpoint
from aioshm.zeromq.hosts import is_loopback

ENGINES = "engines"
"""The domain in ZAP (RFC 27) of sockets for engines."""

FRONT_ENDS = "front-ends"
"""The domain of sockets for front ends."""

FRONT_END = "front end"
"""The user id of front ends; an engine has its rank and incarnation."""

AHEAD = 16
"""How many restarts of an engine the owner of a socket may have missed."""

MORE_RANKS = 1024
"""Unexpected engines below this rank are recognised, too, so that an error can name the rank."""

logger: logging.Logger = logging.getLogger("aioshm.engine")

_warned = False


class Protection:
    """Knows the keys that may connect to the sockets of a front end or the coordinator; thread-safe."""

    def __init__(
        self, keys: EngineKeys | None, own: CurveKeys | None, ranks: Iterable[int], *, secure: bool, more: bool = False
    ) -> None:
        self._keys = keys
        self.own: CurveKeys | None = own  # the keys of the end that binds
        self.secure: bool = secure  # whether sockets on this host are for this user only
        self._more = more  # whether unexpected ranks are recognised
        self._lock = threading.RLock()  # the ZAP authenticator recognises keys in its thread
        self._users: dict[tuple[str, bytes], str] = {}
        self._valid: dict[int, int] = {}  # the first incarnation with valid keys, by rank
        self._derived: dict[int, int] = {}  # the last incarnation with derived keys, by rank
        if keys is not None:
            self._users[FRONT_ENDS, z85.decode(keys.front_end.public)] = FRONT_END
            for rank in ranks:
                self.expect(rank)

    @classmethod
    def of_front_end(
        cls, addresses: Iterable[str], ranks: Iterable[int], *, keys: object, secure: bool, more: bool = False
    ) -> Protection:
        """Return the protection of a front end's sockets; without security, warn of the consequences."""
        if not secure:
            warn_of_strangers(addresses)
        elif over_tcp(addresses):
            found = keys_for_front_end(keys)
            return cls(found, found.front_end, ranks, secure=True, more=more)
        return cls(None, None, (), secure=secure)

    @property
    def recognises(self) -> bool:
        return self._keys is not None

    def encrypts(self, address: str) -> bool:
        """Return whether peers at this address are recognised by keys."""
        return self.own is not None and over_tcp([address])

    def name(self, rank: int, address: str) -> bytes:
        """Return the identity of an engine's socket at this address."""
        if self._keys is None or not over_tcp([address]):
            return identity(rank)
        return self._keys.name(rank, self._valid.get(rank, 0))

    def name_of(self, user: str) -> bytes:
        assert self._keys is not None
        rank, _, incarnation = user.partition(".")
        return self._keys.name(int(rank), int(incarnation))

    def recognise(self, domain: str, key: bytes) -> str | None:
        """Return the user id of a key, if it may connect to sockets of this domain; see `ZapAuthenticator`."""
        with self._lock:
            user = self._users.get((domain, key))
            if user is None and domain == ENGINES:
                self._look_ahead()
                user = self._users.get((domain, key))
            if user is None or user == FRONT_END:
                return user
            rank = self.rank_of(user)
            if rank is None:
                return None
            self.void(rank, int(user.partition(".")[2]))  # the keys of its earlier incarnations
            return user

    def rank_of(self, user: str) -> int | None:
        """Return the rank of a recognised engine; None: void keys, or no engine."""
        rank, _, incarnation = user.partition(".")
        if not incarnation or int(incarnation) < self._valid.get(int(rank), 0):
            return None
        return int(rank)

    def expect(self, rank: int) -> None:
        """Admit the engine of one more rank."""
        with self._lock:
            if self._keys is not None and rank not in self._valid:
                self._valid[rank] = 0
                self._admit(rank, 0)

    def void(self, rank: int, incarnation: int) -> None:
        """Refuse the keys of an engine's earlier incarnations."""
        with self._lock:
            if self._keys is None or incarnation <= self._valid.get(rank, 0):
                return
            self._valid[rank] = incarnation
            for each, user in list(self._users.items()):
                if user != FRONT_END and self.rank_of(user) is None:
                    del self._users[each]
            self._admit(rank, incarnation)

    def _look_ahead(self) -> None:
        """Derive the keys of engines that may have been started without notice; 40 us for each."""
        for rank, first in self._valid.items():
            for incarnation in range(max(first, self._derived[rank] + 1), first + AHEAD + 1):
                self._admit(rank, incarnation)
        if self._more:
            self._more = False
            for rank in range(MORE_RANKS):
                if rank not in self._derived:
                    self._admit(rank, 0)

    def _admit(self, rank: int, incarnation: int) -> None:
        assert self._keys is not None
        self._users[ENGINES, z85.decode(self._keys.of_engine(rank, incarnation).public)] = f"{rank}.{incarnation}"
        self._derived[rank] = max(incarnation, self._derived.get(rank, 0))


def over_tcp(addresses: Iterable[str | None]) -> bool:
    """Return whether any of these addresses is on the network."""
    return any(address is not None and check_endpoint(address).startswith("tcp://") for address in addresses)


def warn_of_strangers(addresses: Iterable[str]) -> None:
    """Log a warning, once per process, if other hosts can reach an address."""
    global _warned
    for address in addresses:
        if not _warned and over_tcp([address]) and not is_loopback(address):
            _warned = True
            logger.warning(
                "%s is open to every host that reaches it: with secure=False strangers can read prompts, "
                "answer in an engine's place, and end it",
                address,
            )
