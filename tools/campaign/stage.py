"""The processes of the campaign, forked or started anew where they have other variables; and a journal for each."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aioshm.errors import AioshmError
from tools.campaign.sandbox import Sandbox

HEALTH_S = 5.0
AGAIN_S = 0.3
ROOT = Path(__file__).parents[2]
_CLONE_NEWTIME = 0x80
_LENGTH_BYTES = 4


class Record(NamedTuple):
    """What was noted."""

    at: float
    kind: str
    rest: list[Any]


class Journal:
    """A process' own file. Each record is one write to a file that is only appended to."""

    def __init__(self, path: Path) -> None:
        self.offset = 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._encoder = msgspec.msgpack.Encoder()

    def now(self) -> float:
        """Return the time, on the clock of those whose clocks are not moved."""
        return time.clock_gettime(time.CLOCK_MONOTONIC_RAW) - self.offset

    def note(self, kind: str, *rest: object) -> None:
        """Write a record."""
        body = self._encoder.encode((self.now(), kind, *rest))
        os.write(self._file, len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def failed(self, error: BaseException) -> None:
        """Note an error, and which kinds of errors it is."""
        self.note("error", [kind.__name__ for kind in type(error).__mro__], str(error), getattr(error, "errno", None))


def read(path: Path) -> Iterator[Record]:
    """Yield what is in a journal; the last record may have been cut off."""
    data, at = path.read_bytes(), 0
    while at + _LENGTH_BYTES <= len(data):
        end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
        if end > len(data):
            return
        when, kind, *rest = msgspec.msgpack.decode(data[at + _LENGTH_BYTES : end])
        yield Record(when, kind, rest)
        at = end


@dataclass
class Actor:
    """A part that one process plays after the other."""

    name: str
    play: str  # module and function, such as queues:read
    spec: dict[str, Any]
    weight: float = 1.0  # how often it is struck, against others
    again: bool = True
    pid: int = 0  # 0: none lives
    since: float = 0.0  # its start, or the end of the last one
    killed: bool = False
    starts: int = 0


@dataclass
class Part:
    """What a play is given, in its process."""

    name: str
    spec: dict[str, Any]
    work: Path
    journal: Journal
    chance: random.Random
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def calm(self) -> bool:
        """Whether the striking is over."""
        return (self.work / "calm").exists()

    async def until_stopped(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine; cancel it when this process is to end."""
        told = asyncio.ensure_future(self.stopping.wait())
        task = asyncio.ensure_future(coroutine)
        await asyncio.wait([told, task], return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not task.done():
            self.journal.note("end", "told")
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Stage:
    """Starts them, and starts them again."""

    def __init__(self, work: Path, sandbox: Sandbox, chance: random.Random) -> None:
        self.actors: list[Actor] = []
        self.ended: list[tuple[str, int, int]] = []  # name, pid, exit code
        self.closing = False
        self._work, self._sandbox, self._chance = work, sandbox, chance
        for name in ("journals", "logs", "handles"):
            (work / name).mkdir()

    def start(self, actor: Actor) -> None:
        """Start a process for an actor."""
        chance = self._chance
        actor.starts += 1
        told = {
            "name": actor.name,
            "play": actor.play,
            "spec": actor.spec,
            "work": str(self._work),
            "seed": chance.getrandbits(32),
            "uvloop": chance.random() < 0.5,
            "offset": 0,
            "start": actor.starts,
        }
        environ: dict[str, str] = {}
        if chance.random() < 0.2:
            told["offset"] = self._sandbox.other_clock(chance)
        if chance.random() < 0.25:
            environ["AIOSHM_NATIVE"] = "0"
        path = self._work / "logs" / f"{actor.name}.{actor.starts}"
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        if environ:  # only a fresh process takes them
            command = [sys.executable, "-m", "tools.campaign.stage", json.dumps(told)]
            process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environ, stdout=log, stderr=log)
            actor.pid = process.pid
            process.returncode = 0  # reaped here, with all the others
        else:
            actor.pid = os.fork()
            if not actor.pid:
                os.dup2(log, 1)
                os.dup2(log, 2)
                os._exit(perform(told))
        os.close(log)
        actor.since, actor.killed = time.monotonic(), False

    def look(self) -> None:
        """Reap what has ended, and start others for it."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            for actor in self.actors:
                if actor.pid == pid:
                    self.ended.append((actor.name, pid, os.waitstatus_to_exitcode(status)))
                    actor.pid, actor.since = 0, time.monotonic()
        for actor in self.actors:
            due = actor.since + AGAIN_S * (1 + self._chance.random())
            if not actor.pid and actor.again and not self.closing and time.monotonic() >= due:
                self.start(actor)


def perform(told: dict[str, Any]) -> int:
    """Play a part in this process; return its exit status."""
    work = Path(told["work"])
    journal = Journal(work / "journals" / f"{told['name']}.{told['start']}.{os.getpid()}")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    part = Part(told["name"], told["spec"], work, journal, random.Random(told["seed"]))
    module, function = told["play"].split(":")
    try:
        if told["offset"]:
            _shift_clocks(told["offset"])
            journal.offset = told["offset"]
        journal.note("begins", os.environ.get("AIOSHM_NATIVE", "1"), told["uvloop"], told["offset"])
        play = getattr(importlib.import_module(f"tools.campaign.{module}"), function)
        with asyncio.Runner(loop_factory=_loop_factory(told["uvloop"])) as runner:
            runner.run(_run(part, play))
    except BaseException as error:
        with suppress(BaseException):
            journal.failed(error)
            if not isinstance(error, AioshmError):
                traceback.print_exc()
                sys.stderr.flush()
        return 1
    journal.note("ends")
    return 0


async def _run(part: Part, play: Callable[[Part], Coroutine[Any, Any, None]]) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, part.stopping.set)
    health = asyncio.ensure_future(_tell_health(part.journal))
    try:
        await play(part)
    finally:
        health.cancel()


async def _tell_health(journal: Journal) -> None:
    while True:
        with suppress(OSError):  # no descriptor to look with
            with open("/proc/self/statm") as file:  # noqa: ASYNC230 -- nobody waits for it
                pages = int(file.read().split()[1])
            journal.note("health", pages * os.sysconf("SC_PAGE_SIZE") >> 10, len(os.listdir("/proc/self/fd")))
        await asyncio.sleep(HEALTH_S)


def _loop_factory(fast: bool) -> Callable[[], asyncio.AbstractEventLoop]:
    if fast:
        with suppress(ImportError):
            import uvloop

            factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
            return factory
    return asyncio.new_event_loop


def _shift_clocks(seconds: int) -> None:
    """Move this process to a time namespace; see time_namespaces(7)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWTIME):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/timens_offsets").write_text(f"monotonic {seconds} 0\nboottime {seconds} 0\n")
    with open("/proc/self/ns/time_for_children") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWTIME):
            raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    sys.exit(perform(json.loads(sys.argv[1])))
