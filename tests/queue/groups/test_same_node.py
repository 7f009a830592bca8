"""Which ranks share memory: found out by sharing some, not by names and numbers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from members import Member, each, meet, probe_sockets, traces_of_probes
from support import HELPERS, eventually, raising

from aioshm import AioshmError, HandleError, Options, OutOfDescriptors, SharedMemoryError
from aioshm.queue.groups import process_group
from aioshm.queue.groups.process_group import in_the_same_node_as
from aioshm.ring.segment import Segment

CHILD = HELPERS / "group_child.py"


def everywhere(group: list[Member], source: int = 0, options: Options | None = None) -> list[Any]:
    return each(group, lambda pg: in_the_same_node_as(pg, source, options=options))


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = traces_of_probes()
    yield
    eventually(lambda: traces_of_probes() <= before, "the end of every probe")


# Who shares memory


@pytest.mark.parametrize(("backing", "lifeline"), [("memfd", "abstract"), ("named", "directory")])
def test_threads_of_one_process_do(backing: Any, lifeline: Any, base: Path) -> None:
    options = Options(backing=backing, lifeline=lifeline, runtime_dir=str(base / "run"))
    assert everywhere(meet(4), 2, options) == [[True] * 4] * 4
    assert list(base.glob("run/*")) == []
    assert everywhere(meet(1)) == [[True]]


def unmeasured() -> dict[str, str]:
    """Return an environment without what lets coverage measure a process: other users cannot write its files."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}


class Processes:
    """Ranks in processes of their own, each of which may be started in surroundings of its own."""

    def __init__(self, base: Path) -> None:
        self._meeting = base / "meeting"
        self._meeting.mkdir(mode=0o777)
        self._meeting.chmod(0o777)  # whatever the umask
        base.chmod(0o755)

    def ask(self, *around: list[str], uids: tuple[int, ...] = (), ways: tuple[str, ...] = ("",)) -> list[Any]:
        """Return each rank's answers for each of the options, by source."""
        uids = uids or (0,) * len(around)
        return self.run("same_node", *around, arguments=[[str(uid), *ways] for uid in uids], uids=uids)

    def run(self, role: str, *around: list[str], arguments: list[list[str]], uids: tuple[int, ...] = ()) -> list[Any]:
        """Run a role of the child at each rank; return what each has said."""
        child = [sys.executable, str(CHILD), role, str(self._meeting)]
        children = [
            subprocess.Popen(
                [*before, *child, str(rank), str(len(around)), *arguments[rank]],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=unmeasured() if any(uids[rank : rank + 1]) else None,
            )
            for rank, before in enumerate(around)
        ]
        results = [child.communicate(timeout=60) for child in children]
        assert [child.returncode for child in children] == [0] * len(children), results
        assert all(complaints == "" for _, complaints in results), results
        return [[json.loads(line) for line in out.splitlines()] for out, _ in results]


@pytest.fixture
def processes() -> Iterator[Processes]:
    with tempfile.TemporaryDirectory(prefix="aioshm-") as open_to_all:  # pytest's own are closed to other users
        yield Processes(Path(open_to_all))


def unshared(*arguments: str) -> list[str]:
    """Return what starts a command in namespaces of its own; skip the test where that is not allowed."""
    command = ["unshare", *arguments]
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare(1) here")
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"{' '.join(command)} is not allowed here: {tried.stderr.strip()}")
    return command


def covered(directory: Path, *namespaces: str) -> list[str]:
    """Return what starts a command that sees another directory there."""
    return [
        *unshared("--mount", *namespaces),
        "sh",
        "-c",
        f'mount -t tmpfs -o mode=0700 none "{directory}" && exec "$@"',
        "sh",
    ]


ALL = [True] * 3
NOT_THE_LAST = [[True, True, False], [True, True, False], [False, False, True]]


def test_process_with_a_network_and_named_segments_of_its_own_does_by_a_directory(
    processes: Processes, base: Path
) -> None:
    ways = (
        "lifeline=abstract",  # the network namespace's (unix(7), network_namespaces(7))
        f"lifeline=directory,backing=named,runtime_dir={base / 'run'}",
        f"lifeline=directory,runtime_dir={base / 'run'}",
    )
    alone = covered(Path("/dev/shm"), "--net")
    assert processes.ask([], [], alone, ways=ways) == [[NOT_THE_LAST, NOT_THE_LAST, [ALL] * 3]] * 3


def test_a_queue_to_those_who_share_memory_and_to_one_who_does_not(processes: Processes, base: Path) -> None:
    run = base / "run"
    run.mkdir(mode=0o700)
    said = processes.run("mixed", [], [], covered(run), [], arguments=[[str(run)]] * 4)
    assert said == [[[[1, 3], [2]]], [True], [True], [True]]


def test_not_for_another_user(processes: Processes) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    as_nobody = ["setpriv", "--reuid=65534", sys.executable, "-c", ""]
    if subprocess.run(as_nobody, check=False, env=unmeasured()).returncode:
        pytest.skip("the interpreter is nobody's to run but root's")
    assert processes.ask([], [], [], uids=(0, 0, 65534)) == [[NOT_THE_LAST]] * 3


# What is asked for is what is there


def between(member: Member, call: int, action: Callable[[], object]) -> None:
    """Do something at one rank before one of its collectives: 0 invites, 1 gathers the answers."""

    def before(number: int) -> None:
        if number == call:
            action()

    member.before = before


def the_probe() -> str:
    """Return the address of the only probe there is."""
    (address,) = probe_sockets()
    return "\0" + address[1:] if address.startswith("@") else address


def test_another_memory_with_the_same_name_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    class Elsewhere(Segment):
        @classmethod
        def open(cls, name: str, size: int) -> Segment:
            segment = Segment.create(size, "memfd")
            opened.append(os.dup(segment.fd))
            return segment

    monkeypatch.setattr(process_group, "Segment", Elsewhere)
    assert everywhere(meet(2), 0, Options(backing="named")) == [[True, False]] * 2
    (fd,) = opened
    assert os.pread(fd, 1000, 0).strip(b"\0") == b""
    os.close(fd)


def test_strangers_that_connect_do_no_harm() -> None:
    group = meet(3)
    strangers: list[socket.socket] = []

    def come() -> None:
        address = the_probe()
        for _ in range(30):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(address)
            stranger.sendall(b"garbage")
            strangers.append(stranger)

    between(group[0], 1, come)
    try:
        assert everywhere(group) == [[True] * 3] * 3
    finally:
        for stranger in strangers:
            stranger.close()


# Errors


@pytest.mark.parametrize(("rank", "call"), [(0, 0), (0, 1), (1, 1)])
def test_a_broken_group_leaves_nothing(rank: int, call: int, base: Path) -> None:
    group = meet(3)
    between(group[rank], call, group[rank].break_off)
    errors = everywhere(group, 0, Options(lifeline="directory", runtime_dir=str(base / "run")))
    assert type(errors[rank]) is ConnectionResetError
    assert all(type(error) is threading.BrokenBarrierError for error in errors if error is not errors[rank])
    assert list(base.glob("run/*")) == []


def test_a_source_that_cannot_is_told_to_all(base: Path) -> None:
    (base / "run").touch()
    errors = everywhere(meet(3), 1, Options(lifeline="directory", runtime_dir=str(base / "run")))
    assert type(errors[1]) is SharedMemoryError
    for error in (errors[0], errors[2]):
        assert type(error) is HandleError
        assert str(error).startswith("rank 1 could not make the queue: SharedMemoryError: ")


def test_rank_without_descriptors_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "peer_credentials", raising(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
    assert list(map(type, everywhere(meet(2)))) == [HandleError, OutOfDescriptors]


def test_the_environment_counts_where_nothing_is_passed(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    monkeypatch.setenv("AIOSHM_LIFELINE", "directory")
    monkeypatch.setenv("AIOSHM_RUNTIME_DIR", str(base / "run"))
    group = meet(2)
    seen: list[str] = []
    between(group[1], 1, lambda: seen.append(the_probe()))
    assert everywhere(group) == [[True, True]] * 2
    assert seen[0].startswith(str(base / "run"))
    monkeypatch.setenv("AIOSHM_BACKING", "paper")
    errors = everywhere(meet(2))
    assert type(errors[0]) is ValueError
    assert isinstance(errors[1], AioshmError)
