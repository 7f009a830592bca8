"""``aioshm top``: queues and their ends, live."""

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
from typing import Annotated, Any, Literal, NoReturn, get_args

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from aioshm.cli.inspection import tables
from aioshm.cli.outcome import UNUSABLE, CommandFailed, interrupted
from aioshm.errors import AioshmError
from aioshm.observe.scan import Watch, Watched

Key = Literal["name", "rate", "backlog", "age", "memory", "cpu"]
KEYS: tuple[Key, ...] = get_args(Key)
_LETTERS: dict[str, Key] = {key[0]: key for key in KEYS}
_UNCUT = 1000
"""Columns of what is no terminal."""


def command(
    sort: Annotated[str, typer.Option(help=f"By {', '.join(KEYS)}.")] = "name",
    interval: Annotated[float, typer.Option(min=0.05, max=3600.0, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, print that, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show every live queue of this user on this host, and its ends, again and again."""
    if sort not in KEYS:
        raise CommandFailed(f"--sort must be one of {', '.join(KEYS)}, not {sort!r}", UNUSABLE)
    show = _JsonLines() if as_json else Screen() if _is_screen() and not once else _Pages()
    try:
        with _terminable(), Watch() as watch, show:
            show.sort = next(key for key in KEYS if key == sort)
            watch.look()
            while not show.wait(min(interval, 0.25) if once else interval):
                show.show(watch.look(), watch.skipped)
                if once:
                    return
    except KeyboardInterrupt:
        pass  # that is how it is ended
    except AioshmError as error:
        raise CommandFailed(str(error), UNUSABLE) from None


def as_json(each: Watched) -> dict[str, Any]:
    """Return a queue as ``--json`` prints it."""
    built: dict[str, Any] = msgspec.to_builtins(each.queue)
    header = built.pop("header")
    bounds = list(each.queue.header.readers[0].latency.BOUNDS_NS) if each.queue.readers else []
    for end, row in zip(built["readers"], header["readers"], strict=True):
        end["latency"] = row["latency"]
    sizes = ("n_reader", "max_chunk_bytes", "max_chunks", "slots", "inline_bytes")
    totals = ("messages", "bytes", "overflows", "remote_readers", "age_s")
    return {
        "id": header["queue_id"],
        "name": header["name"],
        **built,
        "ring": {name: header[name] for name in sizes},
        **{name: header["writer"][name] for name in totals},
        "backlog": each.queue.header.backlog,
        "latency_bounds_ns": bounds,
        "rates": each.rates,
    }


def ordered(watched: Sequence[Watched], key: Key) -> list[Watched]:
    """Return queues in an order: by name, or the largest first."""

    def rank(each: Watched) -> float:
        queue, rates = each.queue, each.rates
        shares = () if rates is None else rates.cpu_share
        return {
            "rate": 0.0 if rates is None else rates.messages_per_s,
            "backlog": queue.header.backlog,
            # They were looked at one after the other: only from when on they are there can be compared.
            "age": queue.header.writer.age_s - queue.taken_ns / 1e9,
            "memory": queue.memory_bytes + queue.overflow_bytes,
            "cpu": sum(part for part in shares if part is not None),
        }[key]

    return list(watched) if key == "name" else sorted(watched, key=rank, reverse=True)


class _Show(contextlib.AbstractContextManager["_Show"]):
    """Where it is shown."""

    sort: Key = "name"

    def __exit__(self, *_: object) -> None: ...

    def wait(self, seconds: float) -> bool:
        """Wait until the next look is due; return whether to end instead."""
        time.sleep(seconds)
        return False

    def show(self, watched: Sequence[Watched], skipped: int) -> None: ...


class _JsonLines(_Show):
    """One object a line."""

    def show(self, watched: Sequence[Watched], skipped: int) -> None:
        queues = [as_json(each) for each in ordered(watched, self.sort)]
        print(msgspec.json.encode(tables.report(queues=queues, skipped=skipped)).decode(), flush=True)


class _Pages(_Show):
    """One page after the other, where there is no terminal, or one page only."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, width=None if sys.stdout.isatty() else _UNCUT)

    def show(self, watched: Sequence[Watched], skipped: int) -> None:
        self._console.print(page(ordered(watched, self.sort), skipped))
        sys.stdout.flush()


class Screen(_Show):
    """The whole terminal, and its keys."""

    def __init__(self) -> None:
        self._live = Live(console=Console(highlight=False), screen=True, auto_refresh=False)
        self._latest: tuple[Sequence[Watched], int] = (), 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Screen:
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
                    self.sort = _LETTERS[key.lower()]
                    self.show(*self._latest)
        return False

    def show(self, watched: Sequence[Watched], skipped: int) -> None:
        self._latest = watched, skipped
        keys = "  ".join(f"[{'bold' if key == self.sort else 'dim'}]{key[0]} {key}[/]" for key in KEYS)
        head = Text.from_markup(f"aioshm top   sort: {keys}   q quit")
        self._live.update(Group(head, page(ordered(watched, self.sort), skipped)), refresh=True)


def page(watched: Sequence[Watched], skipped: int) -> Group:
    """Return one look at everything."""
    note = Text(f"queues: {len(watched)}; processes of other users not looked at: {skipped}", style="dim")
    if not watched:
        return Group(Text("no queue of this user is open on this host"), note)
    queues, ends = tables.queues_rows(watched), tables.ends_rows(watched, queues=True)
    return Group(Text(), queues, Text(), ends, Text(), note)


def _is_screen() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


@contextlib.contextmanager
def _single_keys(fd: int) -> Iterator[None]:
    """Let keys be read one by one, as they are pressed, and not be shown."""
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Give the terminal back when this is terminated, too."""

    def end(_number: int, _frame: FrameType | None) -> NoReturn:
        raise interrupted(signal.SIGTERM)

    before: Callable[[int, FrameType | None], Any] | int | None = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
