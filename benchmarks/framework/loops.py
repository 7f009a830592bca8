"""The measuring loops.

What they do themselves for a message is a store and two comparisons, so that they measure the contestant.

Each is written once, for contestants that are awaited. For the others the same code is run with its awaits taken out,
without an event loop: an ``await`` of what needs none would cost as much as some of them do.
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


@dataclass(frozen=True)
class Ports:
    """What a loop has at hand, for one kind of message.

    Attributes:
        work: The kind of message.
        send: Sends a message, in a process that has such an end.
        receive: Returns the next message, in a process that has such an end.
        lease: Returns a block that has the next message, in a process whose end has such.
        messages: Can be iterated over, and its ``leases()`` too, in a process whose end can.
        parks: Returns how often the receiving end has gone to sleep; None if it does not know.
        turn: Lets the event loop run once; does nothing where there is none.
        copied: Returns how many bytes of messages the end has copied; None if it does not know.
    """

    work: Workload
    send: Callable[[Any], Any]
    receive: Callable[[], Any]
    lease: Callable[[], Any]
    messages: Any
    parks: Callable[[], int] | None
    turn: Callable[[], Any]
    copied: Any = None


Loop: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]
"""``async def loop(ports, *args)``, importable by its name, which awaits nothing but what `Ports` has."""


@dataclass(frozen=True)
class Order:
    """What a process shall do next.

    Attributes:
        loop: What to run.
        args: Its arguments behind the ports.
        kind: Which kind of message its ports are for, as an index.
    """

    loop: Loop
    args: tuple[Any, ...] = ()
    kind: int = 0


def ports_for(work: Workload, out: Port | None, back: Port | None, awaited: bool) -> Ports:
    """Return what a process with these open ends has."""
    return Ports(
        work,
        out.call if out else _missing,
        back.call if back else _missing,
        (back.lease if back else None) or _missing,
        back.messages if back else (),
        back.parks if back else None,
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


WAYS = ("received", "leased", "iterated", "leases iterated")
"""How `read_waiting` reads: by `Ports.receive`, in a block of `Ports.lease`, or iterating over messages or leases."""

A_TURN = 2
"""How often `read_waiting` reads in each way in one turn."""


async def read_waiting(ports: Ports, pause_s: float, count: int, turns: int, seed: int = 0) -> list[list[float]]:
    """Return the seconds of each round of so many messages, by the way to read them (see `WAYS`).

    In each turn every way has as many rounds as any other, in an order that is drawn: what was read before, and how,
    leaves its memory and its code in the caches, and shall do so for each alike. Before each round the reader sleeps,
    so that its messages wait for it. All count alike, so that they differ by nothing but the way to read.

    What is timed begins with the third message of a round and ends before the last one. That leaves out how a loop is
    entered and left, which is done once for more messages than a ring holds; what comes of the reader's sleep, with
    the first message, or with the second, where a lease of the first ends; and how the writer is woken, by the last one
    if a round is half of a ring.
    """
    work, receive, lease, messages, at = ports.work, ports.receive, ports.lease, ports.messages, 0
    key, mask, body, length, tail, clock = work.key, work.mask, work.body, work.length, work.tail, time.perf_counter
    seconds: list[list[float]] = [[] for _ in WAYS]
    rng, order = random.Random(seed), [*range(len(WAYS))] * A_TURN
    for _ in range(turns):
        rng.shuffle(order)
        for way in order:
            _doze(pause_s)
            number, third, last, end, began, ended = at, at + 2, at + count - 1, at + count, 0.0, 0.0
            if WAYS[way] == "leased":
                while number != end:
                    if number == third:
                        began = clock()
                    elif number == last:
                        ended = clock()
                    async with lease() as message:
                        part = message if body is None else message[body]
                        if (
                            message[key] != number & mask
                            or len(part) != length
                            or (tail is not None and part[-1] != tail)
                        ):
                            raise work.wrong(message, number)
                    number += 1
            elif WAYS[way] in {"iterated", "leases iterated"}:
                async for message in messages.leases() if WAYS[way] == "leases iterated" else messages:
                    part = message if body is None else message[body]
                    if message[key] != number & mask or len(part) != length or (tail is not None and part[-1] != tail):
                        raise work.wrong(message, number)
                    number += 1
                    if number == third:
                        began = clock()
                    elif number == last:
                        ended = clock()
                    elif number == end:
                        break
            else:
                while number != end:
                    if number == third:
                        began = clock()
                    elif number == last:
                        ended = clock()
                    message = await receive()
                    part = message if body is None else message[body]
                    if message[key] != number & mask or len(part) != length or (tail is not None and part[-1] != tail):
                        raise work.wrong(message, number)
                    number += 1
            seconds[way].append(ended - began)
            at = end
    return seconds


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


@dataclass(frozen=True)
class Heard:
    """What one listener at a cadence found.

    Attributes:
        late_us: How long after it was sent each message was there.
        cpu_percent: Of a core, by the whole process from the first of these messages to the last.
    """

    late_us: list[float]
    cpu_percent: float


async def tick(ports: Ports, count: int, period_s: float, seed: int = 0) -> None:
    """Send so many messages at a cadence, each with the time at which it was sent in place of its number.

    Args:
        ports: What there is.
        count: How many.
        period_s: The mean of their gaps.
        seed: Which gaps: the same again for the same number.
    """
    send, turn, message, key = ports.send, ports.turn, ports.work.make(), ports.work.key
    rng, due = random.Random(seed), time.perf_counter() + 0.05
    for _ in range(count):
        due += max(0.0, rng.gauss(period_s, JITTER * period_s))
        await turn()  # whatever its loop has still to do for the last message
        sleep_until(due)
        message[key] = time.monotonic_ns()
        await send(message)


async def listen(ports: Ports, warm_up: int, count: int) -> Heard:
    """Note when each message of a cadence is there."""
    work, receive, late, watch = ports.work, ports.receive, [], CpuWatch()
    key, body, length = work.key, work.body, work.length
    for number in range(warm_up + count):
        message = await receive()
        late.append((time.monotonic_ns() - message[key]) / 1e3)
        if len(message if body is None else message[body]) != length:
            raise work.wrong(message, number)
        if number + 1 == warm_up:
            watch = CpuWatch()
    return Heard(late[warm_up:], watch.percent())


class CpuWatch:
    """The CPU time and the context switches of this process, all its threads, from now on."""

    def __init__(self) -> None:
        self._wall, self._usage = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)

    def percent(self) -> float:
        """Return the CPU time, as a share of a core."""
        now, then = resource.getrusage(resource.RUSAGE_SELF), self._usage
        cpu_s = now.ru_utime + now.ru_stime - then.ru_utime - then.ru_stime
        return 100 * cpu_s / (time.perf_counter() - self._wall)

    def switches(self) -> tuple[int, int]:
        """Return the context switches because there was nothing to do, and those because others were to run."""
        now, then = resource.getrusage(resource.RUSAGE_SELF), self._usage
        return now.ru_nvcsw - then.ru_nvcsw, now.ru_nivcsw - then.ru_nivcsw


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
        self.generic_visit(node)
        fields = {name: getattr(node, name) for name in node._fields}
        return ast.copy_location(ast.FunctionDef(**fields), node)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        self.generic_visit(node)
        fields = {name: getattr(node, name) for name in node._fields}
        return ast.copy_location(ast.For(**fields), node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        self.generic_visit(node)
        fields = {name: getattr(node, name) for name in node._fields}
        return ast.copy_location(ast.With(**fields), node)

    def visit_Await(self, node: ast.Await) -> ast.AST:
        self.generic_visit(node)
        return node.value


def sleep_until(due: float) -> None:
    """Sleep, and spin for the rest, until a moment of `time.perf_counter`."""
    left = due - time.perf_counter() - SPIN_S
    if left > 0:
        time.sleep(left)
    while time.perf_counter() < due:
        pass


def _doze(seconds: float) -> None:
    """Sleep with everything that runs in this thread, an event loop or not."""
    time.sleep(seconds)


def _missing(*_: object) -> Any:
    raise AssertionError("this process has no such end")


def _nothing() -> None:
    pass
