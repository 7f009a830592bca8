"""A process group without global state: a process can have any number of them."""

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
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from aioshm.config import check_int, check_seconds, shown
from aioshm.errors import GroupBroken, RoleError
from aioshm.process.background import run_apart
from aioshm.queue.groups.process_group import check_rank
from aioshm.zeromq.hosts import bracketed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

T = TypeVar("T")

TIMEOUT_S = 300.0
GRACE_S = 5.0
"""How much longer than its timeout a call waits for the store before it takes that for dead."""

MAX_WORLD_SIZE = 1 << 16
"""Every call waits for a key of each rank."""

_DIAL_PAUSE_S = 0.05
_MIN_WAIT_S = 0.001  # what the store counts in; 0 would be for ever
_SOMETHING = b"."  # the answer to the question for an empty value takes the store 200 ms

_IDENTITY = "aioshm/group"
"""Rank 0 sets this key before any other."""


class _Identity(msgspec.Struct, frozen=True):
    """Which group has the store, and the process of its rank 0."""

    name: str
    world_size: int
    process: str = ""

    def __str__(self) -> str:
        at = f" (rank 0 is {self.process})" if self.process else ""
        return f"group {shown(self.name)} with {self.world_size} rank{'s' * (self.world_size > 1)}{at}"


class StatelessProcessGroup:
    """Processes that can broadcast and gather objects, over a ``torch.distributed.TCPStore`` at rank 0.

    It needs no ``init_process_group`` and leaves none behind. Made by `create`, at every rank. All ranks make the same
    calls in the same order; every call blocks, so make it in a thread where there is an event loop. A call that raised
    TimeoutError may be made again.

    Objects travel by pickle: any process that reaches the port can run code here, as with the object collectives of
    ``torch.distributed``. Use it in trusted networks only; rank 0 listens at the given address and at no other.

    What was sent is removed from the store when everybody has it. Rank 0 leaves every call last, so that it may close
    the group, or end, after any of them.

    `create` refuses a process that comes to the port of another group, or for a rank that another process has; the
    group does not notice that process. Groups are told apart by their names and world sizes: give groups that may meet
    at one port different names. This guards against mistakes, not against attackers.

    Attributes:
        rank: This process' rank.
        world_size: How many ranks there are.
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
        # In the store, the process that has this rank; the number tells calls of `create` apart.
        self._claim = f"pid {os.getpid()} on {platform.node()}#{secrets.token_hex(8)}"
        self._timeout = timeout
        self._calls = 0
        self._broken: str | None = None
        self._given_up = False
        self._lock = threading.Lock()

    @classmethod
    def create(
        cls, host: str, port: int, rank: int, world_size: int, *, timeout: float = TIMEOUT_S, name: str = ""
    ) -> StatelessProcessGroup:
        """Join a group, and wait until everybody has.

        After an error the rank is free again. The rank of a process that died stays taken until every rank creates the
        group again.

        Args:
            host: Where rank 0 listens: an address of its machine, or a name of one.
            port: And the port, 1 to 65535.
            rank: This process' rank.
            world_size: How many ranks there are.
            timeout: How long this and every later call waits for the other ranks, in seconds.
            name: The group's name, the same at every rank. Of two groups with the same name and world size at one port,
                the process that comes second for a rank gets the error, even if the rank is its own.

        Raises:
            ImportError: torch is not installed.
            TimeoutError: Not everybody came; the text names the ranks that are missing.
            OSError: Rank 0 cannot listen there.
            GroupBroken: Another group listens there, another process has the rank, or what listens there is no group
                or went away; the text names the group, or the process, and says what to do.
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
        make_store = _import_store()  # takes seconds, which are none of the time to meet in
        deadline = monotonic() + timeout
        address = f"{bracketed(host)}:{port}"
        group = cls(None, address, rank, world_size, timeout, name)
        listening = _listen(host, port) if rank == 0 else None
        if listening is None:
            _await_listener(host, port, deadline, f"rank 0 did not come: nobody listens at {address}")

        def enter() -> None:
            group._store = make_store(
                host,
                port,
                None,  # who is there is found out below, where the missing can be named
                rank == 0,
                timedelta(seconds=max(deadline - monotonic(), _MIN_WAIT_S)),
                wait_for_workers=False,
                master_listen_fd=None if listening is None else listening.detach(),
                use_libuv=False,  # the other kind refuses objects of more than 8 MiB
            )
            group._enter(deadline)

        try:
            try:
                # In a thread, because it waits without a timeout for the answer of what accepts but does not speak.
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
        """Send rank ``src``'s object to all; return it. What the other ranks pass is ignored.

        Rank 0 returns when all have it, the others as soon as they do.

        Raises:
            TimeoutError: Rank ``src`` has sent nothing, or (at rank 0) a rank has not fetched it; the text says who.
            GroupBroken: The store of rank 0 is gone, or this group was closed.
            RoleError: Another thread is in a call of this group.
            ValueError, TypeError: ``src`` is no rank, or the object cannot be pickled.
        """
        check_rank("src", src, self.world_size)
        sent = _pickled(obj) if self.rank == src else b""

        def call(prefix: str, deadline: float) -> bytes:
            key = f"{prefix}/{src}"
            if self.rank == src:
                self._set(key, sent)
                received = sent
            else:
                self._await({src: key}, deadline, "broadcast_obj", "sent nothing")
                received = self._live().get(key)
            self._finish(prefix, [key], deadline, "broadcast_obj")
            return received

        received = self._collective(call)
        return obj if self.rank == src else pickle.loads(received)

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, by rank; this rank's own is the very object that was passed.

        Raises:
            TimeoutError: Not everybody came; the text says who is missing.
            GroupBroken: The store of rank 0 is gone, or this group was closed.
            TypeError: The object cannot be pickled.
        """
        everybody = self._exchange("all_gather_obj", _pickled(obj), monotonic() + self._timeout)
        return [obj if rank == self.rank else pickle.loads(sent) for rank, sent in enumerate(everybody)]

    def barrier(self) -> None:
        """Return when every rank has called this.

        Raises:
            TimeoutError: Not everybody came; the text says who is missing.
            GroupBroken: The store of rank 0 is gone, or this group was closed.
        """
        self._exchange("barrier", _SOMETHING, monotonic() + self._timeout)

    def close(self) -> None:
        """Leave the group; rank 0's store ends. Idempotent."""
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._store is None else "broken" if self._broken else "open"
        name = self.name and f"{shown(self.name)} "
        return f"<StatelessProcessGroup {name}at {self._address}, rank {self.rank} of {self.world_size}, {state}>"

    # How a rank enters: it checks the identity that rank 0 has published, then claims its rank.

    def _enter(self, deadline: float) -> None:
        """Publish the identity of the group, or check it and claim the rank."""
        store = self._live()
        process = self._claim.rpartition("#")[0]
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
        found = store.compare_set(self._claim_key, "", self._claim).decode()  # the value that the key has then
        if found != self._claim:
            raise GroupBroken(
                f"rank {self.rank} of {group} at {self._address} is taken by {found.rpartition('#')[0]}: use another "
                "rank, or for a group of its own another port or another name; if that process is gone, create the "
                "group again at every rank"
            )
        if self._given_up:  # `create` has raised before the claim, which nobody else would release
            store.compare_set(self._claim_key, self._claim, "")

    def _give_up(self) -> None:
        """Release the claim, if there is one and the store answers, and close."""
        self._given_up = True
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

    # How a call goes: each rank sets the keys that the others wait for, and, when it needs nothing more, its done key,
    # as its last word to the store. Rank 0 waits for those and removes everything.

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
        self._live().set(key, value)  # type: ignore[arg-type]  # it takes bytes, whatever its annotations say

    def _await(self, keys: dict[int, str], deadline: float, what: str, failure: str) -> None:
        """Wait for the keys of some ranks; at the deadline, name the missing ranks."""
        if not keys:
            return
        try:
            self._live().wait(list(keys.values()), timedelta(seconds=max(deadline - monotonic(), _MIN_WAIT_S)))
        except RuntimeError as error:
            # Raises, too, if the store is lost.
            missing = [rank for rank, key in keys.items() if not self._live().check([key])]
            if missing:
                ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                raise TimeoutError(f"{what}: {ranks} {failure} within {self._timeout:g} s") from error

    def _live(self) -> TCPStore:
        """Return the store, which nobody may keep: a traceback that held it would keep its port."""
        if self._store is None:
            raise GroupBroken(f"{self!r} was closed")
        return self._store

    def _collective(self, call: Callable[[str, float], T], deadline: float | None = None) -> T:
        deadline = monotonic() + self._timeout if deadline is None else deadline
        if not self._lock.acquire(blocking=False):
            raise RoleError(f"{self!r} is in use by another thread: its calls go one after the other")
        try:
            self._live()
            if self._broken is not None:
                raise GroupBroken(self._broken)
            silence = f"the store of rank 0 at {self._address} does not answer"
            # Whatever keeps this call from ending in good order, such as Ctrl-C, leaves the group unusable.
            self._broken = f"{self!r}: an earlier call was broken off"
            prefix = str(self._calls)
            within_s = max(deadline - monotonic(), 0) + GRACE_S
            try:
                # In a thread, because nothing but a wait for keys has a timeout in a store whose machine has vanished.
                result = run_apart(lambda: call(prefix, deadline), within_s, GroupBroken(silence))
            except GroupBroken:
                self._broken = silence
                raise
            except TimeoutError:
                self._broken = None
                raise
            except RuntimeError as error:  # all that the store raises
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
    """Return the identity of the group that has the store; wait for it where the store is still empty."""
    unknown = f"the store at {address} belongs to no group of this version of aioshm: use another port"
    # In this order: a group's store has no key before the identity.
    if store.num_keys() and not store.check([_IDENTITY]):
        raise GroupBroken(unknown)
    try:
        store.wait([_IDENTITY], timedelta(seconds=max(deadline - monotonic(), _MIN_WAIT_S)))
    except RuntimeError as error:
        if not store.check([_IDENTITY]):  # raises, too, if the store is lost
            raise GroupBroken(unknown) from error
    try:
        return msgspec.json.decode(store.get(_IDENTITY), type=_Identity)
    except msgspec.DecodeError as error:
        raise GroupBroken(unknown) from error


def _listen(host: str, port: int) -> socket.socket:
    """Listen at that address alone; the store by itself would at every address of the machine."""
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
        remedy = "; use another port" if error.errno == errno.EADDRINUSE else ""
        text = f"rank 0 cannot listen at {host}, port {port}: {error.strerror}{remedy}"
        raise OSError(error.errno, text) from None
    return listening


def _await_listener(host: str, port: int, deadline: float, missing: str) -> None:
    """Wait until the store listens; the store's own way of it is loud, and may take twice its timeout."""
    while True:
        try:
            with contextlib.closing(socket.create_connection((host, port), max(deadline - monotonic(), _MIN_WAIT_S))):
                return
        except OSError as error:  # nobody there yet, or a name that is not known yet
            if monotonic() + _DIAL_PAUSE_S >= deadline:
                raise TimeoutError(f"{missing}: {error}") from error
        time.sleep(_DIAL_PAUSE_S)


def _pickled(obj: Any) -> bytes:
    return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
