"""Writers that are killed, and started again, under readers that go on with whichever there is."""

from __future__ import annotations

import os
import random
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support import HELPERS
from two_hosts import two_hosts

SCRIPT = HELPERS / "restart_child.py"
READERS = [("asyncio", "1"), ("uvloop", "1"), ("blocking", "1"), ("asyncio", "0")]
"""How each reads, and whether with the native core."""

WITHIN_S = 60.0


class Talker:
    """A running ``restart_child.py``."""

    def __init__(self, arguments: Sequence[str], inside: Sequence[str], native: str) -> None:
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-u", str(SCRIPT), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"AIOSHM_NATIVE": native},
            bufsize=0,  # so that what is there can be waited for
        )
        self._what = " ".join(arguments)
        self._lines: list[str] = []
        self._begun = ""

    def line(self) -> str:
        """Return what it says next."""
        stdout = self.process.stdout
        assert stdout is not None
        while not self._lines:
            with selectors.DefaultSelector() as selector:
                selector.register(stdout, selectors.EVENT_READ)
                assert selector.select(WITHIN_S), f"{self._what} says nothing"
            said = os.read(stdout.fileno(), 4096).decode()
            assert said, f"{self._what} has ended"
            *self._lines, self._begun = (self._begun + said).split("\n")
        line = self._lines.pop(0)
        assert not line.startswith("wrong"), f"{self._what}: {line}"
        return line

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())


class Reader(Talker):
    """One that reads.

    Attributes:
        had: The writers that it has had, in order.
        got: How many messages it has received from each, once it has another.
    """

    def __init__(self, arguments: Sequence[str], inside: Sequence[str], native: str) -> None:
        super().__init__(arguments, inside, native)
        self.had: list[int] = []
        self.got: dict[int, int] = {}

    def is_back(self, pid: int) -> None:
        """Wait until it has this writer."""
        while not self.had or self.had[-1] != pid:
            what, *rest = self.line().split()
            if what == "back":
                self.had.append(int(rest[0]))
            else:
                assert (what, rest[1]) == ("got", "of")
                self.got[int(rest[2])] = int(rest[0])


@contextmanager
def talking(kind: type[Talker], *arguments: str, inside: Sequence[str], native: str = "1") -> Iterator[Talker]:
    talker = kind(arguments, inside, native)
    try:
        yield talker
    finally:
        with talker.process as process:
            process.kill()


def kill_again_and_again(where: str, directory: Path, rounds: int, ip: str, hosts: Sequence[Sequence[str]]) -> None:
    """Kill writers and start others; check what each reader has received and was told.

    Args:
        where: The queue's name, or the path of its identity.
        directory: For the writer's journal.
        rounds: How many writers are killed under readers that are all there; others are before.
        ip: The writer's address for remote readers; empty for local ones.
        hosts: What runs a command where the writer is, and where the readers are.
    """
    journal = directory / "journal"
    journal.write_bytes(bytes(8))
    chance = random.Random(1)
    hasty: set[int] = set()
    calm: list[int] = []
    sent: dict[int, int] = {}
    with ExitStack() as stack:
        writers = stack.enter_context(
            talking(Talker, "write_on_demand", where, str(len(READERS)), ip, str(journal), inside=hosts[0])
        )
        readers: list[Reader] = []

        def start(number: int) -> int:
            writers.tell(str(number))
            return int(writers.line().removeprefix("started "))

        while len(calm) < rounds:
            pid = start(1 + len(calm))
            if not readers:
                if ip:
                    handle = Path(f"{where}.handle")
                    deadline = time.monotonic() + WITHIN_S
                    while not (handle.exists() and handle.stat().st_size):
                        assert time.monotonic() < deadline
                        time.sleep(0.01)
                for rank, (how, native) in enumerate(READERS):
                    arguments = ("read", how, where, str(rank), "remote" if ip else "local")
                    reader = stack.enter_context(talking(Reader, *arguments, inside=hosts[1], native=native))
                    assert isinstance(reader, Reader)
                    readers.append(reader)
            elif chance.random() < 0.2:
                hasty.add(pid)
                time.sleep(chance.random() * 0.1)
            if pid not in hasty:
                for reader in readers:
                    reader.is_back(pid)
                time.sleep(chance.random() * 0.01)
                calm.append(pid)
            os.kill(pid, signal.SIGKILL)
            assert writers.line() == "ended"
            (sent[pid],) = struct.unpack("<Q", journal.read_bytes())
        last = start(-1)
        for reader in readers:
            reader.is_back(last)
            assert reader.line() == "done"
            assert reader.process.wait(WITHIN_S) == 0
        assert writers.line() == "ended"
    for reader in readers:
        assert [pid for pid in reader.had if pid not in hasty] == [*calm, last], "told of each, once and in order"
        assert len(set(reader.had)) == len(reader.had)
        for pid in calm:
            # One more may have been published than its journal says when it was killed.
            assert sent[pid] <= reader.got[pid], f"{sent[pid] - reader.got[pid]} messages are missing"
            assert ip or reader.got[pid] <= sent[pid] + 1
            assert ip or reader.got[pid] == readers[0].got[pid]


HUNDRED = pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(300)], id="a hundred")


@pytest.mark.parametrize("rounds", [pytest.param(2, id="a few"), HUNDRED])
def test_a_named_writer_that_is_killed_and_started_again(
    rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOSHM_RUNTIME_DIR", str(tmp_path / "names"))
    kill_again_and_again("steps", tmp_path, rounds, "", [(), ()])
    assert os.listdir(tmp_path / "names") == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_writer_with_an_identity_that_is_killed_and_started_again(tmp_path: Path) -> None:
    kill_again_and_again(str(tmp_path / "identity"), tmp_path, 50, "127.0.0.1", [(), ()])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_writer_with_an_identity_on_another_host(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        inside = [hosts.enter(0), hosts.enter(1)]
        kill_again_and_again(str(tmp_path / "identity"), tmp_path, 5, hosts.addresses[0], inside)
