"""The measuring loops.

For each message they do a store and two comparisons, so that they measure the contestant.

Each loop is written once, as a coroutine function, for contestants that are awaited. For the others the same code runs
with its awaits taken out and without an event loop: an ``await`` of a plain value would cost as much as some calls do.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import random
import resource
import textwrap
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

from benchmarks.contestants.contestant import Port
from benchmarks.framework.workload import Workload

JITTER = 0.02
"""The standard deviation of a cadence's gaps, as a share of the period."""

SPIN_S = 0.0003
"""How long before a message is due its sender stops sleeping: longer than a sleep may take too long."""

ROUNDS = 2
"""Of each way to read, in each turn of `read_waiting`."""


@dataclass(frozen=True)
class Ports:
    """The ends that a loop uses; those that a process does not have raise an error."""

    work: Workload
    send: Callable[[Any], Any]
    receive: Callable[[], Any]
    lease: Callable[[], Any]  # returns a block that has the next message
    turn: Callable[[], Any]  # lets the event loop run once; does nothing without one
    copied: Callable[[], int] | None = None  # returns how many bytes of messages the end has copied, if it counts them


Loop: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]
"""``async def loop(ports, *args)``, importable by its name, which awaits nothing but members of `Ports`."""


@dataclass(frozen=True)
class Order:
    """A loop to run, and its arguments behind the ports."""

    loop: Loop
    args: tuple[Any, ...] = ()


def ports_for(work: Workload, out: Port | None, back: Port | None, awaited: bool) -> Ports:
    """Return the ports of a process with these open ends."""
    return Ports(
        work,
        out.call if out else _missing,
        back.call if back else _missing,
        (back.lease if back else None) or _missing,
        partial(asyncio.sleep, 0) if awaited else _nothing,
        next((port.copied for port in (out, back) if port), None),
    )


async def send(ports: Ports, first: int, end: int) -> None:
    """Send the messages of these numbers as fast as possible."""
    send = ports.send
    for message in ports.work.numbered(range(first, end)):
        await send(message)


async def read(ports: Ports, warm_up: int, count: int) -> float:
    """Return the seconds from the last message of the warm-up to the last one."""
    began, work, receive = 0.0, ports.work, ports.receive
    key, mask, body, length, tail = work.key, work.mask, work.body, work.length, work.tail
    for numbers in (range(warm_up), range(warm_up, warm_up + count)):
        began = time.perf_counter()
        for number in numbers:
            message = await receive()
            part = message if body is None else message[body]
            if message[key] != number & mask or len(part) != length or (tail is not None and part[-1] != tail):
                raise work.wrong(message, number)
    return time.perf_counter() - began


async def read_leased(ports: Ports, warm_up: int, count: int) -> float:
    """Do as `read`, with each message in a block of its own that leases it."""
    began, work, lease = 0.0, ports.work, ports.lease
    key, mask, body, length, tail = work.key, work.mask, work.body, work.length, work.tail
    for numbers in (range(warm_up), range(warm_up, warm_up + count)):
        began = time.perf_counter()
        for number in numbers:
            async with lease() as message:
                part = message if body is None else message[body]
                if message[key] != number & mask or len(part) != length or (tail is not None and part[-1] != tail):
                    raise work.wrong(message, number)
    return time.perf_counter() - began


async def read_waiting(ports: Ports, pause_s: float, count: int, turns: int) -> list[list[float]]:
    """Return the seconds of each round of so many messages, for calls of `Ports.receive` and for leases.

    Before each round the reader sleeps, with its event loop, so that the messages of the round wait in the ring. The
    order of the ways is drawn, because each leaves its memory in the caches. The first two messages of a round, which
    end the sleep, and the last one, which wakes the writer, are not timed.
    """
    work, receive, lease, clock = ports.work, ports.receive, ports.lease, time.perf_counter
    chance, number = random.Random(count), 0
    seconds: tuple[list[float], list[float]] = ([], [])
    ways = [False, True] * ROUNDS
    for _ in range(turns):
        chance.shuffle(ways)
        for leased in ways:
            _doze(pause_s)
            began = ended = 0.0
            for nth in range(count):
                if nth == 2:
                    began = clock()
                elif nth == count - 1:
                    ended = clock()
                if leased:
                    async with lease() as message:
                        work.check(message, number)
                else:
                    work.check(await receive(), number)
                number += 1
            seconds[leased].append(ended - began)
    return [*seconds]


async def ask(ports: Ports, warm_up: int, count: int) -> list[float]:
    """Return how long each round trip took, in microseconds."""
    send, receive, check, clock, times = ports.send, ports.receive, ports.work.check, time.perf_counter, []
    numbers = range(warm_up + count)
    for number, message in zip(numbers, ports.work.numbered(numbers), strict=True):
        began = clock()
        await send(message)
        answer = await receive()
        times.append((clock() - began) * 1e6)
        check(answer, number)
    return times[warm_up:]


async def answer(ports: Ports, count: int) -> None:
    """Send so many messages back."""
    send, receive, work = ports.send, ports.receive, ports.work
    key, mask = work.key, work.mask
    for number in range(count):
        message = await receive()
        if message[key] != number & mask:
            raise work.wrong(message, number)
        await send(message)


async def tick(ports: Ports, count: int, period_s: float, seed: int = 0) -> None:
    """Send so many messages at a cadence, each with the time at which it was sent in place of its number."""
    send, turn, message, key = ports.send, ports.turn, ports.work.make(), ports.work.key
    rng, due = random.Random(seed), time.perf_counter() + 0.05
    for _ in range(count):
        due += max(0.0, rng.gauss(period_s, JITTER * period_s))
        await turn()  # the loop finishes its work for the last message
        _sleep_until(due)
        message[key] = time.monotonic_ns()
        await send(message)


async def listen(ports: Ports, warm_up: int, count: int) -> tuple[list[float], float]:
    """Return how late each message of a cadence arrived, in microseconds, and the CPU of this process in per cent."""
    work, receive, late = ports.work, ports.receive, []
    key, body, length = work.key, work.body, work.length
    wall, cpu = time.perf_counter(), _cpu_s()
    for number in range(warm_up + count):
        message = await receive()
        late.append((time.monotonic_ns() - message[key]) / 1e3)
        if len(message if body is None else message[body]) != length:
            raise work.wrong(message, number)
        if number + 1 == warm_up:
            wall, cpu = time.perf_counter(), _cpu_s()
    return late[warm_up:], 100 * (_cpu_s() - cpu) / (time.perf_counter() - wall)


async def count_copied(ports: Ports) -> int:
    """Return how many bytes of messages this end has copied so far."""
    assert ports.copied is not None
    return ports.copied()


@cache
def without_awaits(loop: Loop) -> Callable[..., Any]:
    """Return the plain function that has the same code without its awaits."""
    lines, first = inspect.getsourcelines(loop)
    tree = _WithoutAwaits().visit(ast.parse(textwrap.dedent("".join(lines))))
    ast.increment_lineno(ast.fix_missing_locations(tree), first - 1)
    found: dict[str, Any] = {}
    exec(compile(tree, inspect.getfile(loop), "exec"), inspect.unwrap(loop).__globals__, found)
    return found[loop.__name__]  # type: ignore[no-any-return]


class _WithoutAwaits(ast.NodeTransformer):
    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._plain(node, ast.FunctionDef)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        return self._plain(node, ast.With)

    def visit_Await(self, node: ast.Await) -> ast.AST:
        self.generic_visit(node)
        return node.value

    def _plain(self, node: ast.AST, kind: type[ast.AST]) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(kind(**{name: getattr(node, name) for name in node._fields}), node)


def _sleep_until(due: float) -> None:
    """Sleep, and spin for the rest, until a moment of `time.perf_counter`."""
    left = due - time.perf_counter() - SPIN_S
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < due:
        pass


def _doze(seconds: float) -> None:
    """Sleep with everything that runs in this thread, an event loop or not."""
    time.sleep(seconds)


def _cpu_s() -> float:
    """Return the CPU time of this process, all its threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _missing(*_: object) -> Any:
    raise AssertionError("this process has no such end")


def _nothing() -> None:
    pass
