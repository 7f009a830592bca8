"""Who reads a queue over the network: the writer's record of its remote readers. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic

from aioshm.errors import PeerDied
from aioshm.queue.remote import wire
from aioshm.wait.stall import seconds


class RemotePeer:
    """One reader.

    Attributes:
        rank: Its rank.
        identity: Of its control socket, by which it is addressed.
        pid: Its process.
        host: Where that is.
        slow: What becomes of it when it is too slow.
        proven: Whether data has reached it.
        spoke: When it last said something, by the monotonic clock.
        heard: When it, or at least ZeroMQ in its process, was last known to be there.
        finished: Whether it has everything, and knows that nothing more will come.
    """

    def __init__(self, identity: bytes, hello: wire.Hello) -> None:
        self.rank: int = hello.rank
        self.identity = identity
        self.pid: int = hello.pid
        self.host: str = hello.host
        self.slow: str = hello.slow
        self.proven: bool = hello.proven
        self.spoke: float = monotonic()
        self.heard: float = self.spoke
        self.finished = False

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class RemotePeers:
    """The remote readers of one queue, those that are there and those that were.

    Args:
        ranks: The readers'.

    Attributes:
        ranks: The readers'.
        gone: Who is not replaced any more, by rank, and why.
        left: Who was there before all were ready, by rank, and what became of it.
        died: Who of them has died, which nobody has been told.
        going: Whether all are ready: from then on a reader that is gone is not replaced.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.gone: dict[int, str] = {}
        self.left: dict[int, str] = {}
        self.died: dict[int, PeerDied] = {}
        self.going = False
        self._by_rank: dict[int, RemotePeer] = {}
        self._by_identity: dict[bytes, RemotePeer] = {}

    def __iter__(self) -> Iterator[RemotePeer]:
        return iter(list(self._by_rank.values()))

    def __len__(self) -> int:
        return len(self._by_rank)

    def of_rank(self, rank: int) -> RemotePeer | None:
        """Return the reader that has a rank, if it is there."""
        return self._by_rank.get(rank)

    def of_identity(self, identity: bytes) -> RemotePeer | None:
        """Return the reader that is addressed so, if it is there."""
        return self._by_identity.get(identity)

    @property
    def complete(self) -> bool:
        """Whether no reader is waited for any more."""
        return not self._awaited()

    def missing(self) -> list[str]:
        """Name the readers that are not attached yet."""
        return [f"rank {rank} ({self.left[rank]})" if rank in self.left else f"rank {rank}" for rank in self._awaited()]

    def is_proven(self, rank: int) -> bool:
        """Return whether data has reached a reader."""
        return rank in self._by_rank and self._by_rank[rank].proven

    def take_death(self) -> PeerDied | None:
        """Return, once, who has died before all were ready."""
        return self.died.pop(next(iter(self.died))) if self.died else None

    def why_not(self, rank: int) -> str | None:
        """Return why a rank is not to be had."""
        if rank not in self.ranks:
            return f"no remote reader has rank {rank}"
        if rank in self.gone:
            return f"rank {rank} is gone: {self.gone[rank]}"
        peer = self._by_rank.get(rank)
        if peer is None:
            return None
        heard = seconds(monotonic() - peer.heard)
        return f"rank {rank} is taken by pid {peer.pid} on {peer.host}, which lives, or did {heard} ago"

    def admit(self, identity: bytes, hello: wire.Hello) -> RemotePeer:
        """Note a new reader."""
        peer = RemotePeer(identity, hello)
        self._by_rank[peer.rank] = self._by_identity[identity] = peer
        self.left.pop(peer.rank, None)
        self.died.pop(peer.rank, None)
        return peer

    def remove(self, peer: RemotePeer, why: str) -> None:
        """Note that a reader is not there any more."""
        del self._by_rank[peer.rank], self._by_identity[peer.identity]
        if self.going:
            self.gone[peer.rank] = f"pid {peer.pid} on {peer.host}: {why}"
        else:
            self.left[peer.rank] = f"pid {peer.pid} on {peer.host}: {why}"

    def _awaited(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.gone and not self.is_proven(rank)]
