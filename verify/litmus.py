"""Litmus tests of the fences: ``python -m verify.litmus`` explores every execution, with and without each fence.

Two machines run them. ``c11`` is what C11 promises, and so what AArch64 may show: each thread has a view, the oldest
store that it may still read from each place; a release passes that view on with its value, an acquire takes it over,
and a seq_cst fence shares it with all other such fences (Kang et al., A Promising Semantics, POPL 2017, without
promises; of those, a relaxed load may be put off behind a later store to another place). ``x86`` has a store buffer for
each thread and nothing else (Sewell et al., x86-TSO, CACM 2010).

A test has threads of one step a line:  x = 1 rlx | r0 = x acq | when r0 == 1 (else this thread ends) | fence sc
A step that ends in @ is removed in turn, if it is a fence, or made relaxed; then what is forbidden has to be seen, but
where ``spare:`` names it by its number. ``x86:`` says of which of them x86 must not miss the removal, either.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent / "litmus_tests"

View = tuple[tuple[str, int], ...]
Registers = frozenset[tuple[str, int]]
State = tuple[Any, Registers, Any, Any, View]


@dataclass(frozen=True)
class Step:
    """One step: ``kind`` is store, load, when or fence."""

    kind: str
    place: str = ""
    value: int = 0
    register: str = ""
    order: str = "rlx"
    removable: bool = False


@dataclass(frozen=True)
class Test:
    """A test as its file has it."""

    name: str
    start: dict[str, int]
    threads: tuple[tuple[Step, ...], ...]
    forbidden: dict[str, int] = field(default_factory=dict)
    spare: tuple[int, ...] = ()
    x86: tuple[int, ...] = ()
    about: str = ""
    seen: dict[str, bool] = field(default_factory=dict)


def parse(path: Path) -> Test:
    """Read a test."""
    start: dict[str, int] = {}
    threads: list[list[Step]] = []
    fields: dict[str, str] = {}
    for line in path.read_text().splitlines():
        text = line.split("#")[0].strip()
        if match := re.fullmatch(r"(forbidden|spare|x86|seen|about|start):\s*(.*)", text):
            fields[match[1]] = match[2]
        elif text == "thread:":
            threads.append([])
        elif text:
            threads[-1].append(_step(text))
    for pair in fields.get("start", "").split():
        start[pair.split("=")[0]] = int(pair.split("=")[1])
    forbidden = {a: int(b) for a, b in (pair.split("=") for pair in fields["forbidden"].split())}
    numbers = {key: tuple(map(int, fields.get(key, "").split())) for key in ("spare", "x86")}
    seen = {name: answer == "yes" for name, answer in (pair.split("=") for pair in fields.get("seen", "").split())}
    steps = tuple(map(tuple, threads))
    return Test(path.stem, start, steps, forbidden, numbers["spare"], numbers["x86"], fields.get("about", ""), seen)


def _step(text: str) -> Step:
    removable = text.endswith("@")
    text = text.rstrip("@ ")
    if match := re.fullmatch(r"fence (acq|rel|sc)", text):
        return Step("fence", order=match[1], removable=removable)
    if match := re.fullmatch(r"when (r\d+) == (\d+)", text):
        return Step("when", register=match[1], value=int(match[2]))
    if match := re.fullmatch(r"(r\d+) = (\w+) (rlx|acq)", text):
        return Step("load", match[2], register=match[1], order=match[3], removable=removable)
    if match := re.fullmatch(r"(\w+) = (\d+) (rlx|rel)", text):
        return Step("store", match[1], int(match[2]), order=match[3], removable=removable)
    raise ValueError(f"no step of a litmus test: {text!r}")


def mutants(test: Test) -> Iterator[tuple[int, str, Test]]:
    """Return the test without each of its removable steps in turn: its number, what was removed, and the rest."""
    number = 0
    for t, thread in enumerate(test.threads):
        for s, step in enumerate(thread):
            if not step.removable:
                continue
            number += 1
            weaker = () if step.kind == "fence" else (replace(step, order="rlx"),)
            threads = (*test.threads[:t], (*thread[:s], *weaker, *thread[s + 1 :]), *test.threads[t + 1 :])
            yield number, _named(t, step), replace(test, threads=threads)


def _named(thread: int, step: Step) -> str:
    what = f"{step.order} fence" if step.kind == "fence" else f"{step.order} {step.kind} of {step.place}"
    return f"thread {thread}'s {what}"


def shows(test: Test, machine: str) -> bool:
    """Return whether some execution ends in what is forbidden."""
    if machine == "x86":
        return any(_matches(test, registers) for registers in _tso(test))
    orders = (replace(test, threads=threads) for threads in _put_off(test.threads))
    return any(_matches(test, registers) for order in orders for registers in _c11(order))


def _matches(test: Test, registers: frozenset[tuple[str, int]]) -> bool:
    known = dict(registers)
    return all(known.get(name) == value for name, value in test.forbidden.items())


def _put_off(threads: tuple[tuple[Step, ...], ...]) -> list[tuple[tuple[Step, ...], ...]]:
    """Return every order of steps in which relaxed loads come behind relaxed stores that followed them."""
    found, todo = {threads}, [threads]
    while todo:
        now = todo.pop()
        for t, thread in enumerate(now):
            for s in range(len(thread) - 1):
                first, second = thread[s], thread[s + 1]
                if (first.kind, first.order, second.kind, second.order) != ("load", "rlx", "store", "rlx"):
                    continue
                if first.place == second.place:
                    continue
                other = (*now[:t], (*thread[:s], second, first, *thread[s + 2 :]), *now[t + 1 :])
                if other not in found:
                    found.add(other)
                    todo.append(other)
    return list(found)


def _join(one: View, other: View) -> View:
    joined = dict(one)
    for place, at in other:
        joined[place] = max(at, joined.get(place, 0))
    return tuple(sorted(joined.items()))


def _ends(first: Any, following: Callable[[Any], Iterable[Any]]) -> set[Registers]:
    """Return the registers, which come second in a state, of all states after which nothing follows."""
    ends, seen, todo = set(), {first}, [first]
    while todo:
        state = todo.pop()
        found = list(following(state))
        if not found:
            ends.add(state[1])
        todo += {*found} - seen
        seen.update(found)
    return ends


# A state of c11: where each thread is, its registers, its three views (what it has seen; what it would have with an
# acquire fence; what it had at its last release fence), each place's stores (value, view), and what sc fences share.
# No place of these tests is written by two threads, so a place's stores are in the order in which they are made.
def _c11(test: Test) -> set[frozenset[tuple[str, int]]]:
    places = sorted({step.place for thread in test.threads for step in thread if step.place})
    memory = tuple(((test.start.get(place, 0), ()),) for place in places)
    views: tuple[View, View, View] = ((), (), ())
    first: State = (tuple(0 for _ in test.threads), frozenset(), tuple(views for _ in test.threads), memory, ())
    return _ends(first, lambda state: [s for t in range(len(test.threads)) for s in _c11_steps(test, places, state, t)])


def _c11_steps(test: Test, places: list[str], state: State, t: int) -> Iterator[State]:
    at, registers, views, memory, shared = state
    if at[t] >= len(test.threads[t]):
        return
    step = test.threads[t][at[t]]
    now, acquired, released = views[t]

    def after(
        known: Registers = registers,
        mine: tuple[View, View, View] = views[t],
        stores: Any = memory,
        common: View = shared,
        to: int = at[t] + 1,
    ) -> State:
        return (*at[:t], to, *at[t + 1 :]), known, (*views[:t], mine, *views[t + 1 :]), stores, common

    if step.kind == "when":
        goes_on = (f"{t}:{step.register}", step.value) in registers
        yield after(to=at[t] + 1 if goes_on else len(test.threads[t]))
    elif step.kind == "fence":
        if step.order in ("acq", "sc"):
            now = _join(now, acquired)
        if step.order == "sc":
            now = shared = _join(now, shared)
        if step.order in ("rel", "sc"):
            released = now
        yield after(mine=(now, _join(now, acquired), released), common=shared)
    elif step.kind == "store":
        p = places.index(step.place)
        own = ((step.place, len(memory[p])),)
        now = _join(now, own)
        passed = now if step.order == "rel" else _join(released, own)
        stores = (*memory[:p], (*memory[p], (step.value, passed)), *memory[p + 1 :])
        yield after(mine=(now, _join(acquired, own), released), stores=stores)
    else:
        p = places.index(step.place)
        for number in range(dict(now).get(step.place, 0), len(memory[p])):
            value, passed = memory[p][number]
            own = ((step.place, number),)
            mine = _join(now, passed if step.order == "acq" else ())
            known = registers | {(f"{t}:{step.register}", value)}
            yield after(known, (_join(mine, own), _join(_join(acquired, passed), own), released))


def _tso(test: Test) -> set[frozenset[tuple[str, int]]]:
    n = len(test.threads)
    places = {step.place for thread in test.threads for step in thread if step.place}
    start = tuple(sorted((place, test.start.get(place, 0)) for place in places))
    first: tuple[Any, Registers, Any, Any] = ((0,) * n, frozenset[tuple[str, int]](), ((),) * n, start)

    def following(state: Any) -> Iterator[Any]:
        at, registers, buffers, memory = state
        for t in range(n):
            if buffers[t]:
                place, value = buffers[t][0]
                stored = tuple(sorted({**dict(memory), place: value}.items()))
                yield at, registers, (*buffers[:t], buffers[t][1:], *buffers[t + 1 :]), stored
            if at[t] >= len(test.threads[t]):
                continue
            step, known, mine, to = test.threads[t][at[t]], registers, buffers[t], at[t] + 1
            if step.kind == "fence" and step.order == "sc" and mine:
                continue
            if step.kind == "store":
                mine = (*mine, (step.place, step.value))
            elif step.kind == "load":
                held = [value for place, value in mine if place == step.place]
                known = registers | {(f"{t}:{step.register}", held[-1] if held else dict(memory)[step.place])}
            elif step.kind == "when" and (f"{t}:{step.register}", step.value) not in registers:
                to = len(test.threads[t])
            yield (*at[:t], to, *at[t + 1 :]), known, (*buffers[:t], mine, *buffers[t + 1 :]), memory

    return _ends(first, following)


def examine(test: Test) -> list[tuple[bool, str]]:
    """Return what was found of a test: for each question whether the answer is as it should be, and the words."""
    rows = []
    for machine in ("c11", "x86"):
        expected, found = test.seen.get(machine, False), shows(test, machine)
        rows.append((found == expected, f"{machine}: the outcome is {'seen' if found else 'never seen'}"))
    for number, what, mutant in mutants(test):
        found, spare = shows(mutant, "c11"), number in test.spare
        verdict = "bad outcome shown" if found else "no bad outcome"
        rows.append((found != spare, f"without {number}, {what}: {verdict}{' (spare)' if spare else ''}"))
        if number in test.x86:
            found = shows(mutant, "x86")
            rows.append((found, f"without it on x86: {'bad outcome shown' if found else 'no bad outcome'}"))
    return rows


def main() -> int:
    """Run every test; return the exit status: 1 if one of them shows what it must not, or a mutant does not."""
    began, bad, asked = time.monotonic(), 0, 0
    for path in sorted(TESTS.glob("*.litmus")):
        test = parse(path)
        print(f"{test.name}: {test.about}")
        for ok, words in examine(test):
            bad += not ok
            asked += 1
            print(f"  {'ok    ' if ok else 'FAILED'} {words}", flush=True)
    print(f"{time.monotonic() - began:.1f} s; {asked} questions, {bad} wrong answers")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
