"""``aioshm top``: queues, their ends, engines and workers, live."""

from __future__ import annotations

import contextlib
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Annotated, Any, Literal, NoReturn, Self, get_args

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from aioshm.cli import tables
from aioshm.cli.app import UNUSABLE, CommandFailed, interrupted
from aioshm.errors import AioshmError
from aioshm.observe.processes import StartedProcess, StartedProcesses
from aioshm.observe.scan import Watch
from aioshm.observe.snapshot import QueueSnapshot

Key = Literal["name", "rate", "backlog", "age", "memory", "cpu"]
KEYS: tuple[Key, ...] = get_args(Key)
_LETTERS: dict[str, Key] = {key[0]: key for key in KEYS}


def top(
    sort: Annotated[str, typer.Option(help=f"By {', '.join(KEYS)}.")] = "name",
    interval: Annotated[float, typer.Option(min=0.05, max=3600.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one page, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show every live queue of this user on this host, its ends, and engines and workers, again and again."""
    if sort not in KEYS:
        raise CommandFailed(f"--sort must be one of {', '.join(KEYS)}, not {sort!r}", UNUSABLE)
    key = next(key for key in KEYS if key == sort)
    show = _Pages(key, as_json=as_json)
    if _is_screen() and not once and not as_json:
        show = _Screen(key)
    if once:
        interval = min(interval, 0.25)
    try:
        with _terminable(), Watch() as watch, show:
            started = StartedProcesses()
            look = started.look
            if once:
                look = started.settle
            watch.look()
            started.look()
            while not show.wait(interval):
                show.show(watch.look(), look(), watch.skipped)
                if once:
                    return
    except KeyboardInterrupt:
        pass  # Ctrl-C is how users quit
    except (AioshmError, ValueError) as error:
        raise CommandFailed(str(error), UNUSABLE) from None


def ordered(queues: Sequence[QueueSnapshot], key: Key) -> list[QueueSnapshot]:
    """Sort queues by name, or the largest first."""

    def rank(queue: QueueSnapshot) -> float:
        return {
            "rate": queue.writer.messages_per_s or 0.0,
            "backlog": queue.header.backlog,
            # Snapshots differ in time: the moment of creation is compared.
            "age": queue.header.writer.age_s - queue.taken_ns / 1e9,
            "memory": queue.memory_bytes + queue.overflow_bytes,
            "cpu": sum(end.cpu_share or 0.0 for end in queue.ends),
        }[key]

    if key == "name":
        return list(queues)
    return sorted(queues, key=rank, reverse=True)


class _Pages(contextlib.AbstractContextManager["_Pages"]):
    """Prints one page, or one line of JSON, after the other."""

    def __init__(self, sort: Key, *, as_json: bool = False) -> None:
        self._sort = sort
        self._as_json = as_json
        self._console = tables.console()

    def __exit__(self, *_: object) -> None: ...

    def wait(self, seconds: float) -> bool:
        """Wait; return whether the user wants to quit."""
        time.sleep(seconds)
        return False

    def show(self, queues: Sequence[QueueSnapshot], started: Sequence[StartedProcess], skipped: int) -> None:
        """Show all queues and processes."""
        queues = ordered(queues, self._sort)
        if self._as_json:
            print(msgspec.json.encode(tables.report(queues=queues, processes=started, skipped=skipped)).decode())
        else:
            self._console.print(page(queues, started, skipped), crop=False)
        sys.stdout.flush()


class _Screen(_Pages):
    """Shows queues on the whole terminal, and reads its keys."""

    def __init__(self, sort: Key) -> None:
        super().__init__(sort)
        self._live = Live(console=Console(highlight=False), screen=True, auto_refresh=False)
        self._latest: tuple[Sequence[QueueSnapshot], Sequence[StartedProcess], int] = ((), (), 0)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_single_keys(sys.stdin.fileno()))
            stack.enter_context(self._live)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0]:
                key = sys.stdin.read(1)
                if key in ("q", "\x1b", ""):
                    return True
                if key.lower() in _LETTERS:
                    self._sort = _LETTERS[key.lower()]
                    self.show(*self._latest)
        return False

    def show(self, queues: Sequence[QueueSnapshot], started: Sequence[StartedProcess], skipped: int) -> None:
        self._latest = (queues, started, skipped)
        keys = Text("  ").join(Text(f"{key[0]} {key}", "dim") for key in KEYS)
        keys.highlight_words([f"{self._sort[0]} {self._sort}"], "not dim bold")
        head = Text("aioshm top   sort: ") + keys + Text("   q quit")
        self._live.update(Group(head, page(ordered(queues, self._sort), started, skipped)), refresh=True)


def page(queues: Sequence[QueueSnapshot], started: Sequence[StartedProcess], skipped: int) -> Group:
    """Return the tables of queues, of engines and workers, and of ends."""
    note = f"queues: {len(queues)}; engines and workers: {len(started)}; "
    note += f"processes of other users not looked at: {skipped}"
    parts: list[Text | tables.Table[Any]] = [Text(tables.NO_QUEUE)]
    if queues:
        parts = [Text(), tables.queues_table(queues)]
    if started:
        parts += [Text(), tables.processes_table(started)]
    if queues:
        parts += [Text(), tables.ends_table(queues, named=True)]
    return Group(*parts, Text(), Text(note, style="dim"))


def _is_screen() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


@contextlib.contextmanager
def _single_keys(fd: int) -> Iterator[None]:
    """Read keys without a line end, and without echo."""
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Restore the terminal on SIGTERM, too."""

    def end(_number: int, _frame: FrameType | None) -> NoReturn:
        raise interrupted(signal.SIGTERM)

    before: Callable[[int, FrameType | None], Any] | int | None = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
