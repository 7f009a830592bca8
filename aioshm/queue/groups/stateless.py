"""A process group without global state."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from aioshm.arguments import check_int, check_seconds, shown
from aioshm.closing import Closing
from aioshm.errors import GroupBroken, RoleError
from aioshm.process.background import run_apart
from aioshm.queue.groups.process_group import check_rank
from aioshm.zeromq.hosts import bracketed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")

TIMEOUT_S = 300.0
GRACE_S = 5.0
"""How long a call waits for the store's answer beyond the timeout."""

MAX_WORLD_SIZE = 1 << 16
"""Every call waits for one key per rank."""

_DIAL_PAUSE_S = 0.05
_MIN_WAIT_S = 0.001  # the store's unit; the store takes 0 for no timeout
_SOMETHING = b"."  # the store delivers an empty value only after 200 ms

_IDENTITY = "aioshm/group"
"""The first key, set by rank 0."""


class _Identity(msgspec.Struct, frozen=True):
    """The group that owns the store."""

    name: str
    world_size: int
    process: str = ""

    def __str__(self) -> str:
        text = f"group {shown(self.name)} with {self.world_size} rank{'s' * (self.world_size > 1)}"
        if self.process:
            text += f" (rank 0 is {self.process})"
        return text


class StatelessProcessGroup(Closing):
    """Processes that broadcast and gather objects, over a ``torch.distributed.TCPStore`` at rank 0.

    It needs no ``init_process_group``; a process can have any number of groups. Every rank calls `create`. All ranks
    make the same calls in the same order. Every call blocks, so call it in a thread if there is an event loop. A rank
    whose call raised TimeoutError may repeat the call.

    Objects travel by pickle: any process that reaches the port can run code here, as with the object collectives of
    ``torch.distributed``. Use groups in trusted networks only. Rank 0 listens at the given
    address, not at all interfaces.

    Rank 0 returns from every call last, so that it may close the group, or end, after any call. By then the store has
    removed the objects of the call.

    `create` raises in a process that comes to the port of another group, or for a rank that another process has; the
    group that is there already is not disturbed. Names and world sizes distinguish groups: give groups that may meet
    at one port different names. This guards against mistakes, not against attackers.

    Attributes:
        rank: This process' rank.
        world_size: The number of ranks.
        name: The group's name.
    """

    def __init__(
        self, store: TCPStore | None, address: str, rank: int, world_size: int, timeout: float, name: str = ""
    ) -> None:
        self._store = store
        self._address = address
        self.rank = rank
        self.world_size = world_size
        self.name = name
        # The store keeps the claim under the rank. The random part distinguishes calls of `create` in one process.
        self._claim = f"pid {os.getpid()} on {platform.node()}#{secrets.token_hex(8)}"
        self._timeout = timeout
        self._calls = 0
        self._broken: str | None = None
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls, host: str, port: int, rank: int, world_size: int, *, timeout: float = TIMEOUT_S, name: str = ""
    ) -> StatelessProcessGroup:
        """Join a group, and wait for all ranks.

        After an error the rank is free again. The rank of a process that died stays taken until every rank creates the
        group again.

        Args:
            host: Rank 0 listens here: an address of its machine, or a name of one.
            port: And at this port, 1 to 65535.
            rank: This process' rank.
            world_size: The number of ranks.
            timeout: Seconds that this call and every later call wait for all other ranks.
            name: The group's name, the same at every rank. Of two groups with the same name and world size at one port,
                the second process that claims a rank gets the error, even if the rank is its own.

        Raises:
            ImportError: torch is not installed.
            TimeoutError: Ranks are missing; the text names them.
            OSError: Rank 0 cannot listen there.
            GroupBroken: Another group listens there, another process has the rank, no group listens there, or rank 0
                went away; the text names the group or the process, and says what to do.
            ValueError, TypeError: An argument is out of range; the text names it.
        """
        if not isinstance(host, str):
            raise TypeError(f"host must be a string, not {host!r}")
        if not host:
            raise ValueError(f"host must name rank 0's machine, not {host!r}")
        check_int("port", port, minimum=1, maximum=65535)
        check_rank("rank", rank, check_int("world_size", world_size, minimum=1, maximum=MAX_WORLD_SIZE))
        check_seconds("timeout", timeout)
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, not {shown(name)}")
        make_store = _import_store()  # before the deadline begins: the import takes seconds
        deadline = monotonic() + timeout
        address = f"{bracketed(host)}:{port}"
        group = cls(None, address, rank, world_size, timeout, name)
        listener: socket.socket | None = None
        if rank == 0:
            listener = _listen(host, port)
        else:
            _await_listener(host, port, deadline, f"rank 0 did not come: nobody listens at {address}")

        def enter() -> None:
            group._store = make_store(
                host,
                port,
                None,  # the exchange below waits for all ranks, and names missing ones
                rank == 0,
                _at_least(deadline),
                wait_for_workers=False,
                master_listen_fd=listener and listener.detach(),
                use_libuv=False,  # with libuv, the store rejects objects of more than 8 MiB
            )
            group._enter(deadline)

        try:
            try:
                # In a thread: the store waits without a timeout for a listener that does not speak.
                silence = GroupBroken(f"what listens at {address} does not answer as rank 0 would")
                run_apart(enter, max(deadline - monotonic(), 0) + GRACE_S, silence)
            except RuntimeError as error:
                raise GroupBroken(f"cannot connect to rank 0 at {address}: {error}") from error
            group._exchange("create", _SOMETHING, deadline)
        except BaseException:
            group._give_up()
            raise
        return group

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """Send rank ``src``'s object to all ranks and return it. The objects of all other ranks are ignored.

        Rank 0 returns when all ranks have received the object.

        Raises:
            TimeoutError: Rank ``src`` has sent nothing, or (at rank 0) some ranks have not fetched the object; the text
                names the ranks.
            GroupBroken: The store of rank 0 is gone, or the group was closed.
            RoleError: Another thread is in a call of this group.
            ValueError, TypeError: ``src`` is no rank, or the object cannot be pickled.
        """
        check_rank("src", src, self.world_size)
        sends = self.rank == src
        sent = b""
        if sends:
            sent = _pickled(obj)

        def call(prefix: str, deadline: float) -> bytes:
            key = f"{prefix}/{src}"
            received = b""
            if sends:
                self._set(key, sent)
            else:
                self._await({src: key}, deadline, "broadcast_obj", "sent nothing")
                received = self._live().get(key)
            self._finish(prefix, [key], deadline, "broadcast_obj")
            return received

        received = self._collective(call, monotonic() + self._timeout)
        if sends:
            return obj
        return pickle.loads(received)

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, by rank; this rank's own object is not copied.

        Raises:
            TimeoutError: Ranks are missing; the text names them.
            GroupBroken: The store of rank 0 is gone, or the group was closed.
            TypeError: The object cannot be pickled.
        """
        everybody = self._exchange("all_gather_obj", _pickled(obj), monotonic() + self._timeout)
        received = [pickle.loads(sent) for sent in everybody[: self.rank]]
        return [*received, obj, *(pickle.loads(sent) for sent in everybody[self.rank + 1 :])]

    def barrier(self) -> None:
        """Wait until every rank has called this.

        Raises:
            TimeoutError: Ranks are missing; the text names them.
            GroupBroken: The store of rank 0 is gone, or the group was closed.
        """
        self._exchange("barrier", _SOMETHING, monotonic() + self._timeout)

    def close(self) -> None:
        """Leave the group; rank 0's store ends. Idempotent."""
        self._store = None

    def __repr__(self) -> str:
        state = "open"
        if self._store is None:
            state = "closed"
        elif self._broken:
            state = "broken"
        name = self.name and f"{shown(self.name)} "
        return f"<StatelessProcessGroup {name}at {self._address}, rank {self.rank} of {self.world_size}, {state}>"

    def _enter(self, deadline: float) -> None:
        """Publish the identity of the group, or check it and claim the rank."""
        store = self._live()
        process = _claimant(self._claim)
        if self.rank == 0:
            own = _Identity(self.name, self.world_size, process)
            store.set(_IDENTITY, msgspec.json.encode(own))  # type: ignore[arg-type]  # see `_set`
            return
        group = _read_identity(store, self._address, deadline)
        if (group.name, group.world_size) != (self.name, self.world_size):
            wanted = _Identity(self.name, self.world_size)
            raise GroupBroken(
                f"{group} listens at {self._address}, not {wanted}: use another port, or pass the same name and "
                "world_size at every rank"
            )
        claim = store.compare_set(self._claim_key, "", self._claim).decode()  # the value that the key has now
        if claim != self._claim:
            raise GroupBroken(
                f"rank {self.rank} of {group} at {self._address} is taken by {_claimant(claim)}: use another rank, or "
                "for a group of its own another port or another name; if that process is gone, create the group again "
                "at every rank"
            )

    def _give_up(self) -> None:
        """Release the claim, if there is one and the store answers, and close."""
        store = self._store
        try:
            if store is not None and self.rank != 0:
                silence = GroupBroken(f"the store of rank 0 at {self._address} does not answer")
                run_apart(lambda: store.compare_set(self._claim_key, self._claim, ""), GRACE_S, silence)
        except (GroupBroken, RuntimeError):
            pass  # the store is gone, and the claim with it
        finally:
            self.close()

    @property
    def _claim_key(self) -> str:
        return f"claim/{self.rank}"

    # A call: each rank sets the keys that all other ranks wait for, and last, its done key; rank 0 waits for all done
    # keys and deletes everything.

    def _exchange(self, what: str, sent: bytes, deadline: float) -> list[bytes]:
        def call(prefix: str, deadline: float) -> list[bytes]:
            keys = {rank: f"{prefix}/{rank}" for rank in range(self.world_size)}
            self._set(keys[self.rank], sent)
            self._await(keys, deadline, what, "did not come")
            everybody = self._live().multi_get(list(keys.values()))
            self._finish(prefix, keys.values(), deadline, what)
            return everybody

        return self._collective(call, deadline)

    def _finish(self, prefix: str, keys: Iterable[str], deadline: float, what: str) -> None:
        if self.rank != 0:
            self._set(f"{prefix}/{self.rank}/done", _SOMETHING)
            return
        done = {rank: f"{prefix}/{rank}/done" for rank in range(1, self.world_size)}
        self._await(done, deadline, what, "did not fetch its result")
        for key in (*keys, *done.values()):
            self._live().delete_key(key)

    def _set(self, key: str, value: bytes) -> None:
        self._live().set(key, value)  # type: ignore[arg-type]  # the store takes bytes; its annotations say str

    def _await(self, keys: dict[int, str], deadline: float, what: str, failure: str) -> None:
        """Wait for the keys of some ranks; at the deadline, name the missing ranks."""
        if not keys:
            return
        try:
            self._live().wait(list(keys.values()), _at_least(deadline))
        except RuntimeError as error:
            # `check` also raises if the store is gone.
            missing = [rank for rank, key in keys.items() if not self._live().check([key])]
            if missing:
                ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                raise TimeoutError(f"{what}: {ranks} {failure} within {self._timeout:g} s") from error

    def _live(self) -> TCPStore:
        """Return the store. Do not keep it in a variable: a traceback would keep the port in use."""
        if self._store is None:
            raise GroupBroken(f"{self!r} was closed")
        return self._store

    def _collective(self, call: Callable[[str, float], T], deadline: float) -> T:
        if not self._lock.acquire(blocking=False):
            raise RoleError(f"{self!r} is in use by another thread: its calls go one after the other")
        try:
            self._live()
            if self._broken is not None:
                raise GroupBroken(self._broken)
            silence = f"the store of rank 0 at {self._address} does not answer"
            # An interrupted call, for example by Ctrl-C, leaves the group unusable.
            self._broken = f"{self!r}: an earlier call was broken off"
            prefix = str(self._calls)
            within_s = max(deadline - monotonic(), 0) + GRACE_S
            try:
                # In a thread: if the machine of the store has vanished, only waits for keys have a timeout.
                result = run_apart(lambda: call(prefix, deadline), within_s, GroupBroken(silence))
            except GroupBroken:
                self._broken = silence
                raise
            except TimeoutError:
                self._broken = None
                raise
            except RuntimeError as error:  # from the store
                self._broken = f"the store of rank 0 at {self._address} is gone: {error}"
                raise GroupBroken(self._broken) from error
            self._broken = None
            self._calls += 1
            return result
        finally:
            self._lock.release()


def _import_store() -> Callable[..., TCPStore]:
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its own page documents it there
    except ImportError as error:  # also where torch was built without torch.distributed
        raise ImportError(f"StatelessProcessGroup needs torch: pip install 'aioshm[torch]' ({error})") from error
    return TCPStore


def _read_identity(store: TCPStore, address: str, deadline: float) -> _Identity:
    """Return the identity of the group that owns the store; wait while the store is empty."""
    unknown = f"the store at {address} belongs to no group of this version of aioshm: use another port"
    # In this order: the identity is the first key of a group's store.
    if store.num_keys() and not store.check([_IDENTITY]):
        raise GroupBroken(unknown)
    try:
        store.wait([_IDENTITY], _at_least(deadline))
    except RuntimeError as error:
        if not store.check([_IDENTITY]):  # also raises if the store is gone
            raise GroupBroken(unknown) from error
    try:
        return msgspec.json.decode(store.get(_IDENTITY), type=_Identity)
    except msgspec.DecodeError as error:
        raise GroupBroken(unknown) from error


def _listen(host: str, port: int) -> socket.socket:
    """Listen at that address alone; the store itself would listen at every address."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        text = f"rank 0 cannot listen at {host}, port {port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            text += "; use another port"
        raise OSError(error.errno, text) from None
    return listening


def _await_listener(host: str, port: int, deadline: float, missing: str) -> None:
    """Wait until the store listens; the store's own wait logs much, and may take twice the timeout."""
    while True:
        try:
            with contextlib.closing(socket.create_connection((host, port), max(deadline - monotonic(), _MIN_WAIT_S))):
                return
        except OSError as error:  # no listener yet, or an unknown name
            if monotonic() + _DIAL_PAUSE_S >= deadline:
                raise TimeoutError(f"{missing}: {error}") from error
        time.sleep(_DIAL_PAUSE_S)


def _at_least(deadline: float) -> timedelta:
    """Return the time until the deadline, as the store counts it."""
    return timedelta(seconds=max(deadline - monotonic(), _MIN_WAIT_S))


def _claimant(claim: str) -> str:
    """Return the process that made a claim."""
    return claim.rpartition("#")[0]


def _pickled(obj: Any) -> bytes:
    return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
