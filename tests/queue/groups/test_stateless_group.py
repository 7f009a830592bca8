"""`StatelessProcessGroup`: its ranks are threads here, except where one has to die."""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from faces import Thread
from members import each
from support import HELPERS, eventually, raising

from aioshm import AioshmError, RoleError
from aioshm.errors import GroupBroken
from aioshm.queue.groups import stateless as stateless_group
from aioshm.queue.groups.stateless import StatelessProcessGroup

CHILD = HELPERS / "group_child.py"
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def impatient_resolver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch asks for the names of addresses; where answers get lost, each would take 5 s."""
    monkeypatch.setenv("RES_OPTIONS", "timeout:1")


@contextlib.contextmanager
def free_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Give a port to the block that is bound meanwhile, so that only a listener with SO_REUSEADDR can have it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((host, 0))
        yield int(kept.getsockname()[1])


def join(world_size: int, timeout: float = PATIENCE_S) -> list[StatelessProcessGroup]:
    """Return a group's ranks, which have met with patience; the timeout is that of their calls afterwards."""
    with free_port() as port:

        def create(rank: int) -> StatelessProcessGroup:
            return StatelessProcessGroup.create("127.0.0.1", port, rank, world_size, timeout=PATIENCE_S)

        groups = each(list(range(world_size)), create)
    assert [type(group) for group in groups] == [StatelessProcessGroup] * world_size, groups
    for group in groups:
        group._timeout = timeout
    return groups


@contextlib.contextmanager
def joined(world_size: int, timeout: float = PATIENCE_S) -> Iterator[list[StatelessProcessGroup]]:
    groups = join(world_size, timeout)
    try:
        yield groups
    finally:
        for group in groups:
            group.close()


def join_one(port: int, rank: int, world_size: int, name: str = "", timeout: float = PATIENCE_S) -> Any:
    """Create a group at one rank; return the group, or the error."""
    try:
        return StatelessProcessGroup.create("127.0.0.1", port, rank, world_size, timeout=timeout, name=name)
    except Exception as error:
        return error


@contextlib.contextmanager
def meeting(ranks: list[int], world_size: int, name: str = "") -> Iterator[tuple[int, list[Future[Any]]]]:
    """Let some ranks of a group wait for the others; give the port, and the groups that they will have."""
    with free_port() as port, ThreadPoolExecutor(world_size) as pool:
        coming = [pool.submit(join_one, port, rank, world_size, name) for rank in ranks]
        await_keys(port, 2 * len(ranks))
        try:
            yield port, coming
        finally:
            for group in coming:
                group.result(PATIENCE_S).close()


def await_keys(port: int, count: int) -> None:
    """Wait until each rank has set two keys: its claim, or rank 0's identity of the group, and its object."""
    patience = timedelta(seconds=PATIENCE_S)

    def have_come() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            store = dist.TCPStore("127.0.0.1", port, None, False, patience, wait_for_workers=False)
            return bool(store.num_keys() >= count)
        return False

    eventually(have_come, "the ranks")


def assert_met(groups: list[Any]) -> None:
    ranks = sorted(group.rank for group in groups)
    assert ranks == list(range(groups[0].world_size))
    assert each(groups, lambda group: group.all_gather_obj(group.rank)) == [ranks] * len(groups)
    for group in groups:
        group.close()


def keys_of(group: StatelessProcessGroup) -> int:
    assert group._store is not None
    return int(group._store.num_keys())


# What it does


def test_objects_reach_everybody_out_of_step_and_nothing_stays() -> None:
    with joined(3) as groups:
        assert [(group.rank, group.world_size) for group in groups] == [(0, 3), (1, 3), (2, 3)]
        before = keys_of(groups[0])

        def talk(group: StatelessProcessGroup) -> list[Any]:
            rng = random.Random(group.rank)
            heard: list[Any] = []
            for number in range(30):
                if rng.random() < 0.3:
                    time.sleep(rng.random() * 0.003)
                src = number % 3
                heard.append(group.broadcast_obj({"number": number} if group.rank == src else "not this", src))
                heard.append(group.all_gather_obj((group.rank, number)))
                group.barrier()
            return heard

        heard = each(groups, talk)
        expected = [
            part for number in range(30) for part in ({"number": number}, [(rank, number) for rank in range(3)])
        ]
        assert heard == [expected] * 3
        assert keys_of(groups[0]) == before
    fds = len(os.listdir("/proc/self/fd"))
    with joined(3) as groups:
        each(groups, lambda group: group.barrier())
    del groups
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= fds, "the end of every socket")


def test_large_objects_and_ones_own() -> None:
    with joined(2) as groups:
        large = random.Random(0).randbytes(4 << 20)
        assert each(groups, lambda group: group.broadcast_obj(large, 1) == large) == [True, True]
        own = [Ours(), Ours()]
        gathered = each(groups, lambda group: group.all_gather_obj(own[group.rank]))
        assert gathered[0][0] is own[0]
        assert gathered[1][1] is own[1]


class Ours:
    pass


def test_groups_side_by_side_need_no_global_state() -> None:
    with joined(1) as (alone,), joined(2) as groups, joined(3) as others:
        assert each([*groups, *others], lambda group: len(group.all_gather_obj(None))) == [2, 2, 3, 3, 3]
        groups[0].close()
        assert each(others, lambda group: group.broadcast_obj(group.rank, 2)) == [2, 2, 2]
        assert alone.all_gather_obj(alone.broadcast_obj("mine", 0)) == ["mine"]
        alone.barrier()
        assert not dist.is_initialized()
        for src, error in [(1, ValueError), (-1, ValueError), ("0", TypeError)]:
            with pytest.raises(error, match="src must be"):
                alone.broadcast_obj(None, src)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "arguments", "expected"),
    [("broadcast_obj", ("x", 0), "x"), ("all_gather_obj", ("x",), ["x"] * 3), ("barrier", (), None)],
)
def test_rank_0_may_close_after_any_call(call: str, arguments: tuple[Any, ...], expected: Any) -> None:
    for _ in range(3):

        def last_call(group: StatelessProcessGroup) -> Any:
            if group.rank:
                time.sleep(0.01)
            with group:
                return getattr(group, call)(*arguments)

        assert each(join(3), last_call) == [expected] * 3


def test_rank_0_listens_at_its_address_alone() -> None:
    with joined(1) as (alone,):
        port = int(re.search(r":(\d+),", repr(alone))[1])  # type: ignore[index]
        with socket.create_connection(("127.0.0.1", port)):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))


def test_it_can_be_reached_by_ipv6() -> None:
    with free_port("::1") as port:
        groups = each([0, 1], lambda rank: StatelessProcessGroup.create("::1", port, rank, 2, timeout=PATIENCE_S))
    assert f"[::1]:{port}" in repr(groups[0])
    assert_met(groups)


# Who is missing


@pytest.mark.parametrize(
    ("call", "arguments", "present", "text"),
    [
        ("barrier", (), [0, 2], "barrier: ranks 1, 3 did not come within 0.15 s"),
        ("broadcast_obj", (None, 2), [0, 1, 3], "broadcast_obj: rank 2 sent nothing within 0.15 s"),
        ("all_gather_obj", ("x",), [1, 2, 3], "all_gather_obj: rank 0 did not come within 0.15 s"),
    ],
)
def test_call_names_who_is_missing(call: str, arguments: tuple[Any, ...], present: list[int], text: str) -> None:
    with joined(4, timeout=0.15) as groups:
        for _ in range(2):  # a rank that came when the time of another was up has come at the second call
            errors = each([groups[rank] for rank in present], lambda group: getattr(group, call)(*arguments))
            assert [type(error) for error in errors] == [TimeoutError] * len(present)
        assert [str(error) for error in errors] == [text] * len(present)


def test_a_call_that_timed_out_may_be_repeated() -> None:
    late = 2
    with joined(3, timeout=0.1) as groups:
        before = keys_of(groups[0])
        groups[late]._timeout = PATIENCE_S
        timed_out: set[int] = set()

        def gather(group: StatelessProcessGroup) -> list[Any]:
            if group.rank == late:
                eventually(lambda: len(timed_out) == 2, "the timeouts of the others")
            while True:
                try:
                    return group.all_gather_obj(group.rank)
                except TimeoutError:
                    if group.rank == late:
                        raise
                    timed_out.add(group.rank)

        assert each(groups, gather) == [[0, 1, 2]] * 3
        for group in groups:
            group._timeout = PATIENCE_S
        assert each(groups, lambda group: group.broadcast_obj("then", 1)) == ["then"] * 3
        assert keys_of(groups[0]) == before


def test_creating_names_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still until two ranks have come: the timeout is that of the wait for the others alone."""
    monkeypatch.setattr(stateless_group, "monotonic", lambda: 100.0)
    come, say = threading.Barrier(2), StatelessProcessGroup._set

    def say_together(group: StatelessProcessGroup, key: str, value: bytes) -> None:
        say(group, key, value)
        come.wait(PATIENCE_S)

    monkeypatch.setattr(StatelessProcessGroup, "_set", say_together)
    with free_port() as port:
        errors = each([0, 2], lambda rank: StatelessProcessGroup.create("127.0.0.1", port, rank, 4, timeout=0.2))
    assert type(errors[0]) is TimeoutError
    assert str(errors[0]) == "create: ranks 1, 3 did not come within 0.2 s"
    assert type(errors[1]) in (TimeoutError, GroupBroken)  # rank 0 may have given up, and taken the store away, first


def test_creating_waits_for_rank_0_no_longer_than_the_timeout() -> None:
    with free_port() as port:
        with pytest.raises(TimeoutError, match=f"rank 0 did not come: nobody listens at 127.0.0.1:{port}"):
            StatelessProcessGroup.create("127.0.0.1", port, 1, 4, timeout=0.2)
    with pytest.raises(TimeoutError, match=r"nobody listens at no\.such\.host\.invalid:"):
        StatelessProcessGroup.create("no.such.host.invalid", 20_000, 1, 2, timeout=0.2)


# Strangers


@pytest.mark.parametrize(("name", "world_size"), [("other", 2), ("one", 3)])
def test_stranger_of_another_group_gets_an_error_and_the_group_meets(name: str, world_size: int) -> None:
    with joined(2) as usual:
        expected_keys = keys_of(usual[0])
    with meeting([0], 2, "one") as (port, coming):
        stranger = join_one(port, 1, world_size, name)
        assert type(stranger) is GroupBroken
        own = f"group 'one' with 2 ranks (rank 0 is pid {os.getpid()} on {platform.node()}) listens at 127.0.0.1:{port}"
        wanted = f"group {name!r} with {world_size} ranks"
        assert str(stranger).startswith(f"{own}, not {wanted}: use another port, or pass the same name and world_size")
        with join_one(port, 1, 2, "one") as rank_1:
            groups = [coming[0].result(PATIENCE_S), rank_1]
            assert each(groups, lambda group: group.all_gather_obj(group.rank)) == [[0, 1]] * 2
            assert keys_of(groups[0]) == expected_keys
            assert repr(rank_1) == f"<StatelessProcessGroup 'one' at 127.0.0.1:{port}, rank 1 of 2, open>"


def test_rank_that_is_taken_is_refused_before_and_after_the_group_met() -> None:
    def refused() -> None:
        stranger = join_one(port, 1, 3)
        assert type(stranger) is GroupBroken
        holder = f"taken by pid {os.getpid()} on {platform.node()}: "
        assert re.match(f"rank 1 of group '' with 3 ranks .* at 127.0.0.1:{port} is {re.escape(holder)}", str(stranger))

    with meeting([0, 1], 3) as (port, coming):
        refused()
        with join_one(port, 2, 3) as rank_2:
            groups = [coming[0].result(PATIENCE_S), coming[1].result(PATIENCE_S), rank_2]
            keys = keys_of(groups[0])
            refused()
            assert keys_of(groups[0]) == keys
            assert each(groups, lambda group: group.all_gather_obj(group.rank)) == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    "keys",
    [{"theirs": "1"}, {}, {"aioshm/group": "no JSON"}],
    ids=["with keys", "without keys", "with another identity"],
)
def test_store_of_another_program_is_refused_and_left_alone(keys: dict[str, str]) -> None:
    with free_port() as port:
        listening = stateless_group._listen("127.0.0.1", port).detach()
        store = dist.TCPStore(
            "127.0.0.1", port, None, True, timedelta(seconds=9), wait_for_workers=False, master_listen_fd=listening
        )
        for key, value in keys.items():
            store.set(key, value)
        stranger = join_one(port, 1, 2, timeout=PATIENCE_S if keys else 0.2)
        assert type(stranger) is GroupBroken
        assert "belongs to no group of this version of aioshm: use another port" in str(stranger)
        assert store.num_keys() == len(keys)


def test_rank_that_timed_out_joins_when_it_is_called_again() -> None:
    with meeting([0], 3) as (port, coming):
        for _ in range(2):
            assert type(join_one(port, 1, 3, timeout=0.2)) is TimeoutError
        later = each([1, 2], lambda rank: join_one(port, rank, 3))
        assert_met([coming[0].result(PATIENCE_S), *later])


def test_rank_whose_call_was_interrupted_joins_when_it_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(function: Callable[[], object], *_: object) -> None:
        function()  # the store has the claim, and the caller does not know
        raise KeyboardInterrupt

    with meeting([0], 2) as (port, coming):
        with monkeypatch.context() as patch:
            patch.setattr(stateless_group, "run_apart", interrupted)
            with pytest.raises(KeyboardInterrupt):
                StatelessProcessGroup.create("127.0.0.1", port, 1, 2)
        assert_met([join_one(port, 1, 2), coming[0].result(PATIENCE_S)])


# What goes wrong


def test_a_closed_store_is_told_at_once() -> None:
    with joined(2) as groups:
        waiting = Thread(each, groups[1:], lambda group: group.barrier())
        time.sleep(0.1)
        started = time.monotonic()
        groups[0].close()
        (error,) = waiting.result(PATIENCE_S)
        assert time.monotonic() - started < 5
        assert type(error) is GroupBroken
        assert isinstance(error, AioshmError)
        assert isinstance(error, ConnectionError)
        assert re.match(r"the store of rank 0 at 127.0.0.1:\d+ is gone: ", str(error))
        with pytest.raises(GroupBroken, match="is gone"):  # and it stays so
            groups[1].barrier()
        with pytest.raises(GroupBroken, match="was closed"):
            groups[0].barrier()


@pytest.mark.slow
def test_a_store_that_is_frozen_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateless_group, "GRACE_S", 0.3)
    with (
        free_port() as port,
        subprocess.Popen(
            [sys.executable, str(CHILD), "store", str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child,
    ):
        try:
            frozen, killed = each(
                [1, 2], lambda rank: StatelessProcessGroup.create("127.0.0.1", port, rank, 3, timeout=PATIENCE_S)
            )
            frozen._timeout = 0.3
            child.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            for _ in range(2):
                with pytest.raises(GroupBroken, match=f"the store of rank 0 at 127.0.0.1:{port} does not answer"):
                    frozen.barrier()
            assert time.monotonic() - started < 5
            child.kill()
            child.wait()
            with pytest.raises(GroupBroken, match=f"the store of rank 0 at 127.0.0.1:{port} is gone"):
                killed.barrier()
        finally:
            child.kill()
    frozen.close()
    killed.close()
    eventually(lambda: not any(thread.name == "aioshm-apart" for thread in threading.enumerate()))


def test_something_else_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateless_group, "GRACE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(GroupBroken, match=f"what listens at 127.0.0.1:{port} does not answer as rank 0 would"):
            StatelessProcessGroup.create("127.0.0.1", port, 1, 2, timeout=0.2)
        # The stuck thread ends with its connection.
    eventually(lambda: not any(thread.name == "aioshm-apart" for thread in threading.enumerate()))


def test_rank_0_needs_an_address_and_a_port_of_its_own() -> None:
    with free_port() as port, join_one(port, 0, 1):
        stranger = join_one(port, 0, 1, "other")
        assert isinstance(stranger, OSError)
        assert f"port {port}: Address already in use; use another port" in str(stranger)
    with pytest.raises(OSError, match=r"rank 0 cannot listen at 192\.0\.2\.1, port 1234: "):
        StatelessProcessGroup.create("192.0.2.1", 1234, 0, 2)
    with pytest.raises(socket.gaierror):
        StatelessProcessGroup.create("no.such.host.invalid", 1234, 0, 2)


def test_one_thread_at_a_time() -> None:
    with joined(2) as groups:
        waiting = Thread(groups[1].barrier)
        eventually(lambda: groups[1]._lock.locked())
        with pytest.raises(RoleError, match="in use by another thread"):
            groups[1].barrier()
        groups[0].barrier()
        waiting.result(PATIENCE_S)


def test_an_interrupted_call_leaves_the_group_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    with joined(2) as groups:
        with monkeypatch.context() as patch:
            patch.setattr(stateless_group, "run_apart", raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                groups[0].barrier()
        with pytest.raises(GroupBroken, match="an earlier call was broken off"):
            groups[0].barrier()


def test_what_cannot_be_pickled_is_refused_at_its_rank() -> None:
    with joined(2) as groups:
        for call in (lambda group: group.broadcast_obj(lambda: 0, 0), lambda group: group.all_gather_obj(lambda: 0)):
            with pytest.raises((pickle.PicklingError, AttributeError)):
                call(groups[0])
        assert each(groups, lambda group: group.broadcast_obj("x", 0)) == ["x", "x"]


def test_torch_is_needed_by_create_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys, aioshm.queue.groups.stateless; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=20, check=False).returncode == 0
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'aioshm[torch]'")):
        StatelessProcessGroup.create("127.0.0.1", 1, 0, 1)
